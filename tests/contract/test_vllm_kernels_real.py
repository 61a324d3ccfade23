"""Compiled kernels with vLLM's real package and its Triton, without a GPU: what is compiled, and
under which key.

Run with `pytest -m vllm`.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamo_trtllm.engines.vllm.patches import compile_key, decode_graphs, triton_constants
from tests.contract.vllm_real import save_model
from tests.kit.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SPECIALIZE = '''
import inspect, textwrap, types, triton

def define_kernel(src, module, attrs=None, **extra_globals):
    """With the signature of triton_kernels 3.5.1."""
    src = textwrap.dedent(src)[src.find("def "):]
    def empty(): pass
    scope = dict(empty.__globals__) | extra_globals
    exec(src, scope)
    made = scope[src[4:].split("(")[0]]
    function = types.FunctionType(empty.__code__, scope)
    function.__module__, function.__name__ = module.__name__, made.__name__
    function.__signature__ = inspect.signature(made)
    kernel = triton.JITFunction(function, **(attrs or {}))
    kernel._unsafe_update_src(src)
    return kernel
'''
TOPK = """
import triton, triton.language as tl

@triton.jit
def _topk_forward(Bits, stride_rm: tl.constexpr, stride_rn: tl.constexpr, n_rows, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(Bits + offsets * stride_rm + stride_rn, offsets, mask=offsets < n_rows)
"""


def keys(kernel: Any) -> int:
    """Return how many kernels Triton would compile for steps of 17, 64 and 70 tokens, on a Hopper
    GPU.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    bits = torch.empty(1, dtype=torch.int32)
    return len(
        {str(bind(bits, 1, -(-tokens // 32) * 32, tokens, BLOCK=32)[1]) for tokens in (17, 64, 70)}
    )


def test_kernel_with_replaced_constant_compiles_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    package = tmp_path / "triton_kernels"
    package.mkdir()
    for name, source in (("__init__", ""), ("specialize", SPECIALIZE), ("topk", TOPK)):
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("triton_kernels", "triton_kernels.specialize", "triton_kernels.topk"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # removed again when the test ends
        del sys.modules[name]
    user = importlib.import_module("triton_kernels.topk")
    assert keys(user._topk_forward) == 3
    assert triton_constants.has_kernel(triton_constants.FIXED[0])
    triton_constants.replace(triton_constants.FIXED[0])
    assert keys(user._topk_forward) == 1
    types = {
        "Bits": "*i32",
        "stride_rm": "constexpr",
        "stride_rn": "i32",
        "n_rows": "i32",
        "BLOCK": "constexpr",
    }
    source = ASTSource(user._topk_forward, types, {"stride_rm": 1, "BLOCK": 32})
    assert "cubin" in compile(source, target=GPUTarget("cuda", 90, 32)).asm
    assert not triton_constants.has_kernel(triton_constants.FIXED[0]), "it was replaced already"


@pytest.mark.parametrize("fixed", triton_constants.FIXED, ids=lambda fixed: str(fixed.kernel))
def test_constants_are_present_in_vllm_kernels(fixed: triton_constants.FixedArgument) -> None:
    """If this fails, vLLM has newer kernels: remove the replacement of this one."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    bundled = Path(found.origin).parent / "third_party" / "triton_kernels"
    if not bundled.is_dir():
        pytest.skip("this build of vLLM has no triton_kernels")
    sources = [path.read_text() for path in bundled.rglob("*.py")]
    (source,) = [text for text in sources if f"def {fixed.kernel}(" in text]
    assert (
        f"{fixed.constant}: tl.constexpr"
        in source.partition(f"def {fixed.kernel}(")[2].partition("):")[0]
    )


def test_compilation_key_is_independent_of_model_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    first = save_model(tmp_path / "first")
    second = tmp_path / "second"
    shutil.copytree(first, second)
    other = save_tiny_llama(tmp_path / "other", head_dim=32)

    def key(folder: Path) -> str:
        arguments: Any = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True}
        return str(
            AsyncEngineArgs(model=str(folder), **arguments).create_engine_config().compute_hash()
        )

    assert key(first) != key(second), (
        "vLLM's key has no path any more: remove patches/compile_key.py"
    )
    # restored when the test ends
    monkeypatch.setattr(ModelConfig, "compute_hash", ModelConfig.compute_hash)
    compile_key.install()
    assert key(first) == key(second) != key(other)


def test_decode_graphs_skipped_by_prefill_use_mixed_steps() -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    sizes: dict[str, Any] = {
        "cudagraph_capture_sizes": [1, 2, 4, 8],
        "max_cudagraph_capture_size": 8,
    }
    compiled = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, mode=3, **sizes)
    compiled.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    config = SimpleNamespace(
        compilation_config=compiled,
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={decode_graphs.NEVER_DECODES: True}
        ),
        lora_config=None,
        num_speculative_tokens=0,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    dispatcher: Any = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(compiled.cudagraph_mode)
    assert dispatcher.dispatch(3, uniform_decode=True)[0] is CUDAGraphMode.FULL

    class Worker:
        vllm_config = config
        model_runner = SimpleNamespace(cudagraph_dispatcher=dispatcher)

        def compile_or_warm_up_model(self) -> list[CUDAGraphMode]:
            return [mode for mode, _ in dispatcher.get_capture_descs()]

    decode_graphs.skip_before_capture(Worker)
    assert Worker().compile_or_warm_up_model() == [CUDAGraphMode.PIECEWISE]
    mode, padded = dispatcher.dispatch(3, uniform_decode=True)
    assert (mode, padded.num_tokens) == (CUDAGraphMode.PIECEWISE, 4)

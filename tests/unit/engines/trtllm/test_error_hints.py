"""Errors that users of TensorRT-LLM and Dynamo report end with what to do."""

from __future__ import annotations

from dynamo_trtllm.engines.trtllm.library import error_text
from tests.kit.cases import each_case


def chained(text: str, cause: str) -> Exception:
    error = RuntimeError(text)
    error.__cause__ = OSError(cause)
    return error


@each_case(
    ("error", "advice"),
    [
        (
            RuntimeError("Assertion failed: status == NIXL_SUCCESS (transferAgent.cpp:654)"),
            "NIXL_PLUGIN_DIR",
        ),
        (
            RuntimeError("nixl_agent.cpp:265] getPluginParams: backend 'UCX' not found"),
            "builds of NIXL or UCX",
        ),
        (RuntimeError("getPluginParams: backend 'UCX' not found"), "tensorrt_llm/libs/nixl"),
        (
            RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: emplaceDone"),
            "transceiver_runtime: PYTHON",
        ),
        (ImportError("libnixl.so: undefined symbol: nixlDescList"), "builds of NIXL or UCX"),
        (
            RuntimeError("UCP API version is incompatible: required >= 1.20, actual 1.19.0"),
            "another UCX",
        ),
        (RuntimeError("VRAM memory is detected as host by UCX."), "unset UCX_TLS"),
        (
            ValueError("Python transceiver currently only supports the NIXL backend, got UCX."),
            "transceiver_runtime: CPP",
        ),
        (
            RuntimeError("cuMemImportFromShareableHandle failed: invalid resource handle"),
            "UCX_CUDA_IPC_ENABLE_MNNVL=n",
        ),
        (RuntimeError("UCX_ERR_ENDPOINT_TIMEOUT"), "UCX_NET_DEVICES"),
        (
            NotImplementedError("TritonFusedMoE is only supported on Hopper with EP size > 1."),
            "CUTLASS",
        ),
        (RuntimeError("CUDA error: out of memory"), "free_gpu_memory_fraction"),
        (RuntimeError("Executor worker returned error"), "lines of the rank"),
        (
            chained(
                "Executor worker returned error", "libucp.so.0: cannot open shared object file"
            ),
            "another UCX",
        ),
    ],
)
def test_error_text_of_known_kind_says_what_to_do(error: Exception, advice: str) -> None:
    text = error_text(error)
    assert text.startswith(f"{type(error).__name__}: {error}; ")
    assert advice in text


def test_error_text_of_unknown_kind_is_the_error() -> None:
    assert error_text(KeyError("x")) == "KeyError: 'x'"

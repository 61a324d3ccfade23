"""Reduce the kernels that Triton compiles for vLLM, tell which steps compile one, and count them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from typing import Any, NamedTuple

from dynamo_trtllm.engines.checkpoint import Checkpoint

_log = logging.getLogger("vllm.dynamo_trtllm")  # below vLLM's logger, which its processes configure


def token_counts(checkpoint: Checkpoint, config: Any) -> list[int]:
    """Return the numbers of tokens of a step that a warm-up has to run, so that later steps compile no kernel.

    Steps of up to the largest captured size are padded to a captured one. Triton compiles a kernel for each value of
    its constants, and for whether an integer argument is divisible by 16; so few counts stand for all.
    """
    parallel = config.parallel_config
    if config.device_config.device_type != "cuda" or int(parallel.data_parallel_size) > 1:
        return []  # the ranks of data parallelism step together, and a pass of one could wait for the others' requests
    limit = int(config.scheduler_config.max_num_batched_tokens)
    captured = () if config.model_config.enforce_eager else config.compilation_config.cudagraph_capture_sizes or ()
    ranks = int(parallel.tensor_parallel_size) if parallel.enable_expert_parallel else 1
    experts = checkpoint.num_experts // ranks
    seen = {
        kernel for tokens in (limit, *captured) for kernel in _kernels(tokens, experts, checkpoint.experts_per_token)
    }
    counts = []
    for tokens in range(limit - 1, max(captured, default=0), -1):
        new = _kernels(tokens, experts, checkpoint.experts_per_token) - seen
        if new:
            counts.append(tokens)
            seen |= new
    return counts


def _kernels(tokens: int, experts: int, top_k: int) -> set[tuple[object, ...]]:
    """Return keys of the kernels that a step runs, as far as they depend on its number of tokens.

    In general these are a power of two and whether the number is divisible by 16; with experts, also the arguments of
    the OpenAI Triton kernels (triton_kernels 3.5.1: routing.py, matmul_ogs.py).
    """

    def divisible(number: int) -> object:
        return number if number == 1 else number % 16 == 0

    general: set[tuple[object, ...]] = {("size", tokens.bit_length()), ("tokens", divisible(tokens))}
    if not experts:
        return general
    rows = tokens * top_k
    block = max(16, min(1 << max(0, rows // experts - 1).bit_length(), 128))  # rows of a tile
    tiles = rows if rows <= experts else -(-(rows - experts + 1) // block) + experts - 1
    parts = -(-tokens // 32)
    fills = -(-2 * rows // 1024) + experts + 1
    return general | {
        ("sum", divisible(parts)),
        ("route", divisible(2 * rows), divisible(parts), divisible(fills)),
        ("sort", divisible(tokens)),
        ("multiply", block, divisible(tokens), divisible(rows), divisible(tiles)),
    }


class FixedArgument(NamedTuple):
    """An argument of a Triton kernel that is a constant, so that each of its values is compiled anew."""

    user: str  # module whose launches use the kernel
    kernel: str
    constant: str
    unspecialized: tuple[str, ...]  # arguments whose divisibility by 16 changes nothing in the code


# Of triton_kernels 3.5.1, which vLLM 0.24.0 contains. Both constants are the number of tokens, rounded up to 32.
FIXED = (
    FixedArgument("triton_kernels.topk", "_topk_forward", "stride_rn", ("n_rows", "n_rows_pad")),
    FixedArgument(
        "triton_kernels.reduction_details.reduce_bitmatrix",
        "_sum_bitmatrix_rows",
        "stride_bn",
        ("shape_bm", "stride_pn", "shape_pn"),
    ),
)


def loosen(fixed: FixedArgument) -> bool:
    """Replace a Triton kernel by the same one with an ordinary argument in place of the constant.

    Returns:
        False if the kernel has no such constant: then its library does not need this.

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such kernel.
    """
    user = importlib.import_module(fixed.user)
    kernel = getattr(user, fixed.kernel)
    constant = f"{fixed.constant}: tl.constexpr"
    source = inspect.getsource(kernel.fn)
    if source.count(constant) != 1:
        return False
    define = importlib.import_module("triton_kernels.specialize").define_kernel
    names = inspect.signature(kernel.fn).parameters
    attributes = {"do_not_specialize": [name for name in fixed.unspecialized if name in names]}
    scope = {name: value for name, value in kernel.fn.__globals__.items() if not name.startswith("__")}
    loosened = define(source.replace(constant, fixed.constant), user, attributes, **scope)
    setattr(user, fixed.kernel, loosened)
    return True


def loosen_kernels() -> None:
    """Compile the two kernels with a constant per 32 tokens once instead, if this build of vLLM has them."""
    if not importlib.import_module("vllm.utils.import_utils").has_triton_kernels():
        return
    for fixed in FIXED:
        try:
            if not loosen(fixed):
                _log.info("%s has no constant %s: nothing to replace", fixed.kernel, fixed.constant)
        except (ImportError, AttributeError, OSError, TypeError, ValueError, SyntaxError) as exc:
            _log.warning(
                "can't replace %s of %s, so it is compiled for every 32 tokens of a step: %s",
                fixed.kernel,
                fixed.user,
                exc,
            )


class Compilations:
    """Counts the kernels that Triton compiles or loads from its cache, in place of vLLM's monitor, which logs each."""

    def __init__(self) -> None:
        """Count from now on."""
        self.count = 0
        self._runtime = importlib.import_module("triton").knobs.runtime
        self._before = self._runtime.jit_post_compile_hook
        self._runtime.jit_post_compile_hook = self._on_compiled

    def _on_compiled(self, **_: Any) -> None:
        self.count += 1

    def stop(self) -> int:
        """Restore the monitor. Return the count."""
        self._runtime.jit_post_compile_hook = self._before
        return self.count


_counting: list[Compilations] = []  # at most one


def start_counting() -> None:
    """Count compilations from now on, if there is Triton."""
    if importlib.util.find_spec("triton") is not None:
        _counting.append(Compilations())


def stop_counting() -> int:
    """End counting. Return the count, 0 if nothing was counted."""
    return sum(_counting.pop().stop() for _ in range(len(_counting)))

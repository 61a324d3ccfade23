"""Choose folders for the kernels that are compiled for vLLM, choose passes that compile the kernels
early, and count the compiled kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_trtllm.engines import warm_up
from dynamo_trtllm.models.checkpoint import Checkpoint
from dynamo_trtllm.protocol.number_types import ceil_div

_TRITON = "TRITON_CACHE_DIR"


def cache_folders(compile_cache: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that name the folders of compiled kernels.

    Triton's own default depends on whether torch.compile's cache was empty, so a restarted engine
    would use another folder than the one that was filled.

    Args:
        compile_cache: the folder for all compiled kernels. If it is None, only Triton's variable is
            returned, and only if the user has not set it.
        environment: environment variables of this process.
    """
    if compile_cache is not None:
        return {
            "VLLM_CACHE_ROOT": str(compile_cache / "vllm"),
            **warm_up.cache_folders(compile_cache),
        }
    if environment.get(_TRITON):
        return {}
    root = environment.get("VLLM_CACHE_ROOT") or str(Path("~/.cache/vllm").expanduser())
    return {_TRITON: str(Path(root) / "triton")}


def token_counts(checkpoint: Checkpoint, config: Any) -> list[int]:
    """Return the numbers of tokens of the steps that a warm-up has to run, so that later steps
    compile no kernel.

    Steps of up to the largest captured size are padded to a captured size, so they need no warm-up.
    For larger steps, Triton compiles a kernel for each value of its constants, and separate code
    for integer arguments that are divisible by 16. So a few numbers of tokens stand for all.
    """
    parallel = config.parallel_config
    if config.device_config.device_type != "cuda":
        return []
    # The ranks of data parallelism step together, so a pass of one rank could wait until the other
    # ranks have requests.
    if int(parallel.data_parallel_size) > 1:
        return []
    limit = int(config.scheduler_config.max_num_batched_tokens)
    captured: Sequence[int] = ()
    if not config.model_config.enforce_eager:
        captured = config.compilation_config.cudagraph_capture_sizes or ()
    ranks = int(parallel.tensor_parallel_size) if parallel.enable_expert_parallel else 1
    experts = checkpoint.num_experts // ranks
    seen: set[tuple[object, ...]] = set()
    for tokens in (limit, *captured):
        seen |= _kernels(tokens, experts, checkpoint.experts_per_token)
    counts = []
    for tokens in range(limit - 1, max(captured, default=0), -1):
        new = _kernels(tokens, experts, checkpoint.experts_per_token) - seen
        if new:
            counts.append(tokens)
            seen |= new
    return counts


def _kernels(tokens: int, experts: int, top_k: int) -> set[tuple[object, ...]]:
    """Return keys of the kernels that a step runs, as far as they depend on its number of tokens.

    The general keys are the power of two of the number, and whether the number is divisible by 16.
    With experts, the keys also have the arguments of the OpenAI Triton kernels (triton_kernels
    3.5.1: routing.py, matmul_ogs.py).
    """

    def divisible(number: int) -> object:
        # Triton also compiles separate code for the number 1.
        return number if number == 1 else number % 16 == 0

    general: set[tuple[object, ...]] = {
        ("size", tokens.bit_length()),
        ("tokens", divisible(tokens)),
    }
    if experts == 0:
        return general
    rows = tokens * top_k
    rows_per_expert = 1 << max(0, rows // experts - 1).bit_length()  # a power of two
    block = max(16, min(rows_per_expert, 128))  # rows of a tile
    if rows <= experts:
        tiles = rows
    else:
        tiles = ceil_div(rows - experts + 1, block) + experts - 1
    parts = ceil_div(tokens, 32)
    fills = ceil_div(2 * rows, 1024) + experts + 1
    return general | {
        ("sum", divisible(parts)),
        ("route", divisible(2 * rows), divisible(parts), divisible(fills)),
        ("sort", divisible(tokens)),
        ("multiply", block, divisible(tokens), divisible(rows), divisible(tiles)),
    }


# At most one function: it ends the counting that is under way, and returns the count.
_counting: list[Callable[[], int]] = []


def count_compilations(*, begins: bool) -> int:
    """Begin or end counting the kernels that Triton compiles or loads from its cache.

    While kernels are counted, vLLM's monitor does not log each compilation. Without Triton, nothing
    is counted.

    Returns:
        The count since the last beginning.
    """
    count = 0
    if _counting:
        stop_last = _counting.pop()
        count = stop_last()
    if not begins or importlib.util.find_spec("triton") is None:
        return count
    runtime = importlib.import_module("triton").knobs.runtime
    monitor = runtime.jit_post_compile_hook
    compiled = itertools.count()

    def note_compilation(**_: Any) -> int:
        return next(compiled)

    def stop() -> int:
        runtime.jit_post_compile_hook = monitor
        return next(compiled)

    runtime.jit_post_compile_hook = note_compilation
    _counting.append(stop)
    return count

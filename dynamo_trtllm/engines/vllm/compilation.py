"""Reduce the kernels that are compiled for vLLM, count them, and store them where later starts find them.

One engine of a host compiles for all that have the same model and arguments.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo_trtllm.engines import warm_up
from dynamo_trtllm.engines.checkpoint import Checkpoint

_log = logging.getLogger("vllm.dynamo_trtllm")  # below vLLM's logger, which its processes configure
_TRITON = "TRITON_CACHE_DIR"
_LOCK_POLL_S = 0.25


def cache_folders(compile_cache: Path | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that name the folders of compiled kernels.

    Triton's own default depends on whether torch.compile's cache was empty, so a restarted engine would use another
    folder than the one that was filled.

    Args:
        compile_cache: the folder for all of them, or None: only Triton's is set, if it is not set yet.
        environment: environment variables of this process.
    """
    if compile_cache is not None:
        return {"VLLM_CACHE_ROOT": str(compile_cache / "vllm"), **warm_up.cache_folders(compile_cache)}
    root = environment.get("VLLM_CACHE_ROOT") or str(Path("~/.cache/vllm").expanduser())
    return {} if environment.get(_TRITON) else {_TRITON: str(Path(root) / "triton")}


class CompileLock:
    """Lets one engine of a host compile, while others with equal model and arguments wait for its kernels."""

    def __init__(self, folder: Path, key: str) -> None:
        """Initialize a lock that is not held.

        Args:
            folder: the folder of the lock's files, in the cache.
            key: what the kernels depend on.
        """
        from filelock import FileLock  # comes with vLLM

        self._lock = FileLock(folder / f"{key}.lock", thread_local=False)
        self._filled = folder / f"{key}.filled"

    def acquire(self, longest_s: float = 300.0) -> bool:
        """Wait for another process that compiles. Hold the lock unless its kernels are there now.

        Args:
            longest_s: longest wait. After it, this process compiles, too.

        Returns:
            True if this process holds the lock.
        """
        if self._filled.exists():
            return False
        self._filled.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except TimeoutError:
            name = self._lock.lock_file
            _log.info("waiting for another engine of this host, which compiles the same kernels (%s)", name)
            try:
                self._lock.acquire(timeout=longest_s, poll_interval=_LOCK_POLL_S)
            except TimeoutError:
                _log.warning("waited %g s for the engine that holds %s; compiling, too", longest_s, name)
                return False
        if self._filled.exists():
            self._lock.release()
        return self._lock.is_locked

    def release(self, *, is_filled: bool) -> None:
        """Let the others go on. Does nothing if the lock is not held.

        Args:
            is_filled: all kernels were compiled, so that no later engine needs to wait.
        """
        if is_filled and self._lock.is_locked:
            self._filled.touch()
        self._lock.release()


def compile_once() -> None:
    """Make vLLM's workers in this process take a `CompileLock` before they compile, until the warm-up has ended."""
    for module, name in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker")):
        loaded = sys.modules.get(f"vllm.v1.worker.{module}")
        if loaded is not None:
            _lock_before_profiling(getattr(loaded, name))


def _lock_before_profiling(worker_class: Any) -> None:
    profile = worker_class.determine_available_memory  # the first method that runs the model

    def determine_available_memory(self: Any) -> int:
        # Another rank of the same engine would wait for this one, which may wait for that rank's lock.
        if self.rank == 0 and self.vllm_config.parallel_config.data_parallel_size == 1 and not _locks:
            lock = _compile_lock(self.vllm_config)
            try:
                if lock.acquire():
                    _locks.append(lock)
            except (OSError, NotImplementedError) as exc:  # a read-only cache, or a file system without locks
                _log.warning("can't wait for other engines that compile the same kernels: %s", exc)
        found: int = profile(self)
        return found

    worker_class.determine_available_memory = determine_available_memory


def _compile_lock(config: Any) -> CompileLock:
    envs: Any = importlib.import_module("vllm.envs")
    platform = importlib.import_module("vllm.platforms").current_platform
    parts = (config.compute_hash(), sorted(envs.compile_factors().items(), key=str), platform.get_device_name())
    return CompileLock(Path(envs.VLLM_CACHE_ROOT) / "dynamo_trtllm", hashlib.sha256(repr(parts).encode()).hexdigest())


_locks: list[CompileLock] = []  # at most one: that of this engine, while it is held


def end_compiling() -> None:
    """Let the engines go on that wait for this one's kernels."""
    if _locks:
        _locks.pop().release(is_filled=True)


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


_counting: list[Callable[[], int]] = []  # at most one: ends the counting, and returns the count


def count_compilations(*, begins: bool) -> int:
    """Begin or end counting the kernels that Triton compiles or loads from its cache.

    Meanwhile, vLLM's monitor does not log each. Without Triton, nothing is counted.

    Returns:
        The count since the last beginning.
    """
    ended = _counting.pop()() if _counting else 0
    if begins and importlib.util.find_spec("triton") is not None:
        runtime = importlib.import_module("triton").knobs.runtime
        monitor, compiled = runtime.jit_post_compile_hook, itertools.count()
        runtime.jit_post_compile_hook = lambda **_: next(compiled)

        def stop() -> int:
            runtime.jit_post_compile_hook = monitor
            return next(compiled)

        _counting.append(stop)
    return ended

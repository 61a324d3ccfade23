"""Store compiled kernels where later starts of vLLM find them, and let one engine of a host compile for all."""

from __future__ import annotations

import copy
import hashlib
import importlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_trtllm.engines import warm_up

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


def hash_without_path() -> None:
    """Make vLLM find compiled code of the same model in another folder: its cache's key has the folder's path.

    The key also has the whole config.json. Weights are no part of compiled code.
    """
    model_config: Any = importlib.import_module("vllm.config").ModelConfig
    compute_hash = model_config.compute_hash

    def compute_hash_without_path(self: Any) -> str:
        anywhere = copy.copy(self)
        anywhere.model = ""
        key: str = compute_hash(anywhere)
        return key

    model_config.compute_hash = compute_hash_without_path


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

"""Let one engine of a host run torch.compile, while other engines with the same model and arguments
wait for its result.

The lock covers torch.compile only, which runs in the first pass of the model. An engine whose code
was compiled by an earlier start does not take the lock. For CUDA graphs and the warm-up, which come
after this pass, no engine waits for another one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynamo_trtllm.engines.vllm import start_progress

# The processes of vLLM configure the logger "vllm", and this one with it.
log = logging.getLogger("vllm.dynamo_trtllm")
_POLL_S = 0.25
_MAX_WAIT_S = 120.0  # torch.compile takes 18 to 47 s for gpt-oss-120b


class CompileLock:
    """A lock of this host. The operating system releases it if its process is killed."""

    def __init__(self, folder: Path, key: str) -> None:
        """Initialize a lock that is not held.

        Args:
            folder: the folder of the lock's files, in the cache.
            key: what the compiled code depends on.
        """
        from filelock import FileLock  # comes with vLLM

        self._lock = FileLock(folder / f"{key}.lock", thread_local=False)
        self._compiled = folder / f"{key}.compiled"

    def acquire(self, longest_s: float = _MAX_WAIT_S) -> bool:
        """Wait for another process that compiles. Hold the lock unless the code is compiled now.

        Args:
            longest_s: longest wait. After this time, this process compiles, too.

        Returns:
            True if this process holds the lock.
        """
        if self._compiled.exists():
            return False
        self._compiled.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except TimeoutError:
            start_progress.note(start_progress.WAITING)
            log.info(
                "waiting for another engine of this host, which compiles the same code (%s)",
                self._lock.lock_file,
            )
            try:
                self._lock.acquire(timeout=longest_s, poll_interval=_POLL_S)
            except TimeoutError:
                log.warning(
                    "waited %g s for the engine that holds %s; compiling, too",
                    longest_s,
                    self._lock.lock_file,
                )
                return False
        if self._compiled.exists():
            self._lock.release()
        return self._lock.is_locked

    def release(self, *, is_compiled: bool) -> None:
        """Let the other engines go on. Does nothing if the lock is not held.

        Args:
            is_compiled: the code is stored, so that no later engine needs to wait.
        """
        try:
            if is_compiled and self._lock.is_locked:
                self._compiled.touch()
            self._lock.release()
        except OSError as exc:
            # For example, the disk is full. The start goes on all the same.
            log.warning("can't note that code was compiled: %s", exc)


def lock_first_pass(worker_class: Any) -> None:
    """Make a class of vLLM's workers hold a `CompileLock` in the model's first pass."""
    profile = worker_class.determine_available_memory  # the first method that runs the model

    @functools.wraps(profile)
    def determine_available_memory(self: Any) -> int:
        # The ranks of an engine wait for each other in a pass. If two ranks took locks, each could
        # wait for the other. So only one rank takes the lock, and the other ranks of tensor
        # parallelism compile, too. With data parallelism, no rank takes it.
        takes_lock = self.rank == 0 and self.vllm_config.parallel_config.data_parallel_size == 1
        lock = _acquired(self.vllm_config) if takes_lock else None
        if self.rank == 0:
            start_progress.note(start_progress.COMPILING)
        if lock is None:
            return int(profile(self))
        try:
            with _released_after_compilation(lock):
                found: int = profile(self)
            lock.release(is_compiled=True)
        finally:
            lock.release(is_compiled=False)
        return found

    worker_class.determine_available_memory = determine_available_memory


@contextmanager
def _released_after_compilation(lock: CompileLock) -> Iterator[None]:
    """Release the lock as soon as vLLM has compiled and stored the code.

    If vLLM does not say when, the end of the pass releases it. vLLM stores the code before it
    leaves `monitor_torch_compile` (0.24 to 0.33). The rest of the pass took 9 of 34 s.
    """
    decorators: Any = sys.modules.get("vllm.compilation.decorators")
    monitor = getattr(decorators, "monitor_torch_compile", None)
    if monitor is None:
        yield
        return

    @contextmanager
    def monitor_then_release(*args: Any, **keywords: Any) -> Iterator[Any]:
        with monitor(*args, **keywords) as value:
            yield value
        # A model with an encoder compiles it first, and then its language model.
        if not keywords.get("is_encoder"):
            lock.release(is_compiled=True)

    decorators.monitor_torch_compile = monitor_then_release
    try:
        yield
    finally:
        decorators.monitor_torch_compile = monitor


def _acquired(config: Any) -> CompileLock | None:
    """Return the lock of an engine's compiled code, held if the code must be compiled.

    Return None if the engine compiles nothing, as with `enforce_eager`, or if the lock can't be
    created.
    """
    if config.compilation_config.mode.name != "VLLM_COMPILE":
        return None
    envs: Any = importlib.import_module("vllm.envs")
    platform = importlib.import_module("vllm.platforms").current_platform
    parts = (
        config.compute_hash(),
        sorted(envs.compile_factors().items(), key=str),
        platform.get_device_name(),
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    lock = CompileLock(Path(envs.VLLM_CACHE_ROOT) / "dynamo_trtllm", key)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as exc:
        # For example, the cache is read-only, or its file system has no locks.
        log.warning("can't wait for other engines that compile the same code: %s", exc)
        return None
    return lock

"""Build a library's engine on a thread, and report the progress."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 2.0  # shortest time between two queries of the driver
_GIB = 1 << 30

T = TypeVar("T")


def run_in_daemon_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], None] | None = None
) -> asyncio.Future[T]:
    """Run `call` on a daemon thread. If it never returns, the event loop and the process can still end.

    Args:
        call: blocking function.
        name: name of the thread, for logs.
        unwanted: receives the result, on another thread, if the future was cancelled before `call` returned.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.cancelled():
            if error is not None:
                _log.debug("%s failed after its caller was cancelled: %s", name, error)
            elif unwanted is not None:
                threading.Thread(target=unwanted, args=(value,), name=f"{name}-unwanted", daemon=True).start()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = call()
        except BaseException as exc:  # noqa: BLE001 - raised again by the future
            error = exc
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed
            if error is None and unwanted is not None and value is not None:
                unwanted(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class EngineLoader(Generic[T]):
    """Builds one engine on a thread and reports the progress."""

    def __init__(
        self,
        build: Callable[[], T],
        *,
        discard: Callable[[T], None],
        gpu_bytes_used: Callable[[], int | None],
        weight_bytes: int,
    ) -> None:
        """Initialize the loader.

        Args:
            build: blocking function that builds the engine.
            discard: receives an engine that was built after `load` was cancelled.
            gpu_bytes_used: returns the bytes in use on the GPU, or None if unknown.
            weight_bytes: weights of one GPU. While less memory is in use, weights are being loaded.
        """
        self._build = build
        self._discard = discard
        self._gpu_bytes_used = gpu_bytes_used
        self._weight_bytes = weight_bytes
        self._bytes_before = self._bytes_now = gpu_bytes_used()
        self._looked_at = time.monotonic()

    async def load(self) -> T:
        """Build the engine; raises the exceptions of `build`. A cancelled call returns at once."""
        loading = run_in_daemon_thread(self._build, name="engine-load", unwanted=self._discard)
        try:
            return await loading
        except asyncio.CancelledError:
            if loading.done() and not loading.cancelled() and loading.exception() is None:  # ready in the same turn
                threading.Thread(target=self._discard, args=(loading.result(),), daemon=True).start()
            raise

    def progress(self) -> str:
        """Describe the loading phase, derived from the GPU memory in use. Libraries do not report it."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._bytes_now = self._gpu_bytes_used()
        if self._bytes_now is None or self._bytes_before is None:
            return "building the engine"
        own = max(0, self._bytes_now - self._bytes_before)
        if own < self._weight_bytes:
            phase = f"loading weights {100 * own // self._weight_bytes}%"
        else:
            phase = "capturing CUDA graphs and warming up"
        return f"{phase}, {own / _GIB:.1f} GiB of GPU memory used"

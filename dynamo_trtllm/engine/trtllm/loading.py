"""The blocking construction of an engine on a thread of its own, with a heartbeat on the log and a word for /health.

Knows no vendor: what is built, and how it is thrown away, is given.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)
_HEARTBEAT_S = 10.0
_GIB = 1 << 30

T = TypeVar("T")


class Loading(Generic[T]):
    """One construction. `discard` gets what was built when nobody waits for it any more."""

    def __init__(
        self,
        build: Callable[[], T],
        *,
        discard: Callable[[T], None],
        gpu_bytes_used: Callable[[], int | None],
        weight_bytes: int | None,
    ) -> None:
        """`weight_bytes`: of one GPU; with it "weights" and what comes after can be told apart from outside."""
        self._build = build
        self._discard = discard
        self._gpu_bytes_used = gpu_bytes_used
        self._weight_bytes = weight_bytes
        self._began = time.monotonic()
        self._bytes_before = gpu_bytes_used()
        self._lock = threading.Lock()  # between the thread that has built and the loop that no longer waits
        self._abandoned = False

    async def built(self) -> T:
        """Waits. Raises what `build` raises. Cancelled it lets go at once; the thread cleans up after itself."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        threading.Thread(target=self._run, args=(loop, done), name="trtllm-load", daemon=True).start()
        try:
            while True:
                await asyncio.wait({done}, timeout=_HEARTBEAT_S)
                if done.done():
                    return done.result()
                _log.info("%s", self.progress())
        except asyncio.CancelledError:
            with self._lock:
                self._abandoned = True
            if done.done() and not done.cancelled() and done.exception() is None:
                self._discard(done.result())
            raise

    def progress(self) -> str:
        """What can be seen from outside: how long, how much GPU memory, and so which phase."""
        seconds = time.monotonic() - self._began
        used = self._gpu_bytes_used()
        if used is None or self._bytes_before is None:
            return f"building the engine, {seconds:.0f} s"
        own = max(0, used - self._bytes_before)
        phase = "building the engine"
        if self._weight_bytes is not None:
            loaded = own >= self._weight_bytes
            phase = "capturing CUDA graphs and warming up" if loaded else "loading weights"
        return f"{phase}, {seconds:.0f} s, {own / _GIB:.1f} GiB of GPU memory"

    def _run(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[T]) -> None:
        try:
            value = self._build()
        except BaseException as exc:  # noqa: BLE001 - carried to the loop, where it is raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, done, None, exc)
            return
        with self._lock:
            if not self._abandoned and not loop.is_closed():
                loop.call_soon_threadsafe(_settle, done, value, None)
                return
        self._discard(value)


def _settle(done: asyncio.Future[T], value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
    else:
        done.set_exception(error)

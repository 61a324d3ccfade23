"""The blocking construction of an engine on a thread of its own, and a word for people on how far it is.

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
_LOOK_EVERY_S = 2.0  # the driver is not asked more often
_GIB = 1 << 30

T = TypeVar("T")


def run_in_daemon_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], None] | None = None
) -> asyncio.Future[T]:
    """Runs `call` on a daemon thread, so that one that never returns holds up neither the loop's end nor the process.

    `unwanted` gets the result, on that thread, when the future was cancelled meanwhile.
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
        except BaseException as exc:  # noqa: BLE001 - carried to the loop, where it is raised
            error = exc
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed
            if error is None and unwanted is not None and value is not None:
                unwanted(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class EngineLoader(Generic[T]):
    """Builds one engine. `discard` gets an engine that is finished after `built` was cancelled."""

    def __init__(
        self,
        build: Callable[[], T],
        *,
        discard: Callable[[T], None],
        gpu_bytes_used: Callable[[], int | None],
        weight_bytes: int,
    ) -> None:
        """`weight_bytes`: of one GPU; `progress` uses it to distinguish loading weights from the phase after it."""
        self._build = build
        self._discard = discard
        self._gpu_bytes_used = gpu_bytes_used
        self._weight_bytes = weight_bytes
        self._bytes_before = self._bytes_now = gpu_bytes_used()
        self._looked_at = time.monotonic()

    async def built(self) -> T:
        """Raises what `build` raises. Cancelled it lets go at once; what is still built then is discarded."""
        return await run_in_daemon_thread(self._build, name="engine-load", unwanted=self._discard)

    def progress(self) -> str:
        """What can be seen from outside: how much GPU memory is taken, and so which phase it is."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._bytes_now = self._gpu_bytes_used()
        if self._bytes_now is None or self._bytes_before is None:
            return "building the engine"
        own = max(0, self._bytes_now - self._bytes_before)
        phase = "capturing CUDA graphs and warming up" if own >= self._weight_bytes else "loading weights"
        return f"{phase}, {own / _GIB:.1f} GiB of GPU memory taken"

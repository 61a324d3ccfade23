"""One run of one child process on an event loop: its end and its stop. Decides nothing, reads no output."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from contextlib import suppress


class Child:
    """Around a process of `spawn`. Made on the loop."""

    def __init__(self, process: subprocess.Popen[bytes], stop_timeout_s: float) -> None:
        self._process = process
        self._stop_timeout_s = stop_timeout_s
        self._ended = end_of(process)
        self._is_asked = False
        self.pid = process.pid

    @property
    def is_asked(self) -> bool:
        """Whether its end, if it comes, is what was asked of it here."""
        return self._is_asked

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    async def ended(self) -> int:
        """Its exit status. May be awaited by several."""
        return await asyncio.shield(self._ended)

    def ask(self) -> None:
        """SIGTERM, once: a second one would end a drain at once."""
        if not self._is_asked and not self.has_ended:
            self._is_asked = True
            self._process.terminate()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the time it was given. Returns when it is gone. Idempotent."""
        self.ask()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """SIGKILL to it and what it has started."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()  # not a group of its own yet


def end_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """The exit status to come; what the child had started and left behind is killed by then: an engine's processes hold
    the GPU that the next child needs. A thread waits: that works on each system and needs no child watcher."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def settle(status: int) -> None:
        if not future.done():
            future.set_result(status)

    def wait() -> None:
        with suppress(ChildProcessError):  # somebody was quicker to ask
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its group can't be another's yet
        with suppress(ProcessLookupError, PermissionError):  # no other process in it; on macOS the latter
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        try:
            loop.call_soon_threadsafe(settle, status)
        except RuntimeError:
            return  # the loop has ended, and nothing waits for the status

    threading.Thread(target=wait, name=f"wait-{process.pid}", daemon=True).start()
    return future

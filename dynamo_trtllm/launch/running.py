"""One run of one child process on an event loop: its lines, its end, its stop. Decides nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from dynamo_trtllm.launch.children import spawn
from dynamo_trtllm.launch.console import LineSplitter
from dynamo_trtllm.launch.plan import ProcessSpec

_READ_BYTES = 1 << 16
_LAST_LINES_S = 1.0  # after its end: longest wait for output that something else may hold open


class Running:
    """A child that was started. Made on the loop, in the main thread (`children.spawn` says why)."""

    def __init__(self, spec: ProcessSpec, environ: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        argv = [sys.executable, "-m", spec.module, *spec.argv]
        self.spec = spec
        self._process = spawn(argv, env={**environ, **spec.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.pid = self._process.pid
        self._ended = end_of(self._process)
        self._lines = asyncio.create_task(self._pump(on_line), name=f"lines of {spec.name}")

    async def _pump(self, on_line: Callable[[str], None]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        splitter = LineSplitter()
        try:
            while data := await reader.read(_READ_BYTES):
                for line in splitter.feed(data):
                    on_line(line)
            for line in splitter.end():
                on_line(line)
        finally:
            transport.close()

    async def ended(self) -> int:
        """Its exit status, once all its lines were told. May be awaited by several."""
        status = await asyncio.shield(self._ended)
        await asyncio.wait({self._lines}, timeout=_LAST_LINES_S)
        if self._lines.done():
            if not self._lines.cancelled():
                self._lines.result()
        else:
            self._lines.cancel()
        return status

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the spec's time. Returns when it is gone. Idempotent."""
        self._process.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_timeout_s):
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
    """The exit status to come. A thread waits: that works on each system and needs no child watcher."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def settle(status: int) -> None:
        if not future.done():
            future.set_result(status)

    def wait() -> None:
        status = process.wait()
        try:
            loop.call_soon_threadsafe(settle, status)
        except RuntimeError:
            return  # the loop has ended: nobody asks any more

    threading.Thread(target=wait, name=f"wait-{process.pid}", daemon=True).start()
    return future

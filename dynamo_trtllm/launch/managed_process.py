"""One run of one process of a deployment: a child whose lines are read. Decides nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping

from dynamo_trtllm.launch.console import LineSplitter
from dynamo_trtllm.launch.plan import ProcessSpec
from dynamo_trtllm.subprocesses.child import Child
from dynamo_trtllm.subprocesses.spawn import spawn

_READ_BYTES = 1 << 16
_LAST_LINES_S = 1.0  # after its end: longest wait for output that something else may hold open


class ManagedProcess(Child):
    """A child that was started. Made on the loop, in the main thread (`spawn` says why)."""

    def __init__(
        self, spec: ProcessSpec, port: int, environ: Mapping[str, str], on_line: Callable[[str], None]
    ) -> None:
        argv = [sys.executable, "-m", spec.module, *spec.arguments(port)]
        process = spawn(argv, env={**environ, **spec.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        super().__init__(process, spec.stop_timeout_s)
        self.spec = spec
        self.port = port
        self.is_ready = False  # has answered /ready with 200; set by the supervisor, which asks
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
        """Return the exit status, once all output lines were passed on. Several tasks may await it."""
        status = await super().ended()
        await asyncio.wait({self._lines}, timeout=_LAST_LINES_S)
        if self._lines.done():
            if not self._lines.cancelled():
                self._lines.result()
        else:
            self._lines.cancel()
        return status

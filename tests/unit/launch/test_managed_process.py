"""How the launcher ends one of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from dynamo_trtllm.launch import launcher
from dynamo_trtllm.launch.launcher import ManagedProcess
from dynamo_trtllm.launch.process_specs import ProcessSpec

# Ends with 7 after a SIGTERM.
_DRAINS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("started", flush=True)
signal.sigwait({signal.SIGTERM})
exit(7)
"""


async def started(monkeypatch: pytest.MonkeyPatch) -> ManagedProcess:
    """Return a process that has written a line."""
    has_begun = asyncio.Event()

    def command(module: str, *_: str) -> list[str]:
        assert module == "m"
        return [sys.executable, "-c", _DRAINS]

    monkeypatch.setattr(launcher, "module_command", command)
    spec = ProcessSpec(
        name="w",
        module="m",
        argv=(),
        env={},
        host="127.0.0.1",
        port=1,
        port_flag="--system-port",
        stop_timeout_s=60.0,
    )
    process = ManagedProcess(spec, 1, os.environ, lambda line: has_begun.set())
    await has_begun.wait()
    return process


async def test_process_that_was_never_ready_is_killed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = await started(monkeypatch)
    await process.stop()
    assert await process.ended() == -signal.SIGKILL
    assert process.is_terminating


async def test_process_that_was_ready_may_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await started(monkeypatch)
    process.is_ready = True
    await process.stop()
    assert await process.ended() == 7

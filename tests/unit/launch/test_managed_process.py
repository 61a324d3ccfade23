"""How the launcher ends one of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from dynamo_trtllm.launch import launcher
from dynamo_trtllm.launch.launcher import ManagedProcess
from dynamo_trtllm.launch.process_specs import FRONTEND, ProcessSpec

# Ends with 7 after a SIGTERM.
_DRAINS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("started", flush=True)
signal.sigwait({signal.SIGTERM})
exit(7)
"""


async def started(monkeypatch: pytest.MonkeyPatch, name: str = "w") -> ManagedProcess:
    """Return a process that has written a line."""
    has_begun = asyncio.Event()

    def command(module: str, *_: str) -> list[str]:
        assert module == "m"
        return [sys.executable, "-c", _DRAINS]

    monkeypatch.setattr(launcher, "module_command", command)
    spec = ProcessSpec(
        name=name,
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


async def test_ready_frontend_learns_of_a_stop_before_workers_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frontend = await started(monkeypatch, FRONTEND)
    frontend.announce_stop()  # it is not ready, so it may not handle the signal yet
    frontend.is_ready = True
    await frontend.stop()
    assert await frontend.ended() == 7
    frontend.announce_stop()  # it has ended

    worker = await started(monkeypatch)
    worker.is_ready = True
    worker.announce_stop()
    await worker.stop()
    assert await worker.ended() == 7

    frontend = await started(monkeypatch, FRONTEND)
    frontend.is_ready = True
    frontend.announce_stop()
    assert await frontend.ended() == -signal.SIGUSR1

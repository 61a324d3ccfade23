"""A child's end: what it has started ends too, for that may hold what the next one needs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from dynamo_trtllm.support.subprocesses import Child, spawn
from tests.kit.waiting import SOON_S

LEAVES_ONE_BEHIND = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def started(seconds: float) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    process = spawn([sys.executable, "-c", LEAVES_ONE_BEHIND, str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        return process, psutil.Process(int(process.stdout.readline()))


async def test_child_when_it_ends_then_what_it_left_behind_is_gone() -> None:
    process, grandchild = started(0.0)
    assert await Child(process, 5).ended() == 0
    await asyncio.to_thread(psutil.wait_procs, [grandchild], SOON_S)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


async def test_killed_child_leaves_nothing_behind() -> None:
    process, grandchild = started(600.0)
    child = Child(process, 5)
    process.send_signal(signal.SIGKILL)
    assert await child.ended() == -signal.SIGKILL
    await asyncio.to_thread(psutil.wait_procs, [grandchild], SOON_S)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


SECOND_SIGNAL_IS_CRUEL = """
import signal, sys
signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))
print("ready", flush=True)
sys.stdin.buffer.read(1)
"""


async def test_child_stopped_by_several_gets_one_signal() -> None:
    script = [sys.executable, "-c", SECOND_SIGNAL_IS_CRUEL]
    process = spawn(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"ready\n"
        child = Child(process, SOON_S)
        assert (child.is_terminating, child.has_ended) == (False, False)
        stops = asyncio.gather(child.stop(), child.stop())
        await asyncio.sleep(0)
        child.terminate()
        process.stdin.write(b"x")
        process.stdin.flush()
        await stops
    assert await child.ended() == 0
    assert (child.is_terminating, child.has_ended) == (True, True)


async def test_child_when_it_has_ended_then_it_is_asked_nothing() -> None:
    child = Child(spawn([sys.executable, "-c", ""]), SOON_S)
    await child.ended()
    await child.stop()
    assert not child.is_terminating


async def test_child_that_survives_sigkill_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a process that is stuck in a driver."""
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    process = spawn([sys.executable, "-c", "import time; time.sleep(600)"])
    process.terminate = lambda: None  # type: ignore[method-assign]
    try:
        child = Child(process, stop_timeout_s=0.05, kill_timeout_s=0.05)
        async with asyncio.timeout(SOON_S):
            await child.stop()
            assert await child.ended() == -signal.SIGKILL
        assert f"process {process.pid} still runs 0.05 s after SIGKILL" in caplog.text
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)

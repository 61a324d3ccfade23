"""Construction on a thread: progress, errors, and a start that is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.external.engine import LoadProgress, run_in_daemon_thread
from dynamo_trtllm.protocol.errors import EngineFailed
from tests.kit.waiting import SOON_S

GIB = 1 << 30


async def load(build: Callable[[], str], thrown: list[str]) -> str:
    return await run_in_daemon_thread(build, name="load", unwanted=thrown.append)


async def test_built_when_done_then_the_value_and_nothing_is_discarded() -> None:
    thrown: list[str] = []
    assert await load(lambda: "llm", thrown) == "llm"
    assert thrown == []


async def test_built_when_it_fails_then_its_error() -> None:
    def build() -> str:
        raise EngineFailed("no GPU")

    with pytest.raises(EngineFailed, match="no GPU"):
        await load(build, [])


async def test_built_when_cancelled_then_discards_a_late_result() -> None:
    go_on = threading.Event()
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()

    def build() -> str:
        go_on.wait()
        return "llm"

    thrown: list[str] = []

    def discard(built: str) -> None:
        thrown.append(built)
        loop.call_soon_threadsafe(gone.set)

    task = asyncio.create_task(run_in_daemon_thread(build, name="load", unwanted=discard))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert thrown == []
    go_on.set()
    await asyncio.wait_for(gone.wait(), SOON_S)
    assert thrown == ["llm"]


async def test_thread_wait_ends_at_a_deadline() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_in_daemon_thread(never.wait, name="never")
    never.set()


def test_progress_when_memory_grows_then_the_phase_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "memory_used_bytes", iter([2 * GIB, 5 * GIB, 13 * GIB]).__next__)
    loader = LoadProgress(10 * GIB, look_every_s=-1.0)
    assert loader.progress() == "loading weights 30%, 3.0 GiB of GPU memory used"
    assert loader.progress() == "capturing CUDA graphs and warming up, 11.0 GiB of GPU memory used"


def test_progress_without_driver_shows_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "memory_used_bytes", lambda: None)
    assert LoadProgress(10 * GIB).progress() == "building the engine"

"""Construction on a thread: progress, errors, and a start that is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from dynamo_trtllm.engines.external import engine as external
from dynamo_trtllm.engines.external.engine import EngineLoader, run_in_daemon_thread
from dynamo_trtllm.errors import EngineFailed
from tests.waiting import SOON_S

GIB = 1 << 30


def make(build: Callable[[], str], *, used: list[int | None] | None = None) -> tuple[EngineLoader[str], list[str]]:
    readings = iter(used or [None] * 9)
    thrown: list[str] = []
    return EngineLoader(
        build, discard=thrown.append, gpu_bytes_used=lambda: next(readings), weight_bytes=10 * GIB
    ), thrown


async def test_built_when_done_then_the_value_and_nothing_is_discarded() -> None:
    load, thrown = make(lambda: "llm")
    assert await load.load() == "llm"
    assert thrown == []


async def test_built_when_it_fails_then_its_error() -> None:
    def build() -> str:
        raise EngineFailed("no GPU")

    load, _ = make(build)
    with pytest.raises(EngineFailed, match="no GPU"):
        await load.load()


async def test_built_when_cancelled_then_it_returns_at_once_and_what_comes_is_discarded() -> None:
    go_on, gone = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def build() -> str:
        go_on.wait()
        return "llm"

    thrown: list[str] = []

    def discard(built: str) -> None:
        thrown.append(built)
        loop.call_soon_threadsafe(gone.set)

    load = EngineLoader(build, discard=discard, gpu_bytes_used=lambda: None, weight_bytes=0)
    task = asyncio.create_task(load.load())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert thrown == []
    go_on.set()
    await asyncio.wait_for(gone.wait(), SOON_S)
    assert thrown == ["llm"]


async def test_thread_when_call_never_returns_then_a_deadline_ends_the_wait() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_in_daemon_thread(never.wait, name="never")
    never.set()


def test_progress_when_memory_grows_then_the_phase_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_LOOK_EVERY_S", -1.0)
    load, _ = make(str, used=[2 * GIB, 5 * GIB, 13 * GIB])
    assert load.progress() == "loading weights 30%, 3.0 GiB of GPU memory used"
    assert load.progress() == "capturing CUDA graphs and warming up, 11.0 GiB of GPU memory used"


def test_progress_when_no_driver_tells_then_it_says_what_it_knows() -> None:
    load, _ = make(str)
    assert load.progress() == "building the engine"

"""When a worker broadcasts its load."""

from __future__ import annotations

import asyncio

from dynamo_trtllm.protocol.messages import LoadReport, decode
from dynamo_trtllm.worker.load_reports import broadcast_load
from dynamo_trtllm.worker.timing import WorkerTiming
from tests.kit.waiting import SOON_S


async def test_broadcast_of_idle_worker_sleeps_until_a_call() -> None:
    running = 0
    num_read = 0
    sent = list[LoadReport]()
    called = asyncio.Event()
    is_up = True

    def load() -> LoadReport:
        nonlocal num_read
        num_read += 1
        return LoadReport(7, num_read, running, 0, 0, 0, 0, 0)

    def publish(data: bytes) -> bool:
        if is_up:
            sent.append(decode(data, LoadReport))
        return is_up

    async def settle() -> list[int]:
        for _ in range(20):
            await asyncio.sleep(0)
        return [report.running for report in sent]

    timing = WorkerTiming(load_broadcast_s=0.0, collect_calls_s=0.0)
    task = asyncio.create_task(broadcast_load(load, called, publish, timing))
    assert await settle() == [0]
    assert num_read == 2
    called.set()
    running = 3
    assert await settle() == [0, 3]
    assert num_read > 10
    running = 0
    is_up = False
    assert await settle() == [0, 3]
    is_up = True  # what was not accepted is sent again
    assert await settle() == [0, 3, 0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_broadcast_repeats_an_unchanged_load() -> None:
    num_sent = 0
    is_repeated = asyncio.Event()

    def load() -> LoadReport:
        return LoadReport(7, 1, 0, 0, 0, 0, 0, 0)

    def publish(_: bytes) -> bool:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 5:
            is_repeated.set()
        return True

    timing = WorkerTiming(load_broadcast_s=0.0, collect_calls_s=0.0, unchanged_load_s=0.0)
    task = asyncio.create_task(broadcast_load(load, asyncio.Event(), publish, timing))
    async with asyncio.timeout(SOON_S):
        await is_repeated.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

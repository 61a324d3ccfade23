from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import threading

import pytest

from dynamo_trtllm.protocol.errors import Disconnected, DynamoError, InternalError
from dynamo_trtllm.support.background import MAX_THREADS, BackgroundTasks, in_thread, wait_for_first
from tests.kit.waiting import SOON_S


async def broken() -> None:
    raise KeyError("a bug")


async def over() -> None:
    return


async def away() -> None:
    raise Disconnected("for good")


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (broken, InternalError, "background task t failed: KeyError('a bug'); see the log"),
        (over, InternalError, "background task t ended; see the log"),
        (away, Disconnected, "for good"),
    ],
)
async def test_task_that_ends_tells_its_owner_once(
    caplog: pytest.LogCaptureFixture, work, error: type[DynamoError], message: str
) -> None:
    seen: list[str] = []
    tasks = BackgroundTasks(seen.append)
    assert tasks.failure is None
    tasks.start(work(), "t")
    with pytest.raises(error) as caught:
        await asyncio.wait_for(tasks.until_failed(), SOON_S)
    assert caught.value.message == message
    tasks.start(over(), "another")
    await asyncio.sleep(0.01)
    assert len(seen) == 1
    assert isinstance(tasks.failure, error)
    assert ("a bug" in caplog.text) is (work is broken)


async def test_task_cancelled_by_its_owner_is_no_failure() -> None:
    tasks = BackgroundTasks()
    task = tasks.start(asyncio.sleep(3600), "t")
    await tasks.cancel(task)
    await tasks.cancel(task)
    await tasks.cancel(None)
    assert task.cancelled()
    assert tasks.failure is None


async def test_task_when_cancelled_by_another_then_that_is_a_failure() -> None:
    tasks = BackgroundTasks()
    tasks.start(asyncio.sleep(3600), "t").cancel()
    with pytest.raises(InternalError, match="task t failed: CancelledError"):
        await asyncio.wait_for(tasks.until_failed(), SOON_S)


async def test_first_of_returns_first_and_cancels_others() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert await wait_for_first(wait(), asyncio.sleep(0, "result")) == "result"
    assert cancelled.is_set()


async def test_first_of_raises_an_error_and_is_none_at_limit() -> None:
    async def fail() -> None:
        raise InternalError("broken")

    with pytest.raises(InternalError, match="broken"):
        await wait_for_first(asyncio.Event().wait(), fail())
    assert await wait_for_first(asyncio.Event().wait(), timeout_s=0.0) is None


async def test_in_thread_uses_few_threads_with_caller_context() -> None:
    caller: contextvars.ContextVar[int] = contextvars.ContextVar("caller")
    release = threading.Event()

    def work() -> tuple[int, int]:
        release.wait(SOON_S)
        return threading.get_ident(), caller.get()

    async def call(number: int) -> tuple[int, int]:
        caller.set(number)
        return await in_thread(work)

    calls = [asyncio.create_task(call(number)) for number in range(4 * MAX_THREADS)]
    await asyncio.sleep(0)
    release.set()
    threads, callers = zip(*await asyncio.gather(*calls), strict=True)
    assert callers == tuple(range(4 * MAX_THREADS))
    assert len(set(threads)) <= MAX_THREADS
    assert threading.get_ident() not in threads


def test_in_thread_in_a_forked_process_runs() -> None:
    asyncio.run(in_thread(int))  # starts a thread that the forked process lacks
    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(in_thread(int)))
    child.start()
    child.join(SOON_S)
    child.kill()
    child.join()
    assert child.exitcode == 0

"""Run background tasks and report when one ends, run work on threads, and wait for tasks.

A task of `BackgroundTasks` serves the whole process. If it ends, `/ready` gives the reason and the
process exits. A task that serves only one model or one pair of workers handles its own failures.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from dynamo_trtllm.protocol.errors import DynamoError, InternalError

log = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundTasks:
    """Tasks of one event loop, which must not end by themselves.

    `on_failure` is called once, with the reason, when the first task ends by itself.
    """

    def __init__(self, on_failure: Callable[[str], None] | None = None) -> None:
        self.failure: DynamoError | None = None
        self.reason = ""  # the reason of the failure, with the name of the task
        self._on_failure = on_failure
        self._failed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in a task and return the task.

        If the task ends before `cancel` or `release`, it counts as failed.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def release(self, task: asyncio.Task[None]) -> None:
        """Stop watching a task that the caller is about to end."""
        self._tasks.discard(task)

    async def cancel(self, task: asyncio.Task[None] | None) -> None:
        """Cancel a task and wait until it has ended. Do nothing for None or an ended task."""
        if task is None:
            return
        self.release(task)
        await cancel_all([task])

    async def until_failed(self) -> None:
        """Raise the exception of the first failed task.

        An exception that is not a DynamoError becomes InternalError.
        """
        await self._failed.wait()
        if self.failure is not None:
            raise self.failure

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report a task that ended although it was not released."""
        if task not in self._tasks:
            return
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        name = task.get_name()
        if isinstance(error, DynamoError):  # the process logs it when it exits
            failure = error
            reason = f"background task {name} failed: {error.message}"
        else:
            outcome = "ended" if error is None else f"failed: {error!r}"
            reason = f"background task {name} {outcome}"
            log.error("%s", reason, exc_info=error)
            failure = InternalError(f"{reason}; see the log")
            failure.__cause__ = error
        if self.failure is None:
            self.failure = failure
            self.reason = reason
            self._failed.set()
            if self._on_failure is not None:
                self._on_failure(reason)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """Cancel tasks and wait until they have ended. Return the result or the exception of each."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    return await asyncio.gather(*ending, return_exceptions=True)


async def wait_for_first(*works: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
    """Return the result of the coroutine that ends first, or raise its error.

    The other coroutines are cancelled. After `timeout_s` seconds, all are cancelled, and the result
    is None.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ended = next((task for task in tasks if task.done()), None)
        return None if ended is None else ended.result()
    finally:
        await cancel_all(tasks)


MAX_THREADS: Final = min(4, os.cpu_count() or 1)


class _ProcessThreads:
    """The threads of `in_thread`, which all event loops of this process share.

    There are only few threads, because each thread that tokenizes takes 32 to 110 MiB.
    """

    def __init__(self) -> None:
        self.executor = self._new_executor()
        # A forked process has none of these threads, but its copy of the executor counts them: it
        # would start no others, and work would wait for ever.
        os.register_at_fork(after_in_child=self._replace)

    @staticmethod
    def _new_executor() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MAX_THREADS, "in-thread")

    def _replace(self) -> None:
        self.executor = self._new_executor()


_THREADS: Final = _ProcessThreads()


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run `work` on one of `MAX_THREADS` threads.

    If this call is cancelled, it returns only after the work has ended, because the work uses
    resources that the caller then frees.
    """
    call = partial(contextvars.copy_context().run, work, *args)
    running = asyncio.get_running_loop().run_in_executor(_THREADS.executor, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # marks the error as retrieved, so asyncio does not log it
        raise
    finally:
        # An error refers to this frame by its traceback, and `running` refers to the error. If the
        # frame still referred to `running`, this cycle would keep the arguments in memory.
        del running, call

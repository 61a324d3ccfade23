"""The owner of a process's background tasks: none of them can end unnoticed.

A task that serves one model or one pair handles its own failures. What is started here serves the whole process, which
can't go on without it: the end of such a task is the reason that `/ready` gives, and then ends the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_trtllm.errors import DynamoError, InternalError

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Made on the event loop, or before it. `on_failure` is called once, with the failure, when a task has ended."""

    def __init__(self, on_failure: Callable[[DynamoError], None] | None = None) -> None:
        self.failure: DynamoError | None = None
        self._on_failure = on_failure
        self._failed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work`, which must not end before `cancel` is awaited. Return its task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def release(self, task: asyncio.Task[None]) -> None:
        """Leave a task to its starter, who is about to end it: its end is no failure."""
        self._tasks.discard(task)

    async def cancel(self, task: asyncio.Task[None] | None) -> None:
        """End a task in order; its end is no failure. Does nothing for None or a task that has ended."""
        if task is None:
            return
        self.release(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        """Raise what the first failed task raised, as InternalError when it is not a DynamoError."""
        if self.failure is not None:
            raise self.failure

    async def until_failed(self) -> None:
        """Wait until a task fails, and raise as `check`."""
        await self._failed.wait()
        self.check()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task not in self._tasks:
            return
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        what = "ended" if error is None else f"failed with {type(error).__name__}: {error}"
        _log.error(
            "background task %s %s", task.get_name(), what, exc_info=None if isinstance(error, DynamoError) else error
        )
        if self.failure is None:
            if isinstance(error, DynamoError):
                self.failure = error
            else:
                self.failure = InternalError(f"background task {task.get_name()} {what}; see the log")
                self.failure.__cause__ = error
            self._failed.set()
            if self._on_failure is not None:
                self._on_failure(self.failure)

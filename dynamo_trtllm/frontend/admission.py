"""Which generations run: how many at once, and each by its id. No HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo_trtllm.errors import Cancelled, Overloaded


class Permits:
    """Admission at the door: one more than `limit` is refused at once, never queued.

    A choice takes a permit, because it is a request of the pipeline like any other: what engines and memory bear is
    a number of streams, however clients bundle them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def take(self, count: int) -> None:
        """Raises Overloaded when there are not so many."""
        if self.taken + count > self.limit:
            raise Overloaded(
                f"{self.taken} of at most {self.limit} choices are being generated and this request has {count} more; "
                "try again later"
            )
        self.taken += count

    def give_back(self, count: int) -> None:
        self.taken -= count


class Running:
    """The answers being made, by id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._tasks

    def cancel(self, answer_id: str) -> bool:
        """Ends the answer with the error `Cancelled`, its choices closed. False: none of this id is running."""
        task = self._tasks.get(answer_id)
        if task is None:
            return False
        self._cancelled.add(answer_id)
        task.cancel()
        return True

    @contextmanager
    def entered(self, answer_id: str) -> Iterator[None]:
        """Around the making, in the task that makes it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[answer_id] = task
        try:
            yield
        except asyncio.CancelledError:
            if answer_id in self._cancelled:
                raise Cancelled(f"{answer_id} was cancelled on request") from None
            raise
        finally:
            del self._tasks[answer_id]
            self._cancelled.discard(answer_id)

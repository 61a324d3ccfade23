"""Know the answers in progress, so that clients can look at them and cancel them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from dynamo_trtllm.errors import Cancelled
from dynamo_trtllm.frontend.requests.answer import Answer, AnswerBuilder


@dataclass(slots=True, eq=False)
class _RunningAnswer:
    builder: AnswerBuilder
    client: str  # network address
    task: asyncio.Task[None]  # serves the request
    is_cancelled: bool = False  # on request of a client


class RunningAnswers:
    """The answers whose choices run, by their ids."""

    def __init__(self) -> None:
        self._by_id: dict[str, _RunningAnswer] = {}

    @contextmanager
    def track(self, answer: Answer, client: str) -> Generator[None]:
        """Know the answer as long as a `with` block of the current task runs it.

        Raises Cancelled if a client has cancelled it with `cancel`.

        Args:
            answer: the answer.
            client: network address of its client.
        """
        task = asyncio.current_task()
        assert task is not None
        running = _RunningAnswer(answer.builder, client, task)
        self._by_id[answer.id] = running
        try:
            yield
        except asyncio.CancelledError:
            if running.is_cancelled:
                raise Cancelled(f"{answer.id} was cancelled on request") from None
            raise
        finally:
            del self._by_id[answer.id]

    def builder(self, answer_id: str) -> AnswerBuilder | None:
        """Return the builder of an answer in progress; None if there is none of this id."""
        running = self._by_id.get(answer_id)
        return None if running is None else running.builder

    def cancel(self, answer_id: str) -> str:
        """Cancel an answer in progress. Return the network address of its client."""
        running = self._by_id[answer_id]
        running.is_cancelled = True
        running.task.cancel()
        return running.client

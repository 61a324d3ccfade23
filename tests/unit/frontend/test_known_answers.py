"""Pairs that wait for the same known answer share the work, and only that."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.known_answers import ANSWER_TOKENS, KnownAnswers
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.protocol.messages import Role, TokenIds
from tests.instances import make_instance


class Source:
    """Answers when `is_open` is set."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_cancelled = 0
        self.is_asked, self.is_open = asyncio.Event(), asyncio.Event()

    async def ask(
        self, selection: WorkerSelection, prompt: TokenIds, num_resumed: int
    ) -> list[int]:
        self.num_asked += 1
        self.is_asked.set()
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [len(prompt)] * (ANSWER_TOKENS - num_resumed)


async def waiting(answers: KnownAnswers, source: Source) -> asyncio.Task[object]:
    pair = WorkerSelection(None, make_instance(1, role=Role.AGGREGATED))
    task = asyncio.create_task(answers.get(0, pair, ModelView(), source.ask))
    await asyncio.sleep(0)  # it begins to wait
    await source.is_asked.wait()
    return task


async def test_get_when_one_of_two_waiters_is_cancelled_then_the_other_gets_the_answer() -> None:
    answers = KnownAnswers()
    source = Source()
    first = await waiting(answers, source)
    second = await waiting(answers, source)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    third = await waiting(answers, source)
    source.is_open.set()
    assert await second is await third is not None
    assert (source.num_asked, source.num_cancelled) == (2, 0)  # the two requests of one answer


async def test_get_when_all_waiters_are_cancelled_then_the_request_ends_and_the_next_one_asks_again() -> (
    None
):
    answers = KnownAnswers()
    source = Source()
    tasks = [await waiting(answers, source) for _ in range(2)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    source.is_open.set()
    assert await (await waiting(answers, source)) is not None
    assert (source.num_asked, source.num_cancelled) == (3, 1)

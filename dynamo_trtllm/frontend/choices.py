"""Several choices of one answer: run side by side, and the likeliest kept. Not used for an answer of one choice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

import msgspec

from dynamo_trtllm.frontend.detokenizer import ChoiceDelta
from dynamo_trtllm.frontend.preprocess import GenerationPlan

AHEAD = 16  # pieces per choice that wait for a client that reads slowly; then the choices wait

Pieces = AsyncGenerator[ChoiceDelta, None]


async def merge_streams(streams: Sequence[Pieces]) -> Pieces:
    """Pieces as they come. The first error of a stream ends all and is raised; closing closes all."""
    came: asyncio.Queue[ChoiceDelta | asyncio.Task[None]] = asyncio.Queue()
    slots = asyncio.Semaphore(AHEAD * len(streams))

    async def pump(stream: Pieces) -> None:
        async with aclosing(stream):
            async for piece in stream:
                await slots.acquire()
                came.put_nowait(piece)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(came.put_nowait)  # behind all its pieces
    try:
        running = len(tasks)
        while running:
            item = await came.get()
            if isinstance(item, ChoiceDelta):
                slots.release()
                yield item
            else:
                item.result()
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pick_best_of(
    pieces: Sequence[ChoiceDelta], plan: GenerationPlan, likelihood: Callable[[int], float]
) -> Iterator[ChoiceDelta]:
    """Of the pieces of all candidates those of each prompt's `keep` likeliest, best first and numbered anew.

    `likelihood`: of the candidate at this place of the plan.
    """
    of: list[list[ChoiceDelta]] = [[] for _ in plan.choices]
    for piece in pieces:
        of[piece.index].append(piece)
    answers = itertools.count()
    for first in range(0, len(of), plan.candidates):
        ranked = sorted(range(first, first + plan.candidates), key=likelihood, reverse=True)
        for candidate in ranked[: plan.keep]:
            index = next(answers)
            for piece in of[candidate]:
                yield msgspec.structs.replace(piece, index=index)

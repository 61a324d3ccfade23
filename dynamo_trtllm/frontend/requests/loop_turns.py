"""Limit what one iteration of the event loop does before other streams have their turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar

T = TypeVar("T")

WORK_S = 0.01
CHOICES_PER_ITERATION = 32  # they take 5 to 10 ms
FEW_CHOICES = 4  # requests with more of them are planned within the time of an iteration
_GROUP = 8  # choices of one request in one turn


class IterationTime:
    """A limit on the time that an iteration of the event loop spends on one kind of work.

    Such a kind is the planning of bodies. Other streams are delayed by no more. Bodies that arrive
    together are planned together until the limit, further ones in the next iterations, in order of
    arrival. If each had an iteration of its own, their tokens would come in messages of their own
    with an engine that takes no time: 40% more CPU time per request, and twice as much in workers.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._used_s = 0.0  # in this iteration

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait until this iteration has time left, and count the time of the block."""
        # In order of arrival: those that wait look again before those that arrive.
        while self._used_s >= WORK_S:  # noqa: ASYNC110
            await asyncio.sleep(0)
        begun_s = self._clock()
        try:
            yield
        finally:
            if not self._used_s:
                asyncio.get_running_loop().call_soon(self._begin_iteration)
            self._used_s += self._clock() - begun_s

    def _begin_iteration(self) -> None:
        self._used_s = 0.0


class ChoiceTurns:
    """A limit on the choices that one iteration of the event loop starts, or cancels.

    Requests with several choices handle them in groups, and the groups of all requests take turns.
    Otherwise, all other streams would wait for hundreds of choices. A request with one choice takes
    no turn, because reading its body takes longer than starting its choice.
    """

    def __init__(self) -> None:
        self._used = 0  # in this iteration

    async def run(self, choices: Sequence[T], act: Callable[[T], None]) -> None:
        """Call `act` with all choices, in order."""
        if len(choices) == 1:
            act(choices[0])
            return
        for first in range(0, len(choices), _GROUP):
            group = choices[first : first + _GROUP]
            if first:
                await asyncio.sleep(0)  # other requests have their turn
            await self._take(len(group))
            for choice in group:
                act(choice)

    async def _take(self, count: int) -> None:
        """Wait until `count` more choices fit into the iteration, and count them."""
        # In order of arrival, as for `IterationTime`.
        while self._used + count > CHOICES_PER_ITERATION:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if not self._used:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        self._used += count

    def _begin_iteration(self) -> None:
        self._used = 0


class LoopTurns:
    """The turns of all requests, by kind of work."""

    def __init__(self) -> None:
        self.planning = IterationTime()  # of bodies on the event loop
        self.ending = IterationTime()  # of requests whose last choice has ended, or that failed
        self.starts = ChoiceTurns()  # of new choices
        self.cancels = ChoiceTurns()  # of running choices

    def creation(self, num_choices: int) -> AbstractAsyncContextManager[None]:
        """Return the turn in which the choices of a request are created.

        Requests with few choices need not wait.
        """
        if num_choices <= FEW_CHOICES:
            return nullcontext()
        return self.planning.turn()

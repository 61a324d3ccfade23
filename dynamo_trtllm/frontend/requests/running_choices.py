"""Run the choices of an answer: start them, pass their deltas on, and end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Self

from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.choice import Choice, ChoiceDelta
from dynamo_trtllm.frontend.requests.answer import Answer
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.keep_alive import EventSender
from dynamo_trtllm.frontend.requests.output_budget import (
    COUNTED_TOKENS,
    TOKEN_BYTES,
    Output,
    scored_tokens,
)
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.http_server.exchange import HttpResponse


class RunningChoices:
    """The choices of an answer, while a `with` block runs them.

    Iterate over it to get the deltas that were not written at once. The first error of a choice is
    raised, and the end of the block ends the other ones.

    Args:
        answer: the answer, whose choices were created.
        response: where the answer is sent.
        sender: sends events of the response.
        timeline: that of the request.
        state: what all requests share.
    """

    def __init__(
        self,
        answer: Answer,
        response: HttpResponse,
        sender: EventSender,
        timeline: RequestTimeline,
        state: AppState,
    ) -> None:
        self._answer = answer
        self._state = state
        self._unsent = UnsentDeltas()
        self._deliver = _delivery(answer, response, sender, timeline, self._unsent)
        self._deltas = self._run()

    async def __aenter__(self) -> Self:
        budget = self._state.output_budget
        self._unsent.output = budget.open(self._end, is_streamed=self._answer.is_streamed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unsent.num_pending += 1  # so that `_deliver` writes nothing more
        await self._deltas.aclose()
        await self._stop()

    def __aiter__(self) -> AsyncGenerator[ChoiceDelta, None]:
        return self._deltas

    async def _run(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Start all choices, and yield their deltas until they have finished."""
        unsent = self._unsent
        is_streamed = self._answer.is_streamed
        is_scored = self._answer.plan.is_scored
        num_running = len(self._answer.choices)
        item: ChoiceDelta | DynamoError | None = None
        try:
            await self._start()
            while num_running:
                item = await unsent.items.get()
                if isinstance(item, DynamoError):
                    raise item
                yield item
                if is_streamed:
                    unsent.num_pending -= scored_tokens(item) if is_scored else item.tokens + 1
                    is_less = unsent.num_pending < unsent.num_counted - COUNTED_TOKENS
                    if unsent.num_counted and is_less:
                        unsent.count()
                if item.finish is not None:
                    num_running -= 1
        finally:
            # An error refers to this frame. If the frame also referred to it, the cycle would keep
            # the body in memory.
            item = None

    @property
    def output_bytes(self) -> int:
        """The memory of unsent output."""
        return self._unsent.output.in_use

    async def _start(self) -> None:
        """Start the streams of all choices, in turns with other requests."""
        router = self._state.router
        deliver = self._deliver
        choices = self._answer.choices
        if len(choices) == 1:
            # Reading its body takes longer, so it takes no turn.
            choices[0].start(router, deliver)
            return

        def start(choice: Choice) -> None:
            choice.start(router, deliver)

        await self._state.turns.starts.run(choices, start)

    async def _stop(self) -> None:
        """End the streams of all choices that still run, in turns with other requests."""
        running = [choice for choice in self._answer.choices if choice.is_running]
        try:
            if running:
                await self._state.turns.cancels.run(running, Choice.cancel)
        finally:
            self._cancel()  # those that are left if this task was cancelled
            self._unsent.clear()
            self._unsent.output.close()

    def _end(self, error: DynamoError, drops_pending: bool) -> None:
        """End the request with an error, as its output demands."""
        self._cancel()
        if drops_pending:
            self._unsent.clear()
        self._deliver(error)

    def _cancel(self) -> None:
        for choice in self._answer.choices:
            choice.cancel()


class UnsentDeltas:
    """The deltas of a request that wait to be sent, and the error behind them.

    `output` counts their memory. It is set before the choices start.
    """

    __slots__ = ("items", "num_counted", "num_pending", "output")

    output: Output

    def __init__(self) -> None:
        self.items: asyncio.Queue[ChoiceDelta | DynamoError] = asyncio.Queue()
        self.num_pending = 0  # in units of TOKEN_BYTES; an error counts as one
        self.num_counted = 0  # of them in `output`

    def count(self) -> None:
        """Count what waits in `output`."""
        self.num_counted = self.num_pending
        self.output.set(self.num_counted * TOKEN_BYTES)

    def clear(self) -> None:
        """Drop what waits."""
        while not self.items.empty():
            self.items.get_nowait()


def _delivery(
    answer: Answer,
    response: HttpResponse,
    sender: EventSender,
    timeline: RequestTimeline,
    unsent: UnsentDeltas,
) -> Callable[[ChoiceDelta | DynamoError], None]:
    """Return the function that gets the deltas of all choices.

    A delta of a stream is written within the call that has its tokens. It waits while the client
    reads slowly, behind earlier ones or an error, and if it is the last of its choice. Deltas of
    other responses always wait.

    The function runs once per token. It is a closure, because attributes of an object take 30 ns
    more per token.
    """
    encoder = answer.builder if answer.is_streamed else None
    is_scored = answer.plan.is_scored
    delta_arrived = timeline.delta_arrived
    write = sender.write

    def deliver(item: ChoiceDelta | DynamoError) -> None:
        if not isinstance(item, ChoiceDelta):
            unsent.items.put_nowait(item)
            unsent.num_pending += 1  # no delta overtakes the error
            return
        delta_arrived(item)
        if item.finish is None and not unsent.num_pending and encoder is not None:
            # In a task, it would be later, and all deltas until then would wait.
            if not answer.has_begun:
                answer.begin(response)
            if response.is_writable:
                data = encoder.delta(item)
                if data:
                    write(data)
                return
        unsent.items.put_nowait(item)
        unsent.num_pending += scored_tokens(item) if is_scored else item.tokens + 1
        if unsent.num_pending > unsent.num_counted + COUNTED_TOKENS:
            unsent.count()

    return deliver

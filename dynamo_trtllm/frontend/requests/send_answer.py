"""Send an answer to its client while its choices run: as a stream of events, or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Self, TypeAlias

import orjson

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests.answer import Answer
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.choice import Choice, ChoiceDelta, pick_best_of
from dynamo_trtllm.frontend.requests.output_budget import (
    MIN_COUNTED_CHANGE,
    TOKEN_BYTES,
    Output,
    memory_units,
)
from dynamo_trtllm.frontend.requests.request_reports import extras_of
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.frontend.routing.start_window import RequestPlaces
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.support.background import in_thread
from dynamo_trtllm.support.http_server.exchange import HttpResponse

COMMENT: Final = b": keep-alive\n\n"  # clients ignore lines that begin with a colon
_INLINE_OUTPUT_BYTES = 256 << 10  # larger answers are encoded in a thread


async def stream_answer(
    answer: Answer,
    deltas: RunningChoices,
    response: HttpResponse,
    sender: EventSender,
    timeline: RequestTimeline,
    state: AppState,
) -> None:
    """Send the events of an answer that `_delivery` has not written already, and its end.

    `_delivery` writes most deltas of a stream when they arrive.
    """
    # All choices are returned, because `best_of` is rejected with `stream`.
    num_unfinished = len(answer.choices)
    async for delta in deltas:
        if not answer.has_begun:
            answer.begin(response)
        data = answer.builder.delta(delta)
        if delta.finish is not None:
            num_unfinished -= 1
            if not num_unfinished:
                async with state.turns.ending.turn(len(answer.choices)):
                    data += answer.builder.finish(answer.usage(), extras_of(answer, timeline))
                await answer.on_complete()
        if data:
            await sender.send_events(data, last=not num_unfinished)


async def send_whole_answer(
    answer: Answer,
    deltas: RunningChoices,
    response: HttpResponse,
    timeline: RequestTimeline,
    state: AppState,
) -> None:
    """Collect the deltas of all choices, and send the answer when they have finished."""
    plan = answer.plan
    builder = answer.builder

    def likelihood(index: int) -> float:
        return answer.choices[index].mean_logprob

    if plan.candidates == plan.keep:
        async for delta in deltas:
            builder.push(delta)
    else:
        # The best candidates are known when all candidates have finished.
        candidates = [delta async for delta in deltas]
        for delta in pick_best_of(candidates, plan, likelihood):
            builder.push(delta)

    def encode() -> bytes:
        return orjson.dumps(builder.body(answer.usage(), extras_of(answer, timeline)))

    if deltas.output_bytes > _INLINE_OUTPUT_BYTES:
        async with state.limits.slot():
            body = await in_thread(encode)
    else:
        async with state.turns.ending.turn(len(answer.choices)):
            body = encode()
    await answer.on_complete()
    response.send(200, body, headers=answer.headers())


class RunningChoices:
    """The choices of an answer, which run within an `async with` block.

    Iterate over this object within the block: that starts the choices, and yields the deltas that
    `_delivery` has not written. The first error of a choice is raised, and the end of the block
    ends the other choices.

    Args:
        answer: the answer, whose choices were created.
        response: where the answer is sent.
        sender: sends events of the response.
        timeline: the timeline of the request.
        places: the places of the choices in the start window of the model.
        state: what all requests share.
    """

    def __init__(
        self,
        answer: Answer,
        response: HttpResponse,
        sender: EventSender,
        timeline: RequestTimeline,
        places: RequestPlaces,
        state: AppState,
    ) -> None:
        self._answer = answer
        self._places = places
        self._state = state
        self._unsent = UnsentDeltas(is_streamed=answer.is_streamed)
        self._deliver = _delivery(answer, response, sender, timeline, self._unsent)
        self._deltas = self._run()

    async def __aenter__(self) -> Self:
        budget = self._state.output_budget
        self._unsent.output = budget.open(
            self._end,
            is_streamed=self._answer.is_streamed,
            max_tokens_name=self._answer.plan.choices[0].options.name("max_tokens"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the streams of all choices that still run."""
        self._unsent.stop_writing()
        await self._deltas.aclose()
        running = [choice for choice in self._answer.choices if choice.is_running]
        try:
            if running:
                # Many choices are cancelled in turns with other requests.
                await self._state.turns.cancels.run(running, Choice.cancel)
        finally:
            # Some choices still run if this task was cancelled during its turns.
            self._cancel()
            self._unsent.clear()
            self._unsent.output.close()

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
                # Without a stream, the item still counts as unsent: the builder has it until all
                # choices have ended.
                if is_streamed:
                    # `deliver` has added the same number.
                    num_units = memory_units(item) if is_scored else item.tokens + 1
                    unsent.num_pending -= num_units
                    if unsent.num_pending < unsent.num_counted - MIN_COUNTED_CHANGE:
                        unsent.count()
                    if not unsent.num_pending:
                        unsent.resume_writing()
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
        choices = self._answer.choices
        if len(choices) == 1:
            # A single choice needs no turn: its start takes less time than the request's body did.
            self._start_choice(choices[0])
            return
        starts = self._state.turns.starts
        await starts.run(choices, self._start_choice, self._places.wait_for_group)

    def _start_choice(self, choice: Choice) -> None:
        choice.timeline.place = self._places.take()
        choice.start(self._state.router, self._deliver)

    def _end(self, error: DynamoError, drops_pending: bool) -> None:
        """End the request with an error: the output budget calls this at its limits.

        Args:
            error: the error.
            drops_pending: the deltas that wait are dropped, so that their memory is free at once.
        """
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

    Args:
        is_streamed: the response is a stream, to which deltas may be written when they arrive.
    """

    __slots__ = ("_may_resume", "items", "num_counted", "num_pending", "output", "writes_at_once")

    output: Output

    def __init__(self, *, is_streamed: bool) -> None:
        self.items: asyncio.Queue[ChoiceDelta | DynamoError] = asyncio.Queue()
        # The memory of what waits, in units of TOKEN_BYTES: one for each token, and one for each
        # delta. Log-probabilities take more.
        self.num_pending = 0
        self.num_counted = 0  # how many of these units `output` counts
        # The next delta may be written at once, because nothing waits that it would overtake.
        self.writes_at_once = is_streamed
        self._may_resume = is_streamed  # False after `stop_writing`

    def stop_writing(self) -> None:
        """Let all further deltas wait: behind an error, or because the request ends."""
        self.writes_at_once = False
        self._may_resume = False

    def resume_writing(self) -> None:
        """Let the next delta be written at once, unless `stop_writing` was called."""
        self.writes_at_once = self._may_resume

    def count(self) -> None:
        """Report to `output` how much memory the waiting deltas take."""
        self.num_counted = self.num_pending
        self.output.set(self.num_counted * TOKEN_BYTES)

    def clear(self) -> None:
        """Drop the deltas and the error that wait."""
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

    A delta is written at once, in the engine's callback, except in these cases, in which it waits
    in `unsent`:

    - The response is not streamed.
    - Other deltas or an error wait already, or the request ends.
    - The client reads slowly.
    - The delta is the last one of its choice.

    The function runs once per token. It is a closure, because attributes of an object take 30 ns
    more per token.
    """
    encoder = answer.builder
    is_scored = answer.plan.is_scored
    delta_arrived = timeline.delta_arrived
    write = sender.write

    def deliver(item: ChoiceDelta | DynamoError) -> None:
        if not isinstance(item, ChoiceDelta):
            unsent.items.put_nowait(item)
            # No delta may overtake the error.
            unsent.stop_writing()
            return
        delta_arrived(item)
        if item.finish is None and unsent.writes_at_once:
            # Begin the response here: if a task did that, all deltas until then would wait.
            if not answer.has_begun:
                answer.begin(response)
            if response.is_writable:
                data = encoder.delta(item)
                if data:
                    write(data)
                return
        unsent.items.put_nowait(item)
        unsent.writes_at_once = False
        # `RunningChoices` subtracts the same number. The expression is repeated there, because a
        # function call would take longer.
        unsent.num_pending += memory_units(item) if is_scored else item.tokens + 1
        if unsent.num_pending > unsent.num_counted + MIN_COUNTED_CHANGE:
            unsent.count()

    return deliver


class KeepAlive:
    """Sends a ping each time a streamed response was silent for a while.

    The response headers precede the first ping if nothing was sent before it. A stream has one
    timer, which is not set anew for each event. When it fires after an event, it waits for the rest
    of the silence.

    Args:
        seconds: longest silence.
        since_s: when the silence began, in the time of `time.monotonic`.
        headers: returns the response headers that are known now.
        ping: what is sent: an event that clients know, or a comment.
    """

    def __init__(
        self,
        response: HttpResponse,
        seconds: float,
        since_s: float,
        headers: Callable[[], Mapping[str, str]],
        ping: bytes = COMMENT,
    ) -> None:
        self._response = response
        self._seconds = seconds
        self._written_s = since_s
        self._headers = headers
        self._ping = ping
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Send no further pings."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def write(self, events: bytes) -> None:
        """Send events as `HttpResponse.write` does."""
        self._written_s = time.monotonic()
        self._response.write(events)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send events as `HttpResponse.send_events` does."""
        self._written_s = time.monotonic()
        await self._response.send_events(events, last=last)

    def _wait(self) -> None:
        left_s = self._written_s + self._seconds - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._check)

    def _check(self) -> None:
        response = self._response
        if response.ended:
            self._timer = None
            return
        if time.monotonic() - self._written_s >= self._seconds:
            if not response.started:
                response.start_events(self._headers())
            # A response that is not writable needs no ping: the client has not yet read what was
            # sent before.
            if response.is_writable:
                response.write(self._ping)
            self._written_s = time.monotonic()
        self._wait()


EventSender: TypeAlias = HttpResponse | KeepAlive
"""The object that sends the events of a response, with or without pings."""


def keep_alive(
    answer: Answer,
    response: HttpResponse,
    timeline: RequestTimeline,
    config: FrontendConfig,
    ping: bytes,
) -> AbstractContextManager[EventSender]:
    """Return the object that sends the events of an answer, and pings until its `with` block ends.

    Args:
        answer: the answer; only a stream gets pings.
        response: where the answer is sent.
        timeline: the timeline of the request. The silence begins when its body has arrived.
        config: says how long a silence may be.
        ping: an event that clients know; b"": a comment.
    """
    seconds = config.sse_keep_alive_s
    if not answer.is_streamed or not seconds:
        return nullcontext(response)
    begun_s = timeline.body_received_s
    return KeepAlive(response, seconds, begun_s, answer.headers, ping or COMMENT)

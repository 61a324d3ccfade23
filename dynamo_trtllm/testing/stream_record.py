"""Record the events of a stream as an engine sends them."""

from __future__ import annotations

import asyncio

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import GenerateRequest
from dynamo_trtllm.protocol.streams import StreamEvent, StreamHandle
from dynamo_trtllm.testing.engine_requests import LIMITS, within


def is_terminal(event: StreamEvent) -> bool:
    """Return whether an event ends a stream."""
    return isinstance(event, DynamoError) or event.finish_reason is not None


class StreamRecord:
    """One stream of an engine, with its events."""

    def __init__(self, engine: Engine, request: GenerateRequest, cancel_at: int = 0) -> None:
        """Start the stream.

        Args:
            engine: a running engine.
            request: the request.
            cancel_at: number of the event within which the stream is cancelled; 0: none.

        Raises:
            AssertionError: `generate` has called `on_event`.
        """
        self.events: list[StreamEvent] = []
        self._cancel_at = cancel_at
        self._changed = asyncio.Event()
        self.handle: StreamHandle = engine.generate(request, self._on_event)
        assert not self.events, "the first event comes after generate() has returned"

    @property
    def has_ended(self) -> bool:
        """Whether the terminal event has come."""
        return any(is_terminal(event) for event in self.events)

    def _on_event(self, event: StreamEvent) -> None:
        self.events.append(event)
        self._changed.set()
        if len(self.events) == self._cancel_at:
            self.handle.cancel()

    async def wait_for_events(self, count: int) -> None:
        """Wait for this number of events, or for the end of the stream."""
        async with within(LIMITS.answer_s, "a stream has events until its end"):
            while len(self.events) < count and not self.has_ended:
                self._changed.clear()
                await self._changed.wait()

    async def wait_for_end(self) -> None:
        """Wait for the end of the stream."""
        async with within(LIMITS.answer_s, "a stream ends with a finish_reason or an error"):
            while not self.has_ended:
                self._changed.clear()
                await self._changed.wait()

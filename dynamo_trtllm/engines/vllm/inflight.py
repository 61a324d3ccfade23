"""One call of `AsyncLLM.generate` under way: its deadline, and why it was ended when it did not end by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dynamo_trtllm.engines.outputs import phase_timings
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.messages import GenerateRequest, PhaseTimings


class VllmInflightRequest:
    """`end` asks the engine to abort the call; its stream then ends, and the reason is here."""

    def __init__(self, request: GenerateRequest, call_id: str, end: Callable[[str], None]) -> None:
        self.call_id = call_id
        self.reason: Callable[[], DynamoError] | None = None
        self.finished = False  # the engine has said the last word
        self.started = False  # an output has come: of a decode call, its KV has arrived
        self._request = request
        self._end = end
        self._born = self._started_at = time.monotonic()
        self._alarm: asyncio.TimerHandle | None = None

    def due_in(self, left_s: float, reason: Callable[[], DynamoError]) -> None:
        """Ends the call then. One timer per phase of a request, not one per token."""
        self.close()
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, left_s), self.give_up, reason)

    def give_up(self, reason: Callable[[], DynamoError]) -> None:
        if self.reason is None and not self.finished:
            self.reason = reason
            self._end(self.call_id)

    def start(self) -> None:
        self.started = True
        self._started_at = time.monotonic()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def age_s(self) -> float:
        return time.monotonic() - self._born

    def stats(self, *, cached_tokens: int) -> PhaseTimings:
        return phase_timings(self._request, self._started_at - self._born, cached_tokens=cached_tokens)

"""One call of `generate_async` under way: its results step by step, and its end when nobody wants it any more.

The vendor's result object must be read until it ends, also after an abort; but there are cases in which it never
answers, so every wait here has a deadline of our own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from dynamo_trtllm.engine.trtllm.requests import Call
from dynamo_trtllm.engine.trtllm.results import HANDED_OVER, Reader, Step
from dynamo_trtllm.errors import NotMigratable
from dynamo_trtllm.messages import GenerateRequest, LegStats, Phase

_log = logging.getLogger(__name__)

# What comes out of the vendor when its executor, a queue or a request breaks. It has no common base class.
VENDOR_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, OSError, EOFError)

KV_WAIT_S = 30.0  # longest wait for the KV of a cancelled decode leg: aborting it before breaks transfers
ANSWER_S = 10.0  # longest wait for the answer to an abort


class Flight:
    """Used by one task at a time: first the request's, then the one that winds it down."""

    def __init__(self, request: GenerateRequest, call: Call, result: Any, reader: Reader) -> None:
        self.request_id = request.request_id
        self.result = result
        self.fetches_kv = request.phase is Phase.DECODE
        self.started = False  # a result has come: for a decode leg, its KV has arrived
        self.finished = False  # no result will follow
        self.winding_down = False  # nobody reads it but `wind_down`
        self.had_tokens = False
        self.born = time.monotonic()
        self._request = request
        self._started_at = self.born
        self._keeps_kv = call.hands_over
        self._reader = reader
        self._stream = result.__aiter__() if call.streaming else None
        self._timer: asyncio.Timeout | None = None

    async def step(self, until: float) -> Step:
        """The next result. `until`: on the loop's clock. Raises TimeoutError then, or when interrupted.

        Raises NotMigratable for a stream that ends with no reason, and whatever the vendor raises.
        """
        await self._advance(until)
        if self.finished and self.result.outputs[0].finish_reason is None:
            raise NotMigratable("TensorRT-LLM ended a request with no reason")
        step = self._reader.read(self.result.outputs[0])
        self.had_tokens = self.had_tokens or bool(step.token_ids)
        return step

    def age_s(self) -> float:
        return time.monotonic() - self.born

    def stats(self, *, cached_tokens: int) -> LegStats:
        """Seen from outside the vendor: the time to the first result holds queue and work, or queue and transfer."""
        first_s = self._started_at - self.born
        ticket = self._request.ticket
        if ticket is None:
            return LegStats(prefill_s=first_s, cached_tokens=cached_tokens)
        return LegStats(handoff_s=first_s, kv_bytes=ticket.kv_bytes, transport=ticket.transport)

    async def _advance(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(until) as self._timer:
                await self._result()
        finally:
            self._timer = None
        if not self.started:
            self.started = True
            self._started_at = time.monotonic()
        if self.result.outputs[0].finish_reason is not None:
            self.finished = True

    async def _result(self) -> None:
        try:
            if self._stream is not None:
                await self._stream.__anext__()
                return
            await self.result
        except StopAsyncIteration:
            pass
        self.finished = True

    def interrupt(self) -> None:
        """Ends a wait in `step` with TimeoutError."""
        if self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    def abort(self) -> None:
        """Asks the engine to stop. Does not wait; an executor that is gone already is no error."""
        try:
            self.result.abort()
        except VENDOR_ERRORS as exc:
            _log.debug("abort of %s: %s", self.request_id, exc)

    async def wind_down(self, *, kv_wait_s: float = KV_WAIT_S, answer_s: float = ANSWER_S) -> None:
        """Aborts, and reads on until the engine has answered or `answer_s` is over. Raises nothing of the vendor's.

        A decode leg is aborted only after its first result, because a transfer under way can't be taken back.
        """
        loop = asyncio.get_running_loop()
        try:
            if self.fetches_kv and not self.started:
                await self._first_result(loop.time() + kv_wait_s)
            if not self.finished:
                self.abort()
            until = loop.time() + answer_s
            while not self.finished:
                await self._advance(until)
            if self._keeps_kv and self.result.outputs[0].finish_reason in HANDED_OVER:
                self.abort()  # it was done before it heard of the abort: its KV would wait for a decode worker
        except TimeoutError:
            _log.warning("request %s was aborted, and TensorRT-LLM did not answer in %g s", self.request_id, answer_s)
        except VENDOR_ERRORS as exc:
            _log.debug("request %s ended after its abort: %s", self.request_id, exc)

    async def _first_result(self, until: float) -> None:
        try:
            await self._advance(until)
        except TimeoutError:
            _log.warning("request %s was cancelled, and its KV has not come", self.request_id)

"""One running call of `generate_async`: its results step by step, and its abort when they are no longer needed.

The vendor's result object must be read until it ends, also after an abort; but there are cases in which it never
answers, so every wait here has a deadline of our own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from dynamo_trtllm.engines.outputs import EngineOutput, phase_timings
from dynamo_trtllm.engines.trtllm.output_cursor import KV_PENDING, TrtllmOutputCursor
from dynamo_trtllm.engines.trtllm.requests import TrtllmCall
from dynamo_trtllm.errors import MigrationFailed
from dynamo_trtllm.kv_transfer.deadlines import Deadline
from dynamo_trtllm.messages import GenerateRequest, Phase, PhaseTimings

_log = logging.getLogger(__name__)

# What comes out of the vendor when its executor, a queue or a request breaks. It has no common base class.
VENDOR_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, OSError, EOFError)

KV_WAIT_S = 30.0  # longest wait for the KV of a cancelled decode call: aborting it earlier breaks transfers
ANSWER_S = 10.0  # longest wait for the answer to an abort


class VendorError(Exception):
    """Wrap an exception that TensorRT-LLM raised instead of a result: the adapter's own are bugs."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised


class TrtllmInflightRequest:
    """Used by one task at a time: first the request's, then the one that winds it down."""

    def __init__(self, request: GenerateRequest, call: TrtllmCall, result: Any, reader: TrtllmOutputCursor) -> None:
        self.request_id = request.request_id
        self.result = result
        self.fetches_kv = request.phase is Phase.DECODE
        self.started = False  # a result has come: for a decode call, its KV has arrived
        self.finished = False  # no result will follow
        self.winding_down = False  # only `wind_down` reads the results
        self.had_tokens = False
        self.bound: Deadline | None = None  # of the wait for the first result
        self.born = time.monotonic()
        self._request = request
        self._started_at = self.born
        self._keeps_kv = call.hands_over
        self._reader = reader
        self._stream = result.__aiter__() if call.streaming else None
        self._waiter: asyncio.Task[Any] | None = None  # in a wait for the vendor
        self._alarm: asyncio.TimerHandle | None = None
        self._rang = False

    def due_in(self, left_s: float) -> None:
        """From now on waits end then, in TimeoutError. One timer for many waits: one for each would cost more than
        all else that is done for a token."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._rang = False
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, left_s), self.interrupt)

    def close(self) -> None:
        """No wait will follow."""
        if self._alarm is not None:
            self._alarm.cancel()

    def interrupt(self) -> None:
        """Ends the wait for the vendor, or the next one, with TimeoutError."""
        self._rang = True
        if self._waiter is not None:
            self._waiter.cancel()

    async def step(self) -> EngineOutput:
        """The next result. Raises TimeoutError when it is overdue, MigrationFailed for a stream that ends with no
        reason, and VendorError for what the vendor raises."""
        await self._advance()
        if self.finished and self.result.outputs[0].finish_reason is None:
            raise MigrationFailed("TensorRT-LLM ended a request with no reason")
        step = self._reader.read(self.result.outputs[0])
        self.had_tokens = self.had_tokens or bool(step.token_ids)
        return step

    def age_s(self) -> float:
        return time.monotonic() - self.born

    def stats(self, *, cached_tokens: int) -> PhaseTimings:
        return phase_timings(self._request, self._started_at - self.born, cached_tokens=cached_tokens)

    async def _advance(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._rang:
            raise TimeoutError
        cancels = task.cancelling()
        self._waiter = task
        try:
            await self._result()
        except asyncio.CancelledError:
            if self._rang and task.uncancel() <= cancels:  # only our own alarm cancelled the task
                raise TimeoutError from None
            raise
        finally:
            self._waiter = None
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
        except VENDOR_ERRORS as exc:
            self.finished = True
            raise VendorError(exc) from exc
        self.finished = True

    def abort(self) -> None:
        """Asks the engine to stop. Does not wait; an executor that is gone already is no error."""
        try:
            self.result.abort()
        except VENDOR_ERRORS as exc:
            _log.debug("abort of %s: %s", self.request_id, exc)

    async def wind_down(self, *, kv_wait_s: float = KV_WAIT_S, answer_s: float = ANSWER_S) -> None:
        """Aborts, and reads on until the engine has answered or `answer_s` is over. Raises nothing of the vendor's.

        A decode call is aborted only after its first result, because a running KV transfer can't be stopped.
        """
        try:
            if self.fetches_kv and not self.started:
                await self._first_result(kv_wait_s)
            if not self.finished:
                self.abort()
            self.due_in(answer_s)
            while not self.finished:
                await self._advance()
            if self._keeps_kv and self.result.outputs[0].finish_reason in KV_PENDING:
                self.abort()  # it was done before it heard of the abort: its KV would wait for a decode worker
        except TimeoutError:
            _log.warning("request %s was aborted, and TensorRT-LLM did not answer in %g s", self.request_id, answer_s)
        except VendorError as exc:
            _log.debug("request %s ended after its abort: %s", self.request_id, exc)

    async def _first_result(self, wait_s: float) -> None:
        self.due_in(wait_s)
        try:
            await self._advance()
        except TimeoutError:
            _log.warning("request %s was cancelled, and its KV has not come", self.request_id)

"""One running call of `generate_async`: its results step by step, and its abort when they are no longer needed.

The vendor's result object must be read until it ends, also after an abort; but there are cases in which it never
answers, so every wait here has a deadline of our own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dynamo_trtllm.engines.external import Counts, EngineOutput, phase_timings
from dynamo_trtllm.engines.trtllm.requests import TrtllmCall
from dynamo_trtllm.errors import MigrationFailed, RequestRejected
from dynamo_trtllm.kv_transfer.params import Deadline
from dynamo_trtllm.messages import GenerateRequest, Phase, PhaseTimings, TokenLogprob

# After a context-only call both of these mean "go on to decode": the vendor forces its max_tokens to 1.
KV_PENDING = frozenset({"length", "not_finished"})


class TrtllmCompletion(Protocol):
    """What is read of the vendor's `CompletionOutput`."""

    token_ids: Sequence[int]
    logprobs: Sequence[Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class TrtllmOutputCursor:
    """Turns the results of one call into steps. One per call; `read` is called once per result."""

    def __init__(
        self,
        *,
        stop_ids: frozenset[int],
        end_id: int | None,
        logprobs: int | None,
        first: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """`logprobs`: alternatives per token; None: none at all. `first`: those of tokens that a ticket brought."""
        self._stop_ids = stop_ids
        self._end_id = end_id
        self._alternatives = logprobs
        self._first = first
        self._seen = 0
        self._last: int | None = None
        self._unreported = 0  # tokens at the start for which the vendor gives no log-probability

    def read(self, output: TrtllmCompletion) -> EngineOutput:
        new = list(output.token_ids[self._seen :])
        start = self._seen
        if self._seen == 0 and new and output.logprobs is not None:
            self._unreported = max(0, len(output.token_ids) - len(output.logprobs))
        if output.finish_reason == "stop":
            new += self._cut_off(new[-1] if new else self._last, output.stop_reason)
        self._seen += len(new)
        self._last = new[-1] if new else self._last
        return EngineOutput(token_ids=new, logprobs=self._logprobs(output, start, new), finish=output.finish_reason)

    def _cut_off(self, last: int | None, stop_reason: int | str | None) -> list[int]:
        """The stop token, where the vendor took it off the end: our streams end with it."""
        if last is not None and last in self._stop_ids:
            return []
        if isinstance(stop_reason, int):
            return [stop_reason]
        return [] if self._end_id is None else [self._end_id]

    def _logprobs(self, output: TrtllmCompletion, start: int, new: list[int]) -> tuple[TokenLogprob, ...]:
        if self._alternatives is None:
            return ()
        reported = output.logprobs or ()
        return tuple(self._logprob(reported, start + n, token) for n, token in enumerate(new))

    def _logprob(self, reported: Sequence[Any], position: int, token: int) -> TokenLogprob:
        if position < len(self._first):
            return self._first[position]
        index = position - self._unreported
        if 0 <= index < len(reported):
            return token_logprob(token, reported[index], self._alternatives or 0)
        if token in self._stop_ids:
            return TokenLogprob(token, -math.inf)  # cut off together with its entry: it is not known
        raise RequestRejected("TensorRT-LLM gave no log-probability for a token; ask without", field="logprobs")


def token_logprob(token: int, entry: Any, alternatives: int) -> TokenLogprob:
    """One token's entry: a mapping of token id to an object with `logprob`, or the bare number."""
    if not isinstance(entry, Mapping):
        return TokenLogprob(token, float(entry))
    values = {int(each): _value(reported) for each, reported in entry.items()}
    if token not in values:
        raise RequestRejected("TensorRT-LLM gave no log-probability for a token; ask without", field="logprobs")
    likeliest = sorted(values.items(), key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprob(token, values[token], tuple(likeliest))


def _value(reported: Any) -> float:
    return float(reported) if isinstance(reported, (int, float)) else float(reported.logprob)


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

    def __init__(self, request: GenerateRequest, call: TrtllmCall, result: Any, cursor: TrtllmOutputCursor) -> None:
        self.request_id = request.request_id
        self.result = result
        self.fetches_kv = request.phase is Phase.DECODE
        self.started = False  # a result has come: for a decode call, its KV has arrived
        self.finished = False  # no result will follow
        self.is_draining = False  # only `abort_and_drain` reads the results
        self.had_tokens = False
        self.bound: Deadline | None = None  # of the wait for the first result
        self.created_at = time.monotonic()
        self._request = request
        self._started_at = self.created_at
        self._keeps_kv = call.exports_kv
        self._cursor = cursor
        self._stream = result.__aiter__() if call.streaming else None
        self._waiter: asyncio.Task[Any] | None = None  # in a wait for the vendor
        self._timer: asyncio.TimerHandle | None = None
        self._timed_out = False

    def due_in(self, left_s: float) -> None:
        """From now on waits end then, in TimeoutError. One timer for many waits: one for each would cost more than
        all else that is done for a token."""
        if self._timer is not None:
            self._timer.cancel()
        self._timed_out = False
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.interrupt)

    def close(self) -> None:
        """No wait will follow."""
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self) -> None:
        """Ends the wait for the vendor, or the next one, with TimeoutError."""
        self._timed_out = True
        if self._waiter is not None:
            self._waiter.cancel()

    async def step(self) -> EngineOutput:
        """The next result. Raises TimeoutError when it is overdue, MigrationFailed for a stream that ends with no
        reason, and VendorError for what the vendor raises."""
        await self._advance()
        if self.finished and self.result.outputs[0].finish_reason is None:
            raise MigrationFailed("TensorRT-LLM ended a request with no reason")
        step = self._cursor.read(self.result.outputs[0])
        self.had_tokens = self.had_tokens or bool(step.token_ids)
        return step

    def age_s(self) -> float:
        return time.monotonic() - self.created_at

    def stats(self, *, cached_tokens: int) -> PhaseTimings:
        return phase_timings(self._request, self._started_at - self.created_at, cached_tokens=cached_tokens)

    async def _advance(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._timed_out:
            raise TimeoutError
        cancels = task.cancelling()
        self._waiter = task
        try:
            await self._result()
        except asyncio.CancelledError:
            if self._timed_out and task.uncancel() <= cancels:  # only our own alarm cancelled the task
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

    async def abort_and_drain(self, *, kv_wait_s: float = KV_WAIT_S, answer_s: float = ANSWER_S) -> None:
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


_TIMEOUT_S = 2.0
_PAUSE_S = 0.5


class StatsPoller:
    """Start it after the first request: before, some releases have no statistics to wait for."""

    def __init__(self, get_stats: Callable[..., Sequence[Mapping[str, Any]]]) -> None:
        self._get_stats = get_stats
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.counts = Counts()
        self.changed_at = time.monotonic()

    @property
    def is_polling(self) -> bool:
        """False before `start`, and once the vendor has failed to answer."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="trtllm-stats", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Blocks until the thread has ended: at most as long as one call."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _TIMEOUT_S)

    def _poll(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            try:
                rows = self._get_stats(timeout=_TIMEOUT_S)
            except VENDOR_ERRORS as exc:
                _log.warning("TensorRT-LLM's statistics ended: %s", exc)
                return
            if rows:
                self.counts = counts_of(rows[-1])
                self.changed_at = time.monotonic()


def counts_of(stats: Mapping[str, Any]) -> Counts:
    """Reads one iteration's statistics; what a release does not tell is 0."""
    kv = stats.get("kvCacheStats") or {}
    return Counts(
        waiting=int(stats.get("numQueuedRequests") or 0),
        kv_blocks_used=int(kv.get("usedNumBlocks") or 0),
        kv_blocks_total=int(kv.get("maxNumBlocks") or 0),
    )

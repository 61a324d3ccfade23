"""Run one call of `generate_async`: read its results, convert them, abort it; and poll the executor's statistics.

TensorRT-LLM's result object must be read to its end, also after an abort. In some cases it never responds, so every
wait has a time limit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dynamo_trtllm.engines.external.engine import Counts, EngineOutput, phase_timings
from dynamo_trtllm.engines.trtllm.requests import TrtllmCall
from dynamo_trtllm.errors import MigrationFailed, RequestRejected
from dynamo_trtllm.kv_transfer.params import Deadline
from dynamo_trtllm.messages import GenerateRequest, Phase, PhaseTimings, TokenLogprob

# Finish reasons of a context-only call that continues in decode: TensorRT-LLM forces its max_tokens to 1.
KV_PENDING = frozenset({"length", "not_finished"})


class TrtllmCompletion(Protocol):
    """The fields of TensorRT-LLM's `CompletionOutput` that the engine reads."""

    token_ids: Sequence[int]
    logprobs: Sequence[Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class TrtllmOutputCursor:
    """Converts the cumulative results of one call to outputs with the new tokens."""

    def __init__(
        self,
        *,
        stop_ids: frozenset[int],
        end_id: int | None,
        logprobs: int | None,
        first: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Initialize the cursor of one call.

        Args:
            stop_ids: token ids that end the output.
            end_id: the model's own stop token, which TensorRT-LLM strips from the output; None without one.
            logprobs: number of alternatives per token; None: no log-probabilities.
            first: log-probabilities of the first tokens, from the KV transfer parameters.
        """
        self._stop_ids = stop_ids
        self._end_id = end_id
        self._alternatives = logprobs
        self._first = first
        self._seen = 0
        self._last: int | None = None
        self._unreported = 0  # tokens at the start without a log-probability from TensorRT-LLM

    def read(self, output: TrtllmCompletion) -> EngineOutput:
        """Return what is new since the last call. Call it once per result."""
        new = list(output.token_ids[self._seen :])
        start = self._seen
        if self._seen == 0 and new and output.logprobs is not None:
            self._unreported = max(0, len(output.token_ids) - len(output.logprobs))
        if output.finish_reason == "stop":
            new += self._stripped_stop(new[-1] if new else self._last, output.stop_reason)
        self._seen += len(new)
        self._last = new[-1] if new else self._last
        return EngineOutput(token_ids=new, logprobs=self._logprobs(output, start, new), finish=output.finish_reason)

    def _stripped_stop(self, last: int | None, stop_reason: int | str | None) -> list[int]:
        """Return the stop token if TensorRT-LLM stripped it: output of an `Engine` contains it."""
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
            return TokenLogprob(token, -math.inf)  # unknown: its entry was stripped with the token
        raise RequestRejected("TensorRT-LLM returned no log-probability for a token; omit logprobs", field="logprobs")


def token_logprob(token: int, entry: Any, alternatives: int) -> TokenLogprob:
    """Convert one token's log-probabilities.

    Args:
        token: the chosen token id.
        entry: mapping of token id to an object with `logprob`, or the chosen token's log-probability alone.
        alternatives: number of alternatives to return.

    Raises:
        RequestRejected: the mapping lacks the chosen token.
    """
    if not isinstance(entry, Mapping):
        return TokenLogprob(token, float(entry))
    values = {int(each): _value(reported) for each, reported in entry.items()}
    if token not in values:
        raise RequestRejected("TensorRT-LLM returned no log-probability for a token; omit logprobs", field="logprobs")
    likeliest = sorted(values.items(), key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprob(token, values[token], tuple(likeliest))


def _value(reported: Any) -> float:
    return float(reported) if isinstance(reported, (int, float)) else float(reported.logprob)


_log = logging.getLogger(__name__)

# Exceptions that TensorRT-LLM raises when its executor, a queue or a request fails. They have no common base class.
VENDOR_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, OSError, EOFError)

KV_WAIT_S = 30.0  # time limit for the KV of a canceled decode call: an earlier abort breaks the transfer
ANSWER_S = 10.0  # time limit for the last result after an abort


class VendorError(Exception):
    """An exception of TensorRT-LLM, wrapped to distinguish it from bugs of the engine."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised


class TrtllmInflightRequest:
    """One call in flight. One task at a time uses it: the request's, then the one that aborts and drains it."""

    def __init__(self, request: GenerateRequest, call: TrtllmCall, result: Any, cursor: TrtllmOutputCursor) -> None:
        self.request_id = request.request_id
        self.result = result
        self.fetches_kv = request.phase is Phase.DECODE
        self.started = False  # the first result is there: for a decode call, the KV was fetched
        self.finished = False  # no more results
        self.is_draining = False  # owned by `abort_and_drain`
        self.had_tokens = False
        self.bound: Deadline | None = None  # for the first result of a decode call
        self.created_at = time.monotonic()
        self._request = request
        self._started_at = self.created_at
        self._exports_kv = call.exports_kv
        self._cursor = cursor
        self._stream = result.__aiter__() if call.streaming else None
        self._waiter: asyncio.Task[Any] | None = None  # task that waits for a result
        self._timer: asyncio.TimerHandle | None = None
        self._timed_out = False

    def due_in(self, left_s: float) -> None:
        """Set the time limit of all waits; they raise TimeoutError after it.

        One timer covers many waits, because a timer per token would dominate the cost of a token.

        Args:
            left_s: seconds from now.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timed_out = False
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.interrupt)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self) -> None:
        """End the current wait, or the next one, with TimeoutError."""
        self._timed_out = True
        if self._waiter is not None:
            self._waiter.cancel()

    async def step(self) -> EngineOutput:
        """Wait for the next result.

        Raises:
            TimeoutError: the time limit of `due_in` passed.
            MigrationFailed: the stream ended without a finish reason.
            VendorError: TensorRT-LLM raised an exception.
        """
        await self._advance()
        if self.finished and self.result.outputs[0].finish_reason is None:
            raise MigrationFailed("TensorRT-LLM ended the request without a finish reason")
        step = self._cursor.read(self.result.outputs[0])
        self.had_tokens = self.had_tokens or bool(step.token_ids)
        return step

    def age_s(self) -> float:
        """Return the seconds since the call was submitted."""
        return time.monotonic() - self.created_at

    def stats(self, *, cached_tokens: int) -> PhaseTimings:
        """Return the timings of the call; see `phase_timings`."""
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
            if self._timed_out and task.uncancel() <= cancels:  # canceled by `interrupt` alone
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
        """Ask TensorRT-LLM to stop the request, without waiting. A stopped executor is not an error."""
        try:
            self.result.abort()
        except VENDOR_ERRORS as exc:
            _log.debug("request %s: abort failed: %s", self.request_id, exc)

    async def abort_and_drain(self, *, kv_wait_s: float = KV_WAIT_S, answer_s: float = ANSWER_S) -> None:
        """Abort the call and read its results to the end. Exceptions of TensorRT-LLM are logged.

        A decode call is aborted only after its first result, because a running KV transfer can't be stopped.

        Args:
            kv_wait_s: time limit for the first result of a decode call.
            answer_s: time limit for the last result after the abort.
        """
        try:
            if self.fetches_kv and not self.started:
                await self._first_result(kv_wait_s)
            if not self.finished:
                self.abort()
            self.due_in(answer_s)
            while not self.finished:
                await self._advance()
            if self._exports_kv and self.result.outputs[0].finish_reason in KV_PENDING:
                self.abort()  # it ended before the abort: without a second one its KV stays allocated
        except TimeoutError:
            _log.warning("Abort not confirmed by TensorRT-LLM within %g s: request %s", answer_s, self.request_id)
        except VendorError as exc:
            _log.debug("request %s failed after its abort: %s", self.request_id, exc)

    async def _first_result(self, wait_s: float) -> None:
        self.due_in(wait_s)
        try:
            await self._advance()
        except TimeoutError:
            _log.warning("KV transfer still running %g s after cancellation: request %s", wait_s, self.request_id)


_TIMEOUT_S = 2.0
_PAUSE_S = 0.5


class StatsPoller:
    """Polls the executor's statistics on a thread."""

    def __init__(self, get_stats: Callable[..., Sequence[Mapping[str, Any]]]) -> None:
        self._get_stats = get_stats
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.counts = Counts()
        self.changed_at = time.monotonic()

    @property
    def is_polling(self) -> bool:
        """False before `start`, and after TensorRT-LLM failed to return statistics."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Idempotent. Some releases have no statistics before their first request."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="trtllm-stats", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its current call, which has a time limit."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _TIMEOUT_S)

    def _poll(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            try:
                rows = self._get_stats(timeout=_TIMEOUT_S)
            except VENDOR_ERRORS as exc:
                _log.warning("TensorRT-LLM's statistics failed; KV metrics stay at their last values: %s", exc)
                return
            if rows:
                self.counts = counts_of(rows[-1])
                self.changed_at = time.monotonic()


def counts_of(stats: Mapping[str, Any]) -> Counts:
    """Convert the statistics of one iteration; a missing value counts as 0."""
    kv = stats.get("kvCacheStats") or {}
    return Counts(
        waiting=int(stats.get("numQueuedRequests") or 0),
        kv_blocks_used=int(kv.get("usedNumBlocks") or 0),
        kv_blocks_total=int(kv.get("maxNumBlocks") or 0),
    )

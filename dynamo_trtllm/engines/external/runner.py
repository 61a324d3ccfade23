"""Run the requests of a loaded library.

`ExternalCall` is one request, from its call of the library to its end, with its deadlines and its
KV transfer. `LibraryCalls` holds all calls of one engine, and knows whether the library can serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from dynamo_trtllm.engines.engine_interface import EngineStats, client_request_id
from dynamo_trtllm.engines.external.external_transfers import ExternalTransfers
from dynamo_trtllm.engines.external.library import ENDS, Library, LibraryCall
from dynamo_trtllm.kv_transfer.transfer_backend import (
    TransferIdentity,
    collecting_call,
    first_deadline,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineFailed,
    MigrationFailed,
    TransferFailed,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Phase,
    PhaseTimings,
    ReleaseOutcome,
)
from dynamo_trtllm.protocol.phases import phase_timings
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamEvent, unexpected_error

log = logging.getLogger(__name__)

# Finish reasons of a prefill call that continues in decode: the libraries stop it after its first
# token.
_CONTINUES = frozenset({"length", "not_finished"})

_PROMPT_PIECE = 1024  # prompt tokens in one chunk of log-probabilities
# Longest wait for the KV of a cancelled decode call, if the library can't abort a fetch.
KV_WAIT_S = 30.0
ANSWER_S = 10.0  # longest wait for the last result after an abort
# The engine has failed if this many requests fail without a result between them.
MAX_FAILED_REQUESTS = 5


class CallTokens(NamedTuple):
    """How much a call loads its engine, in tokens."""

    to_compute: int = 0  # tokens of the prompt that are not computed yet
    in_batch: int = 0  # tokens of the prompt and the output of a running call


class LibraryCalls:
    """The calls of one engine, and the library that runs them.

    This object is the `KvHolder` of the calls, and runs on the event loop.

    Args:
        library_name: name of the library, for messages.
        kv_fetch_timeout_s: the longest fetch of KV, in seconds.
        unavailable: the error of requests before `open`.
    """

    # `open` sets these two.
    library: Library
    transfers: ExternalTransfers

    def __init__(
        self, library_name: str, *, kv_fetch_timeout_s: float, unavailable: DynamoError
    ) -> None:
        self.library_name = library_name
        self.kv_fetch_timeout_s = kv_fetch_timeout_s
        self.is_open = False
        self.tasks: set[asyncio.Task[None]] = set()  # the tasks of the calls
        # The calls that the library has not ended yet, also aborted ones.
        self.inflight: set[ExternalCall] = set()
        # Requests of clients that have ended in EngineFailed since the last result.
        self.failed_requests: set[str] = set()
        self._unavailable: DynamoError | None = unavailable
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, library: Library, identity: TransferIdentity, *, ttl_s: float) -> None:
        """Accept requests, which the loaded library runs.

        Args:
            library: the library.
            identity: what the parameters of the engine's KV transfers have in common.
            ttl_s: seconds until a transfer expires.
        """
        self.library = library
        self.transfers = ExternalTransfers(identity, ttl_s=ttl_s, on_change=self._update_idle)
        self.is_open = True
        self._unavailable = None

    @property
    def has_failed(self) -> bool:
        return isinstance(self._unavailable, EngineFailed)

    @property
    def keeps_unfetched_kv(self) -> bool:
        """See `EngineInfo.keeps_unfetched_kv`.

        It is False before the library is loaded, because no call runs then.
        """
        return self.is_open and self.library.keeps_unfetched_kv

    def prepare(self, request: GenerateRequest) -> LibraryCall:
        """Return the library's call for a request.

        Raises the errors of `Library.prepare` and of the transfer.
        """
        self._require_available()
        kv_params = None
        if request.phase is Phase.DECODE:
            kv_params = self.transfers.validate(request)
        return self.library.prepare(request, kv_params)

    def check(self) -> None:
        """See `ChecksHealth.check`. If the library can no longer serve, all streams end."""
        if self._unavailable is None:
            begin_times = [call.created_at for call in self.inflight if not call.has_ended]
            reason = self.library.health(min(begin_times, default=None))
            if reason:
                self.fail(reason)
        self._require_available()

    def _require_available(self) -> None:
        error = self._unavailable
        if error is not None:
            # A copy, because many requests raise it, and each adds its traceback.
            raise type(error)(error.message)

    def fail(self, why: str, cause: BaseException | None = None) -> None:
        """End all streams with an error. The first reason is reported for later requests too."""
        if self.has_failed:
            return
        self._unavailable = EngineFailed(why)
        if self.is_open:
            # The KV of the transfers has ended with the library.
            self.transfers.close()
        # The tasks are listed first, because new calls may begin while these calls fail.
        tasks = [task for task in self.tasks if task is not asyncio.current_task()]
        for call in list(self.inflight):
            error = EngineFailed(why)
            error.__cause__ = cause
            call.on_error(error)
        for task in tasks:
            task.cancel()

    def add(self, call: ExternalCall) -> None:
        """Count a call as running."""
        self.inflight.add(call)
        self._update_idle()

    def remove(self, call: ExternalCall) -> None:
        """Stop counting a call. Idempotent."""
        self.inflight.discard(call)
        self._update_idle()

    async def drain(self) -> None:
        """Wait until no call runs and no KV transfer is pending."""
        await self._idle.wait()

    def _update_idle(self) -> None:
        has_transfers = self.is_open and len(self.transfers) > 0
        if self.inflight or has_transfers:
            self._idle.clear()
        else:
            self._idle.set()

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """See `KvHolder.release`.

        After a fetch the library itself frees the KV, without reporting it.
        """
        log.debug("KV transfer %s released: %s", transfer_id, outcome)
        if self.is_open:
            self.transfers.release(transfer_id, outcome)

    def is_pending(self, transfer_id: str) -> bool:
        """See `KvHolder.is_pending`."""
        return self.is_open and self.transfers.is_pending(transfer_id)

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        if not self.is_open:
            return EngineStats()
        transfers = self.transfers
        num_calls = len(self.inflight)
        is_idle = num_calls == 0 and len(transfers) == 0 and transfers.leaked_kv_blocks == 0
        counts = self.library.counts(is_idle=is_idle)
        # The library's number may be out of date.
        waiting = min(counts.waiting, num_calls)
        queued_prefill_tokens = 0
        context_tokens = 0
        for call in self.inflight:
            tokens = call.tokens
            queued_prefill_tokens += tokens.to_compute
            context_tokens += tokens.in_batch
        return EngineStats(
            running=num_calls - waiting,
            waiting=waiting,
            kv_blocks_used=counts.kv_blocks_used,
            kv_blocks_total=counts.kv_blocks_total,
            pending_kv_transfers=len(transfers),
            pending_kv_blocks=transfers.kv_blocks,
            leaked_kv_blocks=transfers.leaked_kv_blocks,
            queued_prefill_tokens=queued_prefill_tokens,
            context_tokens=context_tokens,
        )


class ExternalCall(Stream):
    """One request, from `generate` until the library has ended its call.

    The stream may end earlier.

    | state    | begins with                       | ends with                                  |
    |----------|-----------------------------------|--------------------------------------------|
    | starting | `generate`                        | the first result, an error, a cancel, the  |
    |          |                                   | deadline                                   |
    | running  | the first result                  | the last result, an error, a cancel, the   |
    |          |                                   | deadline                                   |
    | fetching | the end of the stream, while a    | the first result, an error, or KV_WAIT_S   |
    |          | fetch runs that can't be aborted  |                                            |
    | aborting | the end of the stream, or the end | the last result, an error, or ANSWER_S     |
    |          | of the state "fetching"           |                                            |
    | ended    | the last result, an error, or     |                                            |
    |          | ANSWER_S                          |                                            |

    `_run` says what follows a cancel before the library is called.
    """

    def __init__(self, calls: LibraryCalls, request: GenerateRequest, on_event: OnEvent) -> None:
        super().__init__(on_event, calls)
        self.created_at = time.monotonic()
        self._first_result_at = self.created_at  # set when the first result comes
        self._calls = calls
        self._request = request
        self._has_started = False
        self._has_tokens = False
        self._is_aborted = False
        self._call: LibraryCall | None = None  # None before it is prepared, and after its end
        self._timer: asyncio.TimerHandle | None = None
        calls.add(self)
        name = f"{calls.library_name}-{request.request_id}"
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)
        calls.tasks.add(self._task)
        self._task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._calls.tasks.discard(task)
        if task.cancelled():
            self._end_call()
            # This event is dropped if the stream has ended.
            self._pass_on(EngineFailed("the engine shut down during the request"))

    async def _run(self) -> None:
        """Prepare and submit the call.

        Some libraries return when they have the call, others when the call has ended.

        A decode call that was cancelled before this task began is still submitted if only its fetch
        frees the KV at the prefill worker. It is aborted after the fetch.
        """
        if self.has_ended and not self._must_fetch_kv:
            return
        error: DynamoError | None = None
        try:
            self._call = self._calls.prepare(self._request_to_run())
            if self.has_ended:
                self._limit_fetch(self._call)
            else:
                self._start_timer()
            await self._call.run(self)
        except DynamoError as exc:
            error = exc
        except Exception as exc:  # noqa: BLE001 - logged, and the caller gets InternalError
            error = unexpected_error(exc, self._task.get_name())
            if self._call is not None:
                # The library may already have received the call.
                self._call.abort()
        try:
            if error is not None:
                self.on_error(error)
        finally:
            # The traceback of the error refers to this frame. With a reference to the error,
            # the frame would be part of a cycle that keeps the request in memory.
            error = None

    @property
    def _must_fetch_kv(self) -> bool:
        """True while only the fetch of this decode call frees its KV at the prefill worker."""
        return self.is_fetching and self._calls.keeps_unfetched_kv

    def _request_to_run(self) -> GenerateRequest:
        kv_params = self._request.kv_params
        if not self.has_ended or kv_params is None:
            return self._request
        # No client waits for tokens: the call has only to fetch the KV.
        return collecting_call(self._request, kv_params, deadline=self._request.deadline)

    @property
    def tokens(self) -> CallTokens:
        """How the call loads the engine now."""
        prompt_tokens = len(self._request.token_ids)
        if self._has_started:
            call = self._call
            generated = 0 if call is None else call.num_generated
            return CallTokens(in_batch=prompt_tokens + generated)
        if self.is_fetching:
            return CallTokens()
        return CallTokens(to_compute=prompt_tokens)

    def stop(self) -> bool:
        """See `StreamHandle.stop`.

        Only a prefill call whose KV nothing but a fetch can free is stopped. After the abort, such
        a call still offers its KV.
        """
        call = self._call
        if call is None or self.has_ended:
            return False
        only_a_fetch_frees_kv = call.exports_kv and self._calls.keeps_unfetched_kv
        if not only_a_fetch_frees_kv:
            return False
        self._abort(call)
        return True

    # --- what the library says --------------------------------------------------------------------

    @property
    def is_fetching(self) -> bool:
        """See `ResultReceiver.is_fetching`."""
        return self._request.phase is Phase.DECODE and not self._has_started

    def on_result(self, result: Any) -> None:
        """See `ResultReceiver.on_result`."""
        call = self._call
        if call is None:
            return
        self._calls.failed_requests.clear()
        if not self._has_started:
            self._note_started()
        event: StreamEvent | None = None
        finish: str | None = None
        # This is noted now, because the stream may end with this result.
        had_ended = self.has_ended
        try:
            finish = result.outputs[0].finish_reason
            if not had_ended:
                event = self._event_of(call, result)
        except DynamoError as exc:
            event = exc
        except Exception as exc:  # noqa: BLE001 - logged, and the caller gets InternalError
            event = unexpected_error(exc, self._task.get_name())
        try:
            if finish is not None:
                offers_kv = isinstance(event, Chunk) and event.kv_params is not None
                self._end_call(keeps_kv=offers_kv)
            elif had_ended and not self._is_aborted:
                # A fetch that can't be aborted has ended with this result.
                self._abort(call)
            if event is not None:
                self._pass_on(event)
        finally:
            # An error would refer to this frame, and the frame to the error: see `_run`.
            event = None

    def on_error(self, error: DynamoError) -> None:
        """See `ResultReceiver.on_error`."""
        calls = self._calls
        if isinstance(error, EngineFailed) and not calls.has_failed:
            if not self.has_ended:
                calls.failed_requests.add(client_request_id(self._request))
            if calls.library.health(None) or len(calls.failed_requests) >= MAX_FAILED_REQUESTS:
                # All calls end, and this call with them.
                calls.fail(error.message, error.__cause__)
            else:
                log.warning("%s failed; other requests continue: %s", self._task.get_name(), error)
                if self._call is not None:
                    # The call may still run in the library.
                    self._call.abort()
        self._end_call()
        self._pass_on(error)

    def _pass_on(self, event: StreamEvent) -> None:
        """Emit an event.

        An exception of its receiver ends this stream, and not the library's loop over all calls.
        """
        try:
            self.emit(event)
        except Exception as exc:  # noqa: BLE001 - logged; the receiver can't get it
            # This logs the exception. No event carries it, because the receiver has failed.
            unexpected_error(exc, self._task.get_name())
            self.cancel()

    def _note_started(self) -> None:
        self._has_started = True
        self._first_result_at = time.monotonic()
        if self._request.phase is Phase.DECODE and not self.has_ended:
            RECORDER.record(self._request.request_id, RecordedEvent.KV_FETCHED)
            self._limit_by_deadline()

    def _event_of(self, call: LibraryCall, result: Any) -> StreamEvent | None:
        """Return the event of a result; None if the result has nothing to send.

        Log-probabilities of the prompt are sent at once.
        """
        chunk, finish = call.read(result)
        if chunk.prompt_logprobs:
            # A message has a limited size.
            for begin in range(0, len(chunk.prompt_logprobs), _PROMPT_PIECE):
                piece = chunk.prompt_logprobs[begin : begin + _PROMPT_PIECE]
                self._pass_on(Chunk(prompt_logprobs=piece))
            chunk = replace(chunk, prompt_logprobs=())
        if finish is None:
            if not chunk.token_ids:
                return None
            if self._has_tokens:
                return chunk
            self._has_tokens = True
            return replace(chunk, stats=self._timings(call, result))
        if call.exports_kv and finish in _CONTINUES:
            # The library may report the limit of one token although this token ends the output.
            if chunk.token_ids and chunk.token_ids[-1] in call.stop_ids:
                finish = "stop"
            else:
                return self._transfer_chunk(call, result, chunk)
        if finish not in ENDS:
            self._has_tokens = self._has_tokens or bool(chunk.token_ids)
            return self._error_of(finish)
        return replace(chunk, finish_reason=ENDS[finish], stats=self._timings(call, result))

    def _transfer_chunk(self, call: LibraryCall, result: Any, chunk: Chunk) -> Chunk:
        first_token, engine_state = call.export(result, chunk)
        kv_params = self._calls.transfers.create(self._request, call, first_token, engine_state)
        timings = replace(
            self._timings(call, result), kv_bytes=kv_params.kv_bytes, transport=kv_params.transport
        )
        return Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=kv_params, stats=timings)

    def _error_of(self, finish: str) -> DynamoError:
        """Return the error for a finish reason with which the library ends a call on its own."""
        name = self._calls.library_name
        if self._request.phase is Phase.DECODE and not self._has_tokens:
            hint = self._calls.library.transfer_hint
            message = f"{name} did not receive the KV of the prompt ({finish}){hint}"
            if finish == "timeout":
                return TransferTimeout(message)
            return TransferFailed(message)
        if finish == "timeout":
            return DeadlineExceeded(f"the request timed out in {name}")
        return MigrationFailed(f"{name} ended request {self._request.request_id} with {finish!r}")

    def _timings(self, call: LibraryCall, result: Any) -> PhaseTimings:
        """Return the timings of the call until its first result.

        If the library reports no phases, all of this time is one phase.
        """
        kv_params = self._request.kv_params
        until_first_s = self._first_result_at - self.created_at
        phases = call.phases(result)
        if phases:
            # A phase with a dot in its name is a part of another phase.
            in_library_s = sum(seconds for name, seconds in phases.items() if "." not in name)
            phases["submit"] = max(0.0, until_first_s - in_library_s)
        else:
            phase = "prefill" if kv_params is None else "kv_transfer"
            phases = {phase: until_first_s}
        cached_tokens = call.cached_tokens if kv_params is None else 0
        return phase_timings(phases, kv_params, cached_tokens=cached_tokens)

    # --- ends -------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Limit the time until the first result.

        For a decode call, one limit covers the wait in the queue and the fetch of the KV.
        """
        kv_params = self._request.kv_params
        if self._request.phase is not Phase.DECODE or kv_params is None:
            self._limit_by_deadline()
            return
        first = first_deadline(
            kv_params, self._request.deadline, self._calls.kv_fetch_timeout_s, time.time()
        )
        RECORDER.record(
            self._request.request_id, RecordedEvent.KV_FETCH_STARTED, kv_params.prefill_instance_id
        )
        hint = self._calls.library.transfer_hint if first.error is TransferTimeout else ""

        def end_late_fetch() -> None:
            self._pass_on(first.error(first.message + hint))

        self._call_in(first.left_s, end_late_fetch)

    def _limit_by_deadline(self) -> None:
        def end_late_request() -> None:
            in_engine_s = time.monotonic() - self.created_at
            self._pass_on(
                DeadlineExceeded(
                    f"the deadline of the request passed after {in_engine_s:.1f} s in the engine"
                )
            )

        self._call_in(self._request.deadline - time.time(), end_late_request)

    def _call_in(self, left_s: float, act: Callable[[], None]) -> None:
        """Set the timer of the current state.

        A state has one timer, because a timer for each token would cost too much.
        """
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), act)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, last: StreamEvent | None) -> None:
        call = self._call
        if call is None:
            # `_run` submits a cancelled decode call all the same, if only its fetch frees the KV.
            is_submitted_later = last is None and self._must_fetch_kv
            if not is_submitted_later:
                self._end_call()
        elif self.is_fetching and not self._calls.library.can_abort_fetch:
            self._limit_fetch(call)
        else:
            self._abort(call)

    def _limit_fetch(self, call: LibraryCall) -> None:
        """Wait at most KV_WAIT_S for the first result, which shows that the KV was fetched.

        `on_result` aborts then.
        """
        self._call_in(KV_WAIT_S, lambda: self._give_up_fetch(call))

    def _give_up_fetch(self, call: LibraryCall) -> None:
        log.warning(
            "KV transfer still running %g s after cancellation: %s",
            KV_WAIT_S,
            self._task.get_name(),
        )
        self._abort(call)

    def _abort(self, call: LibraryCall) -> None:
        # `stop` may have aborted the call before the stream ended.
        if self._is_aborted:
            return
        self._is_aborted = True
        self._call_in(ANSWER_S, self._give_up)
        call.abort()

    def _give_up(self) -> None:
        text = (
            f"{self._calls.library_name} did not confirm the abort of a request within"
            f" {ANSWER_S:g} s"
        )
        log.warning("%s: %s", text, self._task.get_name())
        self._end_call()
        self._task.cancel()
        # A stream that was stopped still waits for its end. A cancelled one drops this event.
        self._pass_on(MigrationFailed(text))

    def _end_call(self, *, keeps_kv: bool = False) -> None:
        """Forget the call, which the library has ended. Idempotent."""
        self._cancel_timer()
        call = self._call
        self._call = None
        # The KV of a failed library has ended with it.
        must_free_kv = not keeps_kv and not self._calls.has_failed
        if call is not None and call.exports_kv and must_free_kv:
            self._calls.transfers.release_kv(call, len(self._request.token_ids))
        self._calls.remove(self)

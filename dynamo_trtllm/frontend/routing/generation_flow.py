"""Decide what happens next to a request: a state machine without I/O, clocks and tasks.

`request_router` passes events to `GenerationFlow.handle`, and implements the driver that the flow
calls. Only this module knows that a request is a prefill call and a decode call, and how a request
continues after a call has failed. If no decode call has generated a token of the request, it is
retried. Otherwise it migrates. In both cases, the prompt of the next attempt also has the tokens
that the client already has. So a greedy engine generates the same output as without the failure.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import assert_never

import msgspec

from dynamo_trtllm.frontend.routing.attempt import Attempt, feature_with_state
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.early_token import early_chunk, without_repeated
from dynamo_trtllm.frontend.routing.generation_events import (
    FlowDriver,
    FlowEvent,
    RouterOptions,
    Signal,
)
from dynamo_trtllm.frontend.routing.pairs import PAIR_FAILURES, WorkerSelection
from dynamo_trtllm.frontend.routing.suspects import SETTLED_TOKENS, RequestProgress
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Phase,
    ReissueKvParams,
    ReleaseKv,
    ReleaseOutcome,
    ReleaseSlot,
    TokenIds,
    token_ids,
)
from dynamo_trtllm.protocol.streams import StreamEvent

# How many failed KV transfers of a request are retried. It is only one, because a failed transfer
# may have taken the whole time limit of transfers.
_MAX_TRANSFER_FAILURES = 1


class State(Enum):
    """The states of a generation; see the table in `GenerationFlow`."""

    NEW = auto()
    WAITING = auto()
    RESERVING = auto()
    PREFILL = auto()
    DECODE = auto()
    REISSUING = auto()
    CHECKING = auto()
    ENDED = auto()


class GenerationFlow:
    """One request, from the selection of its workers to its last token.

    ```
    state      waits for               next state
    NEW        the start               the first state of an attempt, see below
    WAITING    other workers           the first state of an attempt, or ENDED after the time-out
    RESERVING  a decode slot           PREFILL
    PREFILL    KV parameters           DECODE; ENDED if the answer is complete
    DECODE     tokens                  ENDED after the last token; DECODE or REISSUING if the worker
                                       does not take the call and another one can fetch the KV;
                                       CHECKING if the worker could not fetch the KV
    REISSUING  new KV parameters       DECODE, of the worker for which they are signed
    CHECKING   a sign of the prefill   the state after an error, which is attributed to the prefill
               worker                  worker if it has died, otherwise to the decode worker
    ENDED      nothing                 none
    ```

    An attempt begins with the selection of its workers. Its first state is PREFILL; DECODE with one
    aggregated worker; RESERVING if a decode slot comes first; WAITING or ENDED if there are no
    workers.

    A cancel leads from every state to ENDED. An error that the table does not list leads to the
    next attempt if the request can be retried or migrated, else to ENDED. In all these cases, the
    flow frees a decode slot that no decode call has used, and sends a release of KV that no decode
    call has fetched.

    Some prefill workers ignore that release, and free KV only when it is fetched. After a cancel,
    the driver lets a decode worker fetch that KV. After an error of the decode call, no worker
    fetches the KV again: the call may have fetched it, and another fetch might wait for KV that is
    gone. KV that was not fetched is then freed by the timeout of the engine's library (vLLM,
    TensorRT-LLM).

    Args:
        driver: does what the flow decides.
        request: the request of the client, with its whole prompt.
        timeline: filled while the request runs.
        options: limits of retries, migrations and waits.
        selection: the workers of a probe. A probe is one attempt, which is not retried. The caller
            of a probe records its success. None: the request is no probe.
    """

    def __init__(
        self,
        driver: FlowDriver,
        request: GenerateRequest,
        timeline: ChoiceTimeline,
        options: RouterOptions,
        selection: WorkerSelection | None,
    ) -> None:
        self.state = State.NEW
        self.request = request
        self._driver = driver  # `_end` deletes this attribute
        self._timeline = timeline
        self._options = options
        self._fixed_selection = selection
        self._is_probe = selection is not None
        self._attempt: Attempt | None = None
        # The decode call has begun, and nothing is left to decide about its tokens until it ends.
        self._passes_tokens = False
        self._num_attempts = 0
        self._sent_ids: TokenIds = token_ids()  # tokens sent to the client by all attempts
        self._num_sent_early = 0  # how many of them came from prefill calls, see `early_token`
        self._error: DynamoError | None = None  # the error of the last attempt
        self._excluded: set[int] = set()  # instances that failed this request
        self._avoid: int | None = None  # a prefill instance whose KV transfer failed
        self._num_transfer_failures = 0
        # How many workers died during a call of this request because of another request. Such
        # deaths use up no retries and migrations.
        self._num_explained_deaths = 0
        self._num_rounds = 0  # how often all instances were tried again
        self._rounds_at_attempt = 0  # `_num_rounds` when the current attempt began
        # The wait for other workers has timed out, and no attempt or round has begun since.
        self._wait_timed_out = False
        # This request has probably crashed its last worker: see `suspects`.
        self.is_prime_suspect = False
        # The request waits, as a prime suspect, for workers on which no other suspect is tried.
        self.awaits_trial = False

    def handle(self, event: FlowEvent) -> StreamEvent | None:
        """Call the driver as an event demands.

        Return the event for the client, if any. After the end, do nothing.
        """
        if self.state is State.ENDED:
            return None
        match event:
            case Chunk():
                return self._on_chunk(event)
            case DynamoError():
                return self._on_error(event)
            case KvTransferParams():
                self._on_reissued(event)
            case Signal.START if self._fixed_selection is not None:
                self._begin_attempt(self._fixed_selection)
            case Signal.START | Signal.WORKERS_CHANGED:
                return self._select()
            case Signal.WAIT_TIMED_OUT if self.awaits_trial:
                # The request now runs beside other suspects.
                self.awaits_trial = False
                return self._select()
            case Signal.WAIT_TIMED_OUT:
                self._wait_timed_out = True
                return self._select(is_last_resort=True)
            case Signal.SLOT_RESERVED:
                self._call_prefill()
            case Signal.WORKER_LISTENS:
                return self._on_prefill_alive()
            case Signal.CANCEL:
                if not self._start_kv_collection():
                    self._free()
                self._end()
            case _:
                assert_never(event)
        return None

    def try_forward(self, chunk: Chunk) -> bool:
        """Count the tokens of a chunk as sent, if the chunk has nothing to decide about.

        Return True for such a chunk, as nearly all chunks are. The caller then sends it to the
        client, and does not call `handle` with it.
        """
        if not self._passes_tokens or chunk.finish_reason is not None or chunk.stats is not None:
            return False
        self._sent_ids.extend(chunk.token_ids)
        return True

    def progress(self) -> RequestProgress:
        """Return the number of tokens of the latest attempt and of all attempts."""
        num_sent = len(self._sent_ids)
        num_sent_before = 0 if self._attempt is None else self._attempt.num_sent_before
        return RequestProgress(num_sent - num_sent_before, num_sent)

    # --- selection --------------------------------------------------------------------------------

    def _select(self, *, is_last_resort: bool = False) -> StreamEvent | None:
        """Begin an attempt.

        Without workers, wait for other workers. If none comes, try pairs that were never probed
        (`is_last_resort`). After that, try all instances again, also those that have failed. This
        is a round.
        """
        if self.awaits_trial and not self._timeline.suspicion.unexplained_deaths():
            # The deaths are explained by another request, or the worker works again.
            self.awaits_trial = False
        selected = self._driver.select(
            self._num_attempts, frozenset(self._excluded), self._avoid, is_last_resort
        )
        if isinstance(selected, WorkerSelection):
            self._begin_attempt(selected)
            return None
        if not isinstance(selected, errors.NoInstances):
            return self._end(selected)
        if not is_last_resort:
            limit_s = self._wait_limit_s()
            if limit_s is None:
                return self._select(is_last_resort=True)
            self.state = State.WAITING
            self._driver.wait_for_workers(limit_s)
            return None
        if self._wait_timed_out and self._excluded:
            # The next round: all instances are tried again.
            self._wait_timed_out = False
            self._excluded.clear()
            self._num_rounds += 1
            return self._select()
        # The error of the last attempt says more than that no workers are left.
        return self._end(self._error or selected)

    def _wait_limit_s(self) -> float | None:
        """Return until when to wait for workers, in seconds after the attempt's first selection.

        All instances may have failed because of the network, so they are tried again after a pause.
        Each pause is twice as long as the one before, and all pauses together take `hold_s`. If no
        instance has failed since the last pause, wait for the rest of `hold_s`.

        None: do not wait.
        """
        retries = self._options.retries
        hold_s = self._options.hold_s
        if self.awaits_trial:
            return hold_s
        if isinstance(self._error, errors.Overloaded) and not self._sent_ids:
            # Waiting frees no capacity, and the client can try again. It can't if its stream has
            # begun, so then the request waits.
            return None
        if not self._excluded and not self._rounds_at_attempt:
            return hold_s  # the formula below gives the same, but divides by 0 without retries
        if self._excluded and self._num_rounds >= retries:
            return None
        # The pauses are 1, 2, 4, … 2**(retries-1) times the shortest one.
        shortest_s: float = hold_s / (2**retries - 1)
        if self._excluded:
            return shortest_s * 2.0**self._num_rounds
        return hold_s - shortest_s * (2.0**self._rounds_at_attempt - 1)

    # --- calls ------------------------------------------------------------------------------------

    def _begin_attempt(self, selection: WorkerSelection) -> None:
        prefill = selection.prefill
        decode = selection.decode
        request = self._remaining()
        self._num_attempts += 1
        self._wait_timed_out = False
        self._rounds_at_attempt = self._num_rounds
        self._timeline.reset_calls()
        attempt = Attempt(
            prefill,
            decode,
            worker=decode,
            request=request,
            tried=frozenset([decode.id]),
            num_sent_before=len(self._sent_ids),
            tokens_to_settle=self._timeline.suspicion.tokens_to_settle(),
        )
        self._attempt = attempt
        self._passes_tokens = False
        if prefill is None:
            self._call_decode(attempt)
        elif decode.strategy == "decode_first":
            self.state = State.RESERVING
            attempt.reservation_id = f"{request.request_id}-{self._num_attempts}"
            self._driver.reserve_decode_slot(decode, attempt.reservation_id)
        else:
            self._call_prefill()

    def _remaining(self) -> GenerateRequest:
        """Return the request of the next attempt, without the tokens that were sent."""
        sampling = self.request.sampling
        num_sent = len(self._sent_ids)
        if num_sent == 0:
            return self.request
        rest = msgspec.structs.replace(
            sampling,
            max_tokens=sampling.max_tokens - num_sent,
            min_tokens=max(0, sampling.min_tokens - num_sent),
            prompt_logprobs=None,
        )
        return msgspec.structs.replace(
            self.request,
            token_ids=self.request.token_ids + self._sent_ids,
            sampling=rest,
            num_resumed_output_tokens=num_sent,
        )

    def _call_prefill(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        assert attempt.prefill is not None
        self.state = State.PREFILL
        attempt.worker = attempt.prefill
        self._timeline.prefill_instance = attempt.prefill.id
        request = msgspec.structs.replace(
            attempt.request, phase=Phase.PREFILL, kv_receivers=(attempt.decode.id,)
        )
        self._driver.call_worker(attempt.prefill, request)

    def _call_decode(self, attempt: Attempt) -> None:
        self.state = State.DECODE
        attempt.worker = attempt.decode
        self._timeline.decode_instance = attempt.decode.id
        self._driver.call_worker(attempt.decode, attempt.request)

    def _on_chunk(self, chunk: Chunk) -> StreamEvent | None:
        attempt = self._attempt
        assert attempt is not None
        if self.state is State.PREFILL:
            return self._on_prefill_chunk(attempt, chunk)
        if attempt.sent_early:
            try:
                chunk, attempt.sent_early = without_repeated(chunk, attempt.sent_early)
            except errors.StreamIncomplete as exc:
                self._driver.cancel_call()
                return self._on_error(exc)
        self._sent_ids.extend(chunk.token_ids)
        if chunk.stats is not None:
            self._timeline.decode_stats = chunk.stats
        if attempt.tokens_to_settle and self.progress().call_tokens >= attempt.tokens_to_settle:
            attempt.tokens_to_settle = 0
            self._driver.end_trial()
        if not attempt.has_begun:
            # The first chunk shows that the KV has arrived.
            attempt.has_begun = True
            self._free_kv(attempt, ReleaseOutcome.FETCHED)
            if not self._is_probe:
                self._driver.record_transfer(attempt.pair)
        self._passes_tokens = not attempt.tokens_to_settle and not attempt.sent_early
        if chunk.finish_reason is not None:
            return self._end(chunk)
        return chunk if chunk.token_ids else None

    def _on_prefill_chunk(self, attempt: Attempt, chunk: Chunk) -> StreamEvent | None:
        if chunk.finish_reason is None:
            # Only the last chunk of a prefill call has the KV transfer parameters.
            return None
        attempt.params = chunk.kv_params
        announces_kv = chunk.finish_reason is FinishReason.KV_TRANSFER
        has_kv = chunk.kv_params is not None
        if announces_kv != has_kv:
            parameters = "KV transfer parameters" if has_kv else "no KV transfer parameters"
            text = (
                f"prefill instance {attempt.worker.id:x} returned {parameters} with finish reason"
                f" {chunk.finish_reason}; restart it"
            )
            return self._attempt_failed(attempt, errors.StreamIncomplete(text))
        self._timeline.prefill_stats = chunk.stats
        if chunk.kv_params is None:
            # The answer is complete without a decode call.
            self._free()
            return self._end(chunk)
        attempt.request = msgspec.structs.replace(
            attempt.request,
            phase=Phase.DECODE,
            kv_params=chunk.kv_params,
            reservation_id=attempt.reservation_id,
        )
        early = None
        if not self._is_probe and self._driver.is_pause_short(attempt.decode):
            early = early_chunk(attempt.request.sampling, chunk.kv_params)
        if early is not None:
            attempt.sent_early = early.token_ids
            self._sent_ids.extend(early.token_ids)
            self._num_sent_early += len(early.token_ids)
            self._timeline.first_token_sent_early()
        self._call_decode(attempt)
        return early

    # --- failures and ends ------------------------------------------------------------------------

    def _on_error(self, error: DynamoError) -> StreamEvent | None:
        attempt = self._attempt
        assert attempt is not None
        if self.state is State.RESERVING and isinstance(error, errors.Overloaded):
            # The worker has reserved no slot.
            attempt.reservation_id = None
        if self.state is State.CHECKING:
            return self._on_prefill_dead(attempt, error)
        if self.state is not State.DECODE or attempt.prefill is None:
            return self._attempt_failed(attempt, error)
        if isinstance(error, PAIR_FAILURES):
            self._driver.record_transfer(attempt.pair, error)
            if self._is_probe:
                return self._attempt_failed(attempt, error)
            self.state = State.CHECKING
            attempt.transfer_error = error
            self._driver.check_worker(attempt.prefill)
            return None
        is_refused = isinstance(error, errors.Draining | errors.Unreachable | errors.Overloaded)
        other = None
        if is_refused and not attempt.has_begun and not self._is_probe:
            other = self._driver.select_other_decode(attempt.prefill, attempt.tried)
        if other is None:
            return self._attempt_failed(attempt, error)
        # The other instance fetches the same KV, without a reserved slot.
        self._driver.record_failure(attempt.decode, error, f"using {other.id:x}")
        self._free_slot(attempt)
        attempt.decode = other
        attempt.tried = attempt.tried | {other.id}
        attempt.request = msgspec.structs.replace(attempt.request, reservation_id=None)
        params = attempt.params
        if params is None or params.signature is None:
            self._call_decode(attempt)
        else:
            # The parameters are signed for the instance that was called before.
            self.state = State.REISSUING
            attempt.worker = attempt.prefill
            self._driver.reissue_params(attempt.prefill, ReissueKvParams(params, (other.id,)))
        return None

    def _on_reissued(self, params: KvTransferParams) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.params = params
        attempt.request = msgspec.structs.replace(attempt.request, kv_params=params)
        self._call_decode(attempt)

    def _on_prefill_alive(self) -> StreamEvent | None:
        attempt = self._attempt
        assert attempt is not None
        assert attempt.transfer_error is not None
        return self._attempt_failed(attempt, attempt.transfer_error)

    def _on_prefill_dead(self, attempt: Attempt, error: DynamoError) -> StreamEvent | None:
        assert attempt.prefill is not None
        attempt.worker = attempt.prefill
        error.__cause__ = attempt.transfer_error
        return self._attempt_failed(attempt, error)

    def _attempt_failed(self, attempt: Attempt, error: DynamoError) -> StreamEvent | None:
        """Retry or migrate the request, or end it with the error."""
        self._free()
        if self._is_probe:
            return self._end(error)
        final: StreamEvent | None = self._error_after_death(error, attempt)
        next_step = None
        has_all_tokens = len(self._sent_ids) >= self.request.sampling.max_tokens
        if final is None and has_all_tokens and error.retryable:
            # Only the end of the stream was lost.
            final = Chunk(finish_reason=FinishReason.LENGTH)
            next_step = "all tokens were sent"
        elif final is None:
            final = self._error_after_failure(error, attempt)
            next_step = "retrying" if final is None else None
        self._driver.record_failure(attempt.worker, error, next_step)
        if final is not None:
            return self._end(final)
        self._error = error
        if isinstance(error, errors.KvTransferError):
            self._avoid = self._timeline.prefill_instance
        else:
            self._excluded.add(attempt.worker.id)
        return self._select()

    def _error_after_death(self, error: DynamoError, attempt: Attempt) -> DynamoError | None:
        """Record the death of the worker, if it died.

        Return the error that ends the request, if the request is given up because of this death.
        """
        if not isinstance(error, errors.WorkerDied | errors.EngineFailed):
            return None
        final_error = self._driver.record_death(attempt.worker)
        if self._driver.is_death_explained(attempt.worker):
            self._num_explained_deaths += 1
        # A prime suspect is charged with two deaths, or with this one soon after its call began.
        deaths = self._timeline.suspicion.unexplained_deaths()
        is_charged_with_this = any(death.instance_id == attempt.worker.id for death in deaths)
        has_just_begun = self.progress().call_tokens < SETTLED_TOKENS
        is_charged_again = len(deaths) > 1
        self.is_prime_suspect = is_charged_again or (is_charged_with_this and has_just_begun)
        self.awaits_trial = self.is_prime_suspect
        if final_error is not None:
            final_error.__cause__ = error
        return final_error

    def _error_after_failure(self, error: DynamoError, attempt: Attempt) -> DynamoError | None:
        """Count the failure.

        Return the error that ends the request; None if it is retried or migrated.
        """
        if not error.retryable:
            return error
        # A call that its worker did not accept is not counted (see `RouterOptions`). A call that an
        # elastic worker refused because it holds too much KV for others is not counted, either:
        # each elastic worker may refuse the call before one of them runs the whole request.
        is_kv_full = isinstance(error, errors.KvTransfersFull)
        is_counted = not is_kv_full and not errors.is_worker_unavailable(error)
        has_decode_tokens = len(self._sent_ids) > self._num_sent_early
        if not has_decode_tokens:
            if is_counted:
                self._timeline.count_retry()
            if isinstance(error, errors.KvTransferError):
                self._num_transfer_failures += 1
            max_retries = self._options.retries + self._num_explained_deaths
            has_retries = self._timeline.retries <= max_retries
            if not has_retries or self._num_transfer_failures > _MAX_TRANSFER_FAILURES:
                return error
            return None
        feature = feature_with_state(self.request.sampling)
        if feature is not None and "resumed_tokens" in attempt.decode.card.unsupported_features:
            return _migration_failed(error, feature)
        if is_counted:
            self._timeline.count_migration()
        max_migrations = self._options.migrations + self._num_explained_deaths
        return error if self._timeline.migrations > max_migrations else None

    def _start_kv_collection(self) -> bool:
        """Let a decode worker fetch the KV of a cancelled request, if nothing else frees that KV.

        Return True if a decode worker will fetch it.
        """
        attempt = self._attempt
        if (
            attempt is None
            or attempt.has_begun
            or attempt.prefill is None
            or not attempt.prefill.keeps_unfetched_kv
        ):
            return False
        if self.state is State.PREFILL:
            # No decode call has taken the slot yet, and the collecting call takes none.
            self._free_slot(attempt)
        elif self.state is not State.DECODE:
            return False
        self._driver.collect_kv(attempt.prefill, attempt.decode, attempt.request)
        return True

    def _free(self) -> None:
        """Free the slot and the KV of an attempt whose decode call has not begun to answer."""
        attempt = self._attempt
        if attempt is not None and not attempt.has_begun:
            self._free_slot(attempt)
            # A decode call that was sent may not have arrived, so its worker would not free the KV.
            self._free_kv(attempt, ReleaseOutcome.ABORTED)

    def _free_slot(self, attempt: Attempt) -> None:
        reservation_id = attempt.reservation_id
        attempt.reservation_id = None
        if reservation_id is not None:
            self._driver.send_control(attempt.decode, ReleaseSlot(reservation_id))

    def _free_kv(self, attempt: Attempt, outcome: ReleaseOutcome) -> None:
        params = attempt.params
        attempt.params = None
        if attempt.prefill is not None and params is not None:
            self._driver.send_control(attempt.prefill, ReleaseKv(params.transfer_id, outcome))

    def _end(self, event: StreamEvent | None = None) -> StreamEvent | None:
        # The driver refers to this flow. An error refers to the stack frames of its traceback, and
        # these frames refer to this flow, too. So if the flow still referred to the driver or to an
        # error, a reference cycle would keep the request in memory.
        self.state = State.ENDED
        self._attempt = None
        self._error = None
        del self._driver
        return event


def _migration_failed(error: DynamoError, feature: str) -> errors.MigrationFailed:
    failed = errors.MigrationFailed(
        "the stream broke and cannot continue on another worker: its engine cannot resume"
        f" {feature}; retry, or send the request without it ({error.code}: {error.message})"
    )
    failed.__cause__ = error
    return failed

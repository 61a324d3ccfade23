"""Hold what happens to one choice of a request, and when: workers, calls, phases and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dynamo_trtllm.frontend.routing.cost_placement import Costs, CostSelection
from dynamo_trtllm.frontend.routing.pairs import Pair, WorkerSelection
from dynamo_trtllm.frontend.routing.path_selection import ChosenPath
from dynamo_trtllm.frontend.routing.slo_placement import SLO_MODE, SloSelection
from dynamo_trtllm.frontend.routing.start_window import StartPlace
from dynamo_trtllm.frontend.routing.suspects import Suspicion
from dynamo_trtllm.observability.recorded_shares import PackedShares, packed_shares
from dynamo_trtllm.observability.recorder import NO_COST, RECORDER, RecordedEvent
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    Phase,
    PhaseTimings,
    Role,
    TokenLogprob,
)
from dynamo_trtllm.protocol.number_types import MAX_INT64
from dynamo_trtllm.protocol.phases import FRONTEND, Span
from dynamo_trtllm.protocol.shares import Shares


@dataclass(slots=True)
class ChoiceTimeline:
    """The workers and timings of a choice, filled while it runs.

    The router calls a method for each event, which also writes it to the flight recorder. The flow
    sets the instances and stats, which are those of the last attempt. `RequestTimeline` sets the
    times of tokens when they arrive. All times are those of `clock`.
    """

    prefill_instance: int | None = None
    decode_instance: int | None = None
    prefill_stats: PhaseTimings | None = None
    decode_stats: PhaseTimings | None = None
    retries: int = 0
    migrations: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list, compare=False)
    arrived_s: float | None = None  # when the request arrived; None: this is not known
    # The path of the last attempt, if it was chosen by predicted times, and what was predicted.
    chosen: ChosenPath | None = None
    # With `--router-mode slo`, the times of the workers were not known at the last attempt.
    is_unpredicted: bool = False
    # How many spans had begun when the first tokens arrived. None: no token has arrived.
    num_spans_of_ttft: int | None = field(default=None, compare=False)
    first_s: float | None = None  # when the first tokens arrived
    last_s: float = 0.0  # when the newest tokens arrived
    called_s: float | None = field(default=None, compare=False)  # when a worker was called last
    suspicion: Suspicion = field(default_factory=Suspicion, compare=False)
    # The place in the start window; None: the choice is a probe, which does not count there.
    place: StartPlace | None = field(default=None, compare=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    # The index of the first span of the current attempt.
    _attempt_span: int = field(default=0, compare=False)
    # The role of the last worker that was called.
    _called_role: str = field(default=FRONTEND, compare=False)

    def attempt_began(self) -> None:
        """Begin the spans of an attempt.

        One span `retry` replaces the spans of the failed attempt before. But if that attempt sent
        tokens, its spans stay, and a span `migration` begins after its last token.
        """
        spans = self.spans
        # The spans before an early first token stay, too.
        first_failed = max(self._attempt_span, self.num_spans_of_ttft or 0)
        if spans and spans[-1].phase == "decode":
            spans.append(Span("migration", max(spans[-1].begin_s, self.last_s)))
        elif len(spans) > first_failed and spans[-1].phase != "migration":
            spans[first_failed:] = [Span("retry", spans[first_failed].begin_s)]
        self._attempt_span = len(spans)
        self._enter("select")

    def reset_calls(self) -> None:
        """Drop the instances and stats of the attempt before: the next attempt has workers now."""
        self.prefill_instance = None
        self.decode_instance = None
        self.prefill_stats = None
        self.decode_stats = None

    def count_retry(self) -> None:
        """Count an attempt that failed before a decode call had generated a token."""
        self.retries += 1

    def count_migration(self) -> None:
        """Count an attempt that failed after a decode call had generated a token."""
        self.migrations += 1

    def selected(self, request: GenerateRequest, selection: WorkerSelection, mode: str) -> None:
        """Note by which costs or predicted times the workers of an attempt were selected.

        Args:
            request: the request of the choice.
            selection: the workers.
            mode: the router mode.
        """
        chosen = selection.chosen if isinstance(selection, SloSelection) else None
        self.chosen = chosen
        self.is_unpredicted = chosen is None and mode == SLO_MODE
        if chosen is not None:
            RECORDER.record(
                request.request_id,
                RecordedEvent.PATH_CHOSEN,
                _microseconds(chosen.ttft_s),
                _microseconds(chosen.gap_s),
                chosen.num_missed,
                reason=chosen.path,
            )
        elif isinstance(selection, CostSelection):
            if selection.prefill is not None and selection.prefill_costs is not None:
                self._record_costs(request, selection.prefill, selection.prefill_costs, mode)
            self._record_costs(request, selection.decode, selection.decode_costs, mode)

    def _record_costs(
        self, request: GenerateRequest, instance: Instance, costs: Costs, mode: str
    ) -> None:
        other = NO_COST if costs.other is None else costs.other
        RECORDER.record(
            request.request_id,
            RecordedEvent.PLACED_BY_COST,
            instance.id,
            costs.selected,
            other,
            reason=mode,
        )

    def waited_s(self, now: float) -> float:
        """Return for how long the request has waited. `now`: a time of the clock of its arrival."""
        return 0.0 if self.arrived_s is None else max(0.0, now - self.arrived_s)

    def placed(
        self,
        request: GenerateRequest,
        selection: WorkerSelection,
        shares: Mapping[int, Shares] = {},
    ) -> None:
        """Note that workers were selected for an attempt.

        `shares`: the shares of elastic workers, by id.
        """
        prefill_id = 0 if selection.prefill is None else selection.prefill.id
        decode_id = selection.decode.id
        packed = 0
        if shares:
            of_prefill = shares.get(prefill_id)
            of_decode = shares.get(decode_id)
            packed = packed_shares(
                PackedShares(
                    None if of_prefill is None else of_prefill.prefill,
                    None if of_decode is None else of_decode.decode,
                )
            )
        RECORDER.record(request.request_id, RecordedEvent.PLACED, prefill_id, decode_id, packed)

    def waiting_for_workers(self, request: GenerateRequest, quarantined: Pair) -> None:
        """Note that there are no workers.

        `quarantined`: a quarantined pair; (None, 0): no pair is quarantined.
        """
        if self.place is not None:
            self.place.waits_for_workers()
        prefill_id, decode_id = quarantined
        RECORDER.record(
            request.request_id, RecordedEvent.WAITING_FOR_WORKERS, prefill_id or 0, decode_id
        )

    def reserving_slot(self, request: GenerateRequest, decode: Instance) -> None:
        """Note that a slot of a decode worker is being reserved."""
        self._enter("reserve", _role_of_call(decode, Phase.DECODE))
        RECORDER.record(request.request_id, RecordedEvent.RESERVING_SLOT, decode.id)

    def calling(self, request: GenerateRequest, worker: Instance) -> None:
        """Note that a worker is called. `request`: the call."""
        if self.place is not None:
            self.place.called(worker, request.phase)
        phase = request.phase
        self._called_role = _role_of_call(worker, phase)
        self.called_s = self.clock()
        self._enter("prefill" if phase is Phase.PREFILL else "first_token", self._called_role)
        RECORDER.record(request.request_id, RecordedEvent.CALL_SENT, worker.id, reason=phase)

    def first_token_sent_early(self) -> None:
        """Note that the client gets the first token before the decode call begins."""
        if self.num_spans_of_ttft is None:
            self.num_spans_of_ttft = len(self.spans)
        if self.place is not None:
            self.place.first_token()

    @property
    def decode_begun_s(self) -> float | None:
        """Return when the running decode call gave its first answer; None: it gave none yet."""
        last = self.spans[-1] if self.spans else None
        return last.begin_s if last is not None and last.phase == "decode" else None

    def decode_began(self) -> None:
        """Note the first answer of a decode call."""
        if self.num_spans_of_ttft is None:
            self.num_spans_of_ttft = len(self.spans)
        if self.place is not None:
            self.place.decode_began()
        # The last span may be a migration, which has the role of the frontend.
        self._enter("decode", self._called_role)

    def call_failed(
        self, request: GenerateRequest, worker: Instance, error: DynamoError, *, goes_on: bool
    ) -> None:
        """Note that a call has failed. `goes_on`: the request continues."""
        RECORDER.record(
            request.request_id, RecordedEvent.CALL_FAILED, worker.id, goes_on, reason=error.code
        )
        if goes_on and self.spans[-1].phase == "first_token":
            self.spans[-1].phase = "retry"

    def ended(self, request: GenerateRequest) -> None:
        """Note the end of the choice, maybe without a decode call."""
        if self.place is None:
            return
        stats = self.prefill_stats or self.decode_stats
        if stats is not None:
            prompt_tokens = len(request.token_ids)
            # A worker that resumes a stream may have cached tokens of its output, too.
            self.place.prompt_done(prompt_tokens, min(prompt_tokens, stats.cached_tokens))
        self.place.leave()

    def _enter(self, phase: str, role: str = FRONTEND) -> None:
        """Begin a span and end the one before.

        The span `migration` lasts until the first chunk of the next attempt.
        """
        if self.spans:
            last = self.spans[-1]
            if last.phase == "migration" and phase != "decode":
                return
            if last.phase == "prefill":
                last.stats = self.prefill_stats
            elif last.phase == "first_token":
                last.stats = self.decode_stats
        self.spans.append(Span(phase, self.clock(), role))


def _microseconds(seconds: float) -> int:
    """Return a time for the recorder. A cost model that is wrong may predict any number."""
    return int(min(MAX_INT64, 1e6 * seconds))


def _role_of_call(worker: Instance, phase: Phase) -> Role:
    """Return the role in which a worker runs a call.

    The role of an elastic worker is that of the phase.
    """
    return Role[phase.name] if worker.role is Role.ELASTIC else worker.role

"""Follow one request: one call for each event.

Most events are passed to the subscribers; `TimelineSubscribers` lists which.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from dynamo_trtllm.access.access_control import Tenant, tenant_of
from dynamo_trtllm.frontend.requests.answer import Answer
from dynamo_trtllm.frontend.requests.choice import Choice, ChoiceDelta, Usage
from dynamo_trtllm.frontend.requests.preprocess import GenerationPlan
from dynamo_trtllm.frontend.requests.traces import valid_traceparent
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.phases import PHASES, PhaseSeconds, Span, divide
from dynamo_trtllm.support.http_server.exchange import HttpRequest
from dynamo_trtllm.support.network.addresses import network_of


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request when its head has arrived."""

    id: str  # the id that the client sent, if it sent one, and `unique_id`
    unique_id: str  # clients may repeat their ids
    client_request_id: str  # "": the client sent none
    endpoint: str  # the value of the metric label `endpoint`
    path: str
    client: str  # the network of the client, see `network_of`
    tenant: Tenant | None  # the sender, if it has an API key
    wants_stats: bool  # the client wants statistics in the response
    traceparent: str | None  # header of the client; None: the header is missing or not valid
    arrived_at: float  # seconds since the epoch

    @property
    def owner(self) -> str:
        """The name of the API key to which stored responses belong; "": there are no keys."""
        return "" if self.tenant is None else self.tenant.key.name

    @property
    def client_id(self) -> str:
        """The name of the API key; the network of the client if there are no keys."""
        return self.owner or self.client


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a request has ended."""

    outcome: str | DynamoError  # "ok", "cancelled" or the error
    code: str  # "ok", "cancelled" or the error code
    status: int  # HTTP status; 0 if no response was started
    end_s: float  # a time of `time.monotonic()`
    usage: Usage
    phases: PhaseSeconds
    ttft_phases: PhaseSeconds  # the phases before the first token; {}: there is no token


class TimelineSubscribers:
    """The functions that are called at the events of all requests: one list for each event."""

    def __init__(self) -> None:
        self.received: list[Callable[[RequestTimeline], None]] = []
        self.planned: list[Callable[[RequestTimeline, GenerationPlan], None]] = []
        # The wait for permits has ended, with or without them. The number is its seconds.
        self.left_queue: list[Callable[[RequestTimeline, float], None]] = []
        self.started: list[Callable[[RequestTimeline], None]] = []
        # A choice has its first token. The flag says whether it is also the first of the request.
        self.first_token: list[Callable[[RequestTimeline, Choice, bool], None]] = []
        self.last_token: list[Callable[[RequestTimeline, Choice], None]] = []
        self.ended: list[Callable[[RequestTimeline, RequestEnd], None]] = []


class RequestTimeline:
    """One request, from its arrival to its log line: what happened, and when.

    The timeline of each choice (`ChoiceTimeline`) has what belongs to one choice. Times are of
    `time.monotonic()`, and durations count from the end of the request's head. Each delta costs one
    clock reading.
    """

    def __init__(
        self, request: HttpRequest, endpoint: str, subscribers: TimelineSubscribers
    ) -> None:
        unique_id = secrets.token_hex(8)
        self.facts = RequestFacts(
            id=f"{request.id}-{unique_id}" if request.id else unique_id,
            unique_id=unique_id,
            client_request_id=request.id,
            endpoint=endpoint,
            path=request.path,
            client=network_of(request.client),
            tenant=tenant_of(request),
            wants_stats=request.header(b"x-dynamo-stats") == "1",
            traceparent=valid_traceparent(request.header(b"traceparent")),
            arrived_at=time.time(),
        )
        self.begun_s = request.arrived_s
        # When the whole body had arrived. Until it has, this is the time of the head.
        self.body_received_s = request.arrived_s
        self.first_s: float | None = None  # when the first token of the request arrived
        # The spans of the request before its choices begin.
        self.spans = [Span("receive", request.arrived_s)]
        self.model = ""  # set when the request is planned
        self.answer: Answer | None = None  # set when the request is accepted
        # Tokens come too often for a loop over subscribers. So the subscriber that observes the
        # gaps between tokens sets this function. Its arguments are the gap in seconds, and the
        # number of tokens with this gap.
        self.observe_gap: Callable[[float, int], None] = _do_nothing
        self.choices: Sequence[Choice] = ()  # the choices of the answer; empty until they start
        self.usage = Usage()  # set when the request ends
        self._subscribers = subscribers
        for notify in subscribers.received:
            notify(self)

    def enter(self, phase: str) -> None:
        """End the current phase of this request and begin the next one."""
        self.spans.append(Span(phase, time.monotonic()))

    def body_received(self) -> None:
        """Note that the whole body has arrived."""
        self.enter("tokenize_queue")
        self.body_received_s = self.spans[-1].begin_s

    def planned(self, plan: GenerationPlan) -> None:
        """Note the plan of the request."""
        self.model = plan.choices[0].request.model
        for notify in self._subscribers.planned:
            notify(self, plan)

    def accepted(self, answer: Answer) -> None:
        """Note the answer of the request, whose choices wait for permits next."""
        self.answer = answer

    def left_queue(self) -> None:
        """Note the end of the wait for permits, with or without them."""
        queued_s = time.monotonic() - self.spans[-1].begin_s
        for notify in self._subscribers.left_queue:
            notify(self, queued_s)

    def started(self) -> None:
        """Note that the choices of the answer were created, and will be started next."""
        assert self.answer is not None
        self.choices = self.answer.choices
        for choice in self.choices:
            choice.timeline.arrived_s = self.begun_s
        for notify in self._subscribers.started:
            notify(self)

    def delta_arrived(self, delta: ChoiceDelta) -> None:
        """Note a delta of a choice. This runs once per token."""
        choice = self.choices[delta.index]
        timeline = choice.timeline
        now_s = time.monotonic()
        if delta.tokens:
            if timeline.first_s is not None:
                # Tokens that arrived together share the time.
                self.observe_gap((now_s - timeline.last_s) / delta.tokens, delta.tokens)
            else:
                timeline.first_s = now_s
                self._first_token(choice, now_s)
            timeline.last_s = now_s
        if delta.finish is not None:
            for notify in self._subscribers.last_token:
                notify(self, choice)

    def _first_token(self, choice: Choice, now_s: float) -> None:
        is_first = self.first_s is None
        if is_first:
            self.first_s = now_s
        for notify in self._subscribers.first_token:
            notify(self, choice, is_first)

    def ended(self, outcome: str | DynamoError, status: int) -> None:
        """Note the end of the request.

        Args:
            outcome: "ok", "cancelled" or the error.
            status: HTTP status; 0 if no response was started.
        """
        end_s = time.monotonic()
        code = outcome if isinstance(outcome, str) else outcome.code
        phases: PhaseSeconds = {}
        ttft_phases: PhaseSeconds = {}
        if self.choices and self.answer is not None:
            self.usage = self.answer.usage()
            phases = self.phases(last_of(self.choices), end_s)
            ttft_phases = self.ttft_phases(self.choices)
        end = RequestEnd(
            outcome=outcome,
            code=code,
            status=status,
            end_s=end_s,
            usage=self.usage,
            phases=phases,
            ttft_phases=ttft_phases,
        )
        for notify in self._subscribers.ended:
            notify(self, end)

    def phases(self, choice: Choice, end_s: float) -> PhaseSeconds:
        """Return the phases of this request with those of one choice, which has ended last."""
        timeline = choice.timeline
        return divide(self.spans_with(choice), end_s, timeline.prefill_stats, timeline.decode_stats)

    def ttft_phases(self, choices: Sequence[Choice]) -> PhaseSeconds:
        """Return the phases until the first token of any of these choices; {}: no token came."""
        begun = [choice.timeline for choice in choices if choice.timeline.first_s is not None]
        if not begun:
            return {}
        timeline = min(begun, key=_first_token_s)
        spans = [*self.spans, *timeline.spans[: timeline.num_spans_of_ttft]]
        end_s = _first_token_s(timeline)
        if any(span.phase == "migration" for span in timeline.spans):
            # The statistics of the workers are those of calls after the first token.
            return divide(spans, end_s)
        return divide(spans, end_s, timeline.prefill_stats, timeline.decode_stats)

    def spans_with(self, choice: Choice) -> list[Span]:
        """Return the spans of this request and of one of its choices."""
        spans = [*self.spans, *choice.timeline.spans]
        if choice.finish is not None:
            spans.append(Span("respond", choice.timeline.last_s))
        return spans


def _do_nothing(seconds: float, count: int) -> None: ...


def _first_token_s(timeline: ChoiceTimeline) -> float:
    """Return when the first token of a choice arrived; infinity: the choice has no token."""
    return math.inf if timeline.first_s is None else timeline.first_s


def last_of(choices: Sequence[Choice]) -> Choice:
    """Return the choice that ended last, or one that has not ended."""
    # A choice that has not ended is the largest one here, because True is more than False.
    return max(choices, key=lambda choice: (choice.finish is None, choice.timeline.last_s))


def seconds_by_phase(phases: PhaseSeconds) -> dict[str, float]:
    """Return the seconds by phase, summed over roles, in the order of PHASES."""
    sums: dict[str, float] = {}
    for (_, phase), seconds in phases.items():
        sums[phase] = sums.get(phase, 0.0) + seconds
    ordered = {phase: sums[phase] for phase in PHASES if phase in sums}
    # Phases that PHASES lacks come last: a newer worker may report some.
    return ordered | sums

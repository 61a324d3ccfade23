"""Hold what one request takes and measures, from its arrival to its log line."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_trtllm.api.nvext import Extras, NvTiming, Stats, WorkerIds
from dynamo_trtllm.api.unknown_fields import IgnoredFields
from dynamo_trtllm.background import MAX_THREADS
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError, InvalidRequest, RequestError
from dynamo_trtllm.frontend.fleet.model_registry import ModelRegistry
from dynamo_trtllm.frontend.generation.choice import (
    ChoiceDelta,
    ChoiceState,
    Usage,
    record_prompt,
    share_suspicions,
)
from dynamo_trtllm.frontend.generation.pipeline import Pipeline
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan
from dynamo_trtllm.frontend.requests.admission import (
    BodyBudget,
    ChoiceTurns,
    IterationTime,
    read_body,
)
from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.output_budget import Output, OutputBudget
from dynamo_trtllm.http_server.exchange import HttpRequest
from dynamo_trtllm.network.addresses import network_of
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent, id_hash
from dynamo_trtllm.observability.traces import EndedRequest, TraceExporter, valid_traceparent
from dynamo_trtllm.phases import PHASES, PhaseSeconds, Span, divide
from dynamo_trtllm.sanitize import shorten

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.http.request_handler import AnswerBuilder
    from dynamo_trtllm.frontend.requests.keep_alive import KeepAlive

log = logging.getLogger(__name__)

_MESSAGE_CHARS = 300  # longest error message in the log line
_MAX_LOGGED = 1000  # ignored fields that are remembered as logged; clients choose their names
_ALWAYS_SHOWN = ("queue", "prefill", "handoff", "decode_wait")  # phases
_CALLS = ("prefill", "first_token")  # phases that begin with a call
_SHOWN_S = 0.0001  # shorter times are not in the log line
_PROGRAM_CHARS = 64
_NO_PROGRAM = re.compile(r"[^\w./-]", re.ASCII)
_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)


@dataclass(slots=True, eq=False)
class AppState:
    """The objects that all requests share."""

    config: FrontendConfig
    models: ModelRegistry
    pipeline: Pipeline
    metrics: FrontendMetrics
    traces: TraceExporter | None = None
    limiter: ConcurrencyLimiter = field(init=False)
    body_budget: BodyBudget = field(init=False)
    # Requests whose choices run, by the id of the response.
    running: dict[str, tuple[RequestContext, asyncio.Task[None]]] = field(default_factory=dict)
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_THREADS))
    # Ignored fields that were logged, as (client, name), newest last.
    logged_fields: dict[tuple[str, str], None] = field(default_factory=dict)
    # The time for bodies that are planned on the event loop.
    planning_time: IterationTime = field(default_factory=IterationTime)
    # The time for requests whose last choice has ended, or that failed.
    ending_time: IterationTime = field(default_factory=IterationTime)
    starts: ChoiceTurns = field(default_factory=ChoiceTurns)  # of new choices
    cancels: ChoiceTurns = field(default_factory=ChoiceTurns)  # of running choices
    output_budget: OutputBudget = field(default_factory=OutputBudget)

    def __post_init__(self) -> None:
        self.limiter = ConcurrencyLimiter(self.config.max_inflight, self.config.max_queued)
        self.body_budget = BodyBudget(self.config.max_total_body_bytes)


def program_of(request: HttpRequest) -> str:
    """Return the name and version of the client's program; if unknown, its address.

    They are in the header User-Agent.
    """
    named = (request.header(b"user-agent") or "").split(maxsplit=1)
    if not named:
        return request.client
    return _NO_PROGRAM.sub("?", named[0][:_PROGRAM_CHARS])


class RequestContext:
    """One request, from its arrival to its log line.

    It holds the id, deadline, permits, bytes, times and metrics. Its choices hold what belongs to
    one choice. Times count from the end of the request's head. Each delta costs one clock reading.
    """

    def __init__(self, app_state: AppState, endpoint: str, request: HttpRequest) -> None:
        self._unique = secrets.token_hex(8)  # clients may repeat their ids
        self.id = f"{request.id}-{self._unique}" if request.id else self._unique
        client_id_hash = id_hash(request.id) if request.id else 0
        RECORDER.record(self.id, RecordedEvent.RECEIVED, client_id_hash)
        self.client = network_of(request.client)
        self.deadline = 0.0  # seconds since the epoch; known with the body
        self._ignored = ""  # names of ignored fields, for the response header
        self.extra_fields: frozenset[str] = frozenset()  # of `nvext`, in the response
        self.answer_id = ""  # the id in the response; "" until it is known
        self.builder: AnswerBuilder | None = None  # of the response, as soon as it is planned
        self.is_streamed = False  # the response is; known with the builder
        self.has_begun = False  # the builder's first events were sent
        self.keep_alive: KeepAlive | None = None  # of a streamed response, if the server has it on
        self.is_cancelled = False  # on request of a client
        self.choices: list[ChoiceState] = []
        self._app_state = app_state
        self._endpoint = endpoint
        self._path = request.path
        self._wants_stats = request.header(b"x-dynamo-stats") == "1"
        self._body_bytes = app_state.body_budget.body(self.client)
        self.is_scored = False  # the output has log-probabilities; known with the plan
        self._output: Output | None = None
        self._num_choices = 0  # known with the plan
        self._num_permits = 0
        # None: it is missing or not valid
        self.traceparent = valid_traceparent(request.header(b"traceparent"))
        self._arrived_at = time.time()
        self._begun_s = request.arrived_s
        self.received_s = request.arrived_s  # later, when the whole body was there
        self._spans: list[Span] = [Span("receive", self._begun_s)]  # before those of the choices
        self._model = ""
        self._candidates = 1
        app_state.metrics.request_started()

    async def read_body(self, request: HttpRequest) -> bytes:
        """Return the body, whose bytes are reserved until `release_body`.

        Raises as `admission.read_body`.
        """
        config = self._app_state.config
        budget = self._app_state.body_budget
        body = await read_body(
            request, config.max_body_bytes, config.receive_timeout_s, budget, self._body_bytes
        )
        self.enter("tokenize_queue")
        self.received_s = self._spans[-1].begin_s
        return body

    def enter(self, phase: str) -> None:
        """End the current phase of this request and begin the next one."""
        self._spans.append(Span(phase, time.monotonic()))

    def release_body(self) -> None:
        """Release the bytes of the body. Idempotent."""
        self._app_state.body_budget.release(self._body_bytes)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the deadline from the client's wish, which the server caps."""
        seconds = self._app_state.config.request_timeout_s
        if timeout_s is not None:
            seconds = min(timeout_s, seconds)
        self.deadline = self._arrived_at + seconds

    def report_ignored(self, names: Iterable[str], request: HttpRequest) -> None:
        """Report ignored fields in a response header, in metrics and in the log.

        The log names each once per client: a program that a header User-Agent names.
        """
        ignored = IgnoredFields()
        ignored.add(names)
        if not ignored:
            return
        safe = [_NO_NAME.sub("?", name) for name in ignored]
        self._ignored = ", ".join(safe)
        logged = self._app_state.logged_fields
        client = program_of(request)
        new = [name for name in safe if (client, name) not in logged]
        if new:
            log.warning("request fields are ignored: %s (client %s)", ", ".join(new), client)
        for name in safe:
            self._app_state.metrics.field_ignored(name)
            logged.pop((client, name), None)
            logged[client, name] = None
        while len(logged) > _MAX_LOGGED:
            del logged[next(iter(logged))]

    def accept(self, plan: GenerationPlan, id_prefix: str) -> None:
        """Check and record the plan of the request, and create the id of the response.

        It begins with `id_prefix`.

        Raises:
            InvalidRequest: it has more choices than the limit.
        """
        count = len(plan.choices)
        limit = self._app_state.limiter.limit
        self._model = plan.choices[0].request.model
        self._candidates = plan.candidates
        self._num_choices = count
        sampling = plan.choices[0].request.sampling
        self.is_scored = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        for choice_request in plan.choices[:: plan.candidates]:
            record_prompt(choice_request.request)
        if count > limit:
            raise InvalidRequest(
                f"the request has {count} choices; this server runs at most {limit} at once,"
                " lower n"
            )
        # `explain` finds the request by this id.
        self.answer_id = f"{id_prefix}{self._unique}{secrets.token_hex(8)}"

    def create_choices(self, plan: GenerationPlan) -> None:
        """Create the choices.

        Call it after the wait for permits, because 128 choices take 0.5 MB.
        """
        self._observe_itl = self._app_state.metrics.child("itl_seconds", self._model).observe
        self.choices = [
            ChoiceState(choice_request, index) for index, choice_request in enumerate(plan.choices)
        ]
        if len(self.choices) > 1:
            share_suspicions(self.choices, plan.candidates)
        for choice in self.choices:
            RECORDER.follow(choice)

    async def acquire_permits(self) -> None:
        """Wait for the permits of the choices.

        Raises:
            Overloaded, DeadlineExceeded: as `ConcurrencyLimiter.acquire`.
        """
        metrics = self._app_state.metrics
        limiter = self._app_state.limiter
        count = self._num_choices
        self.enter("frontend_queue")
        try:
            await limiter.acquire(count, self.client, self.deadline - time.time())
        finally:
            metrics.child("queue_seconds").observe(time.monotonic() - self._spans[-1].begin_s)
        self.enter("select")
        self._num_permits = count

    def observe(self, delta: ChoiceDelta) -> None:
        """Record a delta when it arrives.

        TTFT counts once per request, inter-token latency in each choice.
        """
        trace = self.choices[delta.index].timeline
        now = time.monotonic()
        if delta.tokens:
            if trace.first_s is not None:
                # Tokens that arrived together share the time.
                self._observe_itl((now - trace.last_s) / delta.tokens, delta.tokens)
            else:
                if self._first_s() is None:
                    self._app_state.metrics.child("ttft_seconds", self._model).observe(
                        now - self._begun_s
                    )
                    if trace.expected is not None:
                        selected_s, predicted = trace.expected
                        self._app_state.metrics.observe_prediction(
                            model=self._model, seconds=now - selected_s, predicted=predicted
                        )
                trace.first_s = now
                RECORDER.record(self.choices[delta.index].request_id, RecordedEvent.FIRST_TOKEN)
            trace.last_s = now
        if delta.finish is not None:
            choice = self.choices[delta.index]
            RECORDER.unfollow(choice)
            RECORDER.record(
                choice.request_id, RecordedEvent.LAST_TOKEN, choice.num_tokens, reason=delta.finish
            )

    def open_output(self, end: Callable[[DynamoError, bool], None]) -> Output:
        """Return what counts the unsent output, until the request ends. `end`: as for `Output`."""
        self._output = self._app_state.output_budget.open(end, is_streamed=self.is_streamed)
        return self._output

    @property
    def output_bytes(self) -> int:
        """The memory of unsent output."""
        return 0 if self._output is None else self._output.in_use

    def cancel(self) -> None:
        """End the streams of all choices that still run."""
        for choice in self.choices:
            choice.cancel()

    async def start_choices(self, on_delta: Callable[[ChoiceDelta | DynamoError], None]) -> None:
        """Start the streams of all choices, in turns with other requests."""
        pipeline = self._app_state.pipeline
        if len(self.choices) == 1:
            # Reading its body takes longer, so it takes no turn.
            self.choices[0].start(pipeline, on_delta)
            return

        def start(choice: ChoiceState) -> None:
            choice.start(pipeline, on_delta)

        await self._app_state.starts.run(self.choices, start)

    async def end_choices(self) -> None:
        """End the streams of all choices that still run, in turns with other requests."""
        running = [choice for choice in self.choices if choice.is_running]
        try:
            if running:
                await self._app_state.cancels.run(running, ChoiceState.cancel)
        finally:
            self.cancel()  # those that are left if this task was cancelled

    def usage(self) -> Usage:
        """Return the usage so far.

        A prompt counts once for all its candidates, with the first one's cached tokens.
        """
        if len(self.choices) == 1:
            return self.choices[0].usage()
        by_choice = [choice.usage() for choice in self.choices]
        by_prompt = by_choice[:: self._candidates]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in by_prompt),
            completion_tokens=sum(usage.completion_tokens for usage in by_choice),
            cached_tokens=sum(usage.cached_tokens for usage in by_prompt),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in by_choice),
        )

    def served_by(self) -> dict[str, str]:
        """Return response headers with the instances known by now and the ignored fields."""
        headers = {
            "x-prefill-instance": self._prefill_ids(),
            "x-decode-instance": self._decode_ids(),
            "x-dynamo-ignored-fields": self._ignored,
        }
        return {name: value for name, value in headers.items() if value}

    def extras(self) -> Extras:
        """Return what the client asked for beside the fields of the API."""
        extras: Extras = {}
        if self._wants_stats:
            stats = self._stats_of(self.choices)
            if len(self.choices) > 1:
                stats["choices"] = [self._stats_of([choice]) for choice in self.choices]
            extras["dynamo_trtllm"] = stats
        if self.extra_fields:
            extras["nvext"] = {}
            if "worker_id" in self.extra_fields:
                extras["nvext"]["worker_id"] = self._worker_ids()
            if "timing" in self.extra_fields:
                extras["nvext"]["timing"] = self._timing()
        return extras

    def _worker_ids(self) -> WorkerIds:
        """Return the workers of the first choice. An aggregated worker has both roles."""
        trace = self.choices[0].timeline
        ids = (trace.prefill_instance, trace.decode_instance)
        known = [instance_id for instance_id in ids if instance_id is not None]
        if not known:
            return {}
        return {"prefill_worker_id": known[0], "decode_worker_id": known[-1]}

    def _timing(self) -> NvTiming:
        usage = self.usage()
        timing: NvTiming = {
            "request_received_ms": int(self._arrived_at * 1e3),
            "total_time_ms": (time.monotonic() - self._begun_s) * 1e3,
            "kv_hit_rate": usage.cached_tokens / max(1, usage.prompt_tokens),
        }
        first_s = self._first_s()
        called_s: list[float] = []
        for choice in self.choices:
            called_s += [span.begin_s for span in choice.timeline.spans if span.phase in _CALLS]
        call_s = min(called_s, default=None)
        if first_s is not None and call_s is not None:
            timing["prefill_wait_time_ms"] = (call_s - self._begun_s) * 1e3
            timing["prefill_time_ms"] = (first_s - call_s) * 1e3
            timing["ttft_ms"] = (first_s - self._begun_s) * 1e3
        return timing

    def _stats_of(self, choices: list[ChoiceState]) -> Stats:
        """Return the statistics of some choices.

        They run in parallel; the phases are those of the last one.
        """
        transfers = [choice.transfer for choice in choices]
        _, transport = transfers[0]
        last = _last_of(choices)
        begins_s = []
        for choice in choices:
            first_s = choice.timeline.first_s
            begins_s.append(choice.timeline.last_s if first_s is None else first_s)
        begin_s = min(begins_s, default=0.0)
        end_s = time.monotonic() if len(choices) == len(self.choices) else last.timeline.last_s
        phases = _by_name(self._phases(last, end_s))
        return {
            "prefill_instance": _joined(choice.timeline.prefill_instance for choice in choices),
            "decode_instance": _joined(choice.timeline.decode_instance for choice in choices),
            "kv_bytes": sum(kv_bytes for kv_bytes, _ in transfers),
            "transport": transport,
            "queued_s": phases.get("frontend_queue", 0.0),
            "ttft_s": begin_s - self._begun_s,
            "tokens_per_s": _tokens_per_s(choices),
            "total_s": end_s - self._begun_s,
            "phase_s": phases | {name: phases.get(name, 0.0) for name in _ALWAYS_SHOWN},
            "part_s": last.parts,
        }

    def _phases(self, choice: ChoiceState, end_s: float) -> PhaseSeconds:
        """Return the phases of this request with one of its choices, which has ended last."""
        return divide(
            self._spans_with(choice),
            end_s,
            choice.timeline.prefill_stats,
            choice.timeline.decode_stats,
        )

    def _spans_with(self, choice: ChoiceState) -> list[Span]:
        respond = [] if choice.finish is None else [Span("respond", choice.timeline.last_s)]
        return [*self._spans, *choice.timeline.spans, *respond]

    def end(self, outcome: str | DynamoError, status: int) -> None:
        """Release all permits and bytes, and write the metrics and the log line.

        Args:
            outcome: "ok", "cancelled" or the error.
            status: HTTP status; 0 if no response was started.
        """
        self.release_body()
        self._app_state.limiter.release(self._num_permits)
        if self._output is not None:
            self._output.close()
            # It refers to frames of the handler, which would be a reference cycle.
            self._output = None
        code = outcome if isinstance(outcome, str) else outcome.code
        metrics = self._app_state.metrics
        end_s = time.monotonic()
        metrics.request_finished(
            model=self._model, endpoint=self._endpoint, code=code, seconds=end_s - self._begun_s
        )
        usage = self.usage() if self.choices else Usage()
        if self.choices:
            metrics.child("prompt_tokens_total", self._model).inc(usage.prompt_tokens)
            metrics.child("output_tokens_total", self._model).inc(usage.completion_tokens)
        for choice in self.choices:
            RECORDER.unfollow(choice)
            trace = choice.timeline
            if trace.retries or trace.migrations:
                metrics.child("retries_total", self._model).inc(trace.retries)
                metrics.child("migrations_total", self._model).inc(trace.migrations)
            stats = trace.decode_stats
            if stats is not None and stats.kv_transfer_s > 0:
                metrics.child("kv_bytes_total", stats.transport).inc(stats.kv_bytes)
        phases = self._phases(_last_of(self.choices), end_s) if self.choices else {}
        metrics.observe_phases(model=self._model, phases=phases)
        reason = code
        if outcome == "ok":
            reason = self._finishes() or code
        RECORDER.record(
            self.id, RecordedEvent.FINISHED, status, usage.completion_tokens, reason=reason
        )
        if self._app_state.traces is not None:
            self._app_state.traces.add(self._ended(code, status, usage, end_s))
        if log.isEnabledFor(logging.INFO):
            self._log(self._summary(outcome, status, usage, _by_name(phases)))

    def _log(self, summary: str) -> None:
        """Write the log line.

        Unlike `log.info`, this does not look for the line of code, which takes CPU time.
        """
        args = (self._unique[:8], summary)
        text = "request %s ended: %s"
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, args, None))

    def _ended(self, code: str, status: int, usage: Usage, end_s: float) -> EndedRequest:
        """Return what the request's trace is made of."""
        spans = self._spans
        prefill = None
        decode = None
        if self.choices:
            last = _last_of(self.choices)
            spans = self._spans_with(last)
            prefill = last.timeline.prefill_stats
            decode = last.timeline.decode_stats
        return EndedRequest(
            endpoint=f"POST {self._path}",
            traceparent=self.traceparent,
            spans=spans,
            end_s=end_s,
            prefill=prefill,
            decode=decode,
            attributes={
                "http.response.status_code": status or None,
                "gen_ai.request.model": self._model or None,
                "gen_ai.response.id": self.answer_id or None,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "dynamo_trtllm.request_id": self._unique[:8],
                "dynamo_trtllm.prefill_instance": self._prefill_ids(),
                "dynamo_trtllm.decode_instance": self._decode_ids(),
            },
            error="" if code == "ok" else code,
        )

    def _summary(
        self, outcome: str | DynamoError, status: int, usage: Usage, phases: Mapping[str, float]
    ) -> str:
        """Return the known facts of the request as name=value, without empty values."""
        first_s = self._first_s()
        rate = _tokens_per_s(self.choices)
        shown = [
            f"{name}:{seconds:.4f}s" for name, seconds in phases.items() if seconds >= _SHOWN_S
        ]
        known = {
            "status": status,
            "path": self._path,
            "id": self.answer_id,
            "model": self._model,
            "prefill": self._prefill_ids(),
            "decode": self._decode_ids(),
            "isl": usage.prompt_tokens,
            "osl": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "queued": _seconds(phases.get("frontend_queue", 0.0)),
            "ttft": _seconds(first_s - self._begun_s) if first_s is not None else None,
            "tpot": _seconds(len(self.choices) / rate) if rate else None,
            "phases": ",".join(shown),
            "finish": self._finish_text(outcome),
        }
        return " ".join(f"{name}={value}" for name, value in known.items() if value)

    def _finish_text(self, outcome: str | DynamoError) -> str:
        """Return how the request ended, for the log line."""
        if isinstance(outcome, DynamoError):
            param = ""
            if isinstance(outcome, RequestError) and outcome.field:
                param = f" param={outcome.field}"
            # The message may quote the client, so it is shortened.
            return f"{outcome.code}{param}: {shorten(outcome.message, _MESSAGE_CHARS)}"
        if outcome == "ok":
            return self._finishes() or "ok"
        return outcome

    def _first_s(self) -> float | None:
        traces = [choice.timeline for choice in self.choices]
        return min((trace.first_s for trace in traces if trace.first_s is not None), default=None)

    def _finishes(self) -> str:
        finishes = [choice.finish for choice in self.choices if choice.finish is not None]
        return ",".join(dict.fromkeys(finishes))

    def _prefill_ids(self) -> str | None:
        return _joined(choice.timeline.prefill_instance for choice in self.choices)

    def _decode_ids(self) -> str | None:
        return _joined(choice.timeline.decode_instance for choice in self.choices)


def _last_of(choices: Sequence[ChoiceState]) -> ChoiceState:
    """Return the choice that ended last, or one that has not ended."""
    return max(choices, key=lambda choice: (choice.finish is None, choice.timeline.last_s))


def _by_name(phases: PhaseSeconds) -> dict[str, float]:
    """Return the seconds by phase, summed over roles, in the order of PHASES."""
    sums: dict[str, float] = {}
    for (_, phase), seconds in phases.items():
        sums[phase] = sums.get(phase, 0.0) + seconds
    return {phase: sums[phase] for phase in PHASES if phase in sums} | sums


def _seconds(value: float) -> str | None:
    """Format a time in seconds; None if it rounds to zero."""
    return f"{value:.4f}s" if value >= _SHOWN_S else None


def _joined(instances: Iterable[int | None]) -> str | None:
    """Join distinct instance ids in hexadecimal; None if there are none."""
    ids = [f"{instance:x}" for instance in instances if instance is not None]
    return ",".join(dict.fromkeys(ids)) or None


def _tokens_per_s(choices: Iterable[ChoiceState]) -> float | None:
    """Return the sum of the choices' rates after their first token; None if no choice has two."""
    rates = [
        (choice.num_tokens - 1) / (choice.timeline.last_s - choice.timeline.first_s)
        for choice in choices
        if choice.timeline.first_s is not None and choice.timeline.last_s > choice.timeline.first_s
    ]
    return sum(rates) if rates else None

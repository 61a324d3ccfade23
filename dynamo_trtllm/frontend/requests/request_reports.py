"""Report requests to the metrics, the flight recorder, the trace exporter, the log and clients."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from dynamo_trtllm.frontend.api.nvext import Extras, NvTiming, Stats, WorkerIds
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields, collector
from dynamo_trtllm.frontend.requests.answer import (
    Answer,
    joined_ids,
    seconds_per_token,
    tokens_per_s,
)
from dynamo_trtllm.frontend.requests.choice import Choice
from dynamo_trtllm.frontend.requests.preprocess import GenerationPlan
from dynamo_trtllm.frontend.requests.timeline import (
    RequestEnd,
    RequestTimeline,
    TimelineSubscribers,
    last_of,
    seconds_by_phase,
)
from dynamo_trtllm.frontend.requests.traces import EndedRequest, TraceExporter
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent, id_hash
from dynamo_trtllm.protocol.errors import DynamoError, RequestError
from dynamo_trtllm.protocol.sanitize import shorten
from dynamo_trtllm.support.http_server.exchange import HttpRequest

log = logging.getLogger(__name__)

_MESSAGE_CHARS = 300  # longest error message in the log line
_MIN_LOGGED_S = 0.0001  # shorter times are not in the log line
# The phases that the statistics of a request have in any case.
_ALWAYS_SHOWN = ("queue", "prefill", "kv_transfer", "decode_wait")
_CALL_PHASES = ("prefill", "first_token")  # phases that begin with a call
# How many ignored fields are remembered as logged. There is a limit because clients choose the
# names.
_MAX_LOGGED = 1000
_UNPREDICTED = "unpredicted"  # the path of requests whose times were not known
_PROGRAM_CHARS = 64
_UNSAFE_IN_PROGRAM = re.compile(r"[^\w./-]", re.ASCII)
_UNSAFE_IN_NAME = re.compile(r"[^\w.-]", re.ASCII)


class RequestMetrics:
    """Observes the metrics of requests.

    TTFT is observed once per request, and inter-token latency in each of its choices.
    """

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def subscribe(self, subscribers: TimelineSubscribers) -> None:
        """Observe all requests."""
        subscribers.received.append(self._received)
        subscribers.left_queue.append(self._left_queue)
        subscribers.started.append(self._started)
        subscribers.first_token.append(self._first_token)
        subscribers.ended.append(self._ended)

    def _received(self, timeline: RequestTimeline) -> None:
        self._metrics.request_started()

    def _left_queue(self, timeline: RequestTimeline, queued_s: float) -> None:
        self._metrics.child("queue_seconds").observe(queued_s)

    def _started(self, timeline: RequestTimeline) -> None:
        timeline.observe_gap = self._metrics.child("itl_seconds", timeline.model).observe

    def _first_token(self, timeline: RequestTimeline, choice: Choice, is_first: bool) -> None:
        now_s = choice.timeline.first_s
        if not is_first or now_s is None:
            return
        ttft_s = now_s - timeline.begun_s
        self._metrics.child("ttft_seconds", timeline.model).observe(ttft_s)

    def _ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        model = timeline.model
        self._metrics.request_finished(
            model=model,
            endpoint=timeline.facts.endpoint,
            code=end.code,
            seconds=end.end_s - timeline.begun_s,
        )
        child = self._metrics.child
        if timeline.choices:
            child("prompt_tokens_total", model).inc(end.usage.prompt_tokens)
            child("output_tokens_total", model).inc(end.usage.completion_tokens)
        for choice in timeline.choices:
            if choice.timeline.retries or choice.timeline.migrations:
                child("retries_total", model).inc(choice.timeline.retries)
                child("migrations_total", model).inc(choice.timeline.migrations)
            stats = choice.timeline.decode_stats
            if stats is not None and stats.kv_transfer_s > 0:
                child("kv_bytes_total", stats.transport).inc(stats.kv_bytes)
            chosen = choice.timeline.chosen
            if chosen is not None:
                child("paths_total", model, chosen.path, chosen.outcome).inc()
            elif choice.timeline.is_unpredicted:
                child("paths_total", model, _UNPREDICTED, _UNPREDICTED).inc()
        self._metrics.observe_phases(model=model, phases=end.phases)


class RequestRecorder:
    """Writes the events of requests to the flight recorder."""

    def subscribe(self, subscribers: TimelineSubscribers) -> None:
        """Record all requests."""
        subscribers.received.append(self._received)
        subscribers.planned.append(self._planned)
        subscribers.started.append(self._started)
        subscribers.first_token.append(self._first_token)
        subscribers.last_token.append(self._last_token)
        subscribers.ended.append(self._ended)

    def _received(self, timeline: RequestTimeline) -> None:
        client_id = timeline.facts.client_request_id
        client_id_hash = id_hash(client_id) if client_id else 0
        RECORDER.record(timeline.facts.id, RecordedEvent.RECEIVED, client_id_hash)

    def _planned(self, timeline: RequestTimeline, plan: GenerationPlan) -> None:
        # A prompt is recorded once for all its choices.
        for choice_request in plan.one_choice_per_prompt:
            request = choice_request.request
            RECORDER.record_prompt(
                request.request_id, request.token_ids, request.sampling.max_tokens
            )

    def _started(self, timeline: RequestTimeline) -> None:
        for choice in timeline.choices:
            RECORDER.follow(choice)

    def _first_token(self, timeline: RequestTimeline, choice: Choice, is_first: bool) -> None:
        RECORDER.record(choice.request_id, RecordedEvent.FIRST_TOKEN)

    def _last_token(self, timeline: RequestTimeline, choice: Choice) -> None:
        RECORDER.unfollow(choice)
        RECORDER.record(
            choice.request_id,
            RecordedEvent.LAST_TOKEN,
            choice.num_tokens,
            reason=choice.finish or "",
        )

    def _ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        for choice in timeline.choices:
            RECORDER.unfollow(choice)
        reason = end.code
        if end.outcome == "ok" and timeline.answer is not None:
            reason = timeline.answer.finish_reasons() or end.code
        RECORDER.record(
            timeline.facts.id,
            RecordedEvent.FINISHED,
            end.status,
            end.usage.completion_tokens,
            reason=reason,
        )


class RequestTraces:
    """Queues a trace of each request that has ended."""

    def __init__(self, exporter: TraceExporter) -> None:
        self._exporter = exporter

    def subscribe(self, subscribers: TimelineSubscribers) -> None:
        """Trace all requests."""
        subscribers.ended.append(self._ended)

    def _ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        facts = timeline.facts
        answer = timeline.answer
        spans = timeline.spans
        prefill = None
        decode = None
        attributes: dict[str, str | int | None] = {
            "http.response.status_code": end.status or None,
            "gen_ai.request.model": timeline.model or None,
            "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": end.usage.completion_tokens,
            "dynamo_trtllm.request_id": facts.unique_id[:8],
        }
        if answer is not None:
            attributes["gen_ai.response.id"] = answer.id
            attributes["dynamo_trtllm.prefill_instance"] = answer.prefill_ids()
            attributes["dynamo_trtllm.decode_instance"] = answer.decode_ids()
        if timeline.choices:
            last = last_of(timeline.choices)
            spans = timeline.spans_with(last)
            prefill = last.timeline.prefill_stats
            decode = last.timeline.decode_stats
        self._exporter.add(
            EndedRequest(
                endpoint=f"POST {facts.path}",
                traceparent=facts.traceparent,
                spans=spans,
                end_s=end.end_s,
                prefill=prefill,
                decode=decode,
                attributes=attributes,
                error="" if end.code == "ok" else end.code,
            )
        )


class RequestLog:
    """Writes the log line of each request."""

    def subscribe(self, subscribers: TimelineSubscribers) -> None:
        """Log all requests."""
        subscribers.ended.append(self._ended)

    def _ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        # Unlike `log.info`, this does not look up the calling line of code, which takes CPU time.
        args = (timeline.facts.unique_id[:8], _summary(timeline, end))
        text = "request %s ended: %s"
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, args, None))


def _summary(timeline: RequestTimeline, end: RequestEnd) -> str:
    """Return the known facts of the request as name=value, without empty values."""
    phases = seconds_by_phase(end.phases)
    shown = [
        f"{name}:{seconds:.4f}s" for name, seconds in phases.items() if seconds >= _MIN_LOGGED_S
    ]
    tenant = timeline.facts.tenant
    # A name with None keeps its place in the line, and gets its value below.
    known = {
        "status": end.status,
        "path": timeline.facts.path,
        "key": tenant.key.name if tenant is not None else None,
        "id": None,
        "model": timeline.model,
        "prefill": None,
        "decode": None,
        "isl": end.usage.prompt_tokens,
        "osl": end.usage.completion_tokens,
        "cached_tokens": end.usage.cached_tokens,
        "queued": _seconds_text(phases.get("frontend_queue", 0.0)),
        "ttft": None,
        "tpot": None,
        "workers_path": None,
        "predicted_ttft": None,
        "predicted_gap": None,
        "phases": ",".join(shown),
        "finish": _finish_text(end.outcome, timeline.answer),
    }
    answer = timeline.answer
    if answer is not None:
        known["id"] = answer.id
        known["prefill"] = answer.prefill_ids()
        known["decode"] = answer.decode_ids()
        if timeline.first_s is not None:
            known["ttft"] = _seconds_text(timeline.first_s - timeline.begun_s)
        tpot_s = seconds_per_token(answer.choices)
        if tpot_s is not None:
            known["tpot"] = _seconds_text(tpot_s)
    chosen = timeline.choices[0].timeline.chosen if timeline.choices else None
    if chosen is not None:
        known["workers_path"] = chosen.path
        known["predicted_ttft"] = _seconds_text(chosen.ttft_s)
        known["predicted_gap"] = _seconds_text(chosen.gap_s)
    return " ".join(f"{name}={value}" for name, value in known.items() if value)


def _finish_text(outcome: str | DynamoError, answer: Answer | None) -> str:
    """Return how the request ended, for the log line."""
    if isinstance(outcome, DynamoError):
        param = ""
        if isinstance(outcome, RequestError) and outcome.field:
            param = f" param={outcome.field}"
        # The message may quote the client, so it is shortened.
        return f"{outcome.code}{param}: {shorten(outcome.message, _MESSAGE_CHARS)}"
    if outcome == "ok" and answer is not None:
        return answer.finish_reasons() or "ok"
    return outcome


def _seconds_text(value: float) -> str | None:
    """Format a time in seconds; None if it rounds to zero."""
    return f"{value:.4f}s" if value >= _MIN_LOGGED_S else None


def extras_of(answer: Answer, timeline: RequestTimeline) -> Extras:
    """Return the statistics and the `nvext` fields that the client asked for.

    They are of the time of this call, so call it after the last token.
    """
    extras: Extras = {}
    choices = answer.choices
    if answer.wants_stats:
        now_s = time.monotonic()
        stats = _stats_of(choices, timeline, now_s)
        if len(choices) > 1:
            # `last_s` is 0 while a choice has no token.
            stats["choices"] = [
                _stats_of([choice], timeline, choice.timeline.last_s or now_s) for choice in choices
            ]
        extras["dynamo_trtllm"] = stats
    if answer.nvext_fields:
        extras["nvext"] = {}
        if "worker_id" in answer.nvext_fields:
            extras["nvext"]["worker_id"] = _worker_ids(choices[0])
        if "timing" in answer.nvext_fields:
            extras["nvext"]["timing"] = _timing(answer, timeline)
    return extras


def _worker_ids(first: Choice) -> WorkerIds:
    """Return the workers of the first choice. An aggregated worker has both roles."""
    ids = (first.timeline.prefill_instance, first.timeline.decode_instance)
    known = [instance_id for instance_id in ids if instance_id is not None]
    if not known:
        return {}
    return {"prefill_worker_id": known[0], "decode_worker_id": known[-1]}


def _timing(answer: Answer, timeline: RequestTimeline) -> NvTiming:
    usage = answer.usage()
    begun_s = timeline.begun_s
    timing: NvTiming = {
        "request_received_ms": int(timeline.facts.arrived_at * 1e3),
        "total_time_ms": (time.monotonic() - begun_s) * 1e3,
        "kv_hit_rate": usage.cached_tokens / max(1, usage.prompt_tokens),
    }
    first_s = timeline.first_s
    called_s: list[float] = []
    for choice in answer.choices:
        called_s += [span.begin_s for span in choice.timeline.spans if span.phase in _CALL_PHASES]
    call_s = min(called_s, default=None)
    if first_s is not None and call_s is not None:
        timing["prefill_wait_time_ms"] = (call_s - begun_s) * 1e3
        timing["prefill_time_ms"] = (first_s - call_s) * 1e3
        timing["ttft_ms"] = (first_s - begun_s) * 1e3
    return timing


def _stats_of(choices: Sequence[Choice], timeline: RequestTimeline, end_s: float) -> Stats:
    """Return the statistics of some choices until `end_s`.

    The choices run in parallel. The phases are those of the choice that ends last.
    """
    transfers = [choice.kv_transfer for choice in choices]
    last = last_of(choices)
    # A choice may end without a token.
    first_tokens_s = [
        choice.timeline.first_s for choice in choices if choice.timeline.first_s is not None
    ]
    first_token_s = min(first_tokens_s, default=end_s)
    phases = seconds_by_phase(timeline.phases(last, end_s))
    return {
        "prefill_instance": joined_ids(choice.timeline.prefill_instance for choice in choices),
        "decode_instance": joined_ids(choice.timeline.decode_instance for choice in choices),
        "kv_bytes": sum(transfer.num_bytes for transfer in transfers),
        "transport": transfers[0].backend,
        "queued_s": phases.get("frontend_queue", 0.0),
        "ttft_s": first_token_s - timeline.begun_s,
        "tokens_per_s": tokens_per_s(choices),
        "total_s": end_s - timeline.begun_s,
        "phase_s": phases | {name: phases.get(name, 0.0) for name in _ALWAYS_SHOWN},
        "ttft_phase_s": seconds_by_phase(timeline.ttft_phases(choices)),
        "part_s": last.parts,
    }


class IgnoredFieldReports:
    """The reports of ignored fields.

    The log names each field once per client. A client is the program that the header User-Agent
    names. Without this header, it is an address.

    Args:
        mode: what happens to unknown fields, as `--unknown-fields` says.
        metrics: counts the ignored fields.
    """

    def __init__(self, mode: Literal["reject", "warn", "ignore"], metrics: FrontendMetrics) -> None:
        self._mode = mode
        self._metrics = metrics
        # Fields that were logged, as (client, name), newest last.
        self._logged: dict[tuple[str, str], None] = {}

    def collector(self) -> IgnoredFields | None:
        """Return the object that collects unknown fields of a request; None: they are rejected."""
        return collector(self._mode)

    def report(
        self, unknown: IgnoredFields | None, ineffective: Iterable[str], request: HttpRequest
    ) -> str:
        """Report the ignored fields of a request. Return them for the response header.

        Args:
            unknown: the unknown fields that were collected.
            ineffective: known fields that have no effect on the model.
            request: the request.
        """
        ignored = IgnoredFields()
        if self._mode != "ignore":
            ignored.add([*(unknown or ()), *ineffective])
        if not ignored:
            return ""
        safe = [_UNSAFE_IN_NAME.sub("?", name) for name in ignored]
        client = _program_of(request)
        new = [name for name in safe if (client, name) not in self._logged]
        if new:
            log.warning("request fields are ignored: %s (client %s)", ", ".join(new), client)
        for name in safe:
            self._metrics.field_ignored(name)
            # Move the field to the end: the field that was ignored longest ago is dropped first.
            self._logged.pop((client, name), None)
            self._logged[client, name] = None
        while len(self._logged) > _MAX_LOGGED:
            del self._logged[next(iter(self._logged))]
        return ", ".join(safe)


def _program_of(request: HttpRequest) -> str:
    """Return the name and version of the client's program, from the header User-Agent.

    Without this header, return the address of the client.
    """
    named = (request.header(b"user-agent") or "").split(maxsplit=1)
    if not named:
        return request.client
    return _UNSAFE_IN_PROGRAM.sub("?", named[0][:_PROGRAM_CHARS])

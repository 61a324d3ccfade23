"""Pass the events of requests to the metrics, the flight recorder and the trace exporter."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_trtllm.frontend.generation.choice import Choice
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan
from dynamo_trtllm.frontend.requests.timeline import (
    RequestEnd,
    RequestTimeline,
    TimelineSubscriber,
    last_of,
)
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent, id_hash
from dynamo_trtllm.observability.traces import EndedRequest, TraceExporter


class RequestMetrics(TimelineSubscriber):
    """Observes the metrics of requests.

    TTFT counts once per request, inter-token latency in each choice.
    """

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def received(self, timeline: RequestTimeline) -> None:
        self._metrics.request_started()

    def left_queue(self, timeline: RequestTimeline, queued_s: float) -> None:
        self._metrics.child("queue_seconds").observe(queued_s)

    def started(self, timeline: RequestTimeline) -> None:
        timeline.observe_gap = self._metrics.child("itl_seconds", timeline.model).observe

    def first_token(
        self, timeline: RequestTimeline, choice: Choice, now_s: float, *, is_first: bool
    ) -> None:
        if not is_first:
            return
        ttft_s = now_s - timeline.begun_s
        self._metrics.child("ttft_seconds", timeline.model).observe(ttft_s)
        expected = choice.timeline.expected
        if expected is not None:
            selected_s, predicted = expected
            self._metrics.observe_prediction(
                model=timeline.model, seconds=now_s - selected_s, predicted=predicted
            )

    def ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        model = timeline.model
        self._metrics.request_finished(
            model=model,
            endpoint=timeline.facts.endpoint,
            code=end.code,
            seconds=end.end_s - timeline.begun_s,
        )
        choices = () if timeline.answer is None else timeline.answer.choices
        if choices:
            self._count("prompt_tokens_total", model, end.usage.prompt_tokens)
            self._count("output_tokens_total", model, end.usage.completion_tokens)
        for choice in choices:
            if choice.timeline.retries or choice.timeline.migrations:
                self._count("retries_total", model, choice.timeline.retries)
                self._count("migrations_total", model, choice.timeline.migrations)
            stats = choice.timeline.decode_stats
            if stats is not None and stats.kv_transfer_s > 0:
                self._count("kv_bytes_total", stats.transport, stats.kv_bytes)
        self._metrics.observe_phases(model=model, phases=end.phases)

    def _count(self, name: str, label: str, count: int) -> None:
        self._metrics.child(name, label).inc(count)


class RequestRecorder(TimelineSubscriber):
    """Writes the events of requests to the flight recorder."""

    def received(self, timeline: RequestTimeline) -> None:
        client_id = timeline.facts.client_request_id
        client_id_hash = id_hash(client_id) if client_id else 0
        RECORDER.record(timeline.facts.id, RecordedEvent.RECEIVED, client_id_hash)

    def planned(self, timeline: RequestTimeline, plan: GenerationPlan) -> None:
        # Once per prompt, for all its choices.
        for choice_request in plan.choices[:: plan.candidates]:
            request = choice_request.request
            RECORDER.record_prompt(
                request.request_id, request.token_ids, request.sampling.max_tokens
            )

    def started(self, timeline: RequestTimeline) -> None:
        for choice in _choices(timeline):
            RECORDER.follow(choice)

    def first_token(
        self, timeline: RequestTimeline, choice: Choice, now_s: float, *, is_first: bool
    ) -> None:
        RECORDER.record(choice.request_id, RecordedEvent.FIRST_TOKEN)

    def last_token(self, timeline: RequestTimeline, choice: Choice) -> None:
        RECORDER.unfollow(choice)
        RECORDER.record(
            choice.request_id,
            RecordedEvent.LAST_TOKEN,
            choice.num_tokens,
            reason=choice.finish or "",
        )

    def ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        for choice in _choices(timeline):
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


class RequestTraces(TimelineSubscriber):
    """Queues a trace of each request that has ended."""

    def __init__(self, exporter: TraceExporter) -> None:
        self._exporter = exporter

    def ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
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
        if answer is not None and answer.choices:
            last = last_of(answer.choices)
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


def _choices(timeline: RequestTimeline) -> Sequence[Choice]:
    return () if timeline.answer is None else timeline.answer.choices

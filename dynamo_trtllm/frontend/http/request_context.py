"""Measure one request while it runs, and write its metrics, statistics and log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dynamo_trtllm.api.common import Stats
from dynamo_trtllm.errors import DynamoError, RequestError
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta, Detokenizer, Usage
from dynamo_trtllm.frontend.generation.flow_events import RouteTrace
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan
from dynamo_trtllm.messages import PhaseTimings
from dynamo_trtllm.observability.logging import short_id
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.sanitize import shorten

log = logging.getLogger(__name__)

_MESSAGE_CHARS = 300  # longest error message in the log line


@dataclass(slots=True)
class ChoiceMetrics:
    """The measurements of one choice."""

    detokenizer: Detokenizer
    trace: RouteTrace = field(default_factory=RouteTrace)
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    finish: str | None = None

    def timings(self) -> PhaseTimings:
        """Return the sum of both calls' timings. KV bytes count once; cached tokens are those of the prefill call."""
        prefill, decode = self.trace.prefill_stats or PhaseTimings(), self.trace.decode_stats or PhaseTimings()
        return PhaseTimings(
            queue_s=prefill.queue_s + decode.queue_s,
            prefill_s=prefill.prefill_s + decode.prefill_s,
            kv_transfer_s=prefill.kv_transfer_s + decode.kv_transfer_s,
            decode_queue_s=prefill.decode_queue_s + decode.decode_queue_s,
            cached_tokens=prefill.cached_tokens if self.trace.prefill_stats else decode.cached_tokens,
            kv_bytes=decode.kv_bytes or prefill.kv_bytes,
            transport=decode.transport or prefill.transport,
        )

    def usage(self) -> Usage:
        return self.detokenizer.usage(self.timings().cached_tokens)


class RequestMetrics:
    """The measurements of one request. Times count from its creation. Each delta costs one clock reading."""

    def __init__(
        self, metrics: FrontendMetrics, endpoint: str, request_id: str, *, path: str, wants_stats: bool
    ) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._wants_stats = wants_stats
        self._begun_s = time.monotonic()
        self._request_id = request_id
        self._path = path
        self.answer_id = ""  # the id in the response; "" until it is known
        self._model = ""
        self._candidates = 1
        self._queued_s = 0.0
        self.choices: list[ChoiceMetrics] = []

    def set_plan(self, plan: GenerationPlan) -> None:
        """Create the measurements of each choice."""
        request = plan.choices[0].request
        self._model, self._candidates = request.model, plan.candidates
        self._observe_itl = self._metrics.itl(model=self._model).observe
        self.choices = [
            ChoiceMetrics(Detokenizer(choice_request, index)) for index, choice_request in enumerate(plan.choices)
        ]

    @contextmanager
    def measure_queue(self) -> Iterator[None]:
        """Measure the time for which the context is open as the request's wait in the queue."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self._queued_s = time.monotonic() - begun_s
            self._metrics.observe_queue(seconds=self._queued_s)

    def observe(self, delta: ChoiceDelta) -> None:
        """Record a delta. TTFT counts once per request, inter-token latency in each choice."""
        choice = self.choices[delta.index]
        if delta.finish is not None:
            choice.finish = delta.finish
        if delta.tokens == 0:
            return
        now = time.monotonic()
        if choice.first_s is not None:
            self._observe_itl((now - choice.last_s) / delta.tokens, delta.tokens)  # tokens that arrived together
        else:
            if self._first_s() is None:
                self._metrics.observe_ttft(model=self._model, seconds=now - self._begun_s)
            choice.first_s = now
        choice.last_s = now
        choice.num_tokens += delta.tokens

    def usage(self) -> Usage:
        """Return the usage so far. A prompt counts once for all its candidates, with the first one's cached tokens."""
        if len(self.choices) == 1:
            return self.choices[0].usage()
        each = [choice.usage() for choice in self.choices]
        prompts = each[:: self._candidates]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            completion_tokens=sum(usage.completion_tokens for usage in each),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in each),
        )

    def likelihood(self, index: int) -> float:
        """Return the mean log-probability so far of the choice at an index of the plan."""
        return self.choices[index].detokenizer.mean_logprob

    def served_by(self) -> dict[str, str]:
        """Return response headers with the instances that are known by now."""
        headers = {"x-prefill-instance": self._prefill_ids(), "x-decode-instance": self._decode_ids()}
        return {name: value for name, value in headers.items() if value is not None}

    def stats(self) -> Stats | None:
        """Return the statistics for the client; None if it did not request them."""
        if not self._wants_stats:
            return None
        stats = self._stats_of(self.choices)
        if len(self.choices) > 1:
            stats["choices"] = [self._stats_of([choice]) for choice in self.choices]
        return stats

    def _stats_of(self, choices: list[ChoiceMetrics]) -> Stats:
        """Return the statistics of some choices. They run in parallel, so each phase takes as long as its longest."""
        timings = [choice.timings() for choice in choices]
        first_s = min((choice.first_s or choice.last_s for choice in choices), default=0.0)
        return {
            "prefill_instance": _joined(choice.trace.prefill_instance for choice in choices),
            "decode_instance": _joined(choice.trace.decode_instance for choice in choices),
            "kv_bytes": sum(timings.kv_bytes for timings in timings),
            "transport": timings[0].transport,
            "queued_s": self._queued_s,
            "ttft_s": first_s - self._begun_s,
            "tokens_per_s": _tokens_per_s(choices),
            "phase_s": {
                "queue": max(timings.queue_s for timings in timings),
                "prefill": max(timings.prefill_s for timings in timings),
                "handoff": max(timings.kv_transfer_s for timings in timings),
                "decode_wait": max(timings.decode_queue_s for timings in timings),
            },
        }

    def write(self, outcome: str | DynamoError, status: int) -> None:
        """Write the metrics and the log line at the end of the request.

        Args:
            outcome: "ok", "cancelled" or the error.
            status: HTTP status; 0 if no response was started.
        """
        code = outcome if isinstance(outcome, str) else outcome.code
        seconds = time.monotonic() - self._begun_s
        metrics = self._metrics
        metrics.request_finished(model=self._model, endpoint=self._endpoint, code=code, seconds=seconds)
        usage = self.usage() if self.choices else Usage()
        if self.choices:
            metrics.observe_tokens(model=self._model, prompt=usage.prompt_tokens, output=usage.completion_tokens)
        for choice in self.choices:
            trace = choice.trace
            if trace.retries or trace.migrations:
                metrics.observe_recovery(model=self._model, retries=trace.retries, migrations=trace.migrations)
            for timings in (choice.trace.prefill_stats, choice.trace.decode_stats):
                if timings is not None:
                    metrics.observe_call(model=self._model, stats=timings)
        log.info("request %s ended: %s", short_id(self._request_id), self._summary(outcome, status, usage))

    def _summary(self, outcome: str | DynamoError, status: int, usage: Usage) -> str:
        """Return the known facts of the request as name=value, without empty values."""
        first_s, rate = self._first_s(), _tokens_per_s(self.choices)
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
            "queued": _seconds(self._queued_s),
            "ttft": _seconds(first_s - self._begun_s) if first_s is not None else None,
            "tpot": _seconds(len(self.choices) / rate) if rate else None,
            "finish": (self._finishes() or "ok") if outcome == "ok" else _format_outcome(outcome),
        }
        return " ".join(f"{name}={value}" for name, value in known.items() if value)

    def _first_s(self) -> float | None:
        return min((choice.first_s for choice in self.choices if choice.first_s is not None), default=None)

    def _finishes(self) -> str:
        return ",".join(dict.fromkeys(choice.finish for choice in self.choices if choice.finish is not None))

    def _prefill_ids(self) -> str | None:
        return _joined(choice.trace.prefill_instance for choice in self.choices)

    def _decode_ids(self) -> str | None:
        return _joined(choice.trace.decode_instance for choice in self.choices)


def _format_outcome(outcome: str | DynamoError) -> str:
    """Return the error's code, field and shortened message, which may quote the client."""
    if isinstance(outcome, str):
        return outcome
    param = f" param={outcome.field}" if isinstance(outcome, RequestError) and outcome.field else ""
    return f"{outcome.code}{param}: {shorten(outcome.message, _MESSAGE_CHARS)}"


def _seconds(value: float) -> str | None:
    """Format a time in seconds; None if it rounds to zero."""
    return f"{value:.4f}s" if value >= 0.0001 else None


def _joined(instances: Iterable[int | None]) -> str | None:
    """Join distinct instance ids in hexadecimal; None if there are none."""
    return ",".join(dict.fromkeys(f"{instance:x}" for instance in instances if instance is not None)) or None


def _tokens_per_s(choices: Iterable[ChoiceMetrics]) -> float | None:
    """Return the sum of the choices' rates after their first token; None if no choice has two."""
    rates = [
        (choice.num_tokens - 1) / (choice.last_s - choice.first_s)
        for choice in choices
        if choice.first_s is not None and choice.last_s > choice.first_s
    ]
    return sum(rates) if rates else None

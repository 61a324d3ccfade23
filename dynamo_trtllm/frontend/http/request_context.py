"""Hold what one request takes and measures, from its arrival to its log line: permits, bytes, times, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_trtllm.api.request_model import IgnoredFields
from dynamo_trtllm.api.response_schemas import Stats
from dynamo_trtllm.background import MAX_THREADS
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError, InvalidRequest, RequestError
from dynamo_trtllm.frontend.fleet.model_registry import ModelRegistry
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta, ChoiceState, Usage
from dynamo_trtllm.frontend.generation.pipeline import Pipeline
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan
from dynamo_trtllm.frontend.http.admission import BodyBudget, ConcurrencyLimiter, InFlight, PlanningTime, read_body
from dynamo_trtllm.http_server.exchange import HttpRequest
from dynamo_trtllm.observability.logging import short_id
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.sanitize import shorten

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.http.request_handler import SseEncoder

log = logging.getLogger(__name__)

_MESSAGE_CHARS = 300  # longest error message in the log line
_MAX_LOGGED = 1000  # ignored fields that are remembered as logged; clients choose their names
_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """The objects that all requests share."""

    config: FrontendConfig
    models: ModelRegistry
    pipeline: Pipeline
    metrics: FrontendMetrics
    limiter: ConcurrencyLimiter
    body_budget: BodyBudget
    running: InFlight
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_THREADS))
    logged_fields: dict[str, None] = field(default_factory=dict)  # ignored fields that were logged, newest last
    planning_time: PlanningTime = field(default_factory=PlanningTime)  # of bodies that are planned on the event loop


class RequestContext:
    """One request, from its arrival to its log line: its id, deadline, permits, bytes, times and metrics.

    Its choices hold what belongs to one choice. Times count from the creation. Each delta costs one clock reading.
    """

    def __init__(self, app_state: AppState, endpoint: str, request: HttpRequest) -> None:
        unique = secrets.token_hex(8)  # clients may repeat their ids
        self.id = f"{request.id}-{unique}" if request.id else unique
        self.client = request.client
        self.deadline = 0.0  # seconds since the epoch; known with the body
        self._ignored = ""  # names of ignored fields, for the response header
        self.answer_id = ""  # the id in the response; "" until it is known
        self.encoder: SseEncoder | None = None  # of a streamed response
        self.choices: list[ChoiceState] = []
        self._app_state = app_state
        self._endpoint = endpoint
        self._path = request.path
        self._wants_stats = request.header(b"x-dynamo-stats") == "1"
        self._body_bytes = app_state.body_budget.body()
        self._num_permits = 0
        self._arrived_at = time.time()
        self._begun_s = time.monotonic()
        self._queued_s = 0.0
        self._model = ""
        self._candidates = 1
        app_state.metrics.request_started()

    async def read_body(self, request: HttpRequest) -> bytes:
        """Return the body, whose bytes are reserved until `release_body`. Raises as `admission.read_body`."""
        config = self._app_state.config
        return await read_body(request, config.max_body_bytes, config.receive_timeout_s, self._reserve)

    async def _reserve(self, count: int) -> None:
        await self._app_state.body_budget.acquire(count, self._body_bytes)

    def release_body(self) -> None:
        """Release the bytes of the body. Idempotent."""
        self._app_state.body_budget.release(self._body_bytes)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the deadline from the client's wish, which the server caps."""
        max_s = self._app_state.config.request_timeout_s
        self.deadline = self._arrived_at + (max_s if timeout_s is None else min(timeout_s, max_s))

    def report_ignored(self, names: Iterable[str]) -> None:
        """Report ignored fields in a response header. Those that were not logged lately are logged in one line."""
        ignored = IgnoredFields()
        ignored.add(names)
        safe = [_NO_NAME.sub("?", name) for name in ignored]
        self._ignored = ", ".join(safe)
        logged = self._app_state.logged_fields
        if new := [name for name in safe if name not in logged]:
            log.warning("request fields are ignored: %s", ", ".join(new))
        for name in safe:
            logged.pop(name, None)
            logged[name] = None
        while len(logged) > _MAX_LOGGED:
            del logged[next(iter(logged))]

    async def begin(self, plan: GenerationPlan, answer_id: str) -> None:
        """Create the choices, and wait for their permits.

        Raises:
            InvalidRequest: they are more than the limit.
            Overloaded, DeadlineExceeded: as `ConcurrencyLimiter.acquire`.
        """
        metrics, limiter, count = self._app_state.metrics, self._app_state.limiter, len(plan.choices)
        self._model, self._candidates = plan.choices[0].request.model, plan.candidates
        self._observe_itl = metrics.itl(model=self._model).observe
        self.choices = [ChoiceState(choice_request, index) for index, choice_request in enumerate(plan.choices)]
        if count > limiter.limit:
            raise InvalidRequest(
                f"the request has {count} choices; this server runs at most {limiter.limit} at once, lower n"
            )
        begun_s = time.monotonic()
        try:
            await limiter.acquire(count, self.deadline - time.time())
        finally:
            self._queued_s = time.monotonic() - begun_s
            metrics.observe_queue(seconds=self._queued_s)
        self._num_permits = count
        self.answer_id = answer_id

    def observe(self, delta: ChoiceDelta) -> None:
        """Record a delta when it arrives. TTFT counts once per request, inter-token latency in each choice."""
        if delta.tokens == 0:
            return
        choice, now = self.choices[delta.index], time.monotonic()
        if choice.first_s is not None:
            self._observe_itl((now - choice.last_s) / delta.tokens, delta.tokens)  # tokens that arrived together
        else:
            if self._first_s() is None:
                self._app_state.metrics.observe_ttft(model=self._model, seconds=now - self._begun_s)
            choice.first_s = now
        choice.last_s = now

    def likelihood(self, index: int) -> float:
        """Return the mean log-probability so far of the choice at an index of the plan."""
        return self.choices[index].mean_logprob

    def cancel(self) -> None:
        """End the streams of all choices that still run."""
        for choice in self.choices:
            choice.cancel()

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

    def served_by(self) -> dict[str, str]:
        """Return response headers with the instances that are known by now, and with the ignored fields."""
        headers = {
            "x-prefill-instance": self._prefill_ids(),
            "x-decode-instance": self._decode_ids(),
            "x-dynamo-ignored-fields": self._ignored,
        }
        return {name: value for name, value in headers.items() if value}

    def stats(self) -> Stats | None:
        """Return the statistics for the client; None if it did not request them."""
        if not self._wants_stats:
            return None
        stats = self._stats_of(self.choices)
        if len(self.choices) > 1:
            stats["choices"] = [self._stats_of([choice]) for choice in self.choices]
        return stats

    def _stats_of(self, choices: list[ChoiceState]) -> Stats:
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

    def end(self, outcome: str | DynamoError, status: int) -> None:
        """Release all permits and bytes, and write the metrics and the log line.

        Args:
            outcome: "ok", "cancelled" or the error.
            status: HTTP status; 0 if no response was started.
        """
        self.release_body()
        self._app_state.limiter.release(self._num_permits)
        code = outcome if isinstance(outcome, str) else outcome.code
        metrics, seconds = self._app_state.metrics, time.monotonic() - self._begun_s
        metrics.request_finished(model=self._model, endpoint=self._endpoint, code=code, seconds=seconds)
        usage = self.usage() if self.choices else Usage()
        if self.choices:
            metrics.observe_tokens(model=self._model, prompt=usage.prompt_tokens, output=usage.completion_tokens)
        for choice in self.choices:
            trace = choice.trace
            if trace.retries or trace.migrations:
                metrics.observe_recovery(model=self._model, retries=trace.retries, migrations=trace.migrations)
            for timings in (trace.prefill_stats, trace.decode_stats):
                if timings is not None:
                    metrics.observe_call(model=self._model, stats=timings)
        log.info("request %s ended: %s", short_id(self.id), self._summary(outcome, status, usage))

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


def _tokens_per_s(choices: Iterable[ChoiceState]) -> float | None:
    """Return the sum of the choices' rates after their first token; None if no choice has two."""
    rates = [
        (choice.num_tokens - 1) / (choice.last_s - choice.first_s)
        for choice in choices
        if choice.first_s is not None and choice.last_s > choice.first_s
    ]
    return sum(rates) if rates else None

"""Export a trace of each request to an OpenTelemetry collector, Jaeger or Tempo.

The protocol is OTLP over HTTP, encoded as JSON.

A trace is made when its request has ended, from the phases that are known then: a root span of the
request and a span per phase. Workers send no traces; they report their phases to the frontend.
Requests do not wait for the collector: traces wait in a queue of limited length, and traces that do
not fit into the queue are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson

from dynamo_trtllm import __version__
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.messages import PhaseTimings
from dynamo_trtllm.protocol.phases import FRONTEND, PHASES, Span, divide
from dynamo_trtllm.support import http_client

log = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0
# A version, the id of a trace, the id of a span, and flags. Version ff and ids of zeros are not
# valid, and version 00 has no further fields.
_PARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_PHASE_ORDER: Final = {phase: number for number, phase in enumerate(PHASES)}
# The numbers of OTLP for kinds of spans, and for the status of a span that failed.
_INTERNAL = 1
_SERVER = 2
_ERROR = 2


def valid_traceparent(header: str | None) -> str | None:
    """Return a client's header `traceparent` in the form of version 00; None if it is not valid.

    Later versions of the format may have more fields, which are dropped
    (https://www.w3.org/TR/trace-context/).
    """
    match = _PARENT.fullmatch(header or "")
    return None if match is None else f"00-{match[1]}-{match[2]}-{match[3]}"


class EndedRequest(NamedTuple):
    """What a trace is made of. Times are of `time.monotonic()`."""

    endpoint: str
    traceparent: str | None  # header of the client
    spans: Sequence[Span]
    end_s: float
    prefill: PhaseTimings | None  # the timings of the last attempt
    decode: PhaseTimings | None
    attributes: Mapping[str, str | int | None]  # None: unknown
    error: str  # error code, or "cancelled"; "" if it succeeded


class _QueuedTrace(NamedTuple):
    """A request that is sampled, with the ids of its trace and of the client's span."""

    trace_id: str
    parent_id: str  # "": the client sent none
    request: EndedRequest


class PhaseInterval(NamedTuple):
    """When a request was in a phase. Times are of `time.monotonic()`."""

    role: str  # the role of the process
    phase: str
    begin_s: float
    end_s: float


class ExportLimits(NamedTuple):
    """How many traces wait, and when and how they are sent."""

    max_queued: int = 2048  # how many traces may wait; further traces are dropped
    max_sent: int = 128  # how many traces one message may have
    every_s: float = 1.0  # traces of requests that end within this time make one message
    # Limit for a message, and for all messages at the end of the process together.
    timeout_s: float = 2.0


DEFAULT_LIMITS: Final = ExportLimits()


class TraceExporter:
    """The queue of traces, and the task that sends them.

    Args:
        endpoint: base URL of the collector, as in OTEL_EXPORTER_OTLP_ENDPOINT.
        namespace: namespace of the deployment.
        sample_ratio: share of the requests with a trace, from 0 to 1. The sampling flag of a
            client's `traceparent` takes precedence.
        on_dropped: called with the number of traces that were dropped now.
        limits: the limits of the queue and of messages.
    """

    def __init__(
        self,
        endpoint: str,
        namespace: str,
        sample_ratio: float = 1.0,
        on_dropped: Callable[[int], None] = lambda count: None,
        limits: ExportLimits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self._url = f"{endpoint.rstrip('/')}/v1/traces"
        self._namespace = namespace
        self._sample_ratio = sample_ratio
        self._on_dropped = on_dropped
        self._queue: deque[_QueuedTrace] = deque()
        self._queued = asyncio.Event()
        self._num_dropped = 0
        self._reason = ""  # why traces were dropped; "": the queue was full
        self._warned_at_s = -_WARN_EVERY_S

    def add(self, request: EndedRequest) -> None:
        """Queue the trace of a request that has ended, if the request is sampled."""
        parent = _PARENT.fullmatch(request.traceparent or "")
        if parent is not None:
            trace_id = parent[1]
            parent_id = parent[2]
            is_sampled = bool(int(parent[3], 16) & 1)
        else:
            trace_id = secrets.token_hex(16)
            parent_id = ""
            # The second half of the id is a random number below 2**64.
            random_number = int(trace_id[16:], 16)
            is_sampled = random_number < self._sample_ratio * (1 << 64)
        if not is_sampled:
            return
        self._queued.set()
        if len(self._queue) < self.limits.max_queued:
            self._queue.append(_QueuedTrace(trace_id, parent_id, request))
        else:
            self._drop(1)

    async def run(self) -> None:
        """Send traces until cancelled. Then send the remaining ones, for at most `timeout_s`."""
        sending: asyncio.Task[None] | None = None
        try:
            while True:
                await self._queued.wait()
                await asyncio.sleep(self.limits.every_s)
                self._queued.clear()
                sending = asyncio.create_task(self._send_all())
                await asyncio.shield(sending)
                if self._queue:
                    # After a failure, `_send_all` has left the other traces in the queue.
                    self._queued.set()
        finally:
            # Keep `_send_all` from warning: one warning at the end counts all dropped traces.
            self._warned_at_s = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.timeout_s):
                    if sending is not None:
                        await sending
                    await self._send_all()
            if self._queue:
                self._drop(len(self._queue))
                if not self._reason:
                    self._reason = (
                        f"{self._url} did not take all traces before the end of this process"
                    )
            self._warned_at_s = -_WARN_EVERY_S
            self._warn()

    async def _send_all(self) -> None:
        """Send the queued traces.

        If it is cancelled, traces that the collector has not taken stay in the queue.
        """
        failure: Exception | None = None
        while self._queue and failure is None:
            traces = list(islice(self._queue, self.limits.max_sent))
            try:
                async with asyncio.timeout(self.limits.timeout_s):
                    await self._send(traces)
            except (OSError, ValueError) as exc:
                # Requests go on in any case.
                failure = exc
                self._drop(len(traces))
                why = str(exc) or f"it has not answered within {self.limits.timeout_s:g} s"
                self._reason = f"traces can't be sent to {self._url}: {why}"
            for _ in traces:
                self._queue.popleft()
        self._warn()

    def _drop(self, count: int) -> None:
        self._num_dropped += count
        self._on_dropped(count)

    def _warn(self) -> None:
        """Log how many traces were dropped and the last reason, at most once a minute."""
        if self._num_dropped and time.monotonic() - self._warned_at_s >= _WARN_EVERY_S:
            reason = self._reason or f"{self._url} does not take traces as fast as requests end"
            was = "was" if self._num_dropped == 1 else "were"
            log.warning("%s; %s %s dropped", reason, counted(self._num_dropped, "trace"), was)
            self._warned_at_s = time.monotonic()
            self._num_dropped = 0
            self._reason = ""

    async def _send(self, traces: Sequence[_QueuedTrace]) -> None:
        """Send traces.

        Raises:
            OSError: the collector can't be reached, or does not take the traces. A redirect is an
                error, too.
        """
        # Encoding takes long, so it runs in a thread, and the event loop goes on.
        body = await asyncio.to_thread(self._encoded, traces)
        headers = {"Content-Type": "application/json"}
        async with await http_client.connect(self._url) as connection:
            response = await connection.request("POST", body, headers)
        if not 200 <= response.status < 300:
            raise OSError(f"it answers with HTTP status {response.status}")

    def _encoded(self, traces: Sequence[_QueuedTrace]) -> bytes:
        return orjson.dumps(self._message(traces))

    def _message(self, traces: Sequence[_QueuedTrace]) -> dict[str, Any]:
        """Return the traces as an ExportTraceServiceRequest, with a resource per role."""
        offset_s = time.time() - time.monotonic()
        by_role: dict[str, list[dict[str, Any]]] = {}
        for trace_id, parent_id, request in traces:
            interval = (request.spans[0].begin_s, request.end_s)
            root = _span(trace_id, parent_id, request.endpoint, interval, offset_s)
            root["kind"] = _SERVER
            root["attributes"] = _attributes(request.attributes)
            if request.error:
                root["status"] = {"code": _ERROR, "message": request.error}
            by_role.setdefault(FRONTEND, []).append(root)
            for role, phase, begin_s, end_s in phase_intervals(request):
                child = _span(trace_id, root["spanId"], phase, (begin_s, end_s), offset_s)
                by_role.setdefault(role, []).append(child)
        common = {"service.namespace": self._namespace, "service.version": __version__}
        scope = {"name": "dynamo_trtllm", "version": __version__}
        resource_spans = []
        for role, spans in by_role.items():
            attributes = _attributes({"service.name": f"dynamo_trtllm.{role}"} | common)
            resource_spans.append(
                {
                    "resource": {"attributes": attributes},
                    "scopeSpans": [{"scope": scope, "spans": spans}],
                }
            )
        return {"resourceSpans": resource_spans}


def phase_intervals(request: EndedRequest) -> Iterator[PhaseInterval]:
    """Yield the interval of each phase.

    The intervals are adjacent. The phases of a worker are in their usual order.
    """
    ends_s = [*(span.begin_s for span in request.spans[1:]), request.end_s]
    # The timings are those of the last attempt, and do not fit the spans of earlier attempts.
    has_migrated = any(span.phase == "migration" for span in request.spans)
    reported = (None, None) if has_migrated else (request.prefill, request.decode)
    for span, end_s in zip(request.spans, ends_s, strict=True):
        parts = divide([span], end_s, *reported)
        begin_s = span.begin_s
        for role, phase in sorted(parts, key=_usual_order):
            part_end_s = begin_s + parts[role, phase]
            yield PhaseInterval(role, phase, begin_s, part_end_s)
            begin_s = part_end_s


def _usual_order(part: tuple[str, str]) -> int:
    """Return the place of a role's phase; phases that are not known come last."""
    _, phase = part
    return _PHASE_ORDER.get(phase, len(_PHASE_ORDER))


def _span(
    trace_id: str, parent_id: str, name: str, interval: tuple[float, float], offset_s: float
) -> dict[str, Any]:
    begin_ns, end_ns = (str(int((seconds + offset_s) * 1e9)) for seconds in interval)
    return {
        "traceId": trace_id,
        "spanId": secrets.token_hex(8),
        "parentSpanId": parent_id,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": begin_ns,
        "endTimeUnixNano": end_ns,
    }


def _attributes(values: Mapping[str, str | int | None]) -> list[dict[str, Any]]:
    attributes = []
    for key, value in values.items():
        if isinstance(value, str):
            attributes.append({"key": key, "value": {"stringValue": value}})
        elif value is not None:
            attributes.append({"key": key, "value": {"intValue": str(value)}})
    return attributes

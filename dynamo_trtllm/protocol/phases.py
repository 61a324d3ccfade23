"""Measure where the time of a request goes: its phases, which docs/request-time.md lists.

| process | measures | with |
|---|---|---|
| engine | the phases of a call | `CallPhases` |
| engine | the resources that the first request of its queue waits for | `QueueWaits` |
| library | its own phases of a call; its adapter reads them | `phase_timings` |
| frontend | the spans of a request, between the events that it sees | `Span` |

A worker sends durations (`messages.PhaseTimings`) with the first token and the last chunk of a
call. Each process measures with its own clock, and no clocks are compared. The spans of a request
follow each other without a gap, and `divide` divides each into the phases that its worker has
reported. So the phases add up to the time from the arrival of the request to the end of its
response.

A name with a dot, such as `queue.slots`, is a part of a phase and is not added to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from dynamo_trtllm.protocol.messages import KvTransferParams, PhaseTimings

PHASES = (
    "receive",
    "tokenize_queue",
    "load",
    "tokenize",
    "frontend_queue",
    "select",
    "reserve",
    "retry",
    "send",
    "grammar",
    "submit",
    "queue",
    "prefill",
    "export",
    "kv_transfer",
    "first_token",
    "decode_wait",
    "decode",
    "migration",
    "respond",
)
"""All phases, about in their order. docs/request-time.md describes them."""

FRONTEND = "frontend"
"""The role of the frontend, beside those of workers in `messages.Role`."""


class Span(msgspec.Struct, gc=False):
    """An interval of a request by the frontend's clock.

    It ends where the next span of the request begins.
    """

    phase: str
    begin_s: float  # a time of `time.monotonic()`
    role: str = FRONTEND  # role of the process for which the request waits
    # Timings of the call to that process, which divide the span.
    stats: PhaseTimings | None = None


PhaseSeconds: TypeAlias = dict[tuple[str, str], float]
"""Seconds by role and phase. They add up to the time between the first span and the end."""


def divide(
    spans: Sequence[Span],
    end_s: float,
    prefill: PhaseTimings | None = None,
    decode: PhaseTimings | None = None,
) -> PhaseSeconds:
    """Return how long the spans took until `end_s`, divided into phases that the workers report.

    A worker reports its own durations, so no clocks are compared. The rest of a call is the phase
    `send`, the way to the worker and back. A call without a report stays one phase. `prefill` and
    `decode` are the reports of the workers of the last attempt. The report of an aggregated worker
    is in `decode`.
    """
    phases: PhaseSeconds = {}
    has_migrated = "migration" in [span.phase for span in spans]
    for span in reversed(spans):
        rest = span.phase
        role = span.role
        stats = span.stats
        reported: Sequence[tuple[str, float]] = ()
        left_s = end_s - span.begin_s
        end_s = span.begin_s
        if not has_migrated:
            if rest == "prefill":
                # The span of a prefill call gets its statistics at the end of the call. `prefill`
                # may be the report of another call.
                stats = stats or prefill
            elif rest == "first_token":
                stats = decode or stats
            elif rest == "decode" and decode is not None:
                reported = (("decode_wait", decode.decode_queue_s),)
        if stats is not None:
            reported = (
                ("queue", stats.queue_s),
                ("prefill", stats.prefill_s),
                ("kv_transfer", stats.kv_transfer_s),
                *stats.more.items(),
            )
            rest = "send"
        for phase, seconds in reported:
            # `seconds > 0` is false for NaN. A name with a dot is a part of another phase.
            if seconds > 0 and left_s > 0 and "." not in phase:
                part_s = seconds if seconds < left_s else left_s
                left_s -= part_s
                key = (role, phase)
                phases[key] = phases.get(key, 0.0) + part_s
        if left_s > 0:
            key = (role, rest)
            phases[key] = phases.get(key, 0.0) + left_s
    return phases


class CallPhases:
    """The phases of one call inside an engine. Each phase begins when the phase before ends.

    Args:
        kv_params: the KV transfer parameters of a decode call.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self, kv_params: KvTransferParams | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Seconds of phases that have ended, and of parts of phases.
        self.seconds: dict[str, float] = {}
        self.cached_tokens = 0  # tokens of the prompt that were not computed again
        self._kv_params = kv_params
        self._clock = clock
        self._begun_s = clock()  # when the current phase began

    def end(self, phase: str) -> None:
        """End the current phase, and begin the next one."""
        now = self._clock()
        self.seconds[phase] = now - self._begun_s
        self._begun_s = now

    def end_part(self, part: str) -> None:
        """End the first part of the current phase."""
        self.seconds[part] = self._clock() - self._begun_s

    def end_export(self, kv_params: KvTransferParams) -> None:
        """End the export of the KV of a prefill call, which these parameters describe."""
        self.end("export")
        self._kv_params = kv_params

    def timings(self) -> PhaseTimings:
        """Return the timings of the phases that have ended."""
        return phase_timings(self.seconds, self._kv_params, cached_tokens=self.cached_tokens)


class QueueWaits:
    """How long the first request of an engine's queue has waited for each resource.

    All other requests wait with the first one. A request reads the times when it is queued. When it
    leaves the queue, `since` returns by how much the times have grown.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited: dict[str, float] = {}
        self._resource = ""
        self._since_s = 0.0

    def waiting_for(self, resource: str) -> None:
        """Note for what the first request waits from now on.

        "": it waits for nothing, or the queue is empty.
        """
        if resource == self._resource:
            return
        self._close()
        self._resource = resource

    def read(self) -> dict[str, float]:
        """Return the seconds so far, by resource."""
        self._close()
        return dict(self._waited)

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Return the seconds since an earlier reading, named as parts of the phase `queue`."""
        parts: dict[str, float] = {}
        for resource, total_s in self.read().items():
            seconds = total_s - before.get(resource, 0.0)
            if seconds > 0:
                parts[f"queue.{resource}"] = seconds
        return parts

    def _close(self) -> None:
        now = self._clock()
        if self._resource:
            before_s = self._waited.get(self._resource, 0.0)
            self._waited[self._resource] = before_s + now - self._since_s
        self._since_s = now


def phase_timings(
    phases: Mapping[str, float], kv_params: KvTransferParams | None, *, cached_tokens: int = 0
) -> PhaseTimings:
    """Return the timings of a call.

    Args:
        phases: seconds by phase, and by part of a phase.
        kv_params: the parameters of the KV transfer of the call, if it has one.
        cached_tokens: prompt tokens that came from the prefix cache.
    """
    # The clock of a library may step back, and readers reject frames with a negative time or NaN.
    more = {phase: seconds if seconds > 0 else 0.0 for phase, seconds in phases.items()}
    return PhaseTimings(
        queue_s=more.pop("queue", 0.0),
        prefill_s=more.pop("prefill", 0.0),
        kv_transfer_s=more.pop("kv_transfer", 0.0),
        decode_queue_s=more.pop("decode_wait", 0.0),
        more=more,
        cached_tokens=cached_tokens,
        kv_bytes=0 if kv_params is None else kv_params.kv_bytes,
        transport="" if kv_params is None else kv_params.transport,
    )

"""Convert the times of several machines to one clock: no effect is earlier than its cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from dynamo_trtllm.observability.recorder import RecordedEvent
from dynamo_trtllm.observability.recordings import Recordings, RequestRecording, Step

_FRONTEND_ID: Final = 0  # the instance id in the recordings of frontends


class ClockOffset(NamedTuple):
    """What converts times of a machine to the clock of this one, by addition: from low to high."""

    low_ns: int
    high_ns: int

    @property
    def ns(self) -> int:
        return (self.low_ns + self.high_ns) // 2

    @property
    def error_s(self) -> float:
        return (self.high_ns - self.low_ns) / 2e9

    def within(self, low_ns: int, high_ns: int) -> ClockOffset:
        """Return the offset, limited to this interval, too."""
        limited = ClockOffset(max(self.low_ns, low_ns), min(self.high_ns, high_ns))
        # Clocks drift, so the bounds may exclude each other.
        return self if limited.low_ns > limited.high_ns else limited


def aligned(
    offsets: Mapping[bytes, ClockOffset], recordings: Recordings
) -> dict[bytes, ClockOffset]:
    """Return the offsets that also let no effect be earlier than its cause.

    Each has the error that remains.

    Args:
        offsets: bounds, by the boot of the machine.
        recordings: recordings of these machines, each in its own clock.
    """
    least = _least_differences(offsets, recordings)
    found = dict(offsets)
    bounds: dict[bytes, ClockOffset] = {}
    for cause_boot, effect_boot in least:
        bounds[cause_boot] = offsets[cause_boot]
        bounds[effect_boot] = offsets[effect_boot]
    # The most exact offset is fixed first, and limits the others then.
    for boot in sorted(bounds, key=lambda boot: bounds[boot].error_s):
        # A bound passes on from machine to machine, one further in each round.
        for _ in bounds:
            if not _tighten(bounds, least):
                break
        found[boot] = bounds[boot]
        middle_ns = bounds[boot].ns
        bounds[boot] = ClockOffset(middle_ns, middle_ns)
    return found


def _least_differences(
    offsets: Mapping[bytes, ClockOffset], recordings: Recordings
) -> dict[tuple[bytes, bytes], int]:
    """Return by how many ns the offset of one machine is higher than that of another, at least.

    The keys are (machine of causes, machine of their effects); the latter has the higher offset.
    """
    least: dict[tuple[bytes, bytes], int] = {}
    for request in recordings.requests.values():
        for cause, effect in _causes(request):
            cause_boot = cause.process.header.boot_id
            effect_boot = effect.process.header.boot_id
            if cause_boot == effect_boot or not offsets.keys() >= {cause_boot, effect_boot}:
                continue
            difference_ns = cause.entry.ns - effect.entry.ns
            pair = (cause_boot, effect_boot)
            least[pair] = max(difference_ns, least.get(pair, difference_ns))
    return least


def _tighten(bounds: dict[bytes, ClockOffset], least: Mapping[tuple[bytes, bytes], int]) -> bool:
    """Limit the offsets of each pair of machines by each other. Return whether one has changed."""
    has_changed = False
    for (cause_boot, effect_boot), difference_ns in least.items():
        cause = bounds[cause_boot]
        effect = bounds[effect_boot]
        bounds[effect_boot] = effect.within(cause.low_ns + difference_ns, effect.high_ns)
        bounds[cause_boot] = cause.within(cause.low_ns, effect.high_ns - difference_ns)
        if bounds[effect_boot] != effect or bounds[cause_boot] != cause:
            has_changed = True
    return has_changed


def _causes(request: RequestRecording) -> Iterator[tuple[Step, Step]]:
    """Yield events of a request's calls, each with one that it caused.

    Choices with a repeated call are left out.
    """
    for choice in {step.entry.choice for step in request.steps}:
        own = [step for step in request.steps if step.entry.choice == choice]
        # Of repeated events the first one remains.
        first = {
            (step.process.header.instance_id, step.entry.event): step for step in reversed(own)
        }
        sent = [step for step in own if step.entry.event == RecordedEvent.CALL_SENT]
        phases = [step.entry.reason for step in sent]
        if phases not in (["prefill", "decode"], ["prefill"], ["aggregated"]):
            continue
        worker_ids = [step.entry.instance_id for step in sent]
        pairs: list[tuple[Step | None, Step | None]] = []
        for step, worker_id in zip(sent, worker_ids, strict=True):
            pairs.append((step, first.get((worker_id, RecordedEvent.CALL_RECEIVED))))
        in_worker = first.get((worker_ids[-1], RecordedEvent.FIRST_TOKEN))
        in_frontend = first.get((_FRONTEND_ID, RecordedEvent.FIRST_TOKEN))
        pairs.append((in_worker, in_frontend))
        if phases == ["prefill", "decode"]:
            prefill_id, decode_id = worker_ids
            published = first.get((prefill_id, RecordedEvent.KV_PUBLISHED))
            pairs.append((published, sent[1]))
            pairs.append((published, first.get((decode_id, RecordedEvent.KV_FETCH_STARTED))))
        for cause, effect in pairs:
            if cause is not None and effect is not None:
                yield cause, effect

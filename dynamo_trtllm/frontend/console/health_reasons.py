"""Say in words what is wrong with a deployment, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dynamo_trtllm.frontend.api.response_schemas import ReadinessReport
from dynamo_trtllm.frontend.console.snapshot import (
    ConsoleFrontend,
    ConsoleWorker,
    HealthReason,
    HealthStatus,
    Severity,
    is_failure,
)
from dynamo_trtllm.frontend.routing.model_registry import WorkerChange
from dynamo_trtllm.frontend.routing.pair_breakers import PairState
from dynamo_trtllm.protocol.counted import counted

# A running stream without a token for this time is reported, and a frontend without a sample.
SILENT_S: Final = 5.0
_FULL_KV: Final = 0.95  # share of used KV blocks at which a KV cache is reported as full
_BRIEF_S: Final = 5.0  # after this time of slowness, the reason says for how long a worker is slow
_LEFT_S: Final = 600.0  # for how long the reasons name a worker that left
_MAX_OF_A_KIND: Final = 5  # reasons of one kind
_MAX_CODES: Final = 3  # error codes that one reason names


def status_of(reasons: Sequence[HealthReason], *, is_ready: bool) -> HealthStatus:
    """Return the status in one word. `is_ready`: each model can answer requests."""
    if not is_ready:
        return "not_ready"
    return "degraded" if reasons else "healthy"


def of_models(not_ready: Sequence[str]) -> Iterator[HealthReason]:
    """Yield why models can't answer requests."""
    for reason in not_ready:
        yield HealthReason("bad", _sentence(reason))


def of_pairs(report: ReadinessReport) -> Iterator[HealthReason]:
    """Yield the pairs that get no requests, the workers and records that are not used, and whether
    etcd is reached.
    """
    broken = [
        pair
        for pair in report["pairs"]
        if pair["state"] in (PairState.QUARANTINED, PairState.FAILING)
    ]
    for pair in broken[:_MAX_OF_A_KIND]:
        name = f"worker {pair['decode']}"
        if pair["prefill"] is not None:
            name = f"pair {pair['prefill']} → {pair['decode']}"
        is_quarantined = pair["state"] == PairState.QUARANTINED
        state = "is quarantined" if is_quarantined else "fails"
        reason = f": {pair['reason']}" if pair["reason"] else ""
        severity: Severity = "bad" if is_quarantined else "warning"
        yield HealthReason(severity, _sentence(f"{name} {state}{reason}"))
    if len(broken) > _MAX_OF_A_KIND:
        yield HealthReason("warning", f"{len(broken) - _MAX_OF_A_KIND} more pairs fail.")
    for line in report["mismatched"][:_MAX_OF_A_KIND]:
        yield HealthReason("warning", _sentence(f"{line}; it matches no other worker"))
    for record in report["rejected_records"][:_MAX_OF_A_KIND]:
        text = f"the etcd record {record['key']} is rejected: {record['reason']}"
        yield HealthReason("warning", _sentence(text))
    if report["discovery_problem"]:
        yield HealthReason("warning", _sentence(report["discovery_problem"]))


def of_workers(workers: Sequence[ConsoleWorker]) -> Iterator[HealthReason]:
    """Yield the workers that are silent, slow or full."""
    for worker in workers:
        name = f"{worker.role} worker {worker.id}"
        if worker.streams and worker.silent_s >= SILENT_S:
            yield HealthReason(
                "bad",
                _sentence(
                    f"{name} has sent no token for {worker.silent_s:.0f} s to one of its"
                    f" {worker.streams} streams"
                ),
            )
        if worker.slow_ratio is not None:
            is_new = worker.slow_s < _BRIEF_S
            # "At least": the worker may have been slow before a console was open.
            state = "is slow" if is_new else f"has been slow for at least {_span(worker.slow_s)}"
            yield HealthReason("warning", _sentence(f"{name} {state}: {_slowness(worker)}"))
        if worker.kv_blocks_total and worker.kv_blocks_used is not None:
            used = worker.kv_blocks_used / worker.kv_blocks_total
            if used >= _FULL_KV:
                yield HealthReason(
                    "warning", _sentence(f"the KV cache of {name} is {used:.0%} full")
                )


def _slowness(worker: ConsoleWorker) -> str:
    """Return how slow a worker is: its time per token, and how it compares to the other workers."""
    ratio = f"{worker.slow_ratio:.1f} times the others of its role"
    if worker.token_ms is not None and not worker.is_slow_at_prompts:
        return f"{worker.token_ms:.1f} ms per token, {ratio}"
    if worker.prompt_token_ms is not None:
        return f"{worker.prompt_token_ms * 1e3:.0f} ms per 1,000 prompt tokens, {ratio}"
    return ratio


def of_changes(changes: Sequence[WorkerChange], now: float) -> Iterator[HealthReason]:
    """Yield the workers that left, and that no later worker of their role has replaced.

    Args:
        changes: the latest changes, the oldest first.
        now: seconds since the epoch.
    """
    replacements: Counter[tuple[str, str]] = Counter()
    missing: list[WorkerChange] = []
    # From the newest change back, each worker that registered replaces one that had left before.
    for change in reversed(changes):
        kind = (change.instance.card.name, str(change.instance.role))
        if change.is_added:
            replacements[kind] += 1
        elif replacements[kind]:
            replacements[kind] -= 1
        elif now - change.at < _LEFT_S:
            missing.append(change)
    for change in missing[:_MAX_OF_A_KIND]:
        instance = change.instance
        yield HealthReason(
            "warning",
            f"The {instance.role} worker {instance.id:x} left {_ago(now - change.at)}, and no"
            f" {instance.role} worker has registered since.",
        )


def of_requests(
    codes: Mapping[str, int], queued: int, frontends: Sequence[ConsoleFrontend]
) -> Iterator[HealthReason]:
    """Yield the errors of the last minute, the queue, and the frontends that are silent.

    Args:
        codes: requests that ended in the last minute, by code.
        queued: requests that wait in frontends.
        frontends: all processes.
    """
    failed = Counter({code: count for code, count in codes.items() if is_failure(code)})
    if failed:
        most_common = failed.most_common(_MAX_CODES)
        named = ", ".join(f"{code} ({count})" for code, count in most_common)
        total = sum(codes.values())
        share = f"{sum(failed.values())} of {counted(total, 'request')} failed in the last minute"
        yield HealthReason("warning", f"{share}: {named}.")
    if queued:
        yield HealthReason(
            "warning", f"Requests wait in the queues of the frontends: {queued} at this moment."
        )
    for frontend in frontends:
        if frontend.silent_s >= SILENT_S:
            yield HealthReason(
                "warning",
                f"{frontend.name} has not reported for {frontend.silent_s:.0f} s: it has ended, or"
                " is blocked.",
            )


def _ago(seconds: float) -> str:
    return f"{_span(max(0.0, seconds))} ago"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _sentence(text: str) -> str:
    """Return a text that begins with an upper case letter and ends with a period."""
    ended = text if text.endswith((".", "!", "?")) else f"{text}."
    return ended[:1].upper() + ended[1:]

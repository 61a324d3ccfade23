"""Summarizes the records of a load, and measures the CPU time of processes during it."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from .stream import RequestRecord

if TYPE_CHECKING:
    import psutil

BUSY_CORES = 0.9  # above this use of one client process, the client may be the bottleneck
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_RESAMPLES = 1000


class LoadSummary(TypedDict):
    """Results of one load.

    Times are in milliseconds, rates are per second of the measured window.
    """

    ok: int
    errors: dict[str, int]
    wall_s: float
    requests_per_s: float
    tokens_per_s: float
    events_per_token: float
    prompt_tokens: float  # mean per request
    cached_tokens: float
    wrong_length: int  # ended before max_tokens
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]  # between reads with text
    tpot_ms: dict[str, float]  # mean gap between tokens, per request
    e2e_ms: dict[str, float]
    # cpu_s, cores, cpu_ms_per_1k_tokens, cpu_ms_per_request; except for the client also rss_mib, at
    # the end
    processes: dict[str, dict[str, float]]
    # of the busiest client process; near 1 the client is the bottleneck; 0: not measured
    client_cores: float


class ProcessMeter:
    """Measures the CPU time of processes and all their children, from `start` to `costs`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        # An extra: --help must work without it.
        import psutil

        self._roots = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._before: dict[str, dict[int, float]] = {}

    def start(self) -> None:
        self._before = {name: _cpu_by_pid(root) for name, root in self._roots.items()}

    def costs(self, *, wall_s: float, tokens: int, requests: int) -> dict[str, dict[str, float]]:
        """Return the CPU time since `start`, and the memory now, by name.

        See LoadSummary.processes.
        """
        costs = {}
        for name, root in self._roots.items():
            before = self._before[name]
            cpu_s = sum(now - before.get(pid, 0.0) for pid, now in _cpu_by_pid(root).items())
            costs[name] = cost(cpu_s, wall_s=wall_s, tokens=tokens, requests=requests)
            rss_bytes = sum(process.memory_info().rss for process in _alive(root))
            costs[name]["rss_mib"] = rss_bytes / (1 << 20)
        return costs


def interval(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float], seed: int = 1
) -> list[float]:
    """Return the 95% interval of a statistic, by bootstrap over the values."""
    if not values:
        return [math.nan, math.nan]
    source = random.Random(seed)
    found = sorted(statistic(source.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return [found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES)]]


def cost(cpu_s: float, *, wall_s: float, tokens: int, requests: int) -> dict[str, float]:
    """Return this CPU time per second, token and request."""
    return {
        "cpu_s": cpu_s,
        "cores": cpu_s / wall_s,
        "cpu_ms_per_1k_tokens": cpu_s * 1e6 / tokens if tokens else 0.0,
        "cpu_ms_per_request": cpu_s * 1e3 / requests if requests else 0.0,
    }


def _alive(root: psutil.Process) -> list[psutil.Process]:
    import psutil

    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_by_pid(root: psutil.Process) -> dict[int, float]:
    """Return CPU seconds by process. Uses the POSIX CPU clocks, because /proc rounds to 10 ms."""
    seconds = {}
    for process in _alive(root):
        try:
            seconds[process.pid] = time.clock_gettime((~process.pid << 3) | 2)
        except OSError:  # it has just ended
            continue
    return seconds


def summarize(
    records: Sequence[RequestRecord],
    *,
    wall_s: float,
    osl: int,
    processes: dict[str, dict[str, float]],
) -> LoadSummary:
    """Return the summary of these requests. `osl` is max_tokens of every request."""
    good = [record for record in records if record.is_ok]
    tokens = sum(record.output_tokens for record in good)
    firsts = [(record, record.first_s) for record in good if record.first_s is not None]
    return {
        "ok": len(good),
        "errors": dict(Counter(record.error for record in records if not record.is_ok)),
        "wall_s": wall_s,
        "requests_per_s": len(good) / wall_s,
        "tokens_per_s": tokens / wall_s,
        "events_per_token": sum(record.events for record in good) / tokens if tokens else 0.0,
        "prompt_tokens": _mean(record.prompt_tokens for record in good),
        "cached_tokens": _mean(record.cached_tokens for record in good),
        "wrong_length": sum(record.output_tokens != osl for record in good),
        "ttft_ms": _quantiles(first - record.planned_s for record, first in firsts),
        "itl_ms": _quantiles(gap for record in good for gap in record.gaps_s),
        "tpot_ms": _quantiles(
            ((record.last_s or first) - first) / (record.output_tokens - 1)
            for record, first in firsts
            if record.output_tokens > 1
        ),
        "e2e_ms": _quantiles(record.end_s - record.planned_s for record in good),
        "processes": processes,
        "client_cores": 0.0,
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _quantiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return quantiles in milliseconds, by nearest rank. Empty without values."""
    values = sorted(seconds)
    if not values:
        return {}
    return {
        name: values[min(len(values) - 1, int(q * len(values)))] * 1e3
        for name, q in QUANTILES.items()
    }


def phase_times(records: Sequence[RequestRecord]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the milliseconds of each phase and part, and the percentage of TTFT that lies in
    phases.

    TTFT by the frontend ends with the first token, by the client with the first text: a part of a
    character is no text. The client's begins when it has sent the request, which may be later than
    planned. Empty if no request has phases.
    """
    known = [record for record in records if record.is_ok and record.phase_s]
    if not known:
        return {}
    names = sorted({name for record in known for name in record.phase_s})
    phases = [record.phase_s for record in known]
    named_s = [sum(record.ttft_phase_s.values()) for record in known]
    ttft_s = {
        "frontend": [record.server_ttft_s for record in known],
        "client": [(record.first_s or record.end_s) - record.sent_s for record in known],
    }
    shares = {
        who: [100 * named / ttft for named, ttft in zip(named_s, times, strict=True)]
        for who, times in ttft_s.items()
    }
    return {
        "phase_ms": {
            name: (
                {"mean": _mean(phases_of_one.get(name, 0.0) * 1e3 for phases_of_one in phases)}
                | _quantiles(phases_of_one.get(name, 0.0) for phases_of_one in phases)
            )
            for name in names
        },
        "named_ttft_percent": {
            who: {"mean": _mean(shares_of_one), "lowest": min(shares_of_one)}
            for who, shares_of_one in shares.items()
        },
    }


def table(summary: LoadSummary) -> str:
    """Return the summary as text."""
    lines = [
        (
            f"{summary['ok']} requests in {summary['wall_s']:.1f} s,"
            f" {summary['requests_per_s']:.1f} requests/s, {summary['tokens_per_s']:.0f} tokens/s,"
            f" {summary['events_per_token']:.2f} events per token"
        ),
    ]
    if summary["errors"]:
        lines.append(
            "errors: "
            + ", ".join(f"{code} {count}" for code, count in sorted(summary["errors"].items()))
        )
    if summary["wrong_length"]:
        lines.append(f"{summary['wrong_length']} answers ended early")
    lines.append(f"{'ms':<8}" + "".join(f"{name:>10}" for name in QUANTILES))
    for name, values in (
        ("TTFT", summary["ttft_ms"]),
        ("ITL", summary["itl_ms"]),
        ("TPOT", summary["tpot_ms"]),
        ("E2E", summary["e2e_ms"]),
    ):
        if values:
            lines.append(f"{name:<8}" + "".join(f"{values[q]:>10.2f}" for q in QUANTILES))
    for name, spent in summary["processes"].items():
        memory = f", {spent['rss_mib']:.0f} MiB" if "rss_mib" in spent else ""
        lines.append(
            f"{name}: {spent['cores']:.2f} cores, {spent['cpu_ms_per_1k_tokens']:.1f} ms CPU per"
            f" 1,000 tokens, {spent['cpu_ms_per_request']:.2f} per request{memory}"
        )
    if summary["client_cores"] > BUSY_CORES:
        lines.append(
            f"a client process used {summary['client_cores']:.0%} of a core: raise --processes"
        )
    return "\n".join(lines) + "\n"

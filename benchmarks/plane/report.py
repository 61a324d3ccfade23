"""Formats runs as tables of medians, and compares the ratios with targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, median, stdev

from ..summary import BUSY_CORES, LoadSummary
from .measure import Run

VALID_EVENTS_PER_TOKEN = 0.95
Measure = Callable[[LoadSummary], float]


def cpu(*names: str, per: str = "cpu_ms_per_1k_tokens") -> Measure:
    """Return a measure: the CPU time of these processes together. `decode-2` counts as `decode`."""
    return lambda figures: sum(
        spent.get(per, 0.0)
        for name, spent in figures["processes"].items()
        if name.partition("-")[0] in names
    )


def quantile(times: str, name: str) -> Measure:
    """Return a measure: a quantile in milliseconds, 0 if there is none."""
    return lambda figures: float(figures[times].get(name, 0.0))  # type: ignore[literal-required]


def resident(name: str) -> Measure:
    """Return a measure: the resident memory of a process in MiB."""
    return lambda figures: figures["processes"].get(name, {}).get("rss_mib", 0.0)


@dataclass(frozen=True, slots=True)
class Bar:
    """A target for the ratio ours / Dynamo at one point."""

    what: str
    point: str
    measure: Measure
    most: float  # largest ratio that meets the target
    against: str = "dynamo fastokens"  # the side to compare with


COLUMNS: tuple[tuple[str, int, Measure], ...] = (
    ("tokens/s", 9, lambda f: f["tokens_per_s"]),
    ("TTFT50", 8, quantile("ttft_ms", "p50")),
    ("TTFT90", 8, quantile("ttft_ms", "p90")),
    ("TTFT99", 8, quantile("ttft_ms", "p99")),
    ("ITL99", 7, quantile("itl_ms", "p99")),
    ("TPOT50", 7, quantile("tpot_ms", "p50")),
    ("fe/1k", 7, cpu("frontend")),
    ("fe/req", 7, cpu("frontend", per="cpu_ms_per_request")),
    ("work/1k", 8, cpu("prefill", "decode")),
    ("nats/1k", 8, cpu("nats")),
    ("fe MiB", 7, resident("frontend")),
    ("fe core", 8, cpu("frontend", per="cores")),
    ("cl core", 8, lambda f: f["client_cores"]),
    ("errors", 7, lambda f: float(sum(f["errors"].values()))),
)
_WHOLE = {"tokens/s", "fe MiB", "errors"}

_ALL = ("frontend", "prefill", "decode", "nats")
BARS = (
    Bar("frontend CPU per 1,000 tokens", "paced-32", cpu("frontend"), 0.55),
    Bar("frontend CPU per 1,000 tokens", "paced-128", cpu("frontend"), 0.5),
    Bar("frontend CPU per 1,000 tokens", "paced-256", cpu("frontend"), 0.55),
    Bar("frontend CPU per 1,000 tokens", "burst-32", cpu("frontend"), 0.5),
    Bar("frontend CPU per 1,000 tokens", "burst-256", cpu("frontend"), 0.5),
    Bar("frontend, workers and NATS, CPU per 1,000 tokens", "paced-128", cpu(*_ALL), 0.45),
    Bar("TTFT p50", "burst-1", quantile("ttft_ms", "p50"), 0.2),
    Bar("ITL p99", "paced-128", quantile("itl_ms", "p99"), 1.0),
    Bar("frontend CPU per request", "long-32", cpu("frontend", per="cpu_ms_per_request"), 0.8),
    Bar("TTFT p50", "long-32", quantile("ttft_ms", "p50"), 1.0),
    Bar("time of a whole request, p50", "long-32", quantile("e2e_ms", "p50"), 1.0),
    Bar(
        "frontend CPU per request",
        "long-32",
        cpu("frontend", per="cpu_ms_per_request"),
        0.2,
        "dynamo default",
    ),
    Bar("frontend memory", "burst-256", resident("frontend"), 0.4),
    Bar("frontend memory", "long-32", resident("frontend"), 0.4),
)


def median_of(runs: Sequence[Run], point: str, side: str, measure: Measure) -> float | None:
    """Return the median over repetitions, or None if the point was not measured."""
    values = [
        measure(run["figures"]) for run in runs if (run["point"], run["side"]) == (point, side)
    ]
    return median(values) if values else None


def table(runs: Sequence[Run]) -> str:
    """Return a table of medians with a line per point and side.

    Times and CPU times are in milliseconds.
    """
    heads = "".join(f"{name:>{width}}" for name, width, _ in COLUMNS)
    lines = [f"{'point':<12}{'side':<18}{heads}  ev/tok  others"]
    for point, side in dict.fromkeys((run["point"], run["side"]) for run in runs):
        cells = []
        for name, width, measure in COLUMNS:
            value = median_of(runs, point, side, measure) or 0.0
            cells.append(
                f"{value:>{width}.0f}"
                if name in _WHOLE or value >= 1000
                else f"{value:>{width}.2f}"
            )
        of_side = [run for run in runs if (run["point"], run["side"]) == (point, side)]
        events = median(run["events_per_text_token"] for run in of_side)
        others = median(run["others_cores"] for run in of_side)
        lines.append(f"{point:<12}{side:<18}" + "".join(cells) + f"{events:>8.2f}{others:>8.2f}")
    lines += notes(runs)
    return "\n".join(lines) + "\n"


def notes(runs: Sequence[Run]) -> list[str]:
    """Return a line for each reason not to trust a figure."""
    found = []
    for point, side in dict.fromkeys((run["point"], run["side"]) for run in runs):
        events = median(
            r["events_per_text_token"] for r in runs if (r["point"], r["side"]) == (point, side)
        )
        if 0 < round(events, 2) < VALID_EVENTS_PER_TOKEN:
            found.append(
                f"{point}, {side}: {events:.2f} events per text token. Tokens are merged, so don't"
                " compare CPU times."
            )
        if (median_of(runs, point, side, lambda f: f["client_cores"]) or 0.0) > BUSY_CORES:
            found.append(
                f"{point}, {side}: the client was the bottleneck; the server may be faster"
            )
        if median_of(runs, point, side, lambda f: float(sum(f["errors"].values()))):
            found.append(f"{point}, {side}: some requests failed")
    return found


def compare_bars(runs: Sequence[Run], bars: Sequence[Bar] = BARS) -> str:
    """Return a table with the ratio of medians for each target that both sides measured."""
    names = f"{'ours / Dynamo':<52}{'point':<11}{'against':<18}"
    values = f"{'ours':>9}{'theirs':>9}{'ratio':>7}{'bar':>6}"
    lines = [names + values]
    for bar in bars:
        ours = median_of(runs, bar.point, "ours", bar.measure)
        theirs = median_of(runs, bar.point, bar.against, bar.measure)
        if ours is None or not theirs:
            continue
        ratio = ours / theirs
        outcome = "reached" if ratio <= bar.most else "MISSED"
        values = f"{ours:>9.2f}{theirs:>9.2f}{ratio:>7.2f}{bar.most:>6.2f}"
        lines.append(f"{bar.what:<52}{bar.point:<11}{bar.against:<18}{values}  {outcome}")
    return "\n".join(lines) + "\n"


def ratios_at_once(runs: Sequence[Run]) -> str:
    """Return for each point the ratios of CPU times that were measured at the same time.

    They are those of the first side's frontend to each other one's: the median, and the mean with
    an interval of 95% over the repetitions.
    """
    sides = list(dict.fromkeys(run["side"] for run in runs if run["repetition"] == 0))
    lines = []
    for point in dict.fromkeys(run["point"] for run in runs):
        costs = {
            (run["side"], run["repetition"]): cpu("frontend")(run["figures"])
            for run in runs
            if run["point"] == point
        }
        for other in sides[1:]:
            ratios = [
                cost / costs[other, repetition]
                for (side, repetition), cost in costs.items()
                if side == sides[0] and costs.get((other, repetition))
            ]
            if ratios:
                lines.append(
                    f"{point}: frontend CPU per token, {sides[0]} / {other}, at the same time:"
                    f" median {median(ratios):.3f}, mean {_mean_with_interval(ratios)}"
                    f" ({len(ratios)} pairs)"
                )
    return "\n".join(lines) + "\n"


def _mean_with_interval(values: Sequence[float]) -> str:
    """Return the mean and its interval of 95%, by the normal distribution."""
    if len(values) < 2:
        return f"{mean(values):.3f}"
    half_width = NormalDist().inv_cdf(0.975) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.3f} ± {half_width:.3f}"

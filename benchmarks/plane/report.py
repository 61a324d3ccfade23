"""Runs to medians, ratios and bars, as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.figures import BUSY_CORES, Figures
from benchmarks.plane.measure import Run

VALID_EVENTS_PER_TOKEN = 0.95
Measure = Callable[[Figures], float]


def cpu(*names: str, per: str = "cpu_ms_per_1k_tokens") -> Measure:
    """CPU of these processes together, with those of the same kind: `decode-2` counts as `decode`."""
    return lambda figures: sum(
        spent.get(per, 0.0) for name, spent in figures["processes"].items() if name.partition("-")[0] in names
    )


def quantile(times: str, name: str) -> Measure:
    """In milliseconds; 0 when there is none."""
    return lambda figures: float(figures[times].get(name, 0.0))  # type: ignore[literal-required]


def resident(name: str) -> Measure:
    return lambda figures: figures["processes"].get(name, {}).get("rss_mib", 0.0)


@dataclass(frozen=True, slots=True)
class Bar:
    """What issue-worthy ratio ours / Dynamo must not be above, at a point and against a tokenizer of theirs."""

    what: str
    point: str
    measure: Measure
    most: float
    against: str = "dynamo fastokens"
    is_goal: bool = False  # reported, not required


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
    Bar("frontend CPU per 1,000 tokens", "paced-32", cpu("frontend"), 0.6),
    Bar("frontend CPU per 1,000 tokens", "paced-128", cpu("frontend"), 0.6),
    Bar("frontend CPU per 1,000 tokens", "paced-256", cpu("frontend"), 0.6),
    Bar("frontend CPU per 1,000 tokens", "burst-32", cpu("frontend"), 1.0, is_goal=True),
    Bar("frontend CPU per 1,000 tokens", "burst-256", cpu("frontend"), 1.0, is_goal=True),
    Bar("frontend, workers and NATS, CPU per 1,000 tokens", "paced-128", cpu(*_ALL), 0.7),
    Bar("TTFT p50", "burst-1", quantile("ttft_ms", "p50"), 0.2),
    Bar("ITL p99", "paced-128", quantile("itl_ms", "p99"), 1.0),
    Bar("frontend CPU per request", "long-32", cpu("frontend", per="cpu_ms_per_request"), 1.0),
    Bar("frontend CPU per request", "long-32", cpu("frontend", per="cpu_ms_per_request"), 0.2, "dynamo default"),
    Bar("frontend memory", "burst-256", resident("frontend"), 0.35),
    Bar("frontend memory", "long-32", resident("frontend"), 0.35),
)


def middle(runs: Sequence[Run], point: str, side: str, measure: Measure) -> float | None:
    """The median over repetitions; None when it was not measured."""
    values = [measure(run["figures"]) for run in runs if (run["point"], run["side"]) == (point, side)]
    return median(values) if values else None


def table(runs: Sequence[Run]) -> str:
    """Medians, a line per point and side. CPU in ms (per 1,000 tokens: microseconds per token), times in ms."""
    heads = "".join(f"{name:>{width}}" for name, width, _ in COLUMNS)
    lines = [f"{'point':<12}{'side':<18}{heads}  ev/tok  others"]
    for point, side in dict.fromkeys((run["point"], run["side"]) for run in runs):
        cells = []
        for name, width, measure in COLUMNS:
            value = middle(runs, point, side, measure) or 0.0
            cells.append(f"{value:>{width}.0f}" if name in _WHOLE or value >= 1000 else f"{value:>{width}.2f}")
        of_side = [run for run in runs if (run["point"], run["side"]) == (point, side)]
        events = median(run["events_per_text_token"] for run in of_side)
        others = median(run["others_cores"] for run in of_side)
        lines.append(f"{point:<12}{side:<18}" + "".join(cells) + f"{events:>8.2f}{others:>8.2f}")
    lines += notes(runs)
    return "\n".join(lines) + "\n"


def notes(runs: Sequence[Run]) -> list[str]:
    """What makes a figure doubtful."""
    found = []
    for point, side in dict.fromkeys((run["point"], run["side"]) for run in runs):
        events = median(r["events_per_text_token"] for r in runs if (r["point"], r["side"]) == (point, side))
        if 0 < round(events, 2) < VALID_EVENTS_PER_TOKEN:
            found.append(
                f"{point}, {side}: {events:.2f} events per token of text, so tokens are merged: compare no CPU"
            )
        if (middle(runs, point, side, lambda f: f["client_cores"]) or 0.0) > BUSY_CORES:
            found.append(f"{point}, {side}: the client was busy; rates and times are its own limit")
        if middle(runs, point, side, lambda f: float(sum(f["errors"].values()))):
            found.append(f"{point}, {side}: there were errors")
    return found


def judged(runs: Sequence[Run], bars: Sequence[Bar] = BARS) -> str:
    """Return the ratio of medians for every bar that both sides measured, and whether it is reached."""
    lines = [f"{'ours / Dynamo':<52}{'point':<11}{'against':<18}{'ours':>9}{'theirs':>9}{'ratio':>7}{'bar':>6}"]
    for bar in bars:
        ours = middle(runs, bar.point, "ours", bar.measure)
        theirs = middle(runs, bar.point, bar.against, bar.measure)
        if ours is None or not theirs:
            continue
        ratio = ours / theirs
        said = "reached" if ratio <= bar.most else "goal" if bar.is_goal else "MISSED"
        values = f"{ours:>9.2f}{theirs:>9.2f}{ratio:>7.2f}{bar.most:>6.2f}"
        lines.append(f"{bar.what:<52}{bar.point:<11}{bar.against:<18}{values}  {said}")
    return "\n".join(lines) + "\n"

"""Charts of the report as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_trtllm.support.charts import COLORS, DASHES, HATCHES, line_style, svg

from ..stream import RequestRecord
from .result import Line, Run, Summary, summary
from .shapes import Level
from .steady import tokens_between

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BINS = 120


@dataclass(frozen=True, slots=True)
class Series:
    """One run in a chart, with its label."""

    name: str
    run: Run
    lines: Sequence[Line]


def throughput(series: Sequence[Series]) -> str:
    """Plot tokens per second by level of the load, and tokens per second per user against those per
    GPU.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for index, measured in enumerate(series):
            values = summary(measured.run)
            style = line_style(index) | {"label": measured.name}
            _with_spread(left, values, "output_tokens_per_s", style)
            scale = measured.run.gpus or 1
            users = [
                row["output_tokens_per_s_per_user"].median
                for row in values.values()
                if _has_user(row)
            ]
            rates = [
                row["output_tokens_per_s"].median / scale
                for row in values.values()
                if _has_user(row)
            ]
            right.plot(users, rates, **style)
        left.set(xlabel=_level_name(series), ylabel="output tokens/s", ylim=(0, None))
        left.set_xscale("log", base=2)
        left.set_xticks([level.value for measured in series for level in summary(measured.run)])
        left.xaxis.set_major_formatter("{x:g}")
        per = "per GPU" if all(measured.run.gpus for measured in series) else "in all"
        right.set(
            xlabel="output tokens/s per user",
            ylabel=f"output tokens/s {per}",
            xlim=(0, None),
            ylim=(0, None),
        )
        left.legend(fontsize=7)

    return svg(draw)


def _has_user(row: Mapping[str, object]) -> bool:
    return "output_tokens_per_s_per_user" in row


def _with_spread(axes: Axes, values: Summary, metric: str, style: dict[str, Any]) -> None:
    points = [(level.value, row[metric]) for level, row in values.items() if metric in row]
    low = [spread.median - spread.low for _, spread in points]
    high = [spread.high - spread.median for _, spread in points]
    axes.errorbar(
        [x for x, _ in points], [s.median for _, s in points], yerr=[low, high], capsize=2, **style
    )


def latency(series: Sequence[Series]) -> str:
    """Plot the cumulative distribution of TTFT and ITL, one curve per run and level."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for index, measured in enumerate(series):
            for place, level in enumerate(sorted({line.level for line in measured.lines})):
                records = [
                    line.record
                    for line in measured.lines
                    if line.level == level and line.record.is_ok
                ]
                name = (
                    f"{measured.name}, {level.value:g}" if len(series) > 1 else f"{level.value:g}"
                )
                style = {
                    "color": COLORS[place % len(COLORS)],
                    "ls": DASHES[(place + index) % 4],
                    "label": name,
                }
                firsts = [(r.first_s - r.planned_s) * 1e3 for r in records if r.first_s is not None]
                gaps = [gap * 1e3 for r in records for gap in r.gaps_s] or [
                    _mean_gap_ms(r) for r in records
                ]
                _share(left, firsts, style)
                _share(right, gaps, style)
        left.set(xlabel="TTFT (ms)", ylabel="share of requests", ylim=(0, 1))
        right.set(xlabel="ITL (ms)", ylabel="share of gaps", ylim=(0, 1))
        if left.lines:
            left.legend(fontsize=7, title=_level_name(series), title_fontsize=7)

    return svg(draw)


def _mean_gap_ms(record: RequestRecord) -> float:
    if record.first_s is None or record.last_s is None or record.output_tokens < 2:
        return 0.0
    return (record.last_s - record.first_s) * 1e3 / (record.output_tokens - 1)


def _share(axes: Axes, values: Iterable[float], style: dict[str, Any]) -> None:
    ordered = sorted(values)
    if not ordered:
        return
    step = max(1, len(ordered) // 500)  # 500 steps are enough
    shown = [*range(0, len(ordered), step), len(ordered) - 1]
    axes.step(
        [ordered[i] for i in shown], [(i + 1) / len(ordered) for i in shown], where="post", **style
    )
    if ordered[0] > 0 and ordered[-1] > 20 * ordered[0]:
        axes.set_xscale("log")


def _level_name(series: Sequence[Series]) -> str:
    return series[0].run.shape.level_name.replace("_", " ")


def phases(series: Sequence[Series]) -> str | None:
    """Plot the mean time of a request in each phase, stacked.

    Return None when no server reported its phases.
    """
    bars = [
        (
            f"{measured.name}\n{level.value:g}" if len(series) > 1 else f"{level.value:g}",
            _mean_phases(measured.run, level),
        )
        for measured in series
        for level in summary(measured.run)
    ]
    names = list(dict.fromkeys(name for _, values in bars for name in values))
    if not names:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bottoms = [0.0] * len(bars)
        for index, name in enumerate(names):
            heights = [values.get(name, 0.0) * 1e3 for _, values in bars]
            style: dict[str, Any] = {
                "color": COLORS[index % len(COLORS)],
                "hatch": HATCHES[index % len(HATCHES)],
            }
            axes.bar(
                [label for label, _ in bars],
                heights,
                0.5,
                bottoms,
                label=name,
                edgecolor="white",
                **style,
            )
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set(xlabel=_level_name(series), ylabel="mean time before the first token (ms)")
        axes.legend(fontsize=7)

    return svg(draw)


def _mean_phases(run: Run, level: Level) -> dict[str, float]:
    points = [point.phase_s for point in run.points if point.level == level and point.phase_s]
    return (
        {name: sum(point.get(name, 0.0) for point in points) / len(points) for name in points[0]}
        if points
        else {}
    )


def timeline(measured: Series) -> str:
    """Plot output tokens per second and running requests over time, at the highest level."""
    top = max(point.level for point in measured.run.points)
    point = next(point for point in measured.run.points if point.level == top)
    records = [
        line.record
        for line in measured.lines
        if (line.level, line.repetition) == (top, point.repetition)
    ]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        end_s = max(record.end_s for record in records)
        width_s = (end_s - point.origin_s) / _BINS or 1.0
        edges = [point.origin_s + index * width_s for index in range(_BINS + 1)]
        rates = [0.0] * _BINS
        for record in records:
            if record.is_ok and record.first_s is not None:
                first = int((record.first_s - point.origin_s) / width_s)
                last = int(((record.last_s or record.first_s) - point.origin_s) / width_s)
                for index in range(max(0, first), min(_BINS, last + 1)):
                    rates[index] += tokens_between(record, edges[index], edges[index + 1]) / width_s
        running = [sum(r.planned_s <= edge < r.end_s for r in records) for edge in edges[:-1]]
        at_s = [edge - point.origin_s for edge in edges[:-1]]
        axes.step(at_s, rates, where="post", color=COLORS[0], label="output tokens/s")
        other = axes.twinx()
        other.step(at_s, running, where="post", color=COLORS[1], ls="--", label="running requests")
        if point.steady is not None:
            axes.axvspan(
                point.steady.begin_s - point.origin_s,
                point.steady.end_s - point.origin_s,
                alpha=0.1,
                color="gray",
            )
        shaded = "" if point.steady is None else ", steady part shaded"
        axes.set(
            xlabel=f"seconds, {top}{shaded}",
            ylabel="output tokens/s",
            ylim=(0, None),
        )
        other.set(ylabel="running requests (dashed)", ylim=(0, None))

    return svg(draw)

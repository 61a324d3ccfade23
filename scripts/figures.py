"""Draws the pictures of README and docs, and writes the README's figures.

`python -m scripts.figures` runs it. Both come from benchmarks/results. Each picture is written
twice, for a light and for a dark page. A test compares the README's figures with the results.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plane.report import BARS, COLUMNS, VALID_EVENTS_PER_TOKEN, cpu, median_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
RECORDING = RESULTS / "failover-demo.cast"  # made by scripts/record_failover.py
THEMES = {
    "light": {
        "ink": "#1f2328",
        "dim": "#59636e",
        "line": "#59636e",
        "box": "#f6f8fa",
        "soft": "#d1d9e0",
        "accent": "#3f7d00",
    },
    "dark": {
        "ink": "#f0f6fc",
        "dim": "#9198a1",
        "line": "#9198a1",
        "box": "#151b23",
        "soft": "#3d444d",
        "accent": "#7ee03a",
    },
}
POINTS = {"paced-32": "32 streams", "paced-128": "128 streams", "paced-256": "256 streams"}


class OpenLoopRow(NamedTuple):
    """A row of the tables of open-loop runs on two GPUs."""

    title: str
    file: str  # end of its name
    topology: str  # in the file


TWO_GPUS = (
    OpenLoopRow("2A", "2A-and-vllm-router", "2A"),
    OpenLoopRow(
        "vLLM's servers and vllm-router, blocks of 16", "2A-and-vllm-router", "vllm-router:1P1D"
    ),
    OpenLoopRow("1P1D, blocks of 16", "1P1D-block16", "1P1D"),
    OpenLoopRow("1P1D, blocks of 128", "1P1D-block128", "1P1D"),
    OpenLoopRow("1P1D, blocks of 128", "vllm026", "1P1D"),
    OpenLoopRow("1P1D, blocks of 128, whole rows", "vllm026-rows", "1P1D"),
    OpenLoopRow(
        "**1P1D, the defaults: blocks of 128, early notice**", "vllm026-early-notice", "1P1D"
    ),
    OpenLoopRow("the defaults again, commit `b65130b1`", "vllm026-again", "1P1D"),
    OpenLoopRow(
        "vLLM's servers and vllm-router, blocks of 16", "vllm026-router", "vllm-router:1P1D"
    ),
    OpenLoopRow("**the defaults with steps of 8,192**", "vllm026-steps-8192", "1P1D"),
    OpenLoopRow("the same with steps of 16,384", "vllm026-steps-16384", "1P1D"),
    OpenLoopRow("the same with steps of 8,192 and blocks of 16", "vllm026-block16", "1P1D"),
    OpenLoopRow("**the defaults**", "vllm033", "1P1D"),
    OpenLoopRow("the same with `UCX_CUDA_IPC_CACHE=n`", "vllm033-no-ipc-cache", "1P1D"),
    OpenLoopRow("the same again, commit `988bc93b`", "vllm033-again", "1P1D"),
    OpenLoopRow("**the same with whole rows**", "vllm033-rows", "1P1D"),
)
BARS_OF_GOODPUT = {
    "2 aggregated": ("2A-and-vllm-router", "2A"),
    "1P1D, blocks of 16": ("1P1D-block16", "1P1D"),
    "1P1D, blocks of 128": ("1P1D-block128", "1P1D"),
}
# The same runs on four GPUs, by load.
BARS_OF_RATIO = {"4 aggregated": "4A", "2 prefill, 2 decode": "2P2D", "1 prefill, 3 decode": "1P3D"}
LOADS_OF_RATIO = ((8192, 256, 8.0), (1000, 1000, 6.0))
Colors = dict[str, str]


def results(kind: str, what: str) -> list[dict[str, Any]]:
    """Return the result files of a kind, the newest first, by the time in their names."""
    files = sorted(RESULTS.glob(f"{kind}-*.json"), reverse=True)
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    found = [content for content in contents if content["what"] == what]
    if not found:
        raise SystemExit(f"figures: there is no result of {kind} in {RESULTS}")
    return found


def fullest() -> dict[str, Any]:
    """Return the comparison with Dynamo that measured the most points, the newest of several."""
    return max(beside_dynamo(), key=lambda run: len(run["runs"]))


def beside_dynamo() -> list[dict[str, Any]]:
    """Return the comparisons with Dynamo of the newest day that has one."""
    runs = results("plane", "against-dynamo")
    newest_day = _day(runs[0])
    return [run for run in runs if _day(run) == newest_day]


def _day(run: dict[str, Any]) -> str:
    return str(run["at"][:10])


def comparable(runs: list[dict[str, Any]], point: str) -> dict[str, float]:
    """Return the frontend's CPU microseconds per token of both sides.

    Empty if a side merged tokens or was not measured: its CPU time would be of fewer events.
    """
    sides = {"ours": "dynamo_trtllm", "dynamo fastokens": "NVIDIA Dynamo"}
    found = {}
    for side, name in sides.items():
        value = median_of(runs, point, side, cpu("frontend"))
        if value is None:
            return {}
        if round(_events_per_token(runs, point, side), 2) < VALID_EVENTS_PER_TOKEN:
            return {}
        found[name] = value
    return found


def _events_per_token(runs: list[dict[str, Any]], point: str, side: str) -> float:
    """Return the median of a point and side that was measured."""
    return median(
        run["events_per_text_token"]
        for run in runs
        if run["point"] == point and run["side"] == side
    )


def readme_figures() -> dict[str, str]:
    """Return the text of each marked place of the README."""
    runs = beside_dynamo()
    ratios = []
    for run in runs:
        for point in POINTS:
            pair = comparable(run["runs"], point)
            if pair:
                ratios.append(pair["dynamo_trtllm"] / pair["NVIDIA Dynamo"])
    day = _day(runs[0])
    newest = [
        goodput(open_loop_cell(row.file, row.topology, 4.0))
        for row in TWO_GPUS
        if row.file.startswith("vllm033")
    ]
    split = open_loop_cell("1P1D-block128", "1P1D", 4.0)
    together = open_loop_cell("2A-and-vllm-router", "2A", 4.0)
    return {
        "cpu": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "cpu-run": f"{len(runs)} runs of {day}" if len(runs) > 1 else f"run of {day}",
        "pause": f"{recorded_pause_s():.1f} s",
        "goodput": f"{goodput(split):.0f} %",
        "goodput-newest": f"{min(newest):.0f} to {max(newest):.0f} %",
        "goodput-aggregated": f"{goodput(together):.0f} %",
        "ttft": f"{split['ttft_ms']['p50']:.0f} ms",
        "ttft-aggregated": f"{together['ttft_ms']['p50']:.0f} ms",
    }


def recorded_pause_s() -> float:
    """Return the longest pause of the stream in the recorded terminal, in seconds."""
    (pause_s,) = re.findall(r"longest pause ([\d.]+) s", RECORDING.read_text(encoding="utf-8"))
    return float(pause_s)


def results_figures() -> dict[str, str]:
    """Return the text of each marked place of the page of results."""
    readme = readme_figures()
    names = ("cpu", "cpu-run", "goodput", "goodput-aggregated", "ttft", "ttft-aggregated")
    figures = {name: readme[name] for name in names}
    long_prompts, short_prompts = LOADS_OF_RATIO
    for name, topology, load in (
        ("short-split", "2P2D", short_prompts),
        ("short-aggregated", "4A", short_prompts),
        ("long-split", "2P2D", long_prompts),
        ("long-one-prefill", "1P3D", long_prompts),
    ):
        figures[name] = f"{mean_goodput(four_gpus_cell(topology, *load)):.0f} %"
    return figures


def open_loop_run(name: str) -> dict[str, Any]:
    """Return an open-loop run on two GPUs."""
    (path,) = RESULTS.glob(f"open-loop-*-2gpu-{name}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def four_gpus_cell(
    topology: str, input_tokens: int, output_tokens: int, rate: float
) -> dict[str, Any]:
    """Return what the open-loop run on four GPUs measured with a load.

    Raises:
        KeyError: the run has no such load.
    """
    run = json.loads((RESULTS / "open-loop-2026-11-22.json").read_text(encoding="utf-8"))
    wanted = (topology, input_tokens, output_tokens, rate)
    names = ("topology", "input_tokens", "output_tokens", "requests_per_s")
    for cell in run["cells"]:
        if tuple(cell[name] for name in names) == wanted:
            return dict(cell)
    raise KeyError(wanted)


def open_loop_cell(name: str, topology: str, rate: float) -> dict[str, Any]:
    """Return what a run measured with prompts of 8,192 tokens and answers of 256.

    Raises:
        KeyError: the run has no such load.
    """
    wanted = {
        "topology": topology,
        "input_tokens": 8192,
        "output_tokens": 256,
        "requests_per_s": rate,
    }
    for cell in open_loop_run(name)["cells"]:
        if all(cell[key] == value for key, value in wanted.items()):
            return dict(cell)
    raise KeyError((name, topology, rate))


def goodput(cell: dict[str, Any]) -> float:
    """Return the percentage of requests with a first token within 2 s and no gap above 100 ms."""
    return float(cell["goodput_percent"]["ttft_2s_gap_100ms"])


def mean_goodput(cell: dict[str, Any]) -> float:
    """Return the percentage of requests with a first token within 2 s and 20 ms per token."""
    return float(cell["goodput_percent"]["ttft_2s_tpot_20ms"])


def open_loop_rows() -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the first columns of each row of the open-loop tables, and its measurements."""
    for rate in (2.0, 4.0):
        for row in TWO_GPUS:
            run = open_loop_run(row.file)
            if rate not in {cell["requests_per_s"] for cell in run["cells"]}:
                continue
            release, _, _ = run["versions"]["vllm"].rpartition(".")
            cell = open_loop_cell(row.file, row.topology, rate)
            yield [f"{rate:g}", row.title, release], cell


def open_loop_table() -> str:
    """Return a table of the open-loop runs on two GPUs."""
    head = [
        "requests/s",
        "deployment",
        "vLLM",
        "TTFT p50 / p99",
        "TPOT p50 / p90",
        "worst gap p50 / p99",
        "TPOT ≤ 20",
        "gap ≤ 100",
    ]
    lines = [head, ["---"] * len(head)]
    for first_cells, cell in open_loop_rows():
        ttft = cell["ttft_ms"]
        tpot = cell["tpot_ms"]
        worst_gap = cell["worst_gap_ms"]
        lines.append(
            [
                *first_cells,
                f"{ttft['p50']:,.0f} / {ttft['p99']:,.0f}",
                f"{tpot['p50']:,.1f} / {tpot['p90']:,.1f}",
                f"{worst_gap['p50']:,.0f} / {worst_gap['p99']:,.0f}",
                f"{cell['goodput_percent']['ttft_2s_tpot_20ms']:.0f} %",
                f"{goodput(cell):.0f} %",
            ]
        )
    return markdown(lines)


def kv_transfer_table() -> str:
    """Return a table of the phases of our own pairs in the open-loop runs on two GPUs."""
    names = ("kv_transfer.post", "kv_transfer.read", "kv_transfer.notice", "prefill", "submit")
    head = ["requests/s", "deployment", "vLLM", "`kv_transfer` p50 / p99"]
    head += [f"`{name}`" for name in names]
    lines = [head, ["---"] * len(head)]
    for first_cells, cell in open_loop_rows():
        phases = cell.get("phase_ms", {})
        if not phases.get("kv_transfer.post"):
            continue  # not split, or vLLM's own servers
        kv_transfer = phases["kv_transfer"]
        medians = [f"{phases[name]['p50']:.1f}" for name in names]
        lines.append(
            [*first_cells, f"{kv_transfer['p50']:.1f} / {kv_transfer['p99']:.1f}", *medians]
        )
    return markdown(lines)


def ratio_table() -> str:
    """Return a table with the ratios ours / Dynamo of every comparison of the newest day."""
    lines = [["metric", "point", "ours / Dynamo", "target", ""], ["---"] * 5]
    for bar in BARS:
        ratios = []
        for run in beside_dynamo():
            ours = median_of(run["runs"], bar.point, "ours", bar.measure)
            theirs = median_of(run["runs"], bar.point, bar.against, bar.measure)
            if ours is not None and theirs:
                ratios.append(ours / theirs)
        if not ratios:
            continue
        missed = [ratio for ratio in ratios if ratio > bar.most]
        outcome = f"**missed** in {len(missed)} of {len(ratios)}" if missed else "reached"
        against = "" if bar.against == "dynamo fastokens" else " (Dynamo's default tokenizer)"
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append([bar.what + against, f"`{bar.point}`", shown, f"{bar.most:g}", outcome])
    return markdown(lines)


def point_table() -> str:
    """Return a table with the medians of the newest comparison that measured the most."""
    runs = fullest()["runs"]
    names = {
        "tokens/s": "tokens/s",
        "TTFT50": "TTFT p50, ms",
        "ITL99": "ITL p99, ms",
        "fe/1k": "frontend, µs/token",
        "fe/req": "frontend, ms/request",
        "work/1k": "workers, µs/token",
        "nats/1k": "NATS, µs/token",
        "fe MiB": "frontend, MiB",
    }
    measures = {names[name]: measure for name, _, measure in COLUMNS if name in names}
    head = ["point", "side", *measures, "events per token"]
    lines = [head, ["---"] * len(head)]
    for point, side in dict.fromkeys((run["point"], run["side"]) for run in runs):
        cells = []
        for measure in measures.values():
            value = median_of(runs, point, side, measure)
            if value is None:
                value = 0.0
            cells.append(f"{value:,.0f}" if value >= 100 else f"{value:.1f}")
        events = _events_per_token(runs, point, side)
        lines.append([f"`{point}`", side, *cells, f"{events:.2f}"])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """Return a table, between the lines of a marked place."""
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_figures(text: str, figures: dict[str, str]) -> str:
    """Return a page's text with figures in its marked places."""
    for name, value in figures.items():
        text, count = re.subn(
            rf"(<!-- {name} -->).*?(<!-- / -->)", rf"\g<1>{value}\g<2>", text, flags=re.DOTALL
        )
        if not count:
            raise SystemExit(f"figures: no place is marked {name}")
    return text


@contextmanager
def chart(name: str, theme: str, height: float) -> Iterator[tuple[Axes, Colors]]:
    """Yield axes in the colors of a theme, and save the chart."""
    colors = THEMES[theme]
    rcParams["svg.fonttype"] = "none"
    rcParams["svg.hashsalt"] = name  # equal charts get equal files
    rcParams["font.family"] = "sans-serif"
    rcParams["font.size"] = 11
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(colors=colors["dim"], length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    yield axes, colors
    without_date = {"Date": None, "Creator": None}
    figure.savefig(IMAGES / f"{name}-{theme}.svg", transparent=True, metadata=without_date)


def head(axes: Axes, colors: Colors, title: str, subtitle: str, *, columns: int) -> None:
    """Write what a chart shows, and of which machine and model, above its legend."""
    axes.set_title(title, color=colors["ink"], loc="left", pad=44)
    axes.annotate(
        subtitle,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 30),
        textcoords="offset points",
        color=colors["dim"],
        fontsize=9.5,
    )
    axes.legend(
        frameon=False,
        labelcolor=colors["ink"],
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
    )


def draw_cpu(theme: str) -> None:
    """Draw the frontend's CPU time per token beside Dynamo's."""
    runs = fullest()["runs"]
    pairs = {}
    for point, label in POINTS.items():
        pair = comparable(runs, point)
        if pair:
            pairs[label] = pair
    sides = {"dynamo_trtllm": "accent", "NVIDIA Dynamo": "soft"}
    with chart("cpu", theme, 2.9) as (axes, colors):
        for row, (side, color) in enumerate(sides.items()):
            places = [place + row * 0.36 for place in range(len(pairs))]
            lengths = [pair[side] for pair in pairs.values()]
            bars = axes.barh(places, lengths, 0.34, color=colors[color], label=side)
            axes.bar_label(bars, fmt="%.0f", padding=4, color=colors["ink"])
        axes.set_yticks([place + 0.18 for place in range(len(pairs))], list(pairs))
        axes.invert_yaxis()
        axes.set_xticks([])
        title = "CPU time of the frontend per token, in µs: less is better"
        subtitle = (
            "two of 16 cores, mock engines with a step every 5.7 ms, Dynamo 1.6.1, both over NATS"
        )
        head(axes, colors, title, subtitle, columns=2)


def draw_bars(axes: Axes, colors: Colors, series: dict[str, list[float]], form: str) -> None:
    """Draw a group of three bars for each load.

    Args:
        axes: where to draw.
        colors: the colors of the theme.
        series: the values of each label, one for each load.
        form: format of the values.
    """
    for column, (label, heights) in enumerate(series.items()):
        color = colors[("soft", "line", "accent")[column]]
        places = [place + column * 0.26 for place in range(len(heights))]
        bars = axes.bar(places, heights, 0.24, color=color, label=label)
        axes.bar_label(bars, fmt=form, padding=2, color=colors["ink"])
    axes.set_yticks([])
    axes.margins(y=0.12)


def draw_goodput(theme: str) -> None:
    """Draw how many requests keep the limits, by deployment and rate, on two GPUs."""
    series = {
        label: [goodput(open_loop_cell(name, topology, rate)) for rate in (2.0, 4.0)]
        for label, (name, topology) in BARS_OF_GOODPUT.items()
    }
    title = "Requests with a first token within 2 s and no gap above 100 ms, in %"
    draw_two_gpus("goodput", theme, series, title)


def draw_ttft(theme: str) -> None:
    """Draw the time to first token, by deployment and rate, on two GPUs."""
    series = {
        label: [open_loop_cell(name, topology, rate)["ttft_ms"]["p50"] for rate in (2.0, 4.0)]
        for label, (name, topology) in BARS_OF_GOODPUT.items()
    }
    draw_two_gpus("ttft", theme, series, "Median time to first token, in ms: less is better")


def draw_two_gpus(name: str, theme: str, series: dict[str, list[float]], title: str) -> None:
    """Draw a chart of the open-loop runs on two GPUs, with a group of bars for each rate."""
    with chart(name, theme, 3.5) as (axes, colors):
        draw_bars(axes, colors, series, "%.0f")
        loads = [f"8,192 / 256 tokens\n{rate} requests/s" for rate in (2, 4)]
        axes.set_xticks([place + 0.26 for place in range(len(loads))], loads)
        subtitle = (
            "two H200, vLLM 0.24, gpt-oss-120b's architecture with random weights, one run each"
        )
        head(axes, colors, title, subtitle, columns=3)


def draw_ratio(theme: str) -> None:
    """Draw how many requests keep a mean time per token, by deployment and load, on four GPUs."""
    series = {
        label: [mean_goodput(four_gpus_cell(topology, *load)) for load in LOADS_OF_RATIO]
        for label, topology in BARS_OF_RATIO.items()
    }
    with chart("ratio", theme, 3.5) as (axes, colors):
        draw_bars(axes, colors, series, "%.0f")
        names = [
            f"{tokens_in:,} / {tokens_out:,} tokens\n{rate:g} requests/s"
            for tokens_in, tokens_out, rate in LOADS_OF_RATIO
        ]
        axes.set_xticks([place + 0.26 for place in range(len(names))], names)
        title = "Requests with a first token within 2 s and at most 20 ms per token, in %"
        subtitle = (
            "four H200, vLLM 0.24 with blocks of 16, the same model, one run each, 2026-11-22"
        )
        head(axes, colors, title, subtitle, columns=3)


def draw_failover(theme: str) -> None:
    """Draw when the text of a stream arrived whose decode worker was killed."""
    failover = results("failover", "failover")[0]
    killed_s = failover["stream"]["killed_s"]
    times, characters = arrivals(failover["stream"]["events"])
    num_before = len([seconds for seconds in times if seconds <= killed_s])
    line = {"where": "post", "linewidth": 2.5}
    with chart("failover", theme, 3.2) as (axes, colors):
        undisturbed = arrivals(failover["reference"]["events"])
        axes.step(*undisturbed, where="post", color=colors["soft"], label="undisturbed")
        before = (times[:num_before], characters[:num_before])
        axes.step(*before, **line, color=colors["line"], label="first worker")
        # The pause belongs to the second worker's part.
        after = (times[num_before - 1 :], characters[num_before - 1 :])
        axes.step(*after, **line, color=colors["accent"], label="second worker")
        axes.axvline(killed_s, color=colors["ink"], linestyle="--", linewidth=1.2)
        axes.annotate(
            f"kill -9 of the decode worker\n{failover['pause_s']:.1f} s until another one"
            " continues",
            (killed_s + failover["pause_s"] / 2, characters[num_before - 1]),
            xytext=(0, 6),
            textcoords="offset points",
            color=colors["ink"],
            horizontalalignment="center",
        )
        axes.set_xlabel("seconds since the request", color=colors["dim"])
        axes.set_ylabel("characters of the answer", color=colors["dim"])
        title = "One stream, as its client saw it"
        subtitle = "torch engine on two CPU cores, tiny-gpt-oss; both texts are equal"
        head(axes, colors, title, subtitle, columns=3)


def arrivals(events: list[tuple[float, str]]) -> tuple[list[float], list[int]]:
    """Return when the text of a stream arrived, and how many characters had arrived by then."""
    times = [seconds for seconds, _ in events]
    return times, list(itertools.accumulate(len(text) for _, text in events))


def draw_architecture(theme: str) -> None:
    """Write scripts/architecture.svg in the colors of a theme."""
    text = (ROOT / "scripts" / "architecture.svg").read_text(encoding="utf-8")
    for name, color in THEMES[theme].items():
        text = text.replace(f"@{name}", color)
    (IMAGES / f"architecture-{theme}.svg").write_text(text, encoding="utf-8")


def pages() -> dict[Path, dict[str, str]]:
    """Return the figures of each page, by the names of their marked places."""
    return {
        README: readme_figures(),
        ROOT / "docs" / "results.md": results_figures(),
        ROOT / "docs" / "performance-gpu.md": {
            "open-loop": open_loop_table(),
            "kv-transfer": kv_transfer_table(),
        },
        ROOT / "docs" / "performance.md": {
            "dynamo-ratios": ratio_table(),
            "dynamo-points": point_table(),
        },
    }


DRAWINGS = (draw_architecture, draw_cpu, draw_goodput, draw_ttft, draw_ratio, draw_failover)


def main() -> None:
    """Write all pictures, and the figures of README and docs."""
    IMAGES.mkdir(exist_ok=True)
    for theme in THEMES:
        for draw in DRAWINGS:
            draw(theme)
    for page, figures in pages().items():
        text = page.read_text(encoding="utf-8")
        page.write_text(with_figures(text, figures), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Formats a run as one self-contained HTML page with tables and charts."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from dynamo_trtllm.protocol.counted import counted

from . import plots
from .plots import Series
from .result import METRICS, Run, Spread, Summary, summary

_CSS = """
body {
  font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #111;
}
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } small { color: #555; }
.bad { background: #fde8e0; padding: .3rem .6rem; } img { max-width: 100%; height: auto; }
figure { margin: 1rem 0; break-inside: avoid; } .wide { overflow-x: auto; }
@media print { body { margin: 0; max-width: none; } }
"""
_LABELS = {
    "output_tokens_per_s": "output tokens/s",
    "steady_output_tokens_per_s": "output tokens/s, steady state",
    "output_tokens_per_s_per_gpu": "output tokens/s per GPU",
    "output_tokens_per_s_per_user": "output tokens/s per user",
    "requests_per_s": "requests/s",
    "goodput_requests_per_s": "requests/s that met the goals (goodput)",
    "good_share": "share of requests that met the goals",
    "error_share": "share of failed requests",
}


def report(run: Run, series: Sequence[Series], command: str) -> str:
    """Return the HTML page.

    Args:
        run: the run.
        series: the run and, for a comparison, an earlier run.
        command: the command line, shown in the report.
    """
    title = f"{run.shape.name}: {run.model}, {run.shape.isl} tokens in, {run.shape.osl} out"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        (
            f"<p>{html.escape(run.began_at)}, {html.escape(run.url)}, load by"
            f" {html.escape(run.driver)}. Values are medians of the repetitions, with the range in"
            " small print.</p>"
        ),
        *(f'<p class="bad">{html.escape(warning)}</p>' for warning in warnings(run)),
        "<h2>Results</h2>",
        _table(run),
    ]
    if len(series) > 1:
        parts += [
            f"<h2>Compared with the run of {html.escape(series[1].run.began_at)}</h2>",
            _ratios(summary(run), summary(series[1].run)),
        ]
    for heading, picture in (
        ("Throughput", plots.throughput(series)),
        ("Latency", plots.latency(series)),
        ("Before the first token", plots.phases(series)),
        ("Over time", plots.timeline(series[0])),
    ):
        if picture is not None:
            parts += [f"<h2>{heading}</h2>", _picture(picture, heading)]
    parts += ["<h2>How it was measured</h2>", _facts(run, command)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta'
        f' charset="utf-8"><title>{html.escape(title)}</title><link rel="icon"'
        f' href="data:,"><style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def warnings(run: Run) -> list[str]:
    """Return a sentence for each reason not to trust a figure."""
    found = []
    for point in run.points:
        where = f"{str(point.level).capitalize()}, repetition {point.repetition}: "
        figures = point.figures
        if figures["errors"]:
            listed = ", ".join(
                f"{code} {counted(count, 'time')}"
                for code, count in sorted(figures["errors"].items())
            )
            num_failed = sum(figures["errors"].values())
            found.append(f"{where}{counted(num_failed, 'request')} failed ({listed}).")
        if figures["wrong_length"]:
            found.append(
                f"{where}{counted(figures['wrong_length'], 'answer')} did not have"
                f" {run.shape.osl} tokens."
            )
        if figures["ok"] and figures["events_per_token"] < 0.95:
            per_token = f"{figures['events_per_token']:.2f} stream events per token"
            found.append(
                f"{where}{per_token}: some events carried several tokens, so ITL is measured"
                " between events."
            )
        if figures.get("client_cores", 0.0) > 0.9:
            found.append(
                f"{where}a client process was the bottleneck: the server may be faster than this."
            )
        if point.steady is None and point.level.concurrency:
            found.append(
                f"{where}too few requests for a steady state; send more than twice the concurrency."
            )
    return found


def _table(run: Run) -> str:
    found = summary(run)
    head = "".join(f"<th>{level.value:g}</th>" for level in found)
    names = [name for name in METRICS if any(name in row for row in found.values())]
    rows = ""
    for name in names:
        cells = "".join(_cell(row.get(name)) for row in found.values())
        rows += f"<tr><td>{html.escape(label(name))}</td>{cells}</tr>\n"
    axis = run.shape.level_name.replace("_", " ")
    return f'<div class="wide"><table>\n<tr><th>{axis}</th>{head}</tr>\n{rows}</table></div>'


def label(metric: str) -> str:
    """Return the name of a metric in the table."""
    if metric in _LABELS:
        return _LABELS[metric]
    name, quantile, unit = metric.split("_")
    return f"{name.upper() if name != 'e2e' else 'whole request'} {quantile} ({unit})"


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "<td>&ndash;</td>"
    span = (
        ""
        if spread.low == spread.high
        else f" <small>{spread.low:.4g} to {spread.high:.4g}</small>"
    )
    return f"<td>{spread.median:.4g}{span}</td>"


def _ratios(found: Summary, other: Summary) -> str:
    both = [level for level in found if level in other]
    if not both:
        return "<p>The two runs have no concurrency or request rate in common.</p>"
    head = "".join(f"<th>{level.value:g}</th>" for level in both)
    rows = []
    for name in METRICS:
        cells = [_ratio(found[level].get(name), other[level].get(name)) for level in both]
        if any(cells):
            shown = "".join(f"<td>{cell or '&ndash;'}</td>" for cell in cells)
            rows.append(f"<tr><td>{html.escape(label(name))}</td>{shown}</tr>\n")
    return f"<table>\n<tr><th>this run / earlier</th>{head}</tr>\n{''.join(rows)}</table>"


def _ratio(mine: Spread | None, theirs: Spread | None) -> str:
    return (
        f"{mine.median / theirs.median:.3f}"
        if mine is not None and theirs is not None and theirs.median
        else ""
    )


def _picture(svg: str, text: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<figure><img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{data}"></figure>'
    )


def _facts(run: Run, command: str) -> str:
    shape = run.shape
    facts: Mapping[str, object] = {
        "command": command,
        "requests per point": ", ".join(
            f"{shape.requests_at(level)} at {level}" for level in summary(run)
        ),
        "warm-up requests": ", ".join(str(shape.warmup_at(level)) for level in summary(run)),
        "goals of a good request": ", ".join(
            f"{name} {goal:g} ms" for name, goal in run.goals_ms.items()
        )
        or "none (--goodput)",
        "repetitions": max((point.repetition for point in run.points), default=0),
        "prompt tokens, as the server counts": ", ".join(
            f"{p.figures['prompt_tokens']:.0f}" for p in run.points
        ),
        "of them cached": ", ".join(f"{p.figures['cached_tokens']:.0f}" for p in run.points),
        "GPUs": run.gpus if run.gpus is not None else "not given (--gpus)",
        **run.machine,
    }
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>\n"
        for name, value in facts.items()
    )
    return f"<table>\n{rows}</table>"

"""The frontend's own account of where requests spent their time."""

from __future__ import annotations

import re

from benchmarks.chaos.scrape import fetch

_LINE = re.compile(r"^dynamo_trtllm_phase_seconds_(sum|count)\{([^}]*)\} (\S+)$", re.M)
_PHASE = re.compile(r'phase="([^"]+)"')


def phase_split(url: str) -> dict[str, tuple[float, float]]:
    """Return by phase: seconds of all requests so far, and their number. Empty if the server has no metrics."""
    try:
        return parse(fetch(f"{url}/metrics").decode())
    except OSError:
        return {}


def parse(text: str) -> dict[str, tuple[float, float]]:
    """Of the Prometheus text format, over all models."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for kind, labels, value in _LINE.findall(text):
        if phase := _PHASE.search(labels):
            kept = sums if kind == "sum" else counts
            kept[phase[1]] = kept.get(phase[1], 0.0) + float(value)
    return {name: (seconds, counts.get(name, 0.0)) for name, seconds in sums.items()}

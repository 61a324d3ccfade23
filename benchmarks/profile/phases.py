"""Where requests spent their time, as the server's own histogram of phases says: read before and after a point."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_NAME = "dynamo_trtllm_phase_seconds"

Totals = dict[str, tuple[float, float]]  # by phase: seconds, requests


def read_totals(url: str) -> Totals:
    """Empty for a server that has no such metrics."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/metrics", timeout=10) as answer:
            return totals(answer.read().decode())
    except (urllib.error.URLError, OSError, ValueError):
        return {}


def totals(text: str) -> Totals:
    """Of a Prometheus text, all models together. Raises ValueError for what is none."""
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (f"{_NAME}_sum", f"{_NAME}_count"):
                both = found.setdefault(sample.labels["phase"], [0.0, 0.0])
                both[sample.name.endswith("_count")] += sample.value
    return {phase: (seconds, count) for phase, (seconds, count) in found.items()}


def means(before: Totals, after: Totals) -> dict[str, float]:
    """Mean seconds per request between two readings."""
    found = {}
    for phase, (seconds, count) in after.items():
        seconds_before, count_before = before.get(phase, (0.0, 0.0))
        if count > count_before:
            found[phase] = (seconds - seconds_before) / (count - count_before)
    return found

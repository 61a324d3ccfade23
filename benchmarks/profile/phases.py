"""Reads the mean time of requests per phase from the server's metrics."""

from __future__ import annotations

import urllib.error

from prometheus_client.parser import text_string_to_metric_families

from ..credentials import open_url

_NAME = "dynamo_trtllm_phase_seconds"
_AFTER_DECODE_BEGAN = frozenset({"decode_wait", "decode", "migration", "respond"})

Totals = dict[str, tuple[float, float]]  # by phase: seconds, requests


def read_totals(url: str) -> Totals:
    """Return the totals by phase so far. Empty if the server has no such metrics."""
    try:
        with open_url(url.rstrip("/") + "/metrics", 10) as answer:
            return totals(answer.read().decode())
    except (urllib.error.URLError, OSError, ValueError):
        return {}


def totals(text: str) -> Totals:
    """Return the totals by phase from metrics in the Prometheus text format, summed over models.

    Raise ValueError.
    """
    totals_by_phase: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (f"{_NAME}_sum", f"{_NAME}_count"):
                both = totals_by_phase.setdefault(sample.labels["phase"], [0.0, 0.0])
                both[sample.name.endswith("_count")] += sample.value
    return {phase: (seconds, count) for phase, (seconds, count) in totals_by_phase.items()}


def means(before: Totals, after: Totals) -> dict[str, float]:
    """Return the mean seconds per request between two readings, of the phases before the decode
    worker generates tokens. A client may have its first token before the KV transfer.
    """
    requests = _requests(after) - _requests(before)
    totals_by_phase = {}
    for phase, (seconds, count) in after.items():
        seconds_before, count_before = before.get(phase, (0.0, 0.0))
        if count > count_before and phase not in _AFTER_DECODE_BEGAN:
            totals_by_phase[phase] = (seconds - seconds_before) / (requests or count - count_before)
    return totals_by_phase


def _requests(totals: Totals) -> float:
    """Return the number of requests, each of which was received. 0: an older server, which does not
    report it.
    """
    return totals.get("receive", (0.0, 0.0))[1]

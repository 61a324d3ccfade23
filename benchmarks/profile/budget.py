"""Limits that a run must meet: `output_tokens_per_s=1000` as a minimum, `ttft_p99_ms=500` as a
maximum.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import msgspec

from dynamo_trtllm.protocol.number_text import parse_float

from .result import METRICS, Summary


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for the median of a metric at every level of the load."""

    metric: str
    value: float
    is_floor: bool


def limit(text: str, *, is_floor: bool) -> Limit:
    """Parse METRIC=VALUE. Raise ValueError if it is invalid."""
    metric, equals, value = text.partition("=")
    if metric not in METRICS:
        near = difflib.get_close_matches(metric, METRICS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Metrics: {', '.join(METRICS)}."
        raise ValueError(f"no metric {metric!r}. {hint}")
    try:
        number = parse_float(value)
    except ValueError as exc:
        raise ValueError(
            f"{text!r} is not METRIC=VALUE" + ("" if equals else ": = is missing")
        ) from exc
    return Limit(metric=metric, value=number, is_floor=is_floor)


def missed(limits: Sequence[Limit], found: Summary) -> list[str]:
    """Return a line for each missed limit. A metric without values misses its limit."""
    lines = []
    for bound in limits:
        for level, row in found.items():
            spread = row.get(bound.metric)
            what = f"{bound.metric} at {level}"
            if spread is None:
                lines.append(f"{what} was not measured")
            elif (spread.median < bound.value) if bound.is_floor else (spread.median > bound.value):
                side = "under" if bound.is_floor else "over"
                lines.append(f"{what} is {spread.median:.6g}, {side} {bound.value:.6g}")
    return lines

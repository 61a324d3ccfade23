"""Counts the requests that met goals for their times: goodput.

Goals are written as vLLM's `bench serve --goodput` takes them: `ttft:2000 tpot:20`, in
milliseconds.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence

from dynamo_trtllm.protocol.number_text import parse_float

from ..stream import RequestRecord


def _ttft_s(record: RequestRecord) -> float:
    return math.inf if record.first_s is None else record.first_s - record.planned_s


def _tpot_s(record: RequestRecord) -> float:
    """Return the mean time of each token after the first."""
    if record.first_s is None or record.last_s is None:
        return math.inf
    return (record.last_s - record.first_s) / max(1, record.output_tokens - 1)


def _whole_s(record: RequestRecord) -> float:
    return record.end_s - record.planned_s


def _longest_gap_s(record: RequestRecord) -> float:
    return max(record.gaps_s, default=0.0)


TIMES: Mapping[str, Callable[[RequestRecord], float]] = {
    "ttft": _ttft_s,
    "tpot": _tpot_s,
    "e2el": _whole_s,
    "gap": _longest_gap_s,
}


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """Return the goals in milliseconds by name. Raise ValueError for a word that is none."""
    goals = {}
    for word in words:
        name, _, text = word.partition(":")
        if name not in TIMES:
            near = difflib.get_close_matches(name, TIMES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Goals: {', '.join(TIMES)}."
            raise ValueError(f"--goodput has no goal {name!r}. {hint}")
        try:
            goals[name] = parse_float(text)
        except ValueError:
            raise ValueError(f"--goodput {word!r} is not {name}:MILLISECONDS") from None
        if not 0 < goals[name] < math.inf:
            raise ValueError(f"--goodput {word!r}: the time must be above 0")
    return goals


def count_good(records: Sequence[RequestRecord], goals_ms: Mapping[str, float]) -> int | None:
    """Return how many requests succeeded and met all goals. None: there are no goals."""
    if not goals_ms:
        return None
    return sum(
        record.is_ok and all(TIMES[name](record) * 1e3 <= goal for name, goal in goals_ms.items())
        for record in records
    )

"""Finds the steady state of a closed-loop run: the time in which every lane was busy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..stream import RequestRecord


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """Rates during the steady state."""

    begin_s: float  # on the client's clock
    end_s: float
    output_tokens_per_s: float
    requests_per_s: float  # requests that ended during it


def steady(records: Sequence[RequestRecord], concurrency: int) -> Steady | None:
    """Return the rates between the first token and the last sent request.

    None if no lane sent a second request.
    """
    starts = sorted(record.planned_s for record in records)
    firsts = sorted(record.first_s for record in records if record.first_s is not None)
    if len(starts) <= concurrency or len(firsts) <= concurrency:
        return None
    begin_s = firsts[0]
    end_s = starts[-1]
    if end_s <= begin_s:
        return None
    good = [record for record in records if record.is_ok]
    tokens = sum(tokens_between(record, begin_s, end_s) for record in good)
    ended = sum(begin_s <= record.end_s <= end_s for record in good)
    seconds = end_s - begin_s
    return Steady(
        begin_s=begin_s,
        end_s=end_s,
        output_tokens_per_s=tokens / seconds,
        requests_per_s=ended / seconds,
    )


def tokens_between(record: RequestRecord, begin_s: float, end_s: float) -> float:
    """Return the output tokens of a request in a time span.

    Tokens after the first are taken as evenly spaced.
    """
    if record.first_s is None or not record.output_tokens:
        return 0.0
    if record.output_tokens == 1 or record.last_s is None or record.last_s <= record.first_s:
        return float(record.output_tokens) if begin_s <= record.first_s < end_s else 0.0
    per_s = (record.output_tokens - 1) / (record.last_s - record.first_s)
    within_s = min(end_s, record.last_s) - max(begin_s, record.first_s)
    return max(0.0, within_s) * per_s + float(begin_s <= record.first_s < end_s)

"""What became of each request of a load: pure, from the client's records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.stream import Record

_CONNECTION = ("connect", "cut", "no_end")  # the client's errors: not connected, cut off, ended before the end event


class Kind(StrEnum):
    """What became of one request."""

    RIGHT = "right"  # whole, and what an undisturbed run says
    NAMED_ERROR = "named_error"  # an error of the API's form with a code, as status or event
    CUT = "cut"  # its frontend died
    WRONG = "wrong"  # other text or another length, also before an error
    LOST = "lost"  # neither an end nor an error that can be read
    HUNG = "hung"  # silent for longer than the bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """By what to judge. Seconds and tokens."""

    texts: Sequence[str]  # undisturbed answers; request N had prompt N-1, and so on around
    osl: int
    hung_s: float  # longest silence
    frontend_dies: bool = False  # connections may break


@dataclass(slots=True, kw_only=True)
class Verdict:
    """One fault's row. `notes` explains what is not right."""

    fault: str
    sent: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    leaked: int = 0
    early: int = 0  # named errors before a first token
    replaced: int = 0  # processes that ended though the fault was not theirs
    silence_s: float = 0.0  # the longest that a client waited for a next sign
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """What no fault excuses did not happen."""
        return not (
            self.leaked or self.replaced or any(self.counts[kind] for kind in (Kind.WRONG, Kind.LOST, Kind.HUNG))
        )

    def row(self) -> dict[str, str | int]:
        """As --json tells it."""
        counts: dict[str, str | int] = {kind.value: self.counts[kind] for kind in Kind}
        return {"fault": self.fault, "sent": self.sent, **counts, "leaked": self.leaked}

    def replace(self, names: Iterable[str]) -> None:
        for name in names:
            self.replaced += 1
            self.notes.append(f"replaced: {name}, though the fault was not its")

    def leak(self, what: Iterable[str]) -> None:
        for each in what:
            self.leaked += 1
            self.notes.append(f"leaked: {each}")


def judged(fault: str, records: Sequence[Record], rules: Rules) -> Verdict:
    """All requests of one load."""
    verdict = Verdict(fault=fault, sent=len(records))
    reasons: Counter[str] = Counter()
    for record in records:
        kind = kind_of(record, rules)
        verdict.silence_s = max(verdict.silence_s, longest_silence_s(record))
        verdict.counts[kind] += 1
        verdict.early += kind is Kind.NAMED_ERROR and record.first_s is None
        if kind is not Kind.RIGHT:
            reasons[_reason(record, kind)] += 1
    verdict.notes += [f"{reason}: {count}" for reason, count in sorted(reasons.items())]
    return verdict


def kind_of(record: Record, rules: Rules) -> Kind:
    expected = rules.texts[(record.index - 1) % len(rules.texts)]
    text = record.text or ""
    if record.error == "timeout" or longest_silence_s(record) > rules.hung_s:
        return Kind.HUNG
    if record.is_ok:
        is_whole = record.finish == "length" and record.output_tokens == rules.osl
        return Kind.RIGHT if is_whole and text == expected else Kind.WRONG
    if not expected.startswith(text):
        return Kind.WRONG
    if record.error in _CONNECTION:
        return Kind.CUT if rules.frontend_dies else Kind.LOST
    if record.error == "bad_http" or record.error.startswith("http_"):
        return Kind.LOST
    return Kind.NAMED_ERROR


def longest_silence_s(record: Record) -> float:
    """Without text, from when it was sent to its end."""
    if record.first_s is None or record.last_s is None:
        return record.end_s - record.planned_s
    return max(record.first_s - record.planned_s, record.end_s - record.last_s, *record.gaps_s)


def _reason(record: Record, kind: Kind) -> str:
    when = "before its first token" if record.first_s is None else f"after {record.events} pieces"
    if kind is Kind.HUNG:
        return f"hung: silent for {longest_silence_s(record):.1f} s"
    if kind is Kind.WRONG:
        return f"wrong: request {record.index} ended {record.error or record.finish} {when}"
    when = "before its first token" if record.first_s is None else "after its first token"
    return f"{kind}: {record.error} {when}"

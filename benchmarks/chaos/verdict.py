"""Classifies the requests of a load by outcome, from the client's records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..stream import RequestRecord

# the client's errors: not connected, cut off, ended before the end event
_CONNECTION = ("connect", "cut", "no_end")


class Outcome(StrEnum):
    """How one request ended."""

    RIGHT = "right"  # complete, with the text of a run without faults
    NAMED_ERROR = "named_error"  # an error of the API with a code, as status or event
    CUT = "cut"  # its frontend died
    WRONG = "wrong"  # another text or length, also before an error
    LOST = "lost"  # neither an end nor a readable error
    HUNG = "hung"  # silent for longer than the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a request must return to be right."""

    # answers of a run without faults; request N has text (N - 1) modulo their number
    texts: Sequence[str]
    osl: int  # tokens per answer
    hung_s: float  # longest silence in seconds
    frontend_dies: bool = False  # connections may break


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The results of one fault. `notes` explains each request that is not right."""

    fault: str
    sent: int = 0
    counts: Counter[Outcome] = field(default_factory=Counter)
    leaked: int = 0
    early_errors: int = 0  # named errors before a first token
    replaced: int = 0  # workers that ended although the fault did not target them
    silence_s: float = 0.0  # longest wait of a client for the next data
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing happened that is wrong under every fault."""
        return not (
            self.leaked
            or self.replaced
            or any(self.counts[outcome] for outcome in (Outcome.WRONG, Outcome.LOST, Outcome.HUNG))
        )

    def row(self) -> dict[str, str | int]:
        """Return the row for --json."""
        counts: dict[str, str | int] = {outcome.value: self.counts[outcome] for outcome in Outcome}
        return {"fault": self.fault, "sent": self.sent, **counts, "leaked": self.leaked}

    def add_replaced(self, names: Iterable[str]) -> None:
        """Count workers that ended although the fault did not target them."""
        for name in names:
            self.replaced += 1
            self.notes.append(f"replaced: {name}, which the fault did not target")

    def add_leaks(self, leaks: Iterable[str]) -> None:
        """Count resources that were not released."""
        for leak in leaks:
            self.leaked += 1
            self.notes.append(f"leaked: {leak}")


def evaluate(fault: str, records: Sequence[RequestRecord], expected: Expected) -> Verdict:
    """Classify all requests of one load and count the outcomes."""
    verdict = Verdict(fault=fault, sent=len(records))
    reasons: Counter[str] = Counter()
    for record in records:
        outcome = classify(record, expected)
        verdict.silence_s = max(verdict.silence_s, longest_silence_s(record))
        verdict.counts[outcome] += 1
        verdict.early_errors += outcome is Outcome.NAMED_ERROR and record.first_s is None
        if outcome is not Outcome.RIGHT:
            reasons[_reason(record, outcome)] += 1
    verdict.notes += [f"{reason}: {count}" for reason, count in sorted(reasons.items())]
    return verdict


def classify(record: RequestRecord, expected: Expected) -> Outcome:
    """Return how the request ended."""
    wanted = expected.texts[(record.index - 1) % len(expected.texts)]
    text = record.text or ""
    if record.error == "timeout" or longest_silence_s(record) > expected.hung_s:
        return Outcome.HUNG
    if record.is_ok:
        is_complete = record.finish == "length" and record.output_tokens == expected.osl
        return Outcome.RIGHT if is_complete and text == wanted else Outcome.WRONG
    if not wanted.startswith(text):
        return Outcome.WRONG
    if record.error in _CONNECTION:
        return Outcome.CUT if expected.frontend_dies else Outcome.LOST
    if record.error == "bad_http" or record.error.startswith("http_"):
        return Outcome.LOST
    return Outcome.NAMED_ERROR


def longest_silence_s(record: RequestRecord) -> float:
    """Return the longest time without text between sending the request and its end, in seconds."""
    if record.first_s is None or record.last_s is None:
        return record.end_s - record.planned_s
    return max(record.first_s - record.planned_s, record.end_s - record.last_s, *record.gaps_s)


def _reason(record: RequestRecord, outcome: Outcome) -> str:
    if outcome is Outcome.HUNG:
        return f"hung: silent for {longest_silence_s(record):.1f} s"
    if outcome is Outcome.WRONG:
        when = (
            "before its first token" if record.first_s is None else f"after {record.events} chunks"
        )
        return f"wrong: request {record.index} ended with {record.error or record.finish} {when}"
    when = "before its first token" if record.first_s is None else "after its first token"
    return f"{outcome}: {record.error} {when}"

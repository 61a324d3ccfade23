"""Which prefill and decode instances were seen to hand KV over, and which are kept apart for now. Pure; owns no clock.

A pair is (prefill, decode), or (None, id) for an instance that does whole requests. Each has a breaker: after some
failures in a row it is open and the pair gets no requests; when its time is over one canary is let through, whose
outcome closes the breaker or opens it for longer. Where canaries run, a new pair gets no requests before its first one,
and only a canary can clear a pair whose answers to a canary were wrong: the right answer to a request is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from dynamo_trtllm.router.view import ModelView

_MOST_DOUBLINGS = 30  # more would overflow, in a pair that fails for days

Pair: TypeAlias = tuple[int | None, int]


class PairState(StrEnum):
    UNTRIED = "untried"
    WORKING = "working"
    FAILING = "failing"  # it failed lately, and still gets requests
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    failures: int = 3  # in a row, until the breaker opens
    open_s: float = 5.0  # doubled each time it opens again
    max_open_s: float = 120.0


@dataclass(slots=True)
class PairStatus:
    """What is known of one pair. Times are seconds of the clock that callers pass."""

    state: PairState = PairState.UNTRIED
    reason: str = ""
    seen_at: float = 0.0  # last outcome
    failures: int = 0  # in a row
    num_openings: int = 0  # since it last worked
    open_until: float = 0.0
    is_wrong: bool = False  # its last answers to a canary were wrong: only a canary can clear it
    is_proven: bool = False  # a canary has passed since it was last wrong
    tried_at: float = 0.0  # while it works without being proven: the last canary, or when it began to work


class PairBreakers:
    """Written by the pipeline (what requests met) and by the canaries; read by placement, health and readiness."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._statuses: dict[Pair, PairStatus] = {}
        self._open: set[Pair] = set()
        self._withheld: set[Pair] = set()  # new pairs that a canary will test

    def withhold(self, pairs: Iterable[Pair]) -> None:
        """Send no requests to those of `pairs` that have no record, until a canary has tested them."""
        self._withheld.update(pair for pair in pairs if pair not in self._statuses)

    def admit(self, pairs: Iterable[Pair]) -> bool:
        """Let requests decide about new pairs whose canary takes long. Return whether any of `pairs` was withheld."""
        overdue = self._withheld.intersection(pairs)
        self._withheld -= overdue
        for pair in overdue:  # from now on it is known, and not withheld again
            self._statuses.setdefault(pair, PairStatus())
        return bool(overdue)

    def record_success(self, pair: Pair, now: float, *, is_probe: bool = False, note: str = "") -> bool:
        """Note that KV was read at the other end, by a request or, with `is_probe`, by a canary that passed.

        `note`: what the canary could not find out, shown as the reason. Return True when the pair did not work before.
        """
        status = self._statuses.get(pair)
        if not is_probe and (pair in self._withheld or (status is not None and status.is_wrong)):
            return False  # it began before the pair was withheld or wrong; whether its answer is right is not known
        status = status or self._statuses.setdefault(pair, PairStatus())
        changed = status.state is not PairState.WORKING
        if changed:
            status.state, status.reason, status.failures, status.num_openings = PairState.WORKING, "", 0, 0
            status.tried_at = now
            self._open.discard(pair)
            self._withheld.discard(pair)
        if is_probe:
            status.is_proven, status.is_wrong, status.reason = True, False, note
        status.seen_at = now
        return changed

    def record_failure(self, pair: Pair, reason: str, now: float, *, is_wrong: bool = False) -> bool:
        """Note a failure. `is_wrong`: the pair gave wrong answers, which opens the breaker at once.

        Return True when this opened the breaker.
        """
        limits, status = self._limits, self._statuses.setdefault(pair, PairStatus())
        status.reason, status.seen_at = reason, now
        self._withheld.discard(pair)
        if is_wrong:
            status.is_wrong, status.is_proven = True, False
        if status.state is PairState.QUARANTINED and now < status.open_until:
            return False  # the call began before the quarantine: each of many such would count as a failed canary
        status.failures += 1
        if not is_wrong and status.failures < limits.failures and status.state is not PairState.QUARANTINED:
            status.state = PairState.FAILING
            return False
        status.state = PairState.QUARANTINED
        status.open_until = now + min(limits.max_open_s, limits.open_s * 2 ** min(status.num_openings, _MOST_DOUBLINGS))
        status.num_openings += 1
        self._open.add(pair)
        return status.num_openings == 1

    def record_unreachable(self, pair: Pair, reason: str, now: float) -> bool:
        """Note that a call was not accepted or lost its connection. Return True when the pair worked before.

        This says nothing about its KV transfers, so the breaker does not count it. The pair is working again when a
        transfer succeeds.
        """
        status = self._statuses.setdefault(pair, PairStatus())
        worked = status.state is PairState.WORKING
        status.seen_at = now
        if status.state is PairState.QUARANTINED:
            status.open_until = max(status.open_until, now + self._limits.open_s)
        else:
            status.state, status.reason = PairState.FAILING, reason
        return worked

    def pairs_with(self, instance_id: int) -> list[Pair]:
        """The pairs of an instance of which something is known."""
        return [pair for pair in self._statuses if instance_id in pair]

    def defer(self, pair: Pair, now: float) -> None:
        """Note that the pair was too busy for a canary, which leaves its state unchanged. A new pair gets requests from
        now on: otherwise workers that stay too busy for a canary would never get any."""
        status = self._statuses.setdefault(pair, PairStatus())
        status.seen_at = status.tried_at = now
        self._withheld.discard(pair)
        if status.state is PairState.QUARANTINED:
            status.open_until = now + self._limits.open_s

    def half_open(self, now: float) -> None:
        """Where no canary decides: pairs whose time is over get requests again, and these decide."""
        self._open -= {pair for pair in self._open if self._statuses[pair].open_until <= now}

    def is_open(self, pair: Pair) -> bool:
        """Whether requests are kept off this pair."""
        return pair in self._open or pair in self._withheld

    @property
    def any_open(self) -> bool:
        """Whether any pair is kept apart: mostly none is, and placement has nothing to look up."""
        return bool(self._open or self._withheld)

    def status(self, pair: Pair) -> PairStatus:
        return self._statuses.get(pair, PairStatus())

    def due(self, pairs: Iterable[Pair], now: float, interval_s: float) -> list[Pair]:
        """Return the pairs that a canary should test now: new and idle pairs, quarantined ones whose time is over, and
        those that work for requests but have not passed a canary."""
        return [pair for pair in pairs if now >= self._due_at(pair, interval_s)]

    def next_due_at(self, pairs: Iterable[Pair], interval_s: float) -> float | None:
        return min((self._due_at(pair, interval_s) for pair in pairs), default=None)

    def _due_at(self, pair: Pair, interval_s: float) -> float:
        status = self._statuses.get(pair)
        if status is None:
            return 0.0
        if status.state is PairState.QUARANTINED:
            return status.open_until
        if status.state is not PairState.WORKING:
            return status.seen_at + min(1.0, interval_s)
        return status.seen_at + interval_s if status.is_proven else status.tried_at + min(1.0, interval_s)

    def keep_only(self, ids: Collection[int]) -> None:
        """Forgets pairs of instances that are gone."""
        gone = [pair for pair in (*self._statuses, *self._withheld) if not all(i is None or i in ids for i in pair)]
        for pair in gone:
            self._statuses.pop(pair, None)
            self._open.discard(pair)
            self._withheld.discard(pair)


def pairs_of(view: ModelView) -> list[Pair]:
    """Every pair of a model that may hand KV over, and every instance that does whole requests."""
    keys = view.keys
    matched = [(p.id, d.id) for p in view.prefill for d in view.decode if keys[p.id] == keys[d.id]]
    return [*matched, *((None, instance.id) for instance in view.aggregated)]


def suspects(breakers: PairBreakers, pairs: Collection[Pair], num_openings: int = 3) -> set[int]:
    """Instances whose every pair's breaker opened this often in a row.

    When that is true of both ends of a pair, and the cause is unknown, only the prefill instance is returned.
    """
    prefills = {prefill for prefill, _ in pairs if prefill is not None}
    decodes = {decode for _, decode in pairs}
    bad = {pair for pair in pairs if breakers.status(pair).num_openings >= num_openings}
    bad_prefills = {p for p in prefills if all(pair in bad for pair in pairs if pair[0] == p)}
    bad_decodes = {d for d in decodes if all(pair in bad for pair in pairs if pair[1] == d)}
    others_work = {pair[1] for pair in pairs if pair[0] is not None and pair[0] not in bad_prefills}
    return bad_prefills | {d for d in bad_decodes if d in others_work or all(p is None for p, o in pairs if o == d)}


def format_pair(pair: Pair) -> str:
    """For people."""
    prefill, decode = pair
    return f"instance {decode:x}" if prefill is None else f"pair {prefill:x} -> {decode:x}"

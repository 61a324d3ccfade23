"""Record how calls and KV transfers end, and say which workers and pairs requests avoid.

Requests and probes record what they see (`FleetHealth`); selection reads it. A worker that did not
accept a call is avoided for a while (`Cooldown`). A pair has a circuit breaker (`PairBreakers`).

After some failures in a row the breaker of a pair opens, and the pair gets no requests. When the
open time is over, one probe is sent. Its outcome closes the breaker, or opens it for longer. In a
frontend with probes, a new pair gets no requests before its first probe. Only a probe can clear a
pair that gave wrong answers, because the right answer to a request is not known. Callers pass the
time.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dynamo_trtllm.frontend.routing.cluster_view import Change, ClusterView, ModelView
from dynamo_trtllm.frontend.routing.pairs import Pair, format_pair
from dynamo_trtllm.frontend.routing.probe_schedule import new_pairs, pairs_of
from dynamo_trtllm.protocol.errors import (
    Disconnected,
    DynamoError,
    WorkerDied,
    is_worker_unavailable,
)

log = logging.getLogger(__name__)

# Limit of the pairs that have a status because they worked for a request. Pairs that failed or were
# probed have a status in any case.
MAX_STATUSES: Final = 1 << 15
_MAX_DOUBLINGS = 30  # prevents an overflow for a pair that fails for days


class PairState(StrEnum):
    UNTRIED = "untried"
    WORKING = "working"
    FAILING = "failing"  # failed recently, and still gets requests
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """The failures that open a breaker, and the time for which it stays open."""

    failures: int = 3  # failures in a row after which the breaker opens
    open_s: float = 5.0  # the first open time; it doubles each time the breaker opens again
    max_open_s: float = 120.0


@dataclass(slots=True)
class PairStatus:
    """The status of one pair. Times are seconds of the callers' clock."""

    state: PairState = PairState.UNTRIED
    reason: str = ""
    seen_at: float = 0.0  # time of the last outcome
    failures: int = 0  # failures in a row
    num_openings: int = 0  # how often the breaker opened since the pair last worked
    open_until: float = 0.0
    # The last answers of the pair to a probe were wrong. Only a probe can clear this.
    is_wrong: bool = False
    is_proven: bool = False  # a probe has passed since the pair was last wrong
    # When the pair began to work, or was last too busy for a probe. Until the pair is proven, its
    # next probe is due soon after this time.
    tried_at: float = 0.0


class PairBreakers:
    """The breakers of all pairs.

    The router and the probes write them; selection, health and readiness read them.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._statuses: dict[Pair, PairStatus] = {}
        self._open: set[Pair] = set()
        self._withheld: set[Pair] = set()  # new pairs that wait for a probe
        # The pairs of each instance in the three collections above, by instance id.
        self._pairs_of: defaultdict[int, set[Pair]] = defaultdict(set)
        # The prefill instances of pairs that get no requests, by id of the decode instance. None:
        # the instance gets no aggregated requests (see `Pair`).
        self.open_partners: dict[int, set[int | None]] = {}
        # No breaker of `_open` becomes half open before this time.
        self._half_open_at = math.inf
        # Each change of `open_partners` replaces this object, so that results can be cached.
        self.revision = object()
        # Pairs whose next probe may be due earlier than before. `PairProbes` empties this set.
        self.rescheduled: set[Pair] = set()

    def withhold(self, pairs: Iterable[Pair]) -> None:
        """Send no requests to the unknown ones of `pairs` until a probe has tested them."""
        for pair in pairs:
            if pair not in self._statuses and pair not in self._withheld:
                self._withheld.add(pair)
                self._index(pair)
                self._update(pair)

    def allow_unprobed(self, view: ModelView) -> None:
        """Let requests test the new pairs of a model, because their probes take long."""
        for pair in self._withheld.intersection(pairs_of(view)):
            self._withheld.discard(pair)
            # A pair with a status is not withheld again.
            self._ensure_status(pair)
            self._update(pair)

    def _ensure_status(self, pair: Pair) -> PairStatus:
        """Return the status of a pair. A pair without a status gets one."""
        status = self._statuses.get(pair)
        if status is None:
            status = PairStatus()
            self._statuses[pair] = status
            self._index(pair)
        return status

    def _index(self, pair: Pair) -> None:
        """Add a pair to the pairs of its instances."""
        for instance_id in pair:
            if instance_id is not None:
                self._pairs_of[instance_id].add(pair)

    def _update(self, pair: Pair) -> None:
        """Update `open_partners` after a change of a pair."""
        prefill, decode = pair
        partners = self.open_partners.setdefault(decode, set())
        is_open = self.is_open(pair)
        if is_open != (prefill in partners):
            self.revision = object()
            if is_open:
                partners.add(prefill)
            else:
                partners.remove(prefill)
        if not partners:
            del self.open_partners[decode]

    def record_success(self, pair: Pair, now: float, *, is_probe: bool = False) -> bool:
        """Record that a KV transfer succeeded, for a request or, with `is_probe`, for a probe.

        Return True if the pair did not work before.
        """
        status = self._statuses.get(pair)
        if not is_probe:
            # The request began before the pair was withheld or wrong, and its answer may be wrong.
            if pair in self._withheld or (status is not None and status.is_wrong):
                return False
            # Thousands of workers have millions of pairs, so not each of them can have a status. A
            # pair without a status gets requests, too.
            if status is None and len(self._statuses) >= MAX_STATUSES:
                return False
        if status is None:
            status = self._ensure_status(pair)
        begins_to_work = status.state is not PairState.WORKING
        if begins_to_work:
            status.state = PairState.WORKING
            status.reason = ""
            status.failures = 0
            status.num_openings = 0
            status.tried_at = now
            self._open.discard(pair)
            self._withheld.discard(pair)
            self._update(pair)
            self.rescheduled.add(pair)
        if is_probe:
            status.is_proven = True
            status.is_wrong = False
        status.seen_at = now
        return begins_to_work

    def record_failure(
        self, pair: Pair, reason: str, now: float, *, is_wrong: bool = False
    ) -> bool:
        """Record a failure.

        With `is_wrong` the pair gave wrong answers, which opens the breaker at once.

        Return True if this opened the breaker for the first time since the pair worked.
        """
        self.rescheduled.add(pair)
        limits = self._limits
        status = self._ensure_status(pair)
        status.reason = reason
        status.seen_at = now
        # If this was the first probe of a new pair, the pair is withheld no longer: from now on,
        # its failures decide whether it gets requests.
        self._withheld.discard(pair)
        self._update(pair)
        if is_wrong:
            status.is_wrong = True
            status.is_proven = False
        was_quarantined = status.state is PairState.QUARANTINED
        if was_quarantined and now < status.open_until:
            # The call began before the quarantine. Such calls may be many, and must not count as
            # failed probes.
            return False
        status.failures += 1
        # A quarantined pair has failed its probe: the breaker opens again.
        opens = is_wrong or was_quarantined or status.failures >= limits.failures
        if not opens:
            status.state = PairState.FAILING
            return False
        status.state = PairState.QUARANTINED
        num_doublings = min(status.num_openings, _MAX_DOUBLINGS)
        status.open_until = now + min(limits.max_open_s, limits.open_s * 2**num_doublings)
        status.num_openings += 1
        self._half_open_at = min(self._half_open_at, status.open_until)
        self._open.add(pair)
        self._update(pair)
        return status.num_openings == 1

    def record_unreachable(self, pair: Pair, reason: str, now: float) -> bool:
        """Record that a call was not accepted or lost its connection.

        Return True if the pair worked before.

        The breaker does not count this, because the failed call says nothing about KV transfers.
        After the next successful transfer, the pair is working again.
        """
        status = self._ensure_status(pair)
        worked = status.state is PairState.WORKING
        status.seen_at = now
        self.rescheduled.add(pair)
        is_open = pair in self._open
        # A half-open breaker waits for the outcome of a KV transfer, so its state stays.
        is_half_open = status.state is PairState.QUARANTINED and not is_open
        if is_open:
            status.open_until = max(status.open_until, now + self._limits.open_s)
        elif not is_half_open:
            status.state = PairState.FAILING
            status.reason = reason
        return worked

    def pairs_with(self, instance_id: int) -> list[Pair]:
        """Return the pairs of an instance that have a status."""
        return [pair for pair in self._pairs_of.get(instance_id, ()) if pair in self._statuses]

    def defer(self, pair: Pair, now: float) -> None:
        """Record that the pair was too busy for a probe, which leaves its state unchanged.

        A new pair gets requests from now on: otherwise workers that are always too busy for a probe
        would get none.
        """
        status = self._ensure_status(pair)
        status.seen_at = now
        status.tried_at = now
        self._withheld.discard(pair)
        self._update(pair)
        if status.state is PairState.QUARANTINED:
            status.open_until = now + self._limits.open_s

    def half_open(self, now: float) -> None:
        """Send requests again to pairs whose open time is over, in a frontend without probes.

        The outcome of these requests decides whether a breaker closes.
        """
        # Each request calls this method, so usually the method does only this comparison.
        if now < self._half_open_at:
            return
        due = [pair for pair in self._open if self._statuses[pair].open_until <= now]
        for pair in due:
            self._open.discard(pair)
            self._update(pair)
        still_open_until = (self._statuses[pair].open_until for pair in self._open)
        self._half_open_at = min(still_open_until, default=math.inf)

    def is_open(self, pair: Pair) -> bool:
        """Return True if this pair gets no requests."""
        return pair in self._open or pair in self._withheld

    def may_be_right(self, pair: Pair) -> bool:
        """Return False if no probe has tested the pair, or if its answers were wrong.

        Aggregated requests avoid a worker if this is False for all of its pairs. Failures of its KV
        transfers do not matter to them.
        """
        return pair not in self._withheld and not self.status(pair).is_wrong

    @property
    def any_open(self) -> bool:
        """True if some pair gets no requests.

        Usually all pairs get requests, and selection can skip the look-ups.
        """
        return bool(self._open or self._withheld)

    @property
    def quarantined(self) -> Collection[Pair]:
        """The pairs whose breaker is open."""
        return self._open

    def status(self, pair: Pair) -> PairStatus:
        return self._statuses.get(pair, PairStatus())

    def due_at(self, pair: Pair, interval_s: float) -> float:
        """Return when the pair is to be probed.

        A new pair is due at once, a quarantined pair after its open time, and an idle pair after
        `interval_s`. A pair that works for requests, but has not passed a probe, is due soon.
        """
        status = self._statuses.get(pair)
        if status is None:
            return 0.0
        if status.state is PairState.QUARANTINED:
            return status.open_until
        soon_s = min(1.0, interval_s)
        if status.state is not PairState.WORKING:
            return status.seen_at + soon_s
        if not status.is_proven:
            return status.tried_at + soon_s
        return status.seen_at + interval_s

    def keep_only(self, ids: Container[int]) -> None:
        """Drop the pairs of instances that are not in `ids`."""
        gone = [instance_id for instance_id in self._pairs_of if instance_id not in ids]
        pairs: list[Pair] = []
        for instance_id in gone:
            pairs += self._pairs_of.pop(instance_id)
        for pair in pairs:
            self._statuses.pop(pair, None)
            self._open.discard(pair)
            self._withheld.discard(pair)
            self.rescheduled.discard(pair)
            self._update(pair)
            for other in pair:
                if other is not None and other in self._pairs_of:
                    self._pairs_of[other].discard(pair)


COOLDOWN_S = 5.0


class Cooldown:
    """The instances that selection avoids for COOLDOWN_S seconds, if there are others.

    `ids` is read per request. It returns the same set object until an instance is added or removed.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._ids: frozenset[int] = frozenset()
        self._next_until = math.inf  # the time at which the next instance is tried again

    def start(self, instance_id: int, now: float) -> None:
        """Avoid an instance from now on. `now` is in seconds of a monotonic clock."""
        self._until[instance_id] = now + COOLDOWN_S
        self._changed()

    def forget(self, instance_id: int) -> None:
        """Stop avoiding an instance, because it worked."""
        if self._until.pop(instance_id, None) is not None:
            self._changed()

    def ids(self, now: float) -> frozenset[int]:
        """Return the ids of the instances to avoid."""
        if self._next_until <= now:
            self._until = {
                instance_id: until for instance_id, until in self._until.items() if until > now
            }
            self._changed()
        return self._ids

    def _changed(self) -> None:
        self._next_until = min(self._until.values(), default=math.inf)
        if self._ids != self._until.keys():
            self._ids = frozenset(self._until)


@dataclass(eq=False)
class FleetHealth:
    """The health of workers and pairs, as the requests and probes of one frontend see it.

    All times `now` are seconds of a monotonic clock.

    Args:
        view: the workers.
        breakers: one for each pair of them.
        has_probes: True: probes test new and quarantined pairs. False: requests test them, and a
            quarantined pair gets no requests until its open time is over.
    """

    view: ClusterView
    breakers: PairBreakers
    has_probes: bool = False
    _cooldown: Cooldown = field(default_factory=Cooldown, init=False)

    def __post_init__(self) -> None:
        # Changes whose new pairs are not withheld yet.
        self._changes = self.view.subscribe() if self.has_probes else deque[Change]()

    def update_breakers(self, now: float) -> None:
        """Update which pairs get no requests. Called before a pair is selected or probed."""
        if self.breakers.any_open and not self.has_probes:
            self.breakers.half_open(now)
        while self._changes:
            change = self._changes.popleft()
            if change.is_added:
                view = self.view.model(change.instance.card.name)
                self.breakers.withhold(new_pairs(view, change))

    def lacks_pairs(self, model: str) -> bool:
        """Return whether a model has pairs of workers, and requests can use none of them.

        Some pair is quarantined then. If all pairs only wait for their first probe, this is not so.
        """
        quarantined = self.breakers.quarantined
        if not quarantined:
            return False
        pairs = [pair for pair in pairs_of(self.view.model(model)) if pair[0] is not None]
        are_open = all(map(self.breakers.is_open, pairs))
        return are_open and any(pair in quarantined for pair in pairs)

    def cooling_down(self, now: float) -> frozenset[int]:
        """Return the ids of the workers to avoid for a while, if there are others."""
        return self._cooldown.ids(now)

    def record_failed_call(self, instance_id: int, error: DynamoError, now: float) -> None:
        """Avoid a worker for a while if it did not accept a call, or has died.

        Its pairs count as not working if it did not accept the call, or lost its connection.
        """
        if is_worker_unavailable(error) or isinstance(error, WorkerDied):
            self._cooldown.start(instance_id, now)
        if is_worker_unavailable(error) or isinstance(error, Disconnected):
            reason = f"{error.code}: {error.message}"
            pairs = self.breakers.pairs_with(instance_id)
            worked = [self.breakers.record_unreachable(pair, reason, now) for pair in pairs]
            if any(worked):
                # Probes test these pairs soon.
                self.view.notify_changed()

    def record_success(self, pair: Pair, now: float, *, is_probe: bool = False) -> None:
        """Record that a KV transfer succeeded. Arguments as for `PairBreakers.record_success`."""
        for instance_id in pair:
            if instance_id is not None:
                self._cooldown.forget(instance_id)
        if self.breakers.record_success(pair, now, is_probe=is_probe):
            # Requests may wait for this pair.
            self.view.notify_changed()
            log.info("%s works", format_pair(pair))

    def record_transfer(self, pair: Pair, error: DynamoError | None, now: float) -> None:
        """Record the outcome of a KV transfer. Failures in a row open the breaker of the pair."""
        if error is None:
            self.record_success(pair, now)
            return
        worked = self.breakers.status(pair).state is PairState.WORKING
        opened = self.breakers.record_failure(pair, f"{error.code}: {error.message}", now)
        if worked or opened:
            # The next probe of the pair may be due earlier.
            self.view.notify_changed()
        if opened:
            log.error("%s quarantined (%s): %s", format_pair(pair), error.code, error.message)

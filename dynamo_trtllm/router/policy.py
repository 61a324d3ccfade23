"""Select the instances of a request, by round robin over the pairs whose circuit breaker is closed.

After some failures in a row the breaker of a pair opens, and the pair gets no requests. When the
open time is over, one probe is sent. It closes the breaker or opens it for longer. With probes, a
new pair gets no requests before its first probe, and only a probe can clear a pair that gave wrong
answers: the right answer to a request is not known. Callers pass the time.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from dynamo_trtllm.errors import NoInstances, TransferMismatch, UnsupportedParameter
from dynamo_trtllm.messages import GenerateRequest, Instance, Role
from dynamo_trtllm.router.view import (
    ModelView,
    Pair,
    PairGroup,
    excluding,
    pairing_fields,
    pairs_of,
    position,
)

MOST_STATUSES: Final = 1 << 15  # of pairs; those that failed or were probed have one in any case
_MOST_DOUBLINGS = 30  # prevents an overflow for a pair that fails for days
_MOST_REASONS_FROM = 100  # pairs whose reasons an error names


class PairState(StrEnum):
    UNTRIED = "untried"
    WORKING = "working"
    FAILING = "failing"  # failed recently, and still gets requests
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """The limits that open a breaker, and for how long."""

    failures: int = 3  # in a row, until the breaker opens
    open_s: float = 5.0  # doubled each time it opens again
    max_open_s: float = 120.0


@dataclass(slots=True)
class PairStatus:
    """The status of one pair. Times are seconds of the callers' clock."""

    state: PairState = PairState.UNTRIED
    reason: str = ""
    seen_at: float = 0.0  # time of the last outcome
    failures: int = 0  # in a row
    num_openings: int = 0  # since it last worked
    open_until: float = 0.0
    is_wrong: bool = False  # its last answers to a probe were wrong: only a probe can clear it
    is_proven: bool = False  # a probe has passed since the pair was last wrong
    # While it works but is not proven: time of the last probe, or when it began to work.
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
        # By instance id: its pairs of the three above.
        self._known: defaultdict[int, set[Pair]] = defaultdict(set)
        # By decode id: the prefill ids of its pairs that get no requests.
        self.open_partners: dict[int, set[int | None]] = {}
        self._half_open_at = math.inf  # no breaker of `_open` may become half open earlier
        self.revision = object()  # another one after each change of `open_partners`
        # Pairs that may be due earlier than before. The probes empty it.
        self.rescheduled: set[Pair] = set()

    def withhold(self, pairs: Iterable[Pair]) -> None:
        """Send no requests to the unknown ones of `pairs` until a probe has tested them."""
        for pair in pairs:
            if pair not in self._statuses and pair not in self._withheld:
                self._withheld.add(pair)
                self._index(pair)
                self._update(pair)

    def admit(self, view: ModelView) -> None:
        """Let requests test the new pairs of a model, because their probes take long."""
        for pair in self._withheld.intersection(pairs_of(view)):
            self._withheld.discard(pair)
            self._status(pair)  # a known pair is not withheld again
            self._update(pair)

    def _status(self, pair: Pair) -> PairStatus:
        """Return the status of a pair, which is known from now on."""
        status = self._statuses.get(pair)
        if status is None:
            status = PairStatus()
            self._statuses[pair] = status
            self._index(pair)
        return status

    def _index(self, pair: Pair) -> None:
        for instance_id in pair:
            if instance_id is not None:
                self._known[instance_id].add(pair)

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

    def record_success(
        self, pair: Pair, now: float, *, is_probe: bool = False, note: str = ""
    ) -> bool:
        """Record that a KV transfer succeeded, for a request or, with `is_probe`, for a probe.

        `note` is what the probe could not detect, shown as the reason. Return True if the pair did
        not work before.
        """
        status = self._statuses.get(pair)
        if not is_probe:
            # The request began before the pair was withheld or wrong, and its answer may be wrong.
            if pair in self._withheld or (status is not None and status.is_wrong):
                return False
            # Thousands of workers have millions of pairs. One without a status gets requests, too.
            if status is None and len(self._statuses) >= MOST_STATUSES:
                return False
        if status is None:
            status = self._status(pair)
        changed = status.state is not PairState.WORKING
        if changed:
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
            status.reason = note
        status.seen_at = now
        return changed

    def record_failure(
        self, pair: Pair, reason: str, now: float, *, is_wrong: bool = False
    ) -> bool:
        """Record a failure.

        With `is_wrong` the pair gave wrong answers, which opens the breaker at once.

        Return True if this opened the breaker for the first time since the pair worked.
        """
        self.rescheduled.add(pair)
        limits = self._limits
        status = self._status(pair)
        status.reason = reason
        status.seen_at = now
        self._withheld.discard(pair)
        self._update(pair)
        if is_wrong:
            status.is_wrong = True
            status.is_proven = False
        was_quarantined = status.state is PairState.QUARANTINED
        if was_quarantined and now < status.open_until:
            # The call began before the quarantine. Many such calls must not count as failed probes.
            return False
        status.failures += 1
        if not is_wrong and not was_quarantined and status.failures < limits.failures:
            status.state = PairState.FAILING
            return False
        status.state = PairState.QUARANTINED
        num_doublings = min(status.num_openings, _MOST_DOUBLINGS)
        status.open_until = now + min(limits.max_open_s, limits.open_s * 2**num_doublings)
        status.num_openings += 1
        self._half_open_at = min(self._half_open_at, status.open_until)
        self._open.add(pair)
        self._update(pair)
        return status.num_openings == 1

    def record_unreachable(self, pair: Pair, reason: str, now: float) -> bool:
        """Record that a call was not accepted or lost its connection.

        Return True if the pair worked before.

        The breaker does not count this, because it says nothing about KV transfers. The next
        successful transfer makes the pair working again.
        """
        status = self._status(pair)
        worked = status.state is PairState.WORKING
        status.seen_at = now
        self.rescheduled.add(pair)
        if status.state is PairState.QUARANTINED:
            status.open_until = max(status.open_until, now + self._limits.open_s)
        else:
            status.state = PairState.FAILING
            status.reason = reason
        return worked

    def pairs_with(self, instance_id: int) -> list[Pair]:
        """Return the known pairs of an instance."""
        return [pair for pair in self._known.get(instance_id, ()) if pair in self._statuses]

    def defer(self, pair: Pair, now: float) -> None:
        """Record that the pair was too busy for a probe, which leaves its state unchanged.

        A new pair gets requests from now on: otherwise workers that are always too busy for a probe
        would get none.
        """
        status = self._status(pair)
        status.seen_at = now
        status.tried_at = now
        self._withheld.discard(pair)
        self._update(pair)
        if status.state is PairState.QUARANTINED:
            status.open_until = now + self._limits.open_s

    def half_open(self, now: float) -> None:
        """Without probes: send requests again to pairs whose open time is over.

        Their outcome decides.
        """
        # This is called per request.
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

    @property
    def any_open(self) -> bool:
        """True if any pair gets no requests.

        Usually none does, and selection can skip the look-ups.
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

        A new pair is due at once, a quarantined one after its open time. An idle pair is due after
        `interval_s`, and one that works for requests but has not passed a probe soon.
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
        gone = [instance_id for instance_id in self._known if instance_id not in ids]
        pairs: list[Pair] = []
        for instance_id in gone:
            pairs += self._known.pop(instance_id)
        for pair in pairs:
            self._statuses.pop(pair, None)
            self._open.discard(pair)
            self._withheld.discard(pair)
            self.rescheduled.discard(pair)
            self._update(pair)
            for other in pair:
                if other is not None and other in self._known:
                    self._known[other].discard(pair)


class WorkerSelection(msgspec.Struct, frozen=True):
    """The instances of a request. `prefill` is None if `decode` runs the aggregated request."""

    prefill: Instance | None
    decode: Instance


def select(
    view: ModelView,
    model: str,
    round_robin_index: int,
    breakers: PairBreakers,
    *,
    avoid: int | None = None,
    decode_fallback: bool = False,
) -> WorkerSelection:
    """Select the workers of one request, round robin per role.

    Prefill and decode are paired only if engine, strategy and KV layout are equal and the pair's
    breaker is closed. Pairs are preferred to aggregated instances, because a deployment with pairs
    was built for them.

    Args:
        round_robin_index: number of requests of this model so far.
        avoid: prefill instance to use only if no other matches the decode instance.
        decode_fallback: without a prefill instance, let a decode instance that can run aggregated
            requests do so.

    Raises:
        NoInstances: a role has no instance, or the breakers of all pairs are open; the message says
            which.
        TransferMismatch: both roles have instances, but none match; the message names the fields
            that differ.
    """
    if not view.prefill or not view.decode:
        instance = _select_aggregated(
            view, model, round_robin_index, breakers, decode_fallback=decode_fallback
        )
        return WorkerSelection(None, instance)
    if not view.paired:
        why = differences(view.prefill[0], view.decode[0])
        raise TransferMismatch(
            f"no prefill worker of model {model!r} matches a decode worker: {why}"
        )
    usable = _usable(view, model, breakers, avoid)
    decode = usable.paired[round_robin_index % len(usable.paired)]
    prefill = _select_prefill(usable, decode, round_robin_index, breakers, avoid)
    return WorkerSelection(prefill, decode)


def _usable(view: ModelView, model: str, breakers: PairBreakers, avoid: int | None) -> ModelView:
    """Return the view without decode instances that have no usable prefill instance.

    Raises:
        NoInstances: the breakers of all pairs are open.
    """
    usable = view
    if breakers.any_open:
        usable = view.excluding(_blocked(view, breakers))
        if not usable.paired:
            raise _all_open(model, breakers, _matching_pairs(view))
    if avoid is not None:
        # A decode instance that works only with this prefill instance would use it again.
        others = usable.excluding(_blocked_without(usable, breakers, avoid))
        if others.paired:
            usable = others
    return usable


def _matching_pairs(view: ModelView) -> Iterator[Pair]:
    """Return all pairs whose pairing keys are equal."""
    for decode in view.paired:
        for prefill in view.groups[view.keys[decode.id]].prefill:
            yield prefill.id, decode.id


def _select_prefill(
    usable: ModelView,
    decode: Instance,
    round_robin_index: int,
    breakers: PairBreakers,
    avoid: int | None,
) -> Instance:
    """Return the prefill instance of a request whose decode instance is selected."""
    group = usable.groups[usable.keys[decode.id]]
    prefills = excluding(group.prefill, breakers.open_partners.get(decode.id, ()))
    if avoid is not None:
        prefills = excluding(prefills, (avoid,)) or prefills
    # Requests are counted per key: an index over the decodes of all keys would skip prefills of
    # this key.
    num_peers = len(group.decode)
    num_cycles = round_robin_index // len(usable.paired)
    index_in_key = num_cycles * num_peers + position(group.decode, decode.id)
    # After each full cycle of decodes and prefills, shift by one: otherwise two and two would use
    # two of four pairs.
    shift = index_in_key // math.lcm(num_peers, len(prefills))
    return prefills[(index_in_key + shift) % len(prefills)]


def _blocked(view: ModelView, breakers: PairBreakers) -> frozenset[int]:
    """Return the decode instances of whose pairs all breakers are open. They get no requests.

    The result is cached until a breaker opens or closes.
    """
    cached: tuple[object, frozenset[int]] | None = view.cache.get("blocked")
    if cached is not None:
        revision, blocked = cached
        if revision is breakers.revision:
            return blocked
    blocked = _blocked_without(view, breakers, None)
    view.cache["blocked"] = breakers.revision, blocked
    return blocked


def _blocked_without(view: ModelView, breakers: PairBreakers, avoid: int | None) -> frozenset[int]:
    """Return the decode instances that get no requests without the prefill instance `avoid`."""
    blocked: set[int] = set()
    for group in view.groups.values():
        if len(group.prefill) == 1 and group.prefill[0].id == avoid:
            blocked.update(decode.id for decode in group.decode)
    for decode_id, partners in breakers.open_partners.items():
        group = view.groups.get(view.keys.get(decode_id, ""), PairGroup())
        # Usually fewer are open, and a look at the number is enough.
        if len(partners) + 1 < len(group.prefill):
            continue
        if all(prefill.id in partners or prefill.id == avoid for prefill in group.prefill):
            blocked.add(decode_id)
    return frozenset(blocked)


def incapable(view: ModelView, request: GenerateRequest) -> frozenset[int]:
    """Return the instances that can't run this request.

    They would ignore when or where it wants to run.

    Raises:
        UnsupportedParameter: the other instances are not enough to run it; `field` is the client's
            name.
    """
    if not request.priority and request.dp_rank is None and request.prefill_dp_rank is None:
        return frozenset()  # nearly all requests
    key = (
        "incapable",
        bool(request.priority),
        request.dp_rank is None,
        request.prefill_dp_rank is None,
    )
    known: frozenset[int] | None = view.cache.get(key)
    if known is not None:
        return known
    lacking: dict[int, str] = {}  # the field that an instance does not support
    for instance in (*view.prefill, *view.decode, *view.aggregated):
        for field, feature in _needs(request, instance.role).items():
            if feature not in instance.supported_features:
                lacking[instance.id] = field
    ids = frozenset(lacking)
    if view.excluding(ids).missing_roles() and not view.missing_roles():
        field = next(iter(lacking.values()))
        raise UnsupportedParameter(
            f"{field} is not supported by the workers of {request.model}, as they are configured"
            " now; leave it out",
            field=field,
        )
    view.cache[key] = ids
    return ids


def _needs(request: GenerateRequest, role: Role) -> dict[str, str]:
    """Return the features that a worker of this role needs, by the field that needs them."""
    needs: dict[str, str] = {}
    if request.priority:
        needs["priority"] = "priority"
    if role is not Role.PREFILL and request.dp_rank is not None:
        needs["nvext.dp_rank"] = "dp_rank"
    if role is not Role.DECODE and request.prefill_dp_rank is not None:
        needs["nvext.prefill_dp_rank"] = (
            "dp_rank" if role is Role.PREFILL else "separate prefill workers"
        )
    return needs


def _select_aggregated(
    view: ModelView,
    model: str,
    round_robin_index: int,
    breakers: PairBreakers,
    *,
    decode_fallback: bool,
) -> Instance:
    candidates = view.aggregated
    if not candidates and decode_fallback:
        candidates = tuple(instance for instance in view.decode if instance.can_aggregate)
    if not candidates:
        missing = " and no ".join(role.value for role in view.missing_roles())
        raise NoInstances(f"model {model!r} has no {missing} worker now; start one or retry later")
    instances = [instance for instance in candidates if not breakers.is_open((None, instance.id))]
    if not instances:
        raise _all_open(model, breakers, ((None, instance.id) for instance in candidates))
    return instances[round_robin_index % len(instances)]


def _all_open(model: str, breakers: PairBreakers, pairs: Iterable[Pair]) -> NoInstances:
    some = itertools.islice(pairs, _MOST_REASONS_FROM)
    # The different ones, in this order.
    reasons = dict.fromkeys(breakers.status(pair).reason or "not probed yet" for pair in some)
    return NoInstances(
        f"every pair (or aggregated worker) of model {model!r} is new or quarantined:"
        f" {'; '.join(reasons)}; see /health"
    )


def differences(instance: Instance, other: Instance) -> str:
    """Return the fields in which two instances must be equal but differ, as text for people."""
    fields = dict(pairing_fields(instance))
    other_fields = dict(pairing_fields(other))
    texts: list[str] = []
    for name in fields | other_fields:
        value = fields.get(name)
        other_value = other_fields.get(name)
        if value != other_value:
            texts.append(
                f"{name} is {value!r} at {instance.role} and {other_value!r} at {other.role}"
            )
    return "; ".join(texts)

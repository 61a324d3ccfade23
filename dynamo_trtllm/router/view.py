"""Hold the router's view of the cluster: instances by model and role, and for which pairs KV transfer works.

A pair is (prefill, decode), or (None, id) for an instance that runs aggregated requests. After some failures in a row
its circuit breaker opens, and the pair gets no requests. When the open time is over, one probe is sent. It closes the
breaker or opens it for longer. With probes, a new pair gets no requests before its first probe, and only a probe can
clear a pair that gave wrong answers: the right answer to a request is not known. Callers pass the time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from dynamo_trtllm.kv_transfer.base import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, ModelDeploymentCard, Role

_REDUCED_VIEWS = 16  # cached per view


def pairing_fields(instance: Instance) -> tuple[tuple[str, object], ...]:
    """Return the (field, value) pairs that must be equal in two instances for KV transfer between them."""
    layout = ((f"layout.{name}", getattr(instance.layout, name)) for name in EQUAL_LAYOUT)
    own = sorted(instance.kv_compat.items())
    return ("engine", instance.engine), ("strategy", instance.strategy), *layout, *own


def pairing_key(instance: Instance) -> str:
    """Return `pairing_fields` as an interned text, which each request compares for every instance."""
    return sys.intern(repr(pairing_fields(instance)))


@dataclass(frozen=True, slots=True)
class ModelView:
    """The instances of one model, sorted by id so that all frontends count alike."""

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    aggregated: tuple[Instance, ...] = ()
    keys: Mapping[int, str] = field(default_factory=dict)  # by instance id; those that are missing are computed
    prefill_ids: Mapping[str, Sequence[int]] = field(init=False, repr=False, compare=False)
    _reduced: dict[frozenset[int], ModelView] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute per change what requests read."""
        both = (*self.prefill, *self.decode)
        keys = {instance.id: self.keys.get(instance.id) or pairing_key(instance) for instance in both}
        object.__setattr__(self, "keys", keys)
        prefill_ids: defaultdict[str, list[int]] = defaultdict(list)
        for instance in self.prefill:
            prefill_ids[keys[instance.id]].append(instance.id)
        object.__setattr__(self, "prefill_ids", prefill_ids)

    def excluding(self, ids: frozenset[int]) -> ModelView:
        """Return the view without these instances. Results are cached, because many requests exclude the same ones."""
        if not ids:
            return self
        reduced = self._reduced.get(ids)
        if reduced is None:
            groups = (self.prefill, self.decode, self.aggregated)
            if len(self._reduced) >= _REDUCED_VIEWS:
                self._reduced.clear()
            prefill, decode, aggregated = (tuple(i for i in each if i.id not in ids) for each in groups)
            reduced = self._reduced[ids] = ModelView(prefill, decode, aggregated, self.keys)
        return reduced

    @property
    def is_complete(self) -> bool:
        """True if a request can run: there is an aggregated worker, or a prefill and a decode worker that match.

        The time is linear in the number of instances, not of pairs.
        """
        keys = [{self.keys[instance.id] for instance in role} for role in (self.prefill, self.decode)]
        return bool(self.aggregated) or not keys[0].isdisjoint(keys[1])

    def missing_roles(self) -> list[Role]:
        """Return the roles that lack an instance; empty if requests of this model can run."""
        if self.aggregated or (self.prefill and self.decode):
            return []
        have = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return [role for role, instances in have.items() if not instances]


_NO_INSTANCES = ModelView()


@dataclass(slots=True)
class ClusterView:
    """All live instances. Only the frontend's watch writes it; readers use `model()`."""

    _instances: dict[int, Instance] = field(default_factory=dict)
    _models: dict[str, ModelView] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set at the next change, then replaced

    def add(self, instance: Instance) -> None:
        self._instances[instance.id] = instance
        self._keys[instance.id] = pairing_key(instance)
        self._rebuild()

    def remove(self, instance_id: int) -> None:
        self._instances.pop(instance_id, None)
        self._keys.pop(instance_id, None)
        self._rebuild()

    def notify_changed(self) -> None:
        """Wake the tasks that wait for a change. Called also if only breakers changed, which changes selections."""
        self.changed.set()
        self.changed = asyncio.Event()

    def model(self, name: str) -> ModelView:
        return self._models.get(name, _NO_INSTANCES)

    def models(self) -> dict[str, ModelDeploymentCard]:
        """Return the card in use by model name, for every model that has an instance.

        The cards of decode and aggregated instances take precedence over those of prefill instances, because their
        context length limits prompt and output together. Among equals, the lowest id takes precedence.
        """
        last_counts = sorted(self._instances.values(), key=lambda i: (i.role is not Role.PREFILL, -i.id))
        return {instance.card.name: instance.card for instance in last_counts}

    def instances(self) -> list[Instance]:
        return sorted(self._instances.values(), key=lambda i: i.id)

    def _rebuild(self) -> None:
        """Rebuild the views of all models per change, so that a request costs only a dictionary look-up."""
        self.notify_changed()
        names = {i.card.name for i in self._instances.values()}
        instances = self.instances()
        self._models = {name: _model_view([i for i in instances if i.card.name == name], self._keys) for name in names}


def _model_view(instances: Iterable[Instance], keys: Mapping[int, str]) -> ModelView:
    by_role: dict[Role, list[Instance]] = {role: [] for role in Role}
    for instance in instances:
        by_role[instance.role].append(instance)
    return ModelView(
        prefill=tuple(by_role[Role.PREFILL]),
        decode=tuple(by_role[Role.DECODE]),
        aggregated=tuple(by_role[Role.AGGREGATED]),
        keys=keys,
    )


MAX_PAIRS: Final = 1024  # of a model; see `pairs_of`
_PARTNERS = 4
_MOST_DOUBLINGS = 30  # prevents an overflow for a pair that fails for days

Pair: TypeAlias = tuple[int | None, int]


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
    tried_at: float = 0.0  # while it works but is not proven: time of the last probe, or when it began to work


class PairBreakers:
    """The breakers of all pairs. The pipeline and the probes write them; selection, health and readiness read them."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._statuses: dict[Pair, PairStatus] = {}
        self._open: set[Pair] = set()
        self._withheld: set[Pair] = set()  # new pairs that wait for a probe

    def withhold(self, pairs: Iterable[Pair]) -> None:
        """Send no requests to the unknown ones of `pairs` until a probe has tested them."""
        self._withheld.update(pair for pair in pairs if pair not in self._statuses)

    def admit(self, pairs: Iterable[Pair]) -> bool:
        """Let requests test new pairs whose probe takes long. Return True if any of `pairs` was withheld."""
        overdue = self._withheld.intersection(pairs)
        self._withheld -= overdue
        for pair in overdue:  # a known pair is not withheld again
            self._statuses.setdefault(pair, PairStatus())
        return bool(overdue)

    def record_success(self, pair: Pair, now: float, *, is_probe: bool = False, note: str = "") -> bool:
        """Record that a KV transfer succeeded, for a request or, with `is_probe`, for a probe.

        `note` is what the probe could not detect, shown as the reason. Return True if the pair did not work before.
        """
        status = self._statuses.get(pair)
        if not is_probe and (pair in self._withheld or (status is not None and status.is_wrong)):
            return False  # the request began before the pair was withheld or wrong, and its answer may be wrong
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
        """Record a failure. With `is_wrong` the pair gave wrong answers, which opens the breaker at once.

        Return True if this opened the breaker for the first time since the pair worked.
        """
        limits, status = self._limits, self._statuses.setdefault(pair, PairStatus())
        status.reason, status.seen_at = reason, now
        self._withheld.discard(pair)
        if is_wrong:
            status.is_wrong, status.is_proven = True, False
        if status.state is PairState.QUARANTINED and now < status.open_until:
            return False  # the call began before the quarantine; many such calls must not count as failed probes
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
        """Record that a call was not accepted or lost its connection. Return True if the pair worked before.

        The breaker does not count this, because it says nothing about KV transfers. The next successful transfer makes
        the pair working again.
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
        """Return the known pairs of an instance."""
        return [pair for pair in self._statuses if instance_id in pair]

    def defer(self, pair: Pair, now: float) -> None:
        """Record that the pair was too busy for a probe, which leaves its state unchanged.

        A new pair gets requests from now on: otherwise workers that are always too busy for a probe would get none.
        """
        status = self._statuses.setdefault(pair, PairStatus())
        status.seen_at = status.tried_at = now
        self._withheld.discard(pair)
        if status.state is PairState.QUARANTINED:
            status.open_until = now + self._limits.open_s

    def half_open(self, now: float) -> None:
        """Without probes: send requests again to pairs whose open time is over. Their outcome decides."""
        self._open -= {pair for pair in self._open if self._statuses[pair].open_until <= now}

    def is_open(self, pair: Pair) -> bool:
        """Return True if this pair gets no requests."""
        return pair in self._open or pair in self._withheld

    @property
    def any_open(self) -> bool:
        """True if any pair gets no requests. Usually none does, and selection can skip the look-ups."""
        return bool(self._open or self._withheld)

    @property
    def quarantined(self) -> Collection[Pair]:
        """The pairs whose breaker is open."""
        return self._open

    def status(self, pair: Pair) -> PairStatus:
        return self._statuses.get(pair, PairStatus())

    def due(self, pairs: Iterable[Pair], now: float, interval_s: float) -> list[Pair]:
        """Return the pairs to probe now.

        These are new and idle pairs, quarantined pairs whose open time is over, and pairs that work for requests but
        have not passed a probe.
        """
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
        """Drop the pairs of instances that are not in `ids`."""
        gone = [pair for pair in (*self._statuses, *self._withheld) if not all(i is None or i in ids for i in pair)]
        for pair in gone:
            self._statuses.pop(pair, None)
            self._open.discard(pair)
            self._withheld.discard(pair)


def pairs_of(view: ModelView, breakers: PairBreakers | None = None) -> list[Pair]:
    """Return the pairs of a model to probe, and (None, id) of instances that run aggregated requests.

    They are all pairs whose settings match. Of more than MAX_PAIRS, they are a few per instance, and those that are
    quarantined in `breakers`: with all of them, the probes would be the load of the deployment. The others get requests
    without a probe of their own.
    """
    decodes: defaultdict[str, list[int]] = defaultdict(list)
    for instance in view.decode:
        decodes[view.keys[instance.id]].append(instance.id)
    pairs: list[Pair] = []
    for key, own in decodes.items():
        prefills = view.prefill_ids.get(key, ())
        if len(prefills) * len(own) <= MAX_PAIRS:
            pairs += itertools.product(prefills, own)
        else:
            some: list[Pair] = [
                (prefills[at % len(prefills)], own[at // _PARTNERS]) for at in range(len(own) * _PARTNERS)
            ]
            some += [(prefills[at // _PARTNERS], own[at % len(own)]) for at in range(len(prefills) * _PARTNERS)]
            if breakers is not None:
                some += [pair for pair in breakers.quarantined if pair[0] in prefills and pair[1] in own]
            pairs += dict.fromkeys(some)
    return [*pairs, *((None, instance.id) for instance in view.aggregated)]


def format_pair(pair: Pair) -> str:
    """Format a pair for logs and errors."""
    prefill, decode = pair
    return f"instance {decode:x}" if prefill is None else f"pair {prefill:x} -> {decode:x}"


COOLDOWN_S = 5.0


class Cooldown:
    """The instances that selection avoids for COOLDOWN_S seconds, if there are others.

    `ids` is read per request. It returns the same set object until an instance is added or removed.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._ids: frozenset[int] = frozenset()
        self._next_until = math.inf  # when the next instance is tried again

    def start(self, instance_id: int, now: float) -> None:
        """Avoid an instance from now on. `now` is in seconds of a monotonic clock."""
        self._until[instance_id] = now + COOLDOWN_S
        self._changed()

    def forget(self, instance_id: int) -> None:
        """Stop avoiding an instance, because it worked."""
        if self._until.pop(instance_id, None) is not None:
            self._changed()

    def ids(self, now: float) -> frozenset[int]:
        if self._next_until <= now:
            self._until = {instance_id: until for instance_id, until in self._until.items() if until > now}
            self._changed()
        return self._ids

    def _changed(self) -> None:
        self._next_until = min(self._until.values(), default=math.inf)
        if self._ids != self._until.keys():
            self._ids = frozenset(self._until)

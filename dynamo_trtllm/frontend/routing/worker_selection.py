"""Select the workers of requests: every selection of a frontend is made here.

The router mode decides how: by cost (`cost_placement`), in turn over the pairs whose breaker is
closed, or at random. Elastic workers count as much as their shares say. Callers pass the time.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import KW_ONLY, dataclass
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.routing.cluster_view import (
    ClusterView,
    ModelView,
    PairGroup,
    excluding,
    position,
)
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.pair_breakers import FleetHealth, PairBreakers
from dynamo_trtllm.frontend.routing.pairs import (
    Pair,
    WorkerSelection,
    can_transfer,
    differences,
    pair_of,
    pairing_key,
)
from dynamo_trtllm.frontend.routing.prefix_index import PromptHashes
from dynamo_trtllm.protocol.errors import NoInstances, TransferMismatch, UnsupportedParameter
from dynamo_trtllm.protocol.messages import GenerateRequest, Instance, Role

_MAX_PAIRS_EXPLAINED = 100  # limit of the pairs that one error names with their reasons
# The fractional parts of the multiples of each number are spread evenly over 0 to 1. The pairs of
# both fractional parts are spread evenly over the unit square, so the selections for decode and for
# prefill do not correlate.
_DECODE_STEP: Final = (math.sqrt(5) - 1) / 2
_PREFILL_STEP: Final = math.sqrt(2) - 1
# The feature that requests with a prefill rank need at an aggregated worker. No instance has this
# feature: an aggregated worker has no separate prefill rank.
_NO_FEATURE: Final = "separate prefill workers"


class _SelectionQuery(NamedTuple):
    """For what workers are selected. See `WorkerSelector.select`."""

    request: GenerateRequest
    round_robin_index: int
    now: float
    avoid: int | None
    waited_s: float
    may_reject: bool


@dataclass(eq=False)
class WorkerSelector:
    """Selects the workers of the requests of one frontend.

    All times `now` are seconds of a monotonic clock.

    Args:
        view: the workers.
        health: which workers are avoided.
        placement: selects by cost or predicted times. None: round robin, or at random.
        selects_at_random: select at random instead of round robin.
        decode_fallback: without a prefill worker, decode workers run aggregated requests.
        seed: the seed of the selection at random. None: the seed differs from run to run.
    """

    view: ClusterView
    health: FleetHealth
    placement: Placement | None = None
    _: KW_ONLY
    selects_at_random: bool = False
    decode_fallback: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._round_robin: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    def new_round_robin_index(self, model: str) -> int:
        """Return the index of a new attempt: how many attempts of the model were begun before it.

        To select at random, return a random number instead.
        """
        if self.selects_at_random:
            return self._random.getrandbits(30)
        return next(self._round_robin[model])

    def select(
        self,
        request: GenerateRequest,
        round_robin_index: int,
        now: float,
        *,
        excluded: frozenset[int],
        avoid: int | None,
        waited_s: float = 0.0,
        may_reject: bool = False,
    ) -> WorkerSelection:
        """Select the workers of an attempt.

        Args:
            request: the request.
            round_robin_index: the index of the attempt, see `new_round_robin_index`.
            now: the time.
            excluded: workers that may not be selected.
            avoid: prefill worker to select only if no other matches.
            waited_s: for how long the request has waited since it arrived.
            may_reject: the request may be rejected for its limits: this is its first attempt.

        Raises:
            NoInstances, TransferMismatch: see `select_round_robin`.
            SloUnreachable: see `SloPlacement.select`.
            UnsupportedParameter: no workers support a field of the request.
        """
        support = field_support(self.view.model(request.model), request)
        field = support.rejected_field
        if field:
            raise UnsupportedParameter(
                f"{field} is not supported by the workers of {request.model}, as they are"
                " configured now; leave it out",
                field=field,
            )
        excluded |= support.incapable
        self.health.update_breakers(now)
        cooling_down = self.health.cooling_down(now)
        query = _SelectionQuery(request, round_robin_index, now, avoid, waited_s, may_reject)
        if cooling_down:
            try:
                return self._select_excluding(cooling_down | excluded, query)
            except NoInstances:
                # A worker that cools down may work again, which is better than no worker.
                pass
        return self._select_excluding(excluded, query)

    def _select_excluding(
        self, excluded: frozenset[int], query: _SelectionQuery
    ) -> WorkerSelection:
        """Select among the workers that are not excluded, first among those with a share."""
        view = self.view.model(query.request.model).excluding(excluded)
        sharing = view.sharing()
        try:
            selection = self._select_in(sharing, query)
        except NoInstances:
            if sharing is view:
                raise
            # Only elastic workers without a share for these calls are left.
            selection = self._select_in(view, query)
        return self._without_blocked_transfer(selection, view, query)

    def _without_blocked_transfer(
        self, selection: WorkerSelection, view: ModelView, query: _SelectionQuery
    ) -> WorkerSelection:
        """Return the selection, without KV transfer if elastic workers lack space for the KV.

        Without KV transfer, one instance whose breaker is closed runs the whole request. If
        possible, it is one of the two selected ones.

        Raises:
            NoInstances: the breakers of all instances that could run the whole request are open.
        """
        prefill = selection.prefill
        decode = selection.decode
        if prefill is None or can_transfer(prefill, decode, query.request):
            return selection
        breakers = self.health.breakers
        selected_two = [instance for instance in (decode, prefill) if instance.can_aggregate]
        closed = _closed(selected_two, breakers)
        if closed:
            # Take the first instance that is not to be avoided: False sorts before True.
            instance = min(closed, key=lambda instance: instance.id == query.avoid)
            return selection.aggregated_on(instance)
        others = _aggregating(view)
        closed = _closed(others, breakers)
        if not closed:
            raise _all_open_error(
                query.request.model, breakers, ((None, instance.id) for instance in others)
            )
        return selection.aggregated_on(closed[query.round_robin_index % len(closed)])

    def _select_in(self, view: ModelView, query: _SelectionQuery) -> WorkerSelection:
        """Select the workers of an attempt from a view."""
        breakers = self.health.breakers
        if self.placement is not None:
            best = self.placement.select(
                view,
                PromptHashes(query.request),
                breakers,
                query.now,
                avoid=query.avoid,
                waited_s=query.waited_s,
                may_reject=query.may_reject,
            )
            if best is not None:
                return best
        return select_round_robin(
            view,
            query.request.model,
            query.round_robin_index,
            breakers,
            avoid=query.avoid,
            decode_fallback=self.decode_fallback,
        )

    def is_usable(
        self,
        selection: WorkerSelection,
        now: float,
        *,
        excluded: frozenset[int],
        avoid: int | None,
    ) -> bool:
        """Return whether an earlier selection may be used again. Arguments as for `select`."""
        prefill_id = None if selection.prefill is None else selection.prefill.id
        decode_id = selection.decode.id
        instance_ids = {decode_id} if prefill_id is None else {prefill_id, decode_id}
        if avoid in instance_ids:
            return False
        if not instance_ids.issubset(self.view.ids()):
            return False
        unusable = excluded | self.health.cooling_down(now)
        if not instance_ids.isdisjoint(unusable):
            return False
        return not self.health.breakers.is_open((prefill_id, decode_id))

    def select_other_decode(
        self, request: GenerateRequest, prefill: Instance, tried: frozenset[int], now: float
    ) -> Instance | None:
        """Return an untried decode worker that can fetch the KV of a prefill worker.

        Return None if there is none.
        """
        self.health.update_breakers(now)
        model = prefill.card.name
        unusable = tried | field_support(self.view.model(model), request).incapable
        unusable |= self.health.cooling_down(now)
        view = self.view.model(model).excluding(unusable)
        group = view.groups.get(pairing_key(prefill), PairGroup())
        breakers = self.health.breakers

        def able_to_fetch(candidates: tuple[Instance, ...]) -> tuple[Instance, ...]:
            return tuple(
                decode
                for decode in candidates
                # An elastic worker never fetches KV from itself.
                if decode.id != prefill.id
                and not breakers.is_open((prefill.id, decode.id))
                and can_transfer(prefill, decode, request)
            )

        # Workers without a share of decode calls are only taken if no other worker can fetch the
        # KV.
        decodes = able_to_fetch(group.sharing(view.shares).decode) or able_to_fetch(group.decode)
        if self.placement is not None:
            return self.placement.select_decode(view, decodes, request)
        if not decodes:
            return None
        index = self.new_round_robin_index(model)
        if view.shares:
            return _weighted(view, decodes, Role.DECODE, index)
        return decodes[index % len(decodes)]


def select_round_robin(
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
        round_robin_index: the index of the attempt, see `WorkerSelector.new_round_robin_index`.
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
    if usable.shares:
        decode = _weighted(usable, usable.paired, Role.DECODE, round_robin_index)
    else:
        decode = usable.paired[round_robin_index % len(usable.paired)]
    prefill = _select_prefill(usable, decode, round_robin_index, breakers, avoid)
    # The same elastic instance in both roles runs the whole request.
    is_same = prefill.id == decode.id
    return WorkerSelection(None if is_same else prefill, decode)


def _weighted(
    view: ModelView, instances: tuple[Instance, ...], role: Role, round_robin_index: int
) -> Instance:
    """Return the instance whose turn it is. Each gets turns in proportion to its share."""
    step = _PREFILL_STEP if role is Role.PREFILL else _DECODE_STEP
    sums = view.cumulative_shares(instances, role)
    fraction = round_robin_index * step % 1.0
    # An instance with a share of 0 has the same sum as the one before it, so bisect_right skips it.
    index = bisect.bisect_right(sums, fraction * sums[-1])
    return instances[min(index, len(instances) - 1)]


def _usable(view: ModelView, model: str, breakers: PairBreakers, avoid: int | None) -> ModelView:
    """Return the view without decode instances that have no usable prefill instance.

    Raises:
        NoInstances: the breakers of all pairs are open.
    """
    usable = view
    if breakers.any_open:
        usable = view.without_decodes(_blocked(view, breakers))
        if not usable.paired:
            raise _all_open_error(model, breakers, _matching_pairs(view))
    if avoid is not None:
        # Leave out the decode instances that work with no prefill instance but the one to avoid, if
        # other decode instances remain.
        others = usable.without_decodes(_blocked_without(usable, breakers, avoid))
        if others.paired:
            usable = others
    return usable


def _matching_pairs(view: ModelView) -> Iterator[Pair]:
    """Return all pairs whose pairing keys are equal."""
    for decode in view.paired:
        for prefill in view.groups[view.keys[decode.id]].prefill:
            yield pair_of(prefill.id, decode.id)


def _select_prefill(
    usable: ModelView,
    decode: Instance,
    round_robin_index: int,
    breakers: PairBreakers,
    avoid: int | None,
) -> Instance:
    """Return the prefill instance of a request whose decode instance is selected."""
    group = usable.groups[usable.keys[decode.id]]
    open_partners = breakers.open_partners.get(decode.id, ())
    prefills = excluding(group.prefill, open_partners)
    if None in open_partners:
        # None stands for whole requests: this elastic instance can't run any now, so it is no
        # prefill instance for itself.
        prefills = excluding(prefills, (decode.id,))
    if avoid is not None:
        # The instance to avoid is used if it is the only one.
        prefills = excluding(prefills, (avoid,)) or prefills
    if usable.shares:
        return _weighted(usable, prefills, Role.PREFILL, round_robin_index)
    # How many requests had decode instances of this pairing key before this one. With two keys of
    # one decode instance each, the requests 0, 2, 4 of the model are 0, 1, 2 of the first key, so
    # its prefill instances take turns.
    num_peers = len(group.decode)
    num_cycles = round_robin_index // len(usable.paired)
    index_in_key = num_cycles * num_peers + position(group.decode, decode.id)
    # After each full cycle of decode and prefill instances, shift by one. Without the shift, two of
    # each would use two of their four pairs: 0-0, 1-1, 0-0, 1-1. With it: 0-0, 1-1, 0-1, 1-0.
    shift = index_in_key // math.lcm(num_peers, len(prefills))
    return prefills[(index_in_key + shift) % len(prefills)]


def _blocked(view: ModelView, breakers: PairBreakers) -> frozenset[int]:
    """Return the decode instances whose pairs are all open. They get no requests.

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
    """Return the decode instances whose pairs are all open or have the prefill instance `avoid`.

    With None, no prefill instance is avoided.
    """
    blocked: set[int] = set()
    for group in view.groups.values():
        if len(group.prefill) == 1 and group.prefill[0].id == avoid:
            blocked.update(decode.id for decode in group.decode)
    for decode_id, partners in breakers.open_partners.items():
        group = view.groups.get(view.keys.get(decode_id, ""), PairGroup())
        # Usually fewer breakers are open than there are prefill instances. Then a prefill instance
        # is usable, and the loop below is not needed.
        max_unusable = len(partners) + 1  # the instance `avoid` is one more
        if max_unusable < len(group.prefill):
            continue
        if all(
            # `pair_of` has None for an elastic instance with itself.
            prefill.id == avoid or pair_of(prefill.id, decode_id)[0] in partners
            for prefill in group.prefill
        ):
            blocked.add(decode_id)
    return frozenset(blocked)


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
    instances = _closed(candidates, breakers)
    if not instances:
        raise _all_open_error(model, breakers, ((None, instance.id) for instance in candidates))
    return instances[round_robin_index % len(instances)]


def _aggregating(view: ModelView) -> list[Instance]:
    """Return the instances that can run whole requests, in every role, sorted by id."""
    able = {
        instance.id: instance
        for instance in (*view.prefill, *view.decode)
        if instance.can_aggregate
    }
    able |= {instance.id: instance for instance in view.aggregated}
    return [able[instance_id] for instance_id in sorted(able)]


def _closed(instances: Iterable[Instance], breakers: PairBreakers) -> list[Instance]:
    """Return the instances that may run whole requests, because their breaker is closed."""
    return [instance for instance in instances if not breakers.is_open((None, instance.id))]


def _all_open_error(model: str, breakers: PairBreakers, pairs: Iterable[Pair]) -> NoInstances:
    """Return the error for a model whose pairs all have an open breaker."""
    some = itertools.islice(pairs, _MAX_PAIRS_EXPLAINED)
    # Each reason is named once, in the order of the pairs.
    reasons = dict.fromkeys(breakers.status(pair).reason or "not probed yet" for pair in some)
    return NoInstances(
        f"every pair (or aggregated worker) of model {model!r} is new or quarantined:"
        f" {'; '.join(reasons)}; see /health"
    )


class FieldSupport(NamedTuple):
    """Which instances of a model can't run a request, and whether the others are enough."""

    # Instances that do not support the priority or the data-parallel rank of the request, and would
    # ignore it.
    incapable: frozenset[int]
    # A field that the client must leave out so that its request can run. "": there is none.
    rejected_field: str


_ALL_FIELDS_SUPPORTED = FieldSupport(frozenset(), "")


def field_support(view: ModelView, request: GenerateRequest) -> FieldSupport:
    """Return which instances can't run this request. The result is cached in the view."""
    if not request.priority and request.dp_rank is None and request.prefill_dp_rank is None:
        # Nearly all requests are of this kind.
        return _ALL_FIELDS_SUPPORTED
    key = (
        "field_support",
        bool(request.priority),
        request.dp_rank is None,
        request.prefill_dp_rank is None,
    )
    known: FieldSupport | None = view.cache.get(key)
    if known is not None:
        return known
    lacking: dict[int, set[str]] = {}  # the fields that an instance does not support
    for instance in (*view.prefill, *view.decode, *view.aggregated):
        for field, feature in _needs(request, instance.role).items():
            if feature not in instance.supported_features:
                lacking.setdefault(instance.id, set()).add(field)
    support = FieldSupport(frozenset(lacking), _rejected_field(view, lacking))
    view.cache[key] = support
    return support


def _rejected_field(view: ModelView, lacking: Mapping[int, Set[str]]) -> str:
    """Return a field that must be left out so that a request can run.

    Args:
        view: the instances of the model.
        lacking: the fields that an instance does not support, by its id.

    Returns:
        "": the request can run as it is, or no request can run now.
    """
    can_any_run = view.is_complete
    can_run_as_it_is = view.excluding(frozenset(lacking)).is_complete
    if not can_any_run or can_run_as_it_is:
        return ""
    # Begin with all fields left out. Put back each field with which the request can still run.
    left_out = sorted({field for fields in lacking.values() for field in fields})
    for field in tuple(left_out):
        others = [other for other in left_out if other != field]
        unusable = frozenset(id_ for id_, fields in lacking.items() if not fields <= set(others))
        if view.excluding(unusable).is_complete:
            left_out = others
    return left_out[0]


def _needs(request: GenerateRequest, role: Role) -> dict[str, str]:
    """Return the features that a worker of this role needs, by the field that needs them."""
    needs: dict[str, str] = {}
    if request.priority:
        needs["priority"] = "priority"
    if role is not Role.PREFILL and request.dp_rank is not None:
        needs["nvext.dp_rank"] = "dp_rank"
    if role is not Role.DECODE and request.prefill_dp_rank is not None:
        has_rank = role is not Role.AGGREGATED
        needs["nvext.prefill_dp_rank"] = "dp_rank" if has_rank else _NO_FEATURE
    return needs

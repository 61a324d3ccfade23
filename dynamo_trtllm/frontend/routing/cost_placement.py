"""Place requests by the load of the workers and by the prefixes in their caches, without I/O.

A selection compares all instances of a role. If there are more than MAX_COMPARED, it compares the
instances whose caches have the longest prefixes of the prompt, and a few at random ("power of d
choices"). So its time does not grow with the number of instances, and frontends with the same
knowledge do not all send their next requests to the same worker. Callers pass the time, and the
seed of the random choices.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Self

import msgspec

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection, pair_of
from dynamo_trtllm.frontend.routing.prefix_index import (
    ClusterPrefixes,
    PrefixOverlaps,
    PromptHashes,
    SentPrompt,
)
from dynamo_trtllm.frontend.routing.worker_load import ClusterLoad, PlacedRequest, instance_cost
from dynamo_trtllm.protocol.messages import GenerateRequest, Instance, Role

# How many instances of a role are compared. The number is a compromise: one frontend knows of all
# requests, so it should compare many instances. Many frontends learn of each other's requests late,
# so each should compare few. The table has the p99 of the time to first token in ms, with eight
# equal workers. The workers to compare are drawn at random (`benchmarks.routing frontends`).
#
#     compared workers                             8     4     2   round robin
#     16 frontends                               615   432   325           291
#     1 frontend, prompts of different lengths   469   564   735          1196
#
# With `--router-mode slo`, three were too few. In a measurement, one of four elastic workers had
# all streams. Four of ten requests were not compared with this worker, so streams began at all
# workers.
MAX_COMPARED: Final = 4
_MAX_BY_PREFIX = 2  # how many instances are compared because of their caches
# An instance is penalized if its time per token is more than this multiple of that of the fastest
# one.
_SLOW_RATIO: Final = 1.5
_MAX_EXPONENT: Final = 700.0  # math.exp overflows above 709


# A struct is created in a third of the time of a named tuple.
class Candidate(msgspec.Struct, frozen=True, order=True):
    """An instance that is compared with others of its role. Candidates are sorted by cost."""

    cost: int
    tie_breaker: float  # a random number that orders instances of equal cost
    instance: Instance
    cached_tokens: int  # tokens of the prompt that are in the cache of the instance


class Costs(msgspec.Struct, frozen=True):
    """The cost of the selected instance of a role, and of the cheapest other one."""

    selected: int
    other: int | None  # None: there is no other instance

    @classmethod
    def of(cls, candidates: Sequence[Candidate], selected: Candidate) -> Costs:
        """Return the costs of a role. `candidates`: all of its candidates, in any order."""
        other_costs = [candidate.cost for candidate in candidates if candidate is not selected]
        return cls(selected.cost, min(other_costs, default=None))


class RankedSelection(WorkerSelection, frozen=True, kw_only=True):
    """A selection for which workers were compared: by cost or by predicted times."""

    prompt: PromptHashes
    # Tokens of the prompt that are in the cache of the instance that computes it.
    overlap_tokens: int


class CostSelection(RankedSelection, frozen=True, kw_only=True):
    """A selection by cost."""

    prefill_costs: Costs | None  # None: there is no prefill instance
    decode_costs: Costs

    def aggregated_on(self, instance: Instance) -> Self:
        """See `WorkerSelection.aggregated_on`."""
        selection = super().aggregated_on(instance)
        return msgspec.structs.replace(selection, prefill_costs=None)


@dataclass(eq=False)
class Placement:
    """Selects workers for the requests of one frontend by their cost, and counts what they run.

    Args:
        mode: the mode of the router, for the flight recorder.
        prefixes: the prefixes in the instances' caches. None: they do not count.
        overlap_credit: how much of the cost of computing a token of the prompt is saved if the
            token is in the cache.
        temperature: 0 selects the least cost. With a higher temperature, instances of higher cost
            are selected, too: the probabilities are softmax(-cost / (range * temperature)), where
            `range` is the highest cost minus the least.
        seed: the seed of the random choices.
    """

    mode: str
    prefixes: ClusterPrefixes | None = None
    _: KW_ONLY
    overlap_credit: float = 1.0
    temperature: float = 0.0
    seed: int | None = None
    loads: ClusterLoad = field(default_factory=ClusterLoad, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed).random

    def start(
        self, selection: WorkerSelection, request: GenerateRequest, now: float
    ) -> PlacedRequest:
        """Record that a request runs at the selected instances, and that they cache its prompt."""
        overlap_tokens = 0
        prompts: list[SentPrompt] = []
        if isinstance(selection, RankedSelection):
            overlap_tokens = selection.overlap_tokens
            if self.prefixes is not None:
                selected = [selection.decode]
                if selection.prefill is not None:
                    selected = [selection.prefill, selection.decode]
                prompts = [
                    self.prefixes.record_sent(selection.prompt, instance.id, now)
                    for instance in selected
                ]
        new_tokens = len(request.token_ids) - overlap_tokens
        return PlacedRequest(self.loads, selection, request, new_tokens, prompts)

    def select(
        self,
        view: ModelView,
        prompt: PromptHashes,
        breakers: PairBreakers,
        now: float,
        *,
        avoid: int | None = None,
        waited_s: float = 0.0,
        may_reject: bool = False,
    ) -> RankedSelection | None:
        """Select a prefill and a decode instance, or an aggregated one if a role has no instance.

        Returns None if no compared instance can be used. Then `select_round_robin` looks at all
        instances, and raises an error if none of them can be used, either.

        Args:
            view: the instances of the request's model.
            prompt: the prompt of the request. Its hashes are computed only if `prefixes` is set.
            breakers: the breakers of the pairs.
            now: seconds of a monotonic clock.
            avoid: prefill instance that is not selected here. `select_round_robin` may select it.
            waited_s: for how long the request has waited. It does not count for costs.
            may_reject: see `SloPlacement.select`. A placement by cost rejects no request.
        """
        overlaps = None if self.prefixes is None else self.prefixes.overlaps(prompt, now)
        if overlaps is not None and not overlaps.matches:
            overlaps = None
        # Pairs are preferred: a deployment that has them was built for them.
        if view.prefill and view.decode:
            return self._select_pair(view, prompt, overlaps, breakers, avoid)
        if view.aggregated:
            return self._select_aggregated(view, prompt, overlaps, breakers)
        return None

    def _select_pair(
        self,
        view: ModelView,
        prompt: PromptHashes,
        overlaps: PrefixOverlaps | None,
        breakers: PairBreakers,
        avoid: int | None,
    ) -> CostSelection | None:
        """Return the preferred pair of the pairing key where this pair costs least."""
        best: CostSelection | None = None
        least_cost = math.inf
        for group in view.groups.values():
            if not group.prefill or not group.decode:
                continue
            prefills = self._ranked(view, group.prefill, prompt.request, overlaps, Role.PREFILL)
            decodes = self._ranked(view, group.decode, prompt.request, overlaps, Role.DECODE)
            if avoid is not None:
                prefills = [candidate for candidate in prefills if candidate.instance.id != avoid]
            pair = _preferred_pair(prefills, decodes, breakers, is_drawn=self.temperature > 0)
            if pair is None:
                continue
            prefill, decode = pair
            cost = prefill.cost + decode.cost
            if cost < least_cost:
                least_cost = cost
                # An elastic instance that is the best one in both roles runs the whole request.
                is_same = prefill.instance.id == decode.instance.id
                best = CostSelection(
                    prefill=None if is_same else prefill.instance,
                    decode=decode.instance,
                    prefill_costs=None if is_same else Costs.of(prefills, prefill),
                    decode_costs=Costs.of(decodes, decode),
                    prompt=prompt,
                    overlap_tokens=prefill.cached_tokens,
                )
        return best

    def _select_aggregated(
        self,
        view: ModelView,
        prompt: PromptHashes,
        overlaps: PrefixOverlaps | None,
        breakers: PairBreakers,
    ) -> CostSelection | None:
        """Return the preferred aggregated instance whose breaker is closed."""
        ranked = self._ranked(view, view.aggregated, prompt.request, overlaps, Role.AGGREGATED)
        if breakers.any_open:
            ranked = [
                candidate
                for candidate in ranked
                if not breakers.is_open((None, candidate.instance.id))
            ]
        if not ranked:
            return None
        best = ranked[0]
        return CostSelection(
            prefill=None,
            decode=best.instance,
            prefill_costs=None,
            decode_costs=Costs.of(ranked, best),
            prompt=prompt,
            overlap_tokens=best.cached_tokens,
        )

    def select_decode(
        self, view: ModelView, decodes: tuple[Instance, ...], request: GenerateRequest
    ) -> Instance | None:
        """Return the preferred decode instance for KV that is already computed.

        None: there is no instance.
        """
        ranked = self._ranked(view, decodes, request, None, Role.DECODE)
        return ranked[0].instance if ranked else None

    def _ranked(
        self,
        view: ModelView,
        instances: tuple[Instance, ...],
        request: GenerateRequest,
        overlaps: PrefixOverlaps | None,
        role: Role,
    ) -> list[Candidate]:
        """Return the instances to compare, the preferred one first.

        They are sorted by cost. With a temperature, their order is drawn at random.

        The cost of an instance is divided by its share: an instance that is to have half of the
        work costs twice as much.

        Args:
            view: the view that has the instances.
            instances: the instances of one role and one pairing key.
            request: the request.
            overlaps: what is cached of its prompt.
            role: the role in which the instances would run the request.
        """
        compared = self._compared(view, instances, overlaps, role)
        cached = [0] * len(compared) if overlaps is None else overlaps.of(compared)
        prompt_tokens = len(request.token_ids)
        candidates: list[Candidate] = []
        paces: list[float] = []
        for (instance_id, instance), cached_tokens in zip(compared.items(), cached, strict=True):
            load = self.loads.get(instance_id)
            credited_tokens = int(self.overlap_credit * cached_tokens)
            cost = instance_cost(load, instance, prompt_tokens, credited_tokens, role)
            share = view.share(instance, role) if view.shares else 1.0
            # An instance with a share of 0 is only compared if those with a share can't run the
            # request. Then its share does not count.
            if 0 < share < 1:
                cost = int(cost / share)
            candidates.append(Candidate(cost, self._random(), instance, cached_tokens))
            paces.append(load.token_s)
        ranked = _penalize_slow(candidates, paces)
        ranked.sort()
        if self.temperature and ranked:
            _draw_order(ranked, self.temperature)
        return ranked

    def _compared(
        self,
        view: ModelView,
        instances: tuple[Instance, ...],
        overlaps: PrefixOverlaps | None,
        role: Role,
    ) -> dict[int, Instance]:
        """Return the instances to compare, by id.

        Up to MAX_COMPARED instances are all compared. Of more instances, those with the longest
        prefixes are compared, and a few at random.
        """
        if len(instances) <= MAX_COMPARED:
            return {instance.id: instance for instance in instances}
        chosen: dict[int, Instance] = {}
        if overlaps is not None:
            by_id = _by_id(view)
            # All of `instances` have the same pairing key. Aggregated instances have none.
            key = view.keys.get(instances[0].id)

            def is_one_of_instances(instance_id: int) -> bool:
                # `overlaps` has all instances of the model. Some are excluded from the view, or
                # have another pairing key.
                if instance_id not in by_id or view.keys.get(instance_id) != key:
                    return False
                # An elastic instance of the view may have no share in this role. Without shares,
                # this search is not needed.
                return not view.shares or by_id[instance_id] in instances

            for instance_id in overlaps.deepest(role, _MAX_BY_PREFIX):
                if is_one_of_instances(instance_id):
                    chosen[instance_id] = by_id[instance_id]
        # An instance may be drawn twice. Then fewer instances are compared.
        for _ in range(MAX_COMPARED - len(chosen)):
            index = int(self._random() * len(instances))
            instance = instances[index]
            chosen[instance.id] = instance
        return chosen


def _penalize_slow(candidates: list[Candidate], paces: Sequence[float]) -> list[Candidate]:
    """Return the candidates, with higher costs for those that are much slower than the fastest one.

    Args:
        candidates: the candidates of one role.
        paces: seconds per token of each candidate. 0: not known. If one is not known, no cost
            changes.
    """
    fastest = min(paces, default=0.0)
    if fastest <= 0:
        return candidates
    limit = _SLOW_RATIO * fastest
    if max(paces) <= limit:
        return candidates
    penalized: list[Candidate] = []
    for candidate, pace in zip(candidates, paces, strict=True):
        cost = candidate.cost
        if pace > limit:
            cost = int(cost * pace / fastest)
        penalized.append(msgspec.structs.replace(candidate, cost=cost))
    return penalized


def _draw_order(ranked: list[Candidate], temperature: float) -> None:
    """Reorder sorted candidates at random. Those of low cost are more likely to be the first.

    The probability of each candidate to be the first is proportional to its weight
    exp(-cost / scale). For that, each candidate gets a random number of the exponential
    distribution, divided by its weight. The candidates are then sorted by these numbers (an
    exponential race, as in the Gumbel trick).
    """
    least_cost = ranked[0].cost
    cost_range = ranked[-1].cost - least_cost
    scale = temperature * max(1, cost_range)

    def arrival(candidate: Candidate) -> float:
        # The tie breaker is distributed uniformly from 0 to 1, so this number is distributed
        # exponentially.
        exponential = -math.log1p(-candidate.tie_breaker)
        exponent = (candidate.cost - least_cost) / scale
        return exponential * math.exp(min(_MAX_EXPONENT, exponent))

    ranked.sort(key=arrival)


def _by_id(view: ModelView) -> Mapping[int, Instance]:
    by_id: Mapping[int, Instance] | None = view.cache.get("by_id")
    if by_id is None:
        instances = (*view.prefill, *view.decode, *view.aggregated)
        by_id = {instance.id: instance for instance in instances}
        view.cache["by_id"] = by_id
    return by_id


def _preferred_pair(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    breakers: PairBreakers,
    *,
    is_drawn: bool,
) -> tuple[Candidate, Candidate] | None:
    """Return the preferred pair whose breaker is closed.

    None: the breakers of all pairs are open, or one role has no candidate.

    Args:
        prefills: the prefill candidates, the preferred one first.
        decodes: the decode candidates, the preferred one first.
        breakers: the breakers of the pairs.
        is_drawn: the candidates are in an order that was drawn at random, which counts. Otherwise
            the sum of the costs counts.
    """
    if not prefills or not decodes:
        return None
    if not breakers.any_open:
        return prefills[0], decodes[0]
    closed = [
        (prefill, decode)
        for prefill, decode in itertools.product(prefills, decodes)
        if not breakers.is_open(pair_of(prefill.instance.id, decode.instance.id))
    ]
    if is_drawn:
        return closed[0] if closed else None
    return min(closed, key=_pair_cost, default=None)


def _pair_cost(pair: tuple[Candidate, Candidate]) -> int:
    prefill, decode = pair
    return prefill.cost + decode.cost

"""Place requests by the load of the workers and by the prefixes in their caches. Pure.

A selection compares all instances of a role, or of more than MOST_COMPARED those whose caches have
the longest prefixes of the prompt, and a few at random ("power of d choices"). So its time does not
grow with the number of instances, and frontends that know the same do not all send their next
requests to the same worker. Callers pass the time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import repeat
from typing import Final, TypeAlias

import msgspec

from dynamo_trtllm.messages import GenerateRequest, Instance
from dynamo_trtllm.router.load import FleetLoad, PlacedRequest, instance_cost
from dynamo_trtllm.router.policy import PairBreakers, WorkerSelection
from dynamo_trtllm.router.prefix_index import (
    KnownPrefixes,
    PrefixOverlaps,
    PromptHashes,
    SentPrompt,
)
from dynamo_trtllm.router.view import ModelView

# Instances of a role that are compared. With those chosen at random only, `benchmarks.routing
# frontends` with eight equal workers and 16 frontends, which learn of each other's requests late:
# p99 of the time to first token was 615 ms when all workers were compared, 432 ms with four, 325 ms
# with two, and 291 ms in turn. With one frontend and prompts of different lengths it was 469, 564,
# 735 and 1196 ms.
MOST_COMPARED: Final = 4
_DEEPEST = 2  # those that are compared because of their caches
# instances that take so many times as long per token as the fastest one cost more
_SLOWER: Final = 1.5
_NO_INSTANCES = ModelView()
_MOST_COST = (1 << 32) - 1  # recorded


Candidate: TypeAlias = tuple[int, float, Instance, int]
"""The cost of an instance, a random number, by which those of equal cost are ordered, the instance,
and its overlap.
"""


class Costs(msgspec.Struct, frozen=True):
    """The cost of the selected instance of a role and of the second best one, or -1."""

    selected: int
    second: int

    @classmethod
    def of(cls, ranked: Sequence[Candidate], selected: Candidate) -> Costs:
        if selected is not ranked[0]:
            return cls(selected[0], ranked[0][0])
        return cls(selected[0], ranked[1][0] if len(ranked) > 1 else -1)

    def packed(self) -> int:
        """Return both in one number of 64 bits, each plus one."""
        return min(self.selected + 1, _MOST_COST) << 32 | min(self.second + 1, _MOST_COST)

    @classmethod
    def unpacked(cls, number: int) -> Costs:
        return cls((number >> 32) - 1, (number & _MOST_COST) - 1)


class CostSelection(WorkerSelection, frozen=True):
    """A selection by cost."""

    prefill_costs: Costs | None  # None: there is no prefill instance
    decode_costs: Costs
    prompt: PromptHashes
    overlap_tokens: int  # of the prompt, in the cache of the instance that computes it

    def recorded(self) -> tuple[int, int]:
        """Return the costs of both roles as numbers for the flight recorder. 0: there is no prefill
        instance.
        """
        return (
            0 if self.prefill_costs is None else self.prefill_costs.packed(),
            self.decode_costs.packed(),
        )


@dataclass(eq=False)
class Placement:
    """Selects workers for the requests of one frontend by their cost, and counts what they run.

    Args:
        mode: of the router, for the flight recorder.
        prefixes: the prefixes in the instances' caches. None: they do not count.
        overlap_credit: how much of the cost of computing a token of the prompt is saved if it is in
            the cache.
        temperature: 0 selects the least cost. With more, those of higher cost are selected, too:
            the probability is the softmax of the negative costs, divided by their range and the
            temperature.
        seed: of the random choices.
    """

    mode: str
    prefixes: KnownPrefixes | None = None
    _: KW_ONLY
    overlap_credit: float = 1.0
    temperature: float = 0.0
    seed: int | None = None
    loads: FleetLoad = field(default_factory=FleetLoad, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed).random

    def start(
        self, selection: WorkerSelection, request: GenerateRequest, now: float
    ) -> PlacedRequest:
        """Count a request at its instances, and its prompt in their caches."""
        overlap_tokens, prompts = 0, list[SentPrompt]()
        if isinstance(selection, CostSelection):
            overlap_tokens = selection.overlap_tokens
            if self.prefixes is not None:
                ids = [
                    each.id for each in (selection.prefill, selection.decode) if each is not None
                ]
                prompts = [self.prefixes.record_sent(selection.prompt, each, now) for each in ids]
        new_tokens = len(request.token_ids) - overlap_tokens
        return PlacedRequest(self.loads, selection, request, new_tokens, now, prompts)

    def select(
        self,
        view: ModelView,
        prompt: PromptHashes,
        breakers: PairBreakers,
        now: float,
        *,
        avoid: int | None = None,
    ) -> CostSelection | None:
        """Return the pair of the least cost, or the aggregated instance if a role has none.

        Returns None if no compared instance can be used. Then `policy.select` looks at all
        instances, and raises the error if none can.

        Args:
            view: the instances of the request's model.
            prompt: of the request. Its hashes are computed only if prefixes count.
            breakers: of the pairs.
            now: seconds of a monotonic clock.
            avoid: prefill instance to use only if no other matches.
        """
        request = prompt.request
        cached = None if self.prefixes is None else self.prefixes.overlaps(prompt, now)
        if cached is not None and not cached.matches:
            cached = None
        best, least = None, math.inf
        for group in view.groups.values():
            if not group.prefill or not group.decode:
                continue
            prefills = self._ranked(view, group.prefill, request, cached)
            decodes = self._ranked(view, group.decode, request, cached)
            if avoid is not None:
                prefills = [each for each in prefills if each[2].id != avoid]
            pair = _best_pair(prefills, decodes, breakers)
            if pair is not None and pair[0][0] + pair[1][0] < least:
                prefill, decode = pair
                least = prefill[0] + decode[0]
                costs = Costs.of(prefills, prefill), Costs.of(decodes, decode)
                best = CostSelection(prefill[2], decode[2], *costs, prompt, prefill[3])
        if view.aggregated and not (view.prefill and view.decode):
            ranked = self._ranked(view, view.aggregated, request, cached)
            if breakers.any_open:
                ranked = [each for each in ranked if not breakers.is_open((None, each[2].id))]
            if ranked:
                best = CostSelection(
                    None, ranked[0][2], None, Costs.of(ranked, ranked[0]), prompt, ranked[0][3]
                )
        return best

    def select_decode(
        self, decodes: tuple[Instance, ...], request: GenerateRequest
    ) -> Instance | None:
        """Return the decode instance of the least cost to fetch KV that is there.

        None: there is no instance.
        """
        ranked = self._ranked(_NO_INSTANCES, decodes, request, None)
        return ranked[0][2] if ranked else None

    def _ranked(
        self,
        view: ModelView,
        instances: tuple[Instance, ...],
        request: GenerateRequest,
        overlaps: PrefixOverlaps | None,
    ) -> list[Candidate]:
        """Return those instances of a view to compare, sorted by cost.

        All have the same role and pairing key.
        """
        compared = self._compared(view, instances, overlaps)
        get, credit, prompt_tokens, number = (
            self.loads.get,
            self.overlap_credit,
            len(request.token_ids),
            self._random,
        )
        ranked, paces = [], []
        cached = repeat(0) if overlaps is None else overlaps.of(compared)
        for (id_, instance), cached_tokens in zip(compared.items(), cached, strict=False):
            load, overlap = get(id_), cached_tokens if credit == 1 else int(credit * cached_tokens)
            ranked.append(
                (
                    instance_cost(load, instance, prompt_tokens, overlap),
                    number(),
                    instance,
                    cached_tokens,
                )
            )
            paces.append(load.token_s)
        # 0: that of one is not known
        if 0 < _SLOWER * (fastest := min(paces, default=0.0)) < max(paces):
            ranked = [
                (
                    int(cost * pace / fastest) if pace > _SLOWER * fastest else cost,
                    tie,
                    instance,
                    cached_tokens,
                )
                for (cost, tie, instance, cached_tokens), pace in zip(ranked, paces, strict=True)
            ]
        ranked.sort()
        # of exponential numbers, each divided by its weight, each may be the least
        if self.temperature and ranked:
            least, scale = ranked[0][0], self.temperature * ((ranked[-1][0] - ranked[0][0]) or 1)
            ranked.sort(
                key=lambda each: (
                    -math.log1p(-each[1]) * math.exp(min(700.0, (each[0] - least) / scale))
                )
            )
        return ranked

    def _compared(
        self, view: ModelView, instances: tuple[Instance, ...], overlaps: PrefixOverlaps | None
    ) -> dict[int, Instance]:
        """Return by id all instances, or of too many those with the longest prefixes and a few at
        random.
        """
        count, number = len(instances), self._random
        if count <= MOST_COMPARED:
            return {each.id: each for each in instances}
        found: dict[int, Instance] = {}
        if overlaps is not None:
            by_id, key = _by_id(view), view.keys.get(instances[0].id)
            for id_ in overlaps.deepest(instances[0].role, _DEEPEST):
                # else it is excluded, or has another pairing key
                if id_ in by_id and view.keys.get(id_) == key:
                    found[id_] = by_id[id_]
        for _ in range(MOST_COMPARED - len(found)):
            other = instances[int(number() * count)]
            found[other.id] = other
        return found


def _by_id(view: ModelView) -> Mapping[int, Instance]:
    found: Mapping[int, Instance] | None = view.cache.get("by_id")
    if found is None:
        found = view.cache["by_id"] = {
            each.id: each for each in (*view.prefill, *view.decode, *view.aggregated)
        }
    return found


def _best_pair(
    prefills: Sequence[Candidate], decodes: Sequence[Candidate], breakers: PairBreakers
) -> tuple[Candidate, Candidate] | None:
    """Return the pair of the least cost whose breaker is closed.

    None: all are open, or one role has no candidate.
    """
    if not prefills or not decodes:
        return None
    if not breakers.any_open:
        return prefills[0], decodes[0]
    closed = [(p, d) for p in prefills for d in decodes if not breakers.is_open((p[2].id, d[2].id))]
    return min(closed, key=lambda pair: pair[0][0] + pair[1][0], default=None)

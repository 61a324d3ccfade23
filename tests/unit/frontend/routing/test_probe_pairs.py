"""The pairs that are probed, as instances come and go."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.probe_schedule import is_probed, new_pairs, pairs_of, pairs_with
from dynamo_trtllm.protocol.messages import Instance, Role
from tests.kit.instances import make_instance, model_view


def test_pairs_of_mixed_roles_match_and_include_aggregated() -> None:
    view = model_view(
        prefill=(make_instance(1, role=Role.PREFILL),),
        decode=(make_instance(2), make_instance(3)),
        aggregated=(make_instance(4, role=Role.AGGREGATED),),
    )
    assert pairs_of(view) == [(1, 2), (1, 3), (None, 4)]


def many(seed: int, num_prefill: int, num_decode: int) -> tuple[list[Instance], list[Instance]]:
    """Return workers with random ids, as real ones have."""
    ids = random.Random(seed).sample(range(1 << 40), num_prefill + num_decode)
    prefills = [make_instance(number, role=Role.PREFILL) for number in ids[:num_prefill]]
    return prefills, [make_instance(number) for number in ids[num_prefill:]]


def cluster_of(*instances: Instance) -> ClusterView:
    view = ClusterView()
    for instance in instances:
        view.add(instance)
    return view


def test_pairs_are_few_per_instance_when_very_many() -> None:
    prefills, decodes = many(1, 300, 50)
    view = cluster_of(*prefills, *decodes).model("tiny")
    pairs = pairs_of(view)
    assert len(pairs) == len(set(pairs)) <= 4 * 300 + 4 * 50 < 300 * 50
    of_instance = Counter(instance_id for pair in pairs for instance_id in pair)
    assert min(of_instance.values()) >= 4
    assert max(of_instance[prefill.id] for prefill in prefills) <= 12
    assert all(is_probed(view, pair, ()) for pair in pairs)
    other = next((p.id, d.id) for p in prefills for d in decodes if (p.id, d.id) not in pairs)
    assert other in pairs_of(view, [other])  # a probe has to end its quarantine
    assert (is_probed(view, other, ()), is_probed(view, other, [other])) == (False, True)
    few = cluster_of(*prefills[:20], *decodes).model("tiny")
    assert len(pairs_of(few)) == len(set(pairs_of(few))) == 20 * 50


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(3, 4), (33, 31), (60, 30), (3, 345)])
def test_new_pairs_are_those_gained(num_prefill: int, num_decode: int) -> None:
    prefills, decodes = many(2, num_prefill, num_decode)
    view = cluster_of(*prefills, *decodes)
    dice = random.Random(3)
    changes = view.subscribe()
    changes.clear()
    present = [*prefills, *decodes]
    for number in range(12):
        before = set(pairs_of(view.model("tiny")))
        if number % 3:
            instance = make_instance(
                dice.randrange(1 << 40), role=dice.choice([Role.PREFILL, Role.DECODE])
            )
            present.append(instance)
            view.add(instance)
        else:
            view.remove(present.pop(dice.randrange(len(present))).id)
        pairs = set(pairs_of(view.model("tiny")))
        assert pairs == {
            pair for instance_id in present for pair in pairs_with(view.model("tiny"), instance_id)
        }
        found = set(new_pairs(view.model("tiny"), changes.popleft()))
        assert pairs - before <= found <= pairs
        assert not changes

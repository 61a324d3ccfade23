"""Where requests go: round robin per role, pairs of equals only."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView, ModelView
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, FleetHealth, PairBreakers
from dynamo_trtllm.frontend.routing.pairs import pairing_key
from dynamo_trtllm.frontend.routing.worker_selection import (
    WorkerSelector,
    field_support,
    select_round_robin,
)
from dynamo_trtllm.protocol.errors import NoInstances, TransferMismatch, UnsupportedParameter
from dynamo_trtllm.protocol.messages import GenerateRequest, Instance, Role, Sampling, token_ids
from tests.kit.cases import each_case
from tests.kit.instances import LAYOUT, make_instance, model_view

OTHER = msgspec.structs.replace(LAYOUT, block_tokens=64)


def some(role: Role, *ids: int, **fields: Any) -> tuple[Instance, ...]:
    return tuple(msgspec.structs.replace(make_instance(i, role=role), **fields) for i in ids)


def prefills(*ids: int, **fields: Any) -> tuple[Instance, ...]:
    return some(Role.PREFILL, *ids, **fields)


def decodes(*ids: int, **fields: Any) -> tuple[Instance, ...]:
    return some(Role.DECODE, *ids, **fields)


def served(
    view: ModelView, turns: int, breakers: PairBreakers | None = None
) -> list[tuple[int, int]]:
    placements = [
        select_round_robin(view, "tiny", turn, breakers or PairBreakers()) for turn in range(turns)
    ]
    return [(p.prefill.id if p.prefill else 0, p.decode.id) for p in placements]


def test_place_when_roles_have_several_then_each_takes_turns() -> None:
    view = model_view(prefill=prefills(1, 2), decode=decodes(11, 12, 13))
    assert served(view, 6) == [(1, 11), (2, 12), (1, 13), (2, 11), (1, 12), (2, 13)]


def test_place_with_different_keys_shares_every_prefill() -> None:
    view = model_view(
        prefill=prefills(1, 2) + prefills(3, 4, layout=OTHER),
        decode=decodes(11) + decodes(12, layout=OTHER),
    )
    pairs = served(view, 8)
    assert Counter(p for p, _ in pairs) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert all((p <= 2) == (d == 11) for p, d in pairs)


@pytest.mark.parametrize(
    "field",
    [
        {"engine": "torch"},
        {"strategy": "other"},
        {"layout": OTHER},
        {"kv_compat": {"release": "1.2"}},
        {"signs_kv_transfers": True},
    ],
)
def test_place_when_one_decode_differs_then_it_is_never_chosen(field: dict[str, Any]) -> None:
    view = model_view(prefill=prefills(1), decode=decodes(11, **field) + decodes(12))
    assert served(view, 3) == [(1, 12)] * 3


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"engine": "torch"}, "engine is 'mock' at prefill and 'torch' at decode"),
        ({"strategy": "other"}, "strategy is 'prefill_first' at prefill and 'other' at decode"),
        ({"layout": OTHER}, "layout.block_tokens is 16 at prefill and 64 at decode"),
        (
            {"signs_kv_transfers": True},
            "--kv-transfer-key-file is 'not given' at prefill and 'given' at decode",
        ),
    ],
)
def test_place_without_matching_pair_names_the_field(field: dict[str, Any], said: str) -> None:
    with pytest.raises(TransferMismatch) as caught:
        select_round_robin(
            model_view(prefill=prefills(1), decode=decodes(11, **field)), "tiny", 0, PairBreakers()
        )
    assert caught.value.message.endswith(f"matches a decode worker: {said}")


@pytest.mark.parametrize(
    ("view", "missing"),
    [
        (model_view(), "no prefill and no decode worker"),
        (model_view(prefill=prefills(1)), "no decode worker"),
        (model_view(decode=decodes(1)), "no prefill worker"),
    ],
)
def test_place_with_missing_roles_names_them(view: ModelView, missing: str) -> None:
    with pytest.raises(NoInstances, match=f"model 'tiny' has {missing} now"):
        select_round_robin(view, "tiny", 0, PairBreakers())


def test_place_when_there_is_no_pair_then_aggregated_take_turns() -> None:
    view = model_view(prefill=prefills(1), aggregated=some(Role.AGGREGATED, 21, 22))
    assert served(view, 3) == [(0, 21), (0, 22), (0, 21)]


def test_place_prefers_a_pair_to_aggregated() -> None:
    view = model_view(prefill=prefills(1), decode=decodes(11), aggregated=some(Role.AGGREGATED, 21))
    assert served(view, 2) == [(1, 11)] * 2


def test_place_avoids_a_prefill_if_there_is_another() -> None:
    two = model_view(prefill=prefills(1, 2), decode=decodes(11))
    one = model_view(prefill=prefills(1), decode=decodes(11))
    assert all(
        select_round_robin(two, "tiny", turn, PairBreakers(), avoid=1).prefill == two.prefill[1]
        for turn in range(3)
    )
    assert select_round_robin(one, "tiny", 0, PairBreakers(), avoid=1).prefill == one.prefill[0]
    breakers = PairBreakers()
    breakers.withhold([(2, 11)])  # decode instance 11 has only the one to be avoided
    view = model_view(prefill=prefills(1, 2), decode=decodes(11, 12))
    assert {
        select_round_robin(view, "tiny", turn, breakers, avoid=1).decode.id for turn in range(4)
    } == {12}


def shut(*pairs: tuple[int | None, int]) -> PairBreakers:
    breakers = PairBreakers(BreakerLimits(failures=1))
    for pair in pairs:
        breakers.record_failure(pair, f"{pair} is broken", 0.0)
    return breakers


def test_place_with_equal_counts_uses_every_pair() -> None:
    pairs = served(model_view(prefill=prefills(1, 2), decode=decodes(11, 12)), 40)
    assert Counter(pairs) == {(1, 11): 10, (2, 12): 10, (1, 12): 10, (2, 11): 10}


def test_place_with_open_pair_uses_its_instances_with_others() -> None:
    view = model_view(prefill=prefills(1, 2), decode=decodes(11, 12))
    pairs = served(view, 40, shut((1, 11)))
    assert set(pairs) == {(2, 11), (1, 12), (2, 12)}
    assert Counter(d for _, d in pairs) == {11: 20, 12: 20}


def test_place_omits_a_decode_whose_pairs_are_all_open() -> None:
    view = model_view(prefill=prefills(1, 2), decode=decodes(11, 12))
    assert {d for _, d in served(view, 8, shut((1, 11), (2, 11)))} == {12}


def test_place_with_every_pair_open_says_why() -> None:
    with pytest.raises(NoInstances, match=r"quarantined: \(1, 11\) is broken"):
        select_round_robin(
            model_view(prefill=prefills(1), decode=decodes(11)), "tiny", 0, shut((1, 11))
        )


def test_place_with_open_aggregated_instance_uses_another() -> None:
    view = model_view(aggregated=some(Role.AGGREGATED, 21, 22))
    assert {d for _, d in served(view, 4, shut((None, 21)))} == {22}


def reference(
    view: ModelView, index: int, breakers: PairBreakers, avoid: int | None
) -> tuple[int, int] | None:
    """Select as `select` does, but look at every instance. None: it raises an error."""
    keys = {member.id: pairing_key(member) for member in (*view.prefill, *view.decode)}

    def closed(decode: Instance) -> list[int]:
        partners = [p.id for p in view.prefill if keys[p.id] == keys[decode.id]]
        return [p for p in partners if not breakers.is_open((p, decode.id))]

    decodes = [d for d in view.decode if closed(d)]
    if not decodes:
        return None
    decodes = [d for d in decodes if any(p != avoid for p in closed(d))] or decodes
    decode = decodes[index % len(decodes)]
    prefills = [p for p in closed(decode) if p != avoid] or closed(decode)
    peers = [d for d in decodes if keys[d.id] == keys[decode.id]]
    index_in_key = index // len(decodes) * len(peers) + peers.index(decode)
    return (
        prefills[
            (index_in_key + index_in_key // math.lcm(len(peers), len(prefills))) % len(prefills)
        ],
        decode.id,
    )


@each_case("seed", range(40))
def test_select_equals_an_exhaustive_search(seed: int) -> None:
    dice = random.Random(seed)
    view = ClusterView()
    breakers = PairBreakers(BreakerLimits(failures=1))
    for number in range(dice.randrange(2, 24)):
        role = dice.choice([Role.PREFILL, Role.DECODE])
        layout = dice.choice([LAYOUT, LAYOUT, OTHER])
        view.add(msgspec.structs.replace(make_instance(number, role=role), layout=layout))
    for index in range(60):
        model = view.model("tiny").excluding(
            frozenset(dice.sample(range(24), dice.choice([0, 0, 1, 5])))
        )
        if model.prefill and model.decode:
            pair = (dice.choice(model.prefill).id, dice.choice(model.decode).id)
            match dice.randrange(8):
                case 0:
                    breakers.withhold([pair])
                case 1:
                    breakers.record_success(pair, 0.0, is_probe=True)
                case 2 | 3:
                    breakers.record_failure(pair, "x", 0.0)
        avoid = dice.choice([None, dice.randrange(24)])
        try:
            chosen = select_round_robin(model, "tiny", index, breakers, avoid=avoid)
        except (NoInstances, TransferMismatch):
            assert reference(model, index, breakers, avoid) is None
            continue
        assert chosen.prefill is not None
        assert (chosen.prefill.id, chosen.decode.id) == reference(model, index, breakers, avoid)


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="tiny",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=1),
        deadline=0,
        **fields,
    )


PRIORITY = {"supported_features": ("priority",)}
RANKS = {"supported_features": ("dp_rank",)}
AGGREGATED = model_view(aggregated=some(Role.AGGREGATED, 1))


@pytest.mark.parametrize(
    ("fields", "view", "ids"),
    [
        ({}, model_view(prefill=prefills(1), decode=decodes(2)), set()),
        # only a hint
        ({"conversation_id": "c"}, model_view(prefill=prefills(1), decode=decodes(2)), set()),
        (
            {"priority": 1},
            model_view(
                prefill=prefills(1) + prefills(3, **PRIORITY), decode=decodes(2, **PRIORITY)
            ),
            {1},
        ),
        (
            {"dp_rank": 0},
            model_view(prefill=prefills(1), decode=decodes(2) + decodes(3, **RANKS)),
            {2},
        ),
        (
            {"prefill_dp_rank": 0},
            model_view(prefill=prefills(1, **RANKS), decode=decodes(2)),
            set(),
        ),
    ],
)
def test_support_excludes_workers_without_the_feature(
    fields: dict[str, Any], view: ModelView, ids: set[int]
) -> None:
    assert field_support(view, asked(**fields)) == (ids, "")
    assert field_support(view, asked(**fields)) == (ids, "")  # cached


@pytest.mark.parametrize(
    ("fields", "view", "name"),
    [
        (
            {"priority": 1},
            model_view(prefill=prefills(1), decode=decodes(2, **PRIORITY)),
            "priority",
        ),
        (
            {"dp_rank": 0},
            model_view(prefill=prefills(1, **RANKS), decode=decodes(2)),
            "nvext.dp_rank",
        ),
        (
            {"prefill_dp_rank": 0},
            model_view(prefill=prefills(1), decode=decodes(2, **RANKS)),
            "nvext.prefill_dp_rank",
        ),
        (
            {"prefill_dp_rank": 0},
            model_view(aggregated=some(Role.AGGREGATED, 1, **RANKS)),
            "nvext.prefill_dp_rank",
        ),
        # one of two prefill workers lacks the priority, and all decode workers lack ranks
        (
            {"priority": 1, "dp_rank": 0},
            model_view(
                prefill=prefills(1) + prefills(3, **PRIORITY), decode=decodes(2, **PRIORITY)
            ),
            "nvext.dp_rank",
        ),
        # the worker lacks both, and any of the two may be named
        ({"priority": 1, "prefill_dp_rank": 0}, AGGREGATED, "nvext.prefill_dp_rank"),
        # no worker has both
        (
            {"priority": 1, "dp_rank": 0},
            model_view(
                prefill=prefills(1, **PRIORITY), decode=decodes(2, **PRIORITY) + decodes(3, **RANKS)
            ),
            "priority",
        ),
        # those which support it do not match
        (
            {"priority": 1},
            model_view(
                prefill=prefills(1) + prefills(3, engine="other", **PRIORITY),
                decode=decodes(2, **PRIORITY) + decodes(4, engine="other"),
            ),
            "priority",
        ),
    ],
)
def test_support_of_missing_feature_rejects_client_field(
    fields: dict[str, Any], view: ModelView, name: str
) -> None:
    assert field_support(view, asked(**fields)).rejected_field == name


def test_select_when_a_field_is_rejected_then_the_error_names_it() -> None:
    view = ClusterView()
    view.add(*some(Role.AGGREGATED, 1))
    selector = WorkerSelector(view, FleetHealth(view, PairBreakers(), has_probes=False))
    with pytest.raises(
        UnsupportedParameter, match="priority is not supported by the workers of tiny"
    ) as caught:
        selector.select(asked(priority=1), 0, 0.0, excluded=frozenset(), avoid=None)
    assert caught.value.field == "priority"


def test_support_with_missing_role_rejects_nothing() -> None:
    assert field_support(model_view(decode=decodes(2)), asked(priority=1)) == ({2}, "")

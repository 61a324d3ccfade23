"""What the router knows, as instances come and go."""

from __future__ import annotations

import random

import msgspec

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView, ModelView, PairGroup
from dynamo_trtllm.frontend.routing.pairs import pairing_key
from dynamo_trtllm.protocol.messages import Instance, Role
from dynamo_trtllm.protocol.shares import ALL_WORK
from tests.kit.instances import CARD, LAYOUT, make_instance


def test_view_sorts_instances_by_id_and_role() -> None:
    view = ClusterView()
    for number, role in (
        (3, Role.DECODE),
        (1, Role.PREFILL),
        (2, Role.DECODE),
        (4, Role.AGGREGATED),
    ):
        view.add(make_instance(number, role=role))
    model = view.model("tiny")
    assert [[i.id for i in some] for some in (model.prefill, model.decode, model.aggregated)] == [
        [1],
        [2, 3],
        [4],
    ]
    assert [i.id for i in view.instances()] == [1, 2, 3, 4]


def test_view_drops_a_model_with_its_last_instance() -> None:
    view = ClusterView()
    view.add(make_instance(1))
    view.remove(2)
    assert list(view.models()) == ["tiny"]
    view.remove(1)
    assert view.models() == set()
    assert view.model("tiny").missing_roles() == [Role.PREFILL, Role.DECODE]


def test_missing_roles_when_one_call_is_there_then_the_other() -> None:
    view = ClusterView()
    view.add(make_instance(1, role=Role.PREFILL))
    assert view.model("tiny").missing_roles() == [Role.DECODE]
    view.add(make_instance(2, role=Role.AGGREGATED))
    assert view.model("tiny").missing_roles() == []


def test_view_moves_a_record_that_changes_its_model() -> None:
    view = ClusterView()
    view.add(make_instance(1))
    view.add(
        msgspec.structs.replace(make_instance(1), card=msgspec.structs.replace(CARD, name="other"))
    )
    assert list(view.models()) == ["other"]
    assert view.model("tiny").decode == ()


Instances = tuple[Instance, ...]


def grouped(prefill: Instances, decode: Instances) -> tuple[dict[int, str], dict[str, PairGroup]]:
    """Return the keys and groups of a view, from all of its instances."""
    keys = {member.id: pairing_key(member) for member in (*prefill, *decode)}
    members = {
        key: [
            tuple(member for member in role if keys[member.id] == key) for role in (prefill, decode)
        ]
        for key in keys.values()
    }
    return keys, {key: PairGroup(*roles) for key, roles in members.items()}


def test_view_updated_equals_one_built_at_once() -> None:
    dice = random.Random(4)
    view = ClusterView()
    present = dict[int, Instance]()
    for _ in range(100):
        number = dice.randrange(30)
        if number in present and dice.random() < 0.5:
            view.remove(number)
            del present[number]
        else:
            layout = msgspec.structs.replace(LAYOUT, block_tokens=dice.choice([16, 64]))
            present[number] = msgspec.structs.replace(
                make_instance(number, role=dice.choice([*Role])), layout=layout
            )
            view.add(present[number])
        model = view.model("tiny")
        instances = sorted(present.values(), key=lambda instance: instance.id)
        roles = [
            tuple(member for member in instances if member.role in of_role)
            for of_role in (
                (Role.PREFILL, Role.ELASTIC),
                (Role.DECODE, Role.ELASTIC),
                (Role.AGGREGATED,),
            )
        ]
        shares = {member.id: ALL_WORK for member in instances if member.role is Role.ELASTIC}
        built = ModelView(roles[0], roles[1], roles[2], *grouped(roles[0], roles[1]), shares)
        assert (model, model.paired) == (built, built.paired)
        gone = frozenset(dice.sample(range(30), 10))
        left = [
            tuple(member for member in role if member.id not in gone)
            for role in (model.prefill, model.decode)
        ]
        reduced = model.excluding(gone)
        assert [reduced.prefill, reduced.decode] == left
        assert (reduced.keys, reduced.groups) == grouped(left[0], left[1])

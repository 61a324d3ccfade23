"""What the router knows, as instances come and go."""

from __future__ import annotations

import msgspec

from dynamo_trtllm.messages import Role
from dynamo_trtllm.router.view import ClusterView, ModelView, PairBreakers, pairs_of
from tests.instances import CARD, make_instance


def test_view_when_instances_come_in_any_order_then_they_are_kept_by_id_and_role() -> None:
    view = ClusterView()
    for number, role in ((3, Role.DECODE), (1, Role.PREFILL), (2, Role.DECODE), (4, Role.AGGREGATED)):
        view.add(make_instance(number, role=role))
    model = view.model("tiny")
    assert [[i.id for i in some] for some in (model.prefill, model.decode, model.aggregated)] == [[1], [2, 3], [4]]
    assert [i.id for i in view.instances()] == [1, 2, 3, 4]


def test_view_when_the_last_instance_leaves_then_the_model_is_gone() -> None:
    view = ClusterView()
    view.add(make_instance(1))
    view.remove(2)
    assert list(view.models()) == ["tiny"]
    view.remove(1)
    assert view.models() == {}
    assert view.model("tiny").missing_roles() == [Role.PREFILL, Role.DECODE]


def test_missing_roles_when_one_call_is_there_then_the_other() -> None:
    view = ClusterView()
    view.add(make_instance(1, role=Role.PREFILL))
    assert view.model("tiny").missing_roles() == [Role.DECODE]
    view.add(make_instance(2, role=Role.AGGREGATED))
    assert view.model("tiny").missing_roles() == []


def test_models_when_cards_differ_then_that_of_the_lowest_id_counts() -> None:
    view = ClusterView()
    newer = msgspec.structs.replace(CARD, context_length=999)
    view.add(make_instance(1))
    view.add(msgspec.structs.replace(make_instance(2), card=newer))
    assert view.models()["tiny"] == CARD
    view.remove(1)
    assert view.models()["tiny"] == newer


def test_models_when_prefill_has_less_context_then_the_card_of_those_who_answer_counts() -> None:
    view = ClusterView()
    shorter = msgspec.structs.replace(CARD, context_length=64)
    view.add(msgspec.structs.replace(make_instance(1, role=Role.PREFILL), card=shorter))
    assert view.models()["tiny"] == shorter
    view.add(make_instance(2))
    assert view.models()["tiny"] == CARD


def test_view_when_a_record_changes_its_model_then_it_is_found_there_only() -> None:
    view = ClusterView()
    view.add(make_instance(1))
    view.add(msgspec.structs.replace(make_instance(1), card=msgspec.structs.replace(CARD, name="other")))
    assert list(view.models()) == ["other"]
    assert view.model("tiny").decode == ()


def test_pairs_when_there_are_very_many_then_each_instance_has_a_few() -> None:
    prefills = tuple(make_instance(number) for number in range(1, 301))
    decodes = tuple(make_instance(number, role=Role.DECODE) for number in range(1001, 1051))
    pairs = pairs_of(ModelView(prefills, decodes))
    assert len(pairs) < 4 * 300 + 4 * 50 < 300 * 50
    for instance, side in ((prefills[-1], 0), (decodes[-1], 1)):
        assert len([pair for pair in pairs if pair[side] == instance.id]) >= 4
    breakers, other = PairBreakers(), (prefills[0].id, decodes[-1].id)
    assert other not in pairs
    for now in range(3):
        breakers.record_failure(other, "transfer", now)
    assert other in pairs_of(ModelView(prefills, decodes), breakers)  # a probe has to end its quarantine
    few = ModelView(prefills[:20], decodes)
    assert len(pairs_of(few)) == len(set(pairs_of(few))) == 20 * 50

"""What a list or an event is news of."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import FrameType
from typing import TypeGuard

import msgspec
import pytest

from dynamo_trtllm.cluster.discovery import instance_cache as mirror_module
from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    CardChosen,
    Event,
    RejectionChanged,
    Removed,
)
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import EndpointId, endpoint_of, instance_key, subject
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.protocol.messages import Instance, ModelDeploymentCard, Role, encode
from tests.kit.cases import each_case
from tests.kit.instances import CARD, make_instance


class Cache(InstanceCache):
    """A cache that stores the chosen cards, and returns the other events."""

    def __init__(self, *, grace_s: float = 0.0) -> None:
        super().__init__(grace_s=grace_s)
        self.cards: dict[str, ModelDeploymentCard] = {}

    def relist(self, listed: Mapping[str, bytes], now_s: float = 0.0) -> list[Event]:
        return self._without_cards(super().relist(listed, now_s))

    def put(self, key: str, record: bytes) -> list[Event]:
        return self._without_cards(super().put(key, record))

    def delete(self, key: str) -> list[Event]:
        return self._without_cards(super().delete(key))

    def _without_cards(self, events: list[Event]) -> list[Event]:
        self.cards |= {event.card.name: event.card for event in events if is_card(event)}
        return [event for event in events if not is_card(event)]


def is_card(event: Event) -> TypeGuard[CardChosen]:
    return isinstance(event, CardChosen)


def entry(instance: Instance) -> tuple[str, bytes]:
    return instance_key(endpoint_of(instance), instance.id), encode(instance)


ONE, TWO, THREE = (make_instance(number) for number in (1, 2, 3))
TWO_CHANGED = msgspec.structs.replace(TWO, version="2.0")


def test_relist_reports_exactly_the_changes() -> None:
    cache = Cache()
    assert cache.relist(dict([entry(ONE), entry(TWO)])) == [Added(ONE), Added(TWO)]
    assert cache.relist(dict([entry(TWO_CHANGED), entry(THREE)])) == [
        Removed(1),
        Added(TWO_CHANGED),
        Added(THREE),
    ]
    assert cache.relist(dict([entry(TWO_CHANGED), entry(THREE)])) == []


def test_relist_missing_instance_is_down_after_grace() -> None:
    cache = Cache(grace_s=10)
    cache.relist(dict([entry(ONE), entry(TWO)]), 100.0)
    assert cache.next_list_s is None
    assert cache.relist(dict([entry(TWO_CHANGED), entry(THREE)]), 101.0) == [
        Added(TWO_CHANGED),
        Added(THREE),
    ]
    assert cache.next_list_s == 111.0
    # another cut does not begin the grace of ONE again
    assert cache.relist(dict([entry(THREE)]), 105.0) == []
    assert cache.next_list_s == 111.0
    assert cache.relist(dict([entry(THREE)]), 111.0) == [Removed(1)]
    assert cache.next_list_s == 115.0
    assert cache.relist(dict([entry(THREE)]), 116.0) == [Removed(2)]
    assert cache.next_list_s is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_relist_missing_instance_back_within_grace_is_unchanged(is_listed: bool) -> None:
    cache = Cache(grace_s=10)
    cache.relist(dict([entry(ONE)]), 0.0)
    cache.relist({}, 1.0)
    assert (cache.relist(dict([entry(ONE)]), 2.0) if is_listed else cache.put(*entry(ONE))) == []
    assert cache.next_list_s is None
    assert cache.relist({}, 20.0) == []  # missing once more: a grace of its own
    assert cache.next_list_s == 30.0


def test_removed_when_missing_then_down_at_once_and_once() -> None:
    cache = Cache(grace_s=10)
    cache.relist(dict([entry(ONE)]), 0.0)
    cache.relist({}, 1.0)
    assert cache.delete(entry(ONE)[0]) == [Removed(1)]
    assert cache.next_list_s is None
    assert cache.relist({}, 20.0) == []


def test_wait_anew_starts_grace_with_the_next_list() -> None:
    cache = Cache(grace_s=10)
    cache.relist(dict([entry(ONE)]), 0.0)
    cache.relist({}, 1.0)
    cache.restart_grace()
    assert cache.relist({}, 30.0) == []
    assert cache.next_list_s == 40.0
    assert cache.relist({}, 40.0) == [Removed(1)]


def test_put_when_record_is_known_then_nothing() -> None:
    cache = Cache()
    assert cache.put(*entry(ONE)) == [Added(ONE)]
    assert cache.put(*entry(ONE)) == []


def test_removed_when_known_then_down_once() -> None:
    cache = Cache()
    key, record = entry(ONE)
    cache.put(key, record)
    assert cache.delete(key) == [Removed(1)]
    assert cache.delete(key) == []
    assert cache.put(key, record) == [Added(ONE)]


ODD_KEY = "v1/instances/dynamo/a/b/1"


def reasons(events: list[Added | Removed | RejectionChanged]) -> list[tuple[str, str | None]]:
    """Of what was rejected, and nothing else."""
    assert all(isinstance(event, RejectionChanged) for event in events)
    return [(event.key, event.reason) for event in events if isinstance(event, RejectionChanged)]


def test_put_when_unreadable_then_rejected_once_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = Cache()
    with caplog.at_level(logging.WARNING):
        ((key, reason),) = reasons(cache.put(ODD_KEY, b"\xc1"))
        assert cache.put(ODD_KEY, b"\xc1") == []
        assert len(cache.put("v1/instances/dynamo/odd", entry(ONE)[1])) == 1
    assert key == ODD_KEY
    assert reason is not None
    assert caplog.records[0].getMessage() == f"etcd record rejected: {reason} (key {ODD_KEY})"
    assert len(caplog.records) == 2


def test_put_with_another_problem_warns_no_second_time(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache()
    cache.put(ODD_KEY, b"\xc1")
    ((_, reason),) = reasons(cache.put(ODD_KEY, b""))
    assert reason is not None
    assert "truncated" in reason
    assert len(caplog.records) == 1


def test_put_when_a_key_holds_anything_then_the_log_has_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ((key, _),) = reasons(Cache().put("v1/instances/dynamo/\n\x1b[2J\udcff" + "x" * 1_000_000, b""))
    assert key.startswith(r"v1/instances/dynamo/\n\x1b[2J\udcffxxx")
    (record,) = caplog.records
    assert len(record.getMessage()) < 500
    assert record.getMessage().isprintable()


def test_put_unreadable_known_record_is_down_and_rejected() -> None:
    cache = Cache()
    key, record = entry(ONE)
    cache.put(key, record)
    down, rejected = cache.put(key, b"\xc1")
    assert down == Removed(1)
    assert isinstance(rejected, RejectionChanged)
    assert cache.put(key, record) == [RejectionChanged(key, None), Added(ONE)]


def test_removed_rejected_record_takes_nothing_down() -> None:
    cache = Cache()
    cache.put(ODD_KEY, b"\xc1")
    assert cache.delete(ODD_KEY) == [RejectionChanged(ODD_KEY, None)]
    assert cache.delete(ODD_KEY) == []


def test_relist_without_a_rejected_key_ends_the_rejection() -> None:
    cache = Cache(grace_s=10)
    cache.relist({ODD_KEY: b"\xc1", **dict([entry(TWO)])})
    assert cache.relist({ODD_KEY: b"\xc1"}, 1.0) == []
    assert cache.relist({}, 2.0) == [RejectionChanged(ODD_KEY, None)]
    assert cache.relist({}, 11.0) == [Removed(2)]


def test_put_of_another_id_affects_no_instance() -> None:
    """The key of a ghost with the record of a real worker, and a ghost at the key of a real
    worker.
    """
    cache = Cache()
    cache.put(*entry(ONE))
    ghost_key = entry(THREE)[0]
    ((_, reason),) = reasons(cache.put(ghost_key, entry(ONE)[1]))
    assert reason == "id is 3 in the key and 1 in the record"
    assert reasons(cache.delete(ghost_key)) == [(ghost_key, None)]
    assert cache.put(*entry(ONE)) == []  # it stands as before


def moved(instance: Instance, component: str = "zzz") -> Instance:
    """The same id at another endpoint, with the key and the subject of that endpoint."""
    endpoint = EndpointId(instance.namespace, component, instance.endpoint)
    return msgspec.structs.replace(
        instance, component=component, subject=subject(endpoint, instance.id)
    )


def test_put_of_id_under_second_key_waits_for_the_first() -> None:
    cache = Cache()
    cache.put(*entry(ONE))
    second_key = entry(moved(ONE))[0]
    third_key = entry(moved(ONE, "zzzz"))[0]
    for second in (moved(ONE), moved(ONE, "zzzz")):
        ((_, reason),) = reasons(cache.put(*entry(second)))
        assert reason == f"instance id 1 is already registered under the key {entry(ONE)[0]}"
        assert cache.put(*entry(second)) == []
    assert cache.put(*entry(ONE)) == []
    assert cache.next_list_s is None
    assert cache.delete(entry(ONE)[0]) == [Removed(1)]
    assert cache.next_list_s == 0.0
    assert cache.relist(dict([entry(moved(ONE)), entry(moved(ONE, "zzzz"))])) == [
        RejectionChanged(
            third_key, f"instance id 1 is already registered under the key {second_key}"
        ),
        RejectionChanged(second_key, None),
        Added(moved(ONE)),
    ]
    assert cache.next_list_s is None
    assert cache.delete(third_key) == [RejectionChanged(third_key, None)]
    assert cache.delete(second_key) == [Removed(1)]


def test_put_when_first_key_is_unreadable_then_second_counts() -> None:
    cache = Cache()
    first_key = entry(ONE)[0]
    second_key = entry(moved(ONE))[0]
    cache.put(*entry(ONE))
    cache.put(*entry(moved(ONE)))
    down, rejected = cache.put(first_key, b"\xc1")
    assert down == Removed(1)
    assert isinstance(rejected, RejectionChanged)
    assert rejected.key == first_key
    assert cache.next_list_s == 0.0
    listed = {second_key: entry(moved(ONE))[1], first_key: b"\xc1"}
    assert cache.relist(listed) == [RejectionChanged(second_key, None), Added(moved(ONE))]


def test_relist_when_first_key_is_unreadable_then_lists_again() -> None:
    cache = Cache()
    cache.put(*entry(ONE))
    listed = {entry(moved(ONE))[0]: entry(moved(ONE))[1], entry(ONE)[0]: b"\xc1"}
    assert cache.relist(listed)[0] == Removed(1)
    assert cache.next_list_s == 0.0
    assert cache.relist(listed) == [RejectionChanged(entry(moved(ONE))[0], None), Added(moved(ONE))]


@pytest.mark.parametrize("is_listed", [True, False])
def test_relist_when_first_key_is_missing_then_second_waits(is_listed: bool) -> None:
    cache = Cache(grace_s=10)
    cache.relist(dict([entry(ONE), entry(moved(ONE))]))
    second = dict([entry(moved(ONE))])
    over = RejectionChanged(entry(moved(ONE))[0], None)
    assert cache.relist(second, 1.0) == []
    expected = [Removed(1), over, Added(moved(ONE))] if is_listed else [Removed(1), over]
    assert cache.relist(second if is_listed else {}, 11.0) == expected


def test_put_of_second_key_that_left_never_counts() -> None:
    cache = Cache()
    cache.put(*entry(ONE))
    cache.put(*entry(moved(ONE)))
    cache.delete(entry(moved(ONE))[0])
    assert cache.delete(entry(ONE)[0]) == [Removed(1)]
    assert cache.relist({}) == []


def test_put_of_too_many_rejected_records_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "MAX_REJECTED", 3)
    cache = Cache()
    odd = [f"v1/instances/dynamo/odd-{number}" for number in range(6)]
    assert [len(cache.put(key, b"")) for key in odd] == [1, 1, 1, 0, 0, 0]
    assert len(caplog.records) == 4
    assert "3 etcd records rejected, not logging further ones" in caplog.text
    assert cache.delete(odd[5]) == []
    cache.delete(odd[0])
    assert len(cache.put(odd[5], b"")) == 1  # there is a place again
    assert cache.put(*entry(ONE)) == [Added(ONE)]


def with_card(instance: Instance, **fields: object) -> Instance:
    return msgspec.structs.replace(instance, card=msgspec.structs.replace(CARD, **fields))


PREFILL = make_instance(9, role=Role.PREFILL)


UNFIT_CARDS = pytest.mark.parametrize(
    ("unfit", "reason"),
    [
        (with_card(TWO, vocab_size=33), "card.vocab_size is 33, and 32 in the card in use,"),
        (
            with_card(TWO, renderer="harmony"),
            "card.renderer is harmony, and chat_template in the card in use,",
        ),
        (
            with_card(TWO, files={"tokenizer.json": "0" * 64}),
            f"card.files.tokenizer.json is {'0' * 64}, and missing in the card in use,",
        ),
        (
            with_card(TWO, context_length=127),
            "card.context_length is 127, and 128 in the card in use,",
        ),
        (with_card(PREFILL, vocab_size=33), "card.vocab_size is 33, and 32 in the card in use,"),
    ],
    ids=["vocabulary", "renderer", "tokenizer", "context", "prefill"],
)


@UNFIT_CARDS
def test_record_with_unfit_card_is_rejected_until_others_leave(
    unfit: Instance, reason: str
) -> None:
    cache = Cache()
    later = Cache()
    cache.put(*entry(ONE))
    (rejected,) = cache.put(*entry(unfit))
    assert isinstance(rejected, RejectionChanged)
    assert str(rejected.reason).startswith(reason)
    assert cache.put(*entry(THREE)) == [Added(THREE)]
    # A frontend that starts later reads a list in the order of registration.
    listed = dict([entry(ONE), entry(unfit), entry(THREE)])
    assert later.relist(listed) == [rejected, Added(ONE), Added(THREE)]
    # THREE has its card still, although the other record is older now.
    assert cache.delete(entry(ONE)[0]) == [Removed(1)]
    assert cache.delete(entry(THREE)[0]) == [
        Removed(3),
        RejectionChanged(rejected.key, None),
        Added(unfit),
    ]
    assert cache.cards == {"tiny": unfit.card}


@UNFIT_CARDS
@pytest.mark.parametrize("has_followed", ["changes", "lists"])
def test_oldest_record_with_unfit_card_loses_to_two_others(
    unfit: Instance, reason: str, has_followed: str
) -> None:
    cache = Cache()
    listed: dict[str, bytes] = {}
    events: list[Event] = []
    for instance in (unfit, make_instance(4, role=Role.PREFILL), THREE):
        key, record = entry(instance)
        listed[key] = record
        events += cache.put(key, record) if has_followed == "changes" else cache.relist(listed)
    view = ClusterView()
    follow(view, events)
    assert [instance.id for instance in view.instances()] == [3, 4]
    assert cache.cards == {"tiny": CARD}
    rejections = {
        event.key: event.reason for event in events if isinstance(event, RejectionChanged)
    }
    ((key, last_reason),) = [(key, why) for key, why in rejections.items() if why is not None]
    assert key == entry(unfit)[0]
    assert last_reason.startswith(reason)


def test_first_list_reports_no_instance_that_others_outvote() -> None:
    unfit = with_card(ONE, vocab_size=33)
    events = InstanceCache().relist(dict([entry(unfit), entry(TWO), entry(THREE)]))
    assert events[0] == CardChosen(CARD)
    assert events[2:] == [Added(TWO), Added(THREE)]


@pytest.mark.parametrize(
    "fields",
    [
        {"files": {"chat_template.jinja": "0" * 64}},
        {"unsupported_features": ("logprobs",)},
        {"reasoning_parser": "missing"},
        {"context_length": 8},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_single_older_record_does_not_choose_the_card(fields: dict[str, object]) -> None:
    cache = Cache()
    older = with_card(ONE, **fields)
    for instance in (older, make_instance(4, role=Role.PREFILL), TWO):
        cache.put(*entry(instance))
    assert cache.cards == {"tiny": CARD}


def test_chosen_card_is_that_of_a_decode_instance() -> None:
    cache = Cache()
    shorter = [
        with_card(make_instance(9 + n, role=Role.PREFILL), context_length=64) for n in (0, 1)
    ]
    for instance in shorter:
        cache.put(*entry(instance))
    assert cache.cards["tiny"].context_length == 64
    assert cache.put(*entry(ONE)) == [Added(ONE)]
    assert cache.cards == {"tiny": CARD}


def test_chosen_card_changes_when_most_instances_have_another() -> None:
    """As in a rolling update: the new template is used once most instances have it."""
    cache = Cache()
    new = [with_card(make_instance(number), reasoning_parser="new") for number in (4, 5)]
    in_use = []
    for instance in (ONE, new[0], new[1]):
        cache.put(*entry(instance))
        in_use.append(cache.cards["tiny"].reasoning_parser)
    assert in_use == ["none", "none", "new"]


def test_instances_fit_again_when_their_card_is_chosen_again() -> None:
    cache = Cache()
    unfit = [with_card(make_instance(number), vocab_size=33) for number in (4, 5)]
    for instance in (ONE, *unfit):
        events = cache.put(*entry(instance))
    assert [event for event in events if not isinstance(event, RejectionChanged)] == [
        Removed(1),
        Added(unfit[0]),
        Added(unfit[1]),
    ]
    key_of_one, _ = entry(ONE)
    key_of_two, _ = entry(TWO)
    event, *_ = cache.put(*entry(TWO))
    assert event == RejectionChanged(key_of_two, cache._rejected[key_of_one])
    events = cache.put(*entry(THREE))
    assert [event for event in events if not isinstance(event, RejectionChanged)] == [
        Removed(4),
        Removed(5),
        Added(ONE),
        Added(TWO),
        Added(THREE),
    ]


@pytest.mark.parametrize(
    "newcomer",
    [
        with_card(TWO, tool_call_parser="hermes", eos_token_ids=(), unsupported_features=("seed",)),
        with_card(TWO, files={"chat_template.jinja": "0" * 64}),
        with_card(TWO, context_length=256),
        with_card(PREFILL, context_length=64),
        with_card(TWO, name="another", vocab_size=33),
    ],
    ids=["parsers", "template", "longer", "prefill", "model"],
)
def test_record_with_different_but_capable_card_is_added(newcomer: Instance) -> None:
    cache = Cache()
    cache.put(*entry(ONE))
    assert cache.put(*entry(newcomer)) == [Added(newcomer)]


SHORT = with_card(ONE, context_length=64)
LONG = with_card(TWO, context_length=256)
UNFIT = with_card(ONE, vocab_size=1, eos_token_ids=())


@each_case("writes", [[SHORT, LONG, UNFIT, SHORT], [SHORT, LONG, SHORT], [SHORT, SHORT, LONG]])
@each_case("has_followed", ["the changes", "the changes, then a list", "lists"])
def test_record_rewritten_is_judged_as_by_a_later_frontend(
    writes: list[Instance], has_followed: str
) -> None:
    earlier = Cache()
    later = Cache()
    view = ClusterView()
    later_view = ClusterView()
    listed: dict[str, bytes] = {}
    for number, instance in enumerate(writes):
        key, record = entry(instance)
        listed.pop(key, None)
        listed[key] = record
        if has_followed == "lists" or (
            has_followed == "the changes, then a list" and number == len(writes) - 1
        ):
            follow(view, earlier.relist(listed))
        else:
            follow(view, earlier.put(key, record))
    if earlier.next_list_s is not None:
        follow(view, earlier.relist(listed))
    follow(later_view, later.relist(listed))
    assert view.instances() == later_view.instances()
    assert earlier.cards == later.cards


def follow(view: ClusterView, events: list[Event]) -> None:
    for event in events:
        if isinstance(event, Added):
            view.add(event.instance)
        elif isinstance(event, Removed):
            view.remove(event.instance_id)


def num_calls(count: int) -> int:
    """Return the number of calls of Python functions that registering prefill workers takes."""
    cache = Cache()
    entries = [entry(make_instance(number + 1, role=Role.PREFILL)) for number in range(count)]
    calls = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        for key, record in entries:
            cache.put(key, record)
    finally:
        sys.setprofile(None)
    return calls


def test_put_cost_is_independent_of_prefill_worker_count() -> None:
    assert num_calls(400) < 2.1 * num_calls(200)


def test_record_overwritten_with_unfit_card_spares_others() -> None:
    cache = Cache()
    cache.relist(dict([entry(ONE), entry(TWO)]))
    removed, rejected = cache.put(*entry(UNFIT))
    assert removed == Removed(1)
    assert isinstance(rejected, RejectionChanged)
    assert cache.put(*entry(ONE)) == [RejectionChanged(rejected.key, None), Added(ONE)]

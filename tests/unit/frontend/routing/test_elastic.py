"""Selection of elastic workers by their shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.pair_breakers import FleetHealth, PairBreakers
from dynamo_trtllm.frontend.routing.pair_probe import random_prompt
from dynamo_trtllm.frontend.routing.pairs import Pair, WorkerSelection
from dynamo_trtllm.frontend.routing.probe_schedule import is_probed, pairs_of
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement
from dynamo_trtllm.frontend.routing.worker_selection import WorkerSelector
from dynamo_trtllm.protocol.errors import NoInstances
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    Limits,
    LoadReport,
    RequestSlo,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.shares import Shares
from tests.kit.cases import each_case
from tests.kit.generator_streams import routed_stream
from tests.kit.instances import elastic_instance, make_instance
from tests.kit.routing import FINISHED, Cluster, kv_chunk, request

PREFILLS = Shares(1.0, 0.0)
DECODES = Shares(0.0, 1.0)
EVEN = Shares(1.0, 1.0)
COST = MockArgs(prefill_token_s=0.0001).cost_prior
MODES = ("round-robin", "random", "kv", "slo")


class Selections:
    """Selects workers of some instances, without loads."""

    def __init__(self, mode: str, instances: Iterable[Instance]) -> None:
        self.view = ClusterView()
        placement = None
        if mode == "kv":
            placement = Placement("kv", seed=1)
        elif mode == "slo":
            placement = SloPlacement(10.0, 10.0, seed=1)
        self.breakers = PairBreakers()
        self.selector = WorkerSelector(
            self.view,
            FleetHealth(self.view, self.breakers),
            placement,
            selects_at_random=mode == "random",
            seed=1,
        )
        for number, instance in enumerate(instances):
            self.view.add(instance)
            if placement is not None:
                report = LoadReport(instance.id, 1, 0, 0, 0, 0, 100, 0, COST)
                placement.loads.on_report(report, 0.0)
            assert number < 10

    def select(
        self,
        made: GenerateRequest | None = None,
        excluded: frozenset[int] = frozenset(),
        avoid: int | None = None,
    ) -> WorkerSelection:
        made = made or request()
        index = self.selector.new_round_robin_index(made.model)
        return self.selector.select(made, index, 0.0, excluded=excluded, avoid=avoid)

    def open(self, instance_id: int) -> None:
        """Open the breaker of an instance that runs whole requests."""
        for _ in range(3):
            self.breakers.record_failure((None, instance_id), "it failed", 0.0)

    def pairs(self, count: int = 200) -> Counter[Pair]:
        """Return how often each pair is selected. (None, id): one worker runs the request."""
        counts: Counter[Pair] = Counter()
        for _ in range(count):
            selection = self.select()
            prefill = selection.prefill
            counts[None if prefill is None else prefill.id, selection.decode.id] += 1
        return counts


@each_case("mode", MODES)
def test_shares_of_fixed_kind_make_a_split(mode: str) -> None:
    selections = Selections(mode, [elastic_instance(1, PREFILLS), elastic_instance(2, DECODES)])
    pairs = selections.pairs()
    if mode == "slo":
        # It may let the decode worker run whole requests.
        assert set(pairs) <= {(1, 2), (None, 2)}
    else:
        assert set(pairs) == {(1, 2)}


@each_case("mode", MODES)
def test_one_elastic_worker_runs_whole_requests(mode: str) -> None:
    for shares in (EVEN, PREFILLS, DECODES):
        selections = Selections(mode, [elastic_instance(1, shares)])
        assert set(selections.pairs(20)) == {(None, 1)}


@each_case("mode", ("round-robin", "random"))
def test_turns_are_as_the_shares(mode: str) -> None:
    selections = Selections(
        mode,
        [
            elastic_instance(1, Shares(1.0, 0.25)),
            elastic_instance(2, Shares(0.5, 1.0)),
            elastic_instance(3, Shares(0.0, 0.75)),
        ],
    )
    pairs = selections.pairs(2000)
    decodes = Counter[int]()
    prefills = Counter[int]()
    for (prefill, decode), count in pairs.items():
        decodes[decode] += count
        prefills[decode if prefill is None else prefill] += count
    parts = [decodes[number] / 2000 for number in (1, 2, 3)]
    assert parts == pytest.approx([0.125, 0.5, 0.375], abs=0.04)
    parts = [prefills[number] / 2000 for number in (1, 2, 3)]
    assert parts == pytest.approx([2 / 3, 1 / 3, 0.0], abs=0.04)
    # All combinations occur, so no worker always has the same partner.
    assert set(pairs) == {(None, 1), (2, 1), (1, 2), (None, 2), (1, 3), (2, 3)}


def test_cost_counts_the_share_of_a_worker() -> None:
    decode = elastic_instance(3, DECODES)
    selections = Selections(
        "kv",
        [elastic_instance(1, Shares(1.0, 0.0)), elastic_instance(2, Shares(0.1, 0.0)), decode],
    )
    placement = selections.selector.placement
    assert placement is not None
    counts = Counter[int]()
    for _ in range(1100):
        selection = selections.select()
        assert selection.prefill is not None
        counts[selection.prefill.id] += 1
        # The request stays.
        placement.start(selection, request(), 0.0)
    # As the request counts, too, the load is as the shares only if there is much of it.
    assert counts[2] == pytest.approx(90, abs=5)


@each_case("mode", MODES)
def test_share_of_0_gets_calls_if_no_other_worker_can(mode: str) -> None:
    selections = Selections(mode, [elastic_instance(1, DECODES), elastic_instance(2, DECODES)])
    assert selections.pairs(50)
    gone = frozenset({1})
    selection = selections.select(excluded=gone)
    assert (selection.prefill, selection.decode.id) == (None, 2)


@each_case("mode", MODES)
def test_worker_without_share_helps_if_all_other_pairs_fail(mode: str) -> None:
    selections = Selections(mode, [elastic_instance(1, PREFILLS), elastic_instance(2, DECODES)])
    breakers = selections.breakers
    breakers.record_failure((1, 2), "wrong", 0.0, is_wrong=True)
    breakers.record_failure((None, 2), "wrong", 0.0, is_wrong=True)
    assert set(selections.pairs(20)) <= {(None, 1), (2, 1)}


@each_case("mode", MODES)
def test_change_of_shares_counts_from_the_next_request(mode: str) -> None:
    selections = Selections(mode, [elastic_instance(1, PREFILLS), elastic_instance(2, DECODES)])
    selections.view.set_shares({1: DECODES, 2: PREFILLS})
    assert set(selections.pairs(20)) <= {(2, 1), (None, 1)}
    selections.view.set_shares({})
    assert set(selections.pairs(20)) <= {(1, 2), (None, 2)}


def test_shares_count_for_workers_that_register_later() -> None:
    selections = Selections("round-robin", [])
    selections.view.set_shares({1: DECODES, 2: PREFILLS})
    selections.view.add(elastic_instance(1))
    selections.view.add(elastic_instance(2))
    assert set(selections.pairs(20)) == {(2, 1)}


def test_change_of_shares_leaves_breakers_and_probes_alone() -> None:
    view = ClusterView()
    view.add(elastic_instance(1))
    changes = view.subscribe()
    changes.clear()
    view.set_shares({1: DECODES})
    assert not changes


@each_case("mode", MODES)
def test_elastic_workers_pair_with_fixed_ones(mode: str) -> None:
    prefill = make_instance(1, role=Role.PREFILL)
    selections = Selections(mode, [prefill, elastic_instance(2, DECODES)])
    assert set(selections.pairs(20)) <= {(1, 2), (None, 2)}
    decode = make_instance(1, role=Role.DECODE)
    selections = Selections(mode, [decode, elastic_instance(2, PREFILLS)])
    assert set(selections.pairs(20)) == {(2, 1)}


def test_all_pairs_of_elastic_workers_are_probed() -> None:
    view = ClusterView()
    for number, shares in ((1, PREFILLS), (2, DECODES), (3, EVEN)):
        view.add(elastic_instance(number, shares))
    view.add(make_instance(4, role=Role.DECODE))
    expected: set[Pair] = {(None, 1), (None, 2), (None, 3)}
    expected |= {(one, other) for one in (1, 2, 3) for other in (1, 2, 3, 4) if one != other}
    model = view.model("tiny")
    assert set(pairs_of(model)) == expected
    assert all(is_probed(model, pair, ()) for pair in expected)


@each_case("mode", MODES)
def test_pairs_get_requests_after_their_probe(mode: str) -> None:
    selections = Selections(mode, [])
    health = FleetHealth(selections.view, selections.breakers, has_probes=True)
    selections.selector.health = health
    selections.view.add(elastic_instance(1))
    selections.view.add(elastic_instance(2))
    with pytest.raises(NoInstances):
        selections.select()
    selections.breakers.record_success((2, 1), 0.0, is_probe=True)
    placement = selections.selector.placement
    if placement is not None:
        for number in (1, 2):
            report = LoadReport(number, 1, 0, 0, 0, 0, 100, 0, COST)
            placement.loads.on_report(report, 0.0)
    assert set(selections.pairs(20)) == {(2, 1)}


@each_case("mode", MODES)
def test_prompt_without_space_for_its_kv_is_not_transferred(mode: str) -> None:
    # Its KV may take 40 blocks of 16 tokens, and the decode call the other 60.
    selections = Selections(mode, [elastic_instance(1, PREFILLS), elastic_instance(2, DECODES)])
    for tokens, output in ((641, 1), (640, 321)):
        long = msgspec.structs.replace(
            request(max_tokens=output), token_ids=token_ids([1] * tokens)
        )
        selection = selections.select(long)
        assert (selection.prefill, selection.decode.id) == (None, 2)
    fitting = msgspec.structs.replace(request(max_tokens=320), token_ids=token_ids([1] * 640))
    if mode != "slo":
        assert selections.select(fitting).prefill is not None


@each_case("mode", MODES)
def test_prompt_without_space_avoids_open_breakers(mode: str) -> None:
    long = msgspec.structs.replace(request(max_tokens=1), token_ids=token_ids([1] * 641))
    workers = [elastic_instance(1, PREFILLS), elastic_instance(2, DECODES)]
    selections = Selections(mode, workers)
    selections.open(2)
    selection = selections.select(long)
    assert (selection.prefill, selection.decode.id) == (None, 1)
    selections.open(1)
    with pytest.raises(NoInstances, match="quarantined"):
        selections.select(long)
    # A worker without a share in these calls is better than none.
    selections.view.add(elastic_instance(3, Shares(0.0, 0.0)))
    selection = selections.select(long)
    assert (selection.prefill, selection.decode.id) == (None, 3)


@each_case("mode", [mode for mode in MODES if mode != "slo"])
def test_prompt_without_space_avoids_the_worker_to_avoid(mode: str) -> None:
    long = msgspec.structs.replace(request(max_tokens=1), token_ids=token_ids([1] * 641))
    selections = Selections(mode, [elastic_instance(1, PREFILLS), elastic_instance(2, DECODES)])
    selection = selections.select(long, avoid=2)
    assert (selection.prefill, selection.decode.id) == (None, 1)


def test_other_decode_worker_is_not_the_holder_of_the_kv() -> None:
    for mode in MODES:
        selections = Selections(mode, [elastic_instance(1), elastic_instance(2)])
        holder = selections.view.instance(1)
        assert holder is not None
        other = selections.selector.select_other_decode(request(), holder, frozenset({2}), 0.0)
        assert other is None
        other = selections.selector.select_other_decode(request(), holder, frozenset(), 0.0)
        assert other is not None
        assert other.id == 2


def test_probe_fits_what_elastic_workers_transfer() -> None:
    one, other = (
        msgspec.structs.replace(
            elastic_instance(number), limits=Limits(kv_blocks=100, max_transfer_blocks=4)
        )
        for number in (1, 2)
    )
    assert len(random_prompt(WorkerSelection(one, other))) == 64


@each_case(
    ("itl_s", "own", "wanted"),
    [
        (None, None, None),
        (0.1, None, RequestSlo(itl_s=0.1)),
        (0.1, RequestSlo(ttft_s=2.0), RequestSlo(ttft_s=2.0, itl_s=0.1)),
        (0.1, RequestSlo(itl_s=0.3), RequestSlo(itl_s=0.3)),
    ],
)
async def test_elastic_workers_get_the_limit_between_tokens(
    itl_s: float | None, own: RequestSlo | None, wanted: RequestSlo | None
) -> None:
    """The steps of their engines follow it. Workers of fixed roles have no use for it."""
    cluster = Cluster()
    cluster.router = RequestRouter(cluster.view, cluster.plane, RouterOptions(itl_s=itl_s))
    fixed = await cluster.add(1, Role.PREFILL, [kv_chunk("t")])
    elastic = await cluster.add_instance(elastic_instance(2, DECODES), FINISHED)
    asked = msgspec.structs.replace(request(), slo=own)
    async for _ in routed_stream(cluster.router, asked, ChoiceTimeline()):
        pass
    assert [call.slo for call in fixed.requests] == [own]
    assert [call.slo for call in elastic.requests] == [wanted]

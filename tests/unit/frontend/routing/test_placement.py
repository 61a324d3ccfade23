"""Where requests go by load: to the worker of the least cost, as reported and as sent since."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.cost_placement import Costs, CostSelection, Placement
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes, PromptHashes
from dynamo_trtllm.frontend.routing.worker_load import (
    STALE_S,
    ClusterLoad,
)
from dynamo_trtllm.frontend.routing.worker_selection import select_round_robin
from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    Fit,
    linear_decode_fit,
    linear_prefill_fit,
)
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    LoadReport,
    Phase,
    Role,
    Sampling,
    decode,
    encode,
    token_ids,
)
from tests.kit.instances import LAYOUT, make_instance, model_view

NONE_OPEN = PairBreakers()


def some(role: Role, *ids: int, **fields: Any) -> tuple[Instance, ...]:
    return tuple(msgspec.structs.replace(make_instance(i, role=role), **fields) for i in ids)


def view_of(prefill: int = 0, decode: int = 0, aggregated: int = 0) -> ModelView:
    """Return a view with so many instances.

    Ids: prefill from 1, decode from 1001, aggregated from 2001.
    """
    return model_view(
        prefill=some(Role.PREFILL, *range(1, 1 + prefill)),
        decode=some(Role.DECODE, *range(1001, 1001 + decode)),
        aggregated=some(Role.AGGREGATED, *range(2001, 2001 + aggregated)),
    )


def request(prompt: int = 100) -> GenerateRequest:
    tokens = token_ids(range(prompt))
    return GenerateRequest(
        request_id="r",
        model="tiny",
        token_ids=tokens,
        sampling=Sampling(max_tokens=9),
        deadline=1e12,
    )


def report(instance_id: int, number: int = 1, **fields: Any) -> LoadReport:
    idle = LoadReport(instance_id, number, 0, 0, 0, 0, 1000, 0)
    return msgspec.structs.replace(idle, **fields)


def selected(
    placement: Placement, view: ModelView, prompt: int = 100, **options: Any
) -> CostSelection:
    found = placement.select(view, PromptHashes(request(prompt)), NONE_OPEN, 0.0, **options)
    assert found is not None
    return found


def pair(selection: WorkerSelection) -> tuple[int, int]:
    return selection.prefill.id if selection.prefill else 0, selection.decode.id


def test_select_prefers_least_reported_work() -> None:
    placement = Placement("least-loaded")
    for instance_id, tokens in ((1, 500), (2, 200), (3, 900)):
        placement.loads.on_report(
            report(instance_id, queued_prefill_tokens=tokens, kv_blocks_used=instance_id), 0.0
        )
    placement.loads.on_report(report(1001, kv_blocks_used=9), 0.0)  # 144 tokens
    placement.loads.on_report(report(1002, kv_blocks_used=1, running=1), 0.0)
    # without space for the request
    placement.loads.on_report(report(1003, kv_blocks_used=998), 0.0)
    found = selected(placement, view_of(3, 3))
    assert pair(found) == (2, 1001)
    assert found.prefill_costs == Costs(1400, 1700)
    assert found.decode_costs == Costs(244, 372)


@pytest.mark.parametrize(
    "busier",
    [{"queued_prefill_tokens": 300}, {"kv_blocks_used": 5}, {"waiting": 1}, {"context_tokens": 7}],
)
def test_select_counts_all_work_of_aggregated_workers(busier: dict[str, int]) -> None:
    placement = Placement("least-loaded")
    if "context_tokens" in busier:
        busier["kv_blocks_total"] = 0  # the engine does not report its KV blocks
    placement.loads.on_report(report(2001, **busier), 0.0)
    found = selected(placement, view_of(aggregated=2))
    assert pair(found) == (0, 2002)
    assert found.prefill_costs is None


def test_select_of_equal_loads_differs_among_frontends() -> None:
    counts = Counter(
        pair(selected(Placement("least-loaded", seed=seed), view_of(4, 2))) for seed in range(400)
    )
    assert len(counts) == 8
    assert max(counts.values()) < 100


def test_select_of_one_idle_worker_spreads_frontends() -> None:
    view = view_of(8, 1)
    idle = 0
    for seed in range(100):
        placement = Placement("least-loaded", seed=seed)
        for instance in view.prefill[1:]:
            placement.loads.on_report(report(instance.id, queued_prefill_tokens=500), 0.0)
        idle += pair(selected(placement, view))[0] == 1
    assert 20 < idle < 60


def test_select_counts_requests_sent_since_the_report() -> None:
    placement = Placement("least-loaded")
    view = view_of(4, 4)
    placed = []
    for _ in range(4):
        found = selected(placement, view)
        placed.append((found, placement.start(found, request(), 0.0)))
    assert {found.prefill and found.prefill.id for found, _ in placed} == {1, 2, 3, 4}
    assert {found.decode.id for found, _ in placed} == {1001, 1002, 1003, 1004}
    first, first_placed = placed[0]
    assert first.prefill is not None
    prefill = placement.loads.of(first.prefill.id)
    decode = placement.loads.of(first.decode.id)
    first_placed.on_sent(first.prefill.id, Phase.PREFILL, 10.0)
    # may be without it
    placement.loads.on_report(report(first.prefill.id, 1, queued_prefill_tokens=60), 10.01)
    assert (prefill.unseen_prefill_tokens, decode.unseen_kv_tokens) == (100, 100)
    placement.loads.on_report(report(first.prefill.id, 2, queued_prefill_tokens=60), 10.2)
    placement.loads.on_report(report(first.decode.id, 1), 10.2)  # its call was not sent yet
    assert (prefill.unseen_prefill_tokens, decode.unseen_kv_tokens) == (0, 100)
    assert prefill.requests == 1
    first_placed.on_sent(1004, Phase.DECODE, 10.3)
    assert prefill.requests == 0
    for _, chosen in placed:
        chosen.end()
    for instance in (*view.prefill, *view.decode):
        load = placement.loads.of(instance.id)
        unseen = load.unseen_requests, load.unseen_prefill_tokens, load.unseen_kv_tokens
        assert (load.requests, unseen, load.sent) == (0, (0, 0, 0), {})


def test_loads_combine_last_report_and_later_requests() -> None:
    placement = Placement("least-loaded")
    view = view_of(aggregated=2)
    placement.loads.on_report(report(2001, 5, running=3), 100.0)
    placement.loads.on_report(report(2001, 4, running=0), 101.0)  # overtaken
    placed = placement.start(WorkerSelection(None, view.aggregated[0]), request(), 101.0)
    placed.on_sent(2001, Phase.AGGREGATED, 101.0)
    found = placement.select(view, PromptHashes(request()), NONE_OPEN, 100.0 + 2 * STALE_S)
    assert found is not None
    assert (found.decode.id, found.decode_costs) == (2002, Costs(1300, 1300 + 2 * 100 + 4 * 256))
    placement.loads.remove(2001)
    assert placement.loads.requests() == {}


def test_placed_request_of_gone_worker_leaves_no_load() -> None:
    placement = Placement("least-loaded")
    view = view_of(aggregated=1)
    placed = placement.start(selected(placement, view), request(), 0.0)
    load = placement.loads.of(2001)
    placement.loads.remove(2001)
    placed.on_sent(2001, Phase.AGGREGATED, 1.0)
    assert load.requests == 1
    placed.end()
    assert load.requests == 0
    assert placement.loads.requests() == {}


def test_select_skips_open_breakers_and_avoided_instances() -> None:
    placement = Placement("least-loaded")
    view = view_of(2, 2)
    placement.loads.on_report(report(2, queued_prefill_tokens=5000), 0.0)
    placement.loads.on_report(report(1002, kv_blocks_used=90), 0.0)
    breakers = PairBreakers(BreakerLimits(failures=1))
    assert pair(selected(placement, view)) == (1, 1001)
    assert pair(selected(placement, view, avoid=1)) == (2, 1001)
    breakers.record_failure((1, 1001), "broken", 0.0)
    found = placement.select(view, PromptHashes(request()), breakers, 0.0)
    assert found is not None
    assert pair(found) == (1, 1002)
    for other in ((1, 1002), (2, 1001), (2, 1002), (None, 2001)):
        breakers.record_failure(other, "broken", 0.0)
    assert placement.select(view, PromptHashes(request()), breakers, 0.0) is None
    assert placement.select(view_of(aggregated=1), PromptHashes(request()), breakers, 0.0) is None


def test_select_matches_keys_with_the_least_sum() -> None:
    other = msgspec.structs.replace(LAYOUT, block_tokens=64)
    view = model_view(
        prefill=some(Role.PREFILL, 1) + some(Role.PREFILL, 2, layout=other),
        decode=some(Role.DECODE, 1001) + some(Role.DECODE, 1002, layout=other),
    )
    placement = Placement("least-loaded")
    placement.loads.on_report(report(1, queued_prefill_tokens=50), 0.0)
    placement.loads.on_report(report(1002, running=3), 0.0)
    assert pair(selected(placement, view)) == (1, 1001)
    placement.loads.on_report(report(1001, running=9), 0.0)
    assert pair(selected(placement, view)) == (2, 1002)


def caching(view: ModelView, tokens: Mapping[int, int]) -> ClusterPrefixes:
    """Return the caches of a view whose instances have the first so many tokens of the prompts of
    `request`.
    """
    known = ClusterPrefixes()
    for instance in (*view.prefill, *view.decode, *view.aggregated):
        known.add_instance(instance)
    for instance_id, count in tokens.items():
        known.record_sent(PromptHashes(request(count + 1)), instance_id, 0.0)
    return known


def test_select_weighs_a_cached_token_as_twelve_waiting() -> None:
    view = view_of(3, 3)
    known = caching(view, {2: 512, 3: 256, 1003: 64})
    placement = Placement("kv", known)
    assert pair(selected(placement, view, 1000)) == (2, 1003)
    placement.loads.on_report(report(2, queued_prefill_tokens=12 * 256 - 1), 0.0)
    assert pair(selected(placement, view, 1000)) == (2, 1003)
    placement.loads.on_report(report(2, 2, queued_prefill_tokens=12 * 256 + 1), 0.0)
    found = selected(placement, view, 1000)
    assert pair(found) == (3, 1003)
    assert found.prefill_costs == Costs(12 * 744, 12 * 744 + 1)
    placed = placement.start(found, request(1000), 0.0)
    assert placement.loads.of(3).unseen_prefill_tokens == 744
    # it will have all blocks
    assert selected(placement, view, 1000).prefill_costs == Costs(744 + 12 * 8, 12 * 744 + 1)
    placed.end()  # its prefill call failed
    assert selected(placement, view, 1000).prefill_costs == Costs(12 * 744, 12 * 744 + 1)
    placement.start(found, request(1000), 0.0).end(is_done=True)
    assert selected(placement, view, 1000).prefill_costs == Costs(12 * 8, 12 * 744 + 1)
    ignoring = Placement("kv", known, overlap_credit=0.0)
    ignoring.loads.on_report(report(2, queued_prefill_tokens=300), 0.0)
    ignoring.loads.on_report(report(3, queued_prefill_tokens=1), 0.0)
    assert pair(selected(ignoring, view, 1000))[0] == 1


def test_start_on_another_decode_worker_updates_the_cache() -> None:
    view = view_of(1, 2)
    placement = Placement("kv", known := caching(view, {}))
    found = selected(placement, view, 1000)
    (other,) = {1001, 1002} - {found.decode.id}
    placed = placement.start(found, request(1000), 0.0)
    placed.on_sent(1, Phase.PREFILL, 0.0)
    for decode_id in (found.decode.id, other):
        placed.on_sent(decode_id, Phase.DECODE, 0.0)
    placed.on_prefill_done()
    placed.end(is_done=True)
    assert known.num_blocks() == {1: 62, 1001: 0, 1002: 0}


def test_select_with_temperature_draws_by_softmax() -> None:
    view = view_of(3, 1)
    drawn = Counter[int]()
    placement = Placement("kv", temperature=0.5, seed=1)
    for id_, waiting in ((1, 0), (2, 500), (3, 1000)):
        placement.loads.on_report(report(id_, queued_prefill_tokens=waiting), 0.0)
    drawn.update(pair(selected(placement, view))[0] for _ in range(2000))
    weights = [math.exp(-cost / 0.5) for cost in (0.0, 0.5, 1.0)]
    for id_, weight in enumerate(weights, 1):
        assert drawn[id_] / 2000 == pytest.approx(weight / sum(weights), abs=0.04)
    cold = Placement("kv", temperature=1e-9, seed=1)
    cold.loads = placement.loads
    assert {pair(selected(cold, view))[0] for _ in range(20)} == {1}


def test_costs_of_a_drawn_instance_have_the_least_other_cost() -> None:
    view = view_of(3, 1)
    placement = Placement("kv", temperature=2.0, seed=1)
    costs = {1: 1200, 2: 1700, 3: 2200}
    for id_, cost in costs.items():
        waiting = cost - costs[1]
        placement.loads.on_report(report(id_, queued_prefill_tokens=waiting), 0.0)
    drawn = set[int]()
    for _ in range(100):
        found = selected(placement, view)
        id_, _ = pair(found)
        drawn.add(id_)
        least_other = min(cost for other, cost in costs.items() if other != id_)
        assert found.prefill_costs == Costs(costs[id_], least_other)
    assert drawn == {1, 2, 3}


def test_select_with_temperature_draws_while_a_breaker_is_open() -> None:
    view = view_of(2, 2)
    placement = Placement("kv", temperature=10.0, seed=1)
    placement.loads.on_report(report(2, queued_prefill_tokens=500), 0.0)
    breakers = PairBreakers(BreakerLimits(failures=1))
    breakers.record_failure((1, 1001), "broken", 0.0)
    drawn = set[tuple[int, int]]()
    for _ in range(100):
        found = placement.select(view, PromptHashes(request()), breakers, 0.0)
        assert found is not None
        drawn.add(pair(found))
    assert drawn == {(1, 1002), (2, 1001), (2, 1002)}


def test_select_limits_the_wait_for_a_long_cached_prefix() -> None:
    view = view_of(2, 1)
    placement = Placement("kv", caching(view, {1: 32_000}))
    limit = 32_000 + 11 * (2560 - 8)  # both have to compute eight tokens or more
    for number, (waiting, expected) in enumerate(((limit - 1, 1), (limit + 1, 2))):
        placement.loads.on_report(report(1, number, queued_prefill_tokens=waiting), 0.0)
        assert pair(selected(placement, view, 32_008))[0] == expected


def test_select_among_thousands_compares_few() -> None:
    view = view_of(1000, 1000)
    placement = Placement("kv", caching(view, {777: 896, 1005: 16}), seed=1)
    assert pair(selected(placement, view, 1000)) == (777, 1005)
    for instance in view.prefill[:900]:
        placement.loads.on_report(report(instance.id, queued_prefill_tokens=5000), 0.0)
    idle = sum(pair(selected(placement, view))[0] > 900 for _ in range(100))
    # a tenth of the workers gets the requests of a half: of six at random, one is often idle
    assert idle > 25


def simulated_ttfts(
    choose: Callable[[ClusterLoad, GenerateRequest, float, int], Instance],
    seed: int,
    *,
    with_costs: bool = False,
) -> list[float]:
    """Serve requests of different lengths for 30 s on four prefill workers, one of them slow.

    Return the TTFTs.
    """
    # tokens per second
    draw = random.Random(seed)
    rates = {1: 10_000.0, 2: 10_000.0, 3: 10_000.0, 4: 2500.0}
    loads = ClusterLoad()
    free_at = dict.fromkeys(rates, 0.0)
    for id_, rate in rates.items() if with_costs else ():
        loads.on_report(report(id_, 0, cost=cost_model(1 / rate, 0.0)), 0.0)
    ends: list[tuple[float, int, Any]] = []
    ttfts = []
    now = 0.0
    count = 0
    while now < 30.0:
        now = now + draw.expovariate(12.0)
        count = count + 1
        while ends and ends[0][0] <= now:
            heapq.heappop(ends)[2].end()
        for id_, rate in rates.items():  # each reports at every arrival
            loads.on_report(
                report(id_, count, queued_prefill_tokens=int(max(0, free_at[id_] - now) * rate)),
                now,
            )
        asked = request(draw.choice((200, 500, 1000, 6000)))
        worker = choose(loads, asked, now, count)
        share = loads.of(worker.id).place(len(asked.token_ids), 0)
        share.on_sent(now)
        free_at[worker.id] = max(now, free_at[worker.id]) + len(asked.token_ids) / rates[worker.id]
        ttfts.append(free_at[worker.id] - now)
        heapq.heappush(ends, (free_at[worker.id], count, share))
    return sorted(ttfts)


def test_least_loaded_has_lower_ttft_than_round_robin() -> None:
    view = view_of(4, 1)

    def least(loads: ClusterLoad, asked: GenerateRequest, now: float, count: int) -> Instance:
        placement.loads = loads
        found = placement.select(view, PromptHashes(asked), NONE_OPEN, now)
        assert found is not None
        assert found.prefill is not None
        return found.prefill

    def in_turn(loads: ClusterLoad, asked: GenerateRequest, now: float, count: int) -> Instance:
        prefill = select_round_robin(view, "tiny", count, NONE_OPEN).prefill
        assert prefill is not None
        return prefill

    placement = Placement("least-loaded", seed=1)
    by_load = simulated_ttfts(least, 1)
    by_turn = simulated_ttfts(in_turn, 1)
    p99_by_load = by_load[len(by_load) * 99 // 100]
    p99_by_turn = by_turn[len(by_turn) * 99 // 100]
    assert 3 * p99_by_load < p99_by_turn
    by_time = simulated_ttfts(least, 1, with_costs=True)
    assert by_time[len(by_time) * 99 // 100] < 0.9 * p99_by_load


def cost_model(token_s: float, call_s: float) -> CostModel:
    """Return a cost model of steps of 1,000 prompt tokens."""
    return CostModel(
        decode=linear_decode_fit(0.01, 0.001),
        prefill=linear_prefill_fit(0.0, token_s),
        first_token=Fit((call_s, 0.0, 0.5, 1.0), 0.5, 2.0, 99),
        step_tokens=1000,
        kv_transfer=Fit((call_s, 0.0, 0.0), 0.5, 2.0, 99),
    )


def test_damaged_fits_are_left_out_of_a_reported_cost() -> None:
    placement = Placement("least-loaded")
    prefill = linear_prefill_fit(0.01, 1e-4)
    cost = CostModel(Fit((1.0,), 1.0, 1.0, 1), prefill, step_tokens=1000)
    placement.loads.on_report(report(1001, cost=cost), 0.0)
    assert placement.loads.get(1001).cost == CostModel(prefill=prefill, step_tokens=1000)


@pytest.mark.parametrize(
    "field", ["running", "waiting", "queued_prefill_tokens", "kv_blocks_used", "context_tokens"]
)
def test_report_when_a_count_is_negative_then_it_is_rejected(field: str) -> None:
    with pytest.raises(BadFrame):
        decode(encode(report(1, **{field: -1})), LoadReport)

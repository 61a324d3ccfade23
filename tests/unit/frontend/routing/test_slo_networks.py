"""How KV transfers that share the network of a worker change the path of a request."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.path_selection import Path
from dynamo_trtllm.frontend.routing.slo_placement import SloSelection
from dynamo_trtllm.protocol.cost_model import (
    prior_fit,
)
from dynamo_trtllm.protocol.messages import (
    LoadReport,
    Phase,
    Role,
)
from tests.kit.instances import model_view
from tests.kit.slo_placements import (
    BUSY_PREFILLS,
    COST,
    DECODE,
    OTHER_DECODE,
    PAIRS_ONLY,
    PREFILL,
    THIRD_DECODE,
    chosen,
    decoding,
    instance,
    placement_of,
    request,
    select,
)

# 1,024 tokens whose KV is fetched before delay a transfer by 0.1 s.
SLOW_NETWORKS = {id_: {"fetching_tokens": 10_240} for id_ in (DECODE, OTHER_DECODE)}


def test_request_runs_whole_while_networks_are_full() -> None:
    assert chosen(decoding(20)).path is Path.PREFILL_DECODE
    found = chosen({id_: SLOW_NETWORKS[id_] | {"running": 20} for id_ in SLOW_NETWORKS})
    assert found.path is Path.ON_DECODE
    assert found.meets_slo
    late = chosen(SLOW_NETWORKS, PAIRS_ONLY)
    assert late.ttft_s == pytest.approx(0.06 + 0.005 + 1.0 - 0.06)
    assert not late.meets_slo


def test_kv_that_is_fetched_during_the_prefill_delays_nothing() -> None:
    found = chosen({id_: {"fetching_tokens": 600} for id_ in (DECODE, OTHER_DECODE)}, PAIRS_ONLY)
    assert found.ttft_s == pytest.approx(0.06 + 0.005)


def test_decode_worker_with_a_free_network_is_chosen() -> None:
    """Also if its streams have longer gaps, or if elastic workers should fill up one by one."""
    loads = {DECODE: SLOW_NETWORKS[DECODE], OTHER_DECODE: {"running": 20}}
    found = chosen(loads, PAIRS_ONLY)
    assert found.decode.id == OTHER_DECODE
    assert found.meets_slo
    # Also if both networks are fast enough.
    for seed in range(20):
        placement = placement_of({DECODE: {"fetching_tokens": 5000}}, seed=seed)
        selection = select(placement, PAIRS_ONLY)
        assert selection is not None
        assert selection.decode.id == OTHER_DECODE
    elastic = model_view(
        prefill=[instance(PREFILL, Role.PREFILL)],
        decode=[instance(id_, Role.ELASTIC, can_aggregate=False) for id_ in (DECODE, OTHER_DECODE)],
    )
    full = {DECODE: {"num_generating": 5, "fetching_tokens": 10_240}}
    found = chosen(full, elastic)
    assert (found.path, found.decode.id) == (Path.PREFILL_DECODE, OTHER_DECODE)
    assert found.meets_slo


def test_full_network_is_no_reason_for_first_streams_of_others() -> None:
    """The elastic worker that has streams runs the whole request, which needs no KV transfer."""
    elastic = model_view(
        prefill=[instance(PREFILL, Role.PREFILL)],
        decode=[instance(id_, Role.ELASTIC) for id_ in (DECODE, OTHER_DECODE)],
    )
    full = {DECODE: {"num_generating": 5, "fetching_tokens": 10_240}}
    found = chosen(full, elastic)
    assert (found.path, found.decode.id) == (Path.ON_DECODE, DECODE)
    assert found.meets_slo


def test_full_network_does_not_keep_whole_requests_away() -> None:
    view = model_view(
        prefill=[instance(PREFILL, Role.PREFILL)],
        decode=[instance(id_, Role.DECODE) for id_ in (DECODE, OTHER_DECODE, THIRD_DECODE)],
    )
    busy = {id_: {"running": 25} for id_ in (DECODE, OTHER_DECODE)}
    found = chosen(
        BUSY_PREFILLS | busy | {THIRD_DECODE: {"fetching_tokens": 6000}}, view, request(850)
    )
    assert (found.path, found.decode.id) == (Path.ON_DECODE, THIRD_DECODE)
    assert found.meets_slo


PAIR_ONLY = model_view(
    prefill=[instance(PREFILL, Role.PREFILL, can_aggregate=False)],
    decode=[instance(DECODE, Role.DECODE, can_aggregate=False)],
)


def test_own_prompts_whose_kv_will_be_fetched_delay_the_next() -> None:
    placement = placement_of()
    for _ in range(10):
        selection = select(placement, PAIR_ONLY, request(1024))
        assert selection is not None
        placement.start(selection, request(1024), 0.0)
    found = select(placement, PAIR_ONLY, request(500))
    assert isinstance(found, SloSelection)
    # 10,240 tokens are computed in 1.1 s, and fetched in 1 s.
    assert found.chosen.ttft_s == pytest.approx(0.01 * 11 + 10_740 * 1e-4 + 0.005, rel=0.05)
    fetched_first = select(placement_of({PREFILL: {}}), PAIR_ONLY, request(500))
    assert isinstance(fetched_first, SloSelection)
    assert fetched_first.chosen.ttft_s < 0.1


def test_kv_that_is_fetched_counts_once_and_until_it_is_fetched() -> None:
    placement = placement_of()
    placed = []
    for _ in range(3):
        selection = select(placement, PAIR_ONLY, request(900))
        assert selection is not None
        placed.append(placement.start(selection, request(900), 0.0))
    load = placement.loads.get(DECODE)
    assert load.fetching_tokens == 2700  # after their prefill
    placed[0].on_sent(DECODE, Phase.DECODE, 1.0)
    placed[1].on_sent(DECODE, Phase.DECODE, 1.0)
    assert load.fetching_tokens == 2700
    report = LoadReport(DECODE, 2, 2, 0, 0, 0, 1000, 0, COST, fetching_tokens=1800)
    placement.loads.on_report(report, 1.05)
    assert load.fetching_tokens == 2700
    placed[0].on_prefill_done()  # its first token came
    assert load.fetching_tokens == 1800
    placed[1].end()
    assert load.fetching_tokens == 900
    # Now only another frontend's KV is fetched there.
    placement.loads.on_report(msgspec.structs.replace(report, number=3, fetching_tokens=500), 1.1)
    assert load.fetching_tokens == 1400
    placement.loads.on_report(msgspec.structs.replace(report, number=4, fetching_tokens=0), 1.1)
    placed[2].on_sent(OTHER_DECODE, Phase.DECODE, 1.2)  # another worker fetches this KV
    other = placement.loads.get(OTHER_DECODE)
    assert (load.fetching_tokens, other.fetching_tokens) == (0, 900)
    for one in placed:
        one.end()
    assert other.fetching_tokens == 0
    assert (load.unseen_fetched_tokens, other.unseen_fetched_tokens) == (0, 0)


def test_time_of_a_transfer_is_taken_from_an_equal_worker() -> None:
    """Also by a worker that has measured everything else."""
    lacking = msgspec.structs.replace(
        COST, first_token=prior_fit((0.0, 0.0, 0.5, 1.0)), kv_transfer=None
    )
    placement = placement_of({DECODE: {"cost": lacking}})
    selection = select(placement, PAIR_ONLY)
    assert isinstance(selection, SloSelection)
    assert selection.chosen.ttft_s == pytest.approx(0.065)

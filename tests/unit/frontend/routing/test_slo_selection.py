"""Which path a request takes by its predicted times, and what happens if none keeps the limits."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.cost_placement import CostSelection
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers
from dynamo_trtllm.frontend.routing.path_selection import Path
from dynamo_trtllm.frontend.routing.prefix_index import PromptHashes
from dynamo_trtllm.frontend.routing.slo_placement import SloSelection
from dynamo_trtllm.frontend.routing.worker_load import STALE_S
from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    linear_prefill_fit,
    prior_fit,
)
from dynamo_trtllm.protocol.errors import SloUnreachable
from dynamo_trtllm.protocol.messages import (
    LoadReport,
    Phase,
    RequestSlo,
    Role,
)
from dynamo_trtllm.protocol.shares import Shares
from tests.kit.instances import model_view
from tests.kit.slo_placements import (
    BUSY_PREFILLS,
    COST,
    DECODE,
    FULL_DECODES,
    MAX_STREAMS,
    NONE_OPEN,
    OTHER_DECODE,
    OTHER_PREFILL,
    PAIRS_ONLY,
    PREFILL,
    THIRD_DECODE,
    chosen,
    decoding,
    instance,
    placement_of,
    request,
    select,
    view_of,
)


def test_prompt_goes_to_a_pair_while_both_workers_have_time() -> None:
    found = chosen(decoding(20))
    assert found.path is Path.PREFILL_DECODE
    assert found.meets_slo
    # A step with 500 tokens and the transfer; then steps of 21 streams.
    assert found.ttft_s == pytest.approx(0.06 + 0.005)
    assert found.gap_s == pytest.approx(0.031)


def test_short_prompt_runs_on_decode_if_prefill_is_late() -> None:
    found = chosen(BUSY_PREFILLS | decoding(20))
    assert found.path is Path.ON_DECODE
    assert found.meets_slo
    assert found.prefill is None
    # A step with 500 prompt tokens and 20 streams, after half of a step with these.
    assert found.ttft_s == pytest.approx(0.08 + 0.03 / 2)
    assert found.gap_s == pytest.approx(0.08)


def test_long_prompt_never_delays_streams_to_save_its_own_time() -> None:
    # A step with 1,000 prompt tokens takes 0.13 s, which 20 streams would wait for.
    found = chosen(BUSY_PREFILLS | decoding(20), asked=request(2000))
    assert found.path is Path.PREFILL_DECODE
    assert not found.meets_slo
    assert found.num_missed == 1


def test_long_prompt_runs_on_decode_worker_without_streams() -> None:
    found = chosen(BUSY_PREFILLS | {OTHER_DECODE: {"running": 20}}, asked=request(2000))
    assert (found.path, found.decode.id) == (Path.ON_DECODE, DECODE)
    assert found.meets_slo


def test_full_decode_workers_leave_requests_to_prefill() -> None:
    found = chosen(FULL_DECODES, asked=request(300))
    assert found.path is Path.ON_PREFILL
    assert found.decode.role is Role.PREFILL
    assert found.meets_slo
    # A later step may have two prompts like this one.
    assert found.gap_s == pytest.approx(0.01 + 600 * 1e-4 + 0.001)


def test_prefill_worker_whose_prompts_are_long_keeps_no_stream() -> None:
    found = chosen(FULL_DECODES, asked=request(600))
    assert found.path is Path.PREFILL_DECODE
    assert not found.meets_slo


def test_prefill_worker_with_streams_gets_no_long_prompt() -> None:
    loads = {
        PREFILL: {"num_generating": 5},
        OTHER_PREFILL: {"queued_prefill_tokens": 2000},
    }
    found = chosen(loads, PAIRS_ONLY, request(2000))
    assert found.prefill is not None
    assert found.prefill.id == OTHER_PREFILL
    assert found.meets_slo


def test_streams_that_are_late_anyway_do_not_count() -> None:
    """Otherwise all prompts go to the worker without streams, however many wait there."""
    loads = {
        PREFILL: {"num_generating": 5, "queued_prefill_tokens": 2000},
        OTHER_PREFILL: {"queued_prefill_tokens": 20_000},
    }
    found = chosen(loads, PAIRS_ONLY, request(2000))
    assert found.prefill is not None
    assert found.prefill.id == PREFILL
    assert found.num_missed == 0


def test_prompt_counted_twice_does_not_make_streams_late() -> None:
    """Otherwise each further prompt goes there as well, and then the streams are really late."""
    placement = placement_of(BUSY_PREFILLS | decoding(20))
    view = model_view(
        prefill=[instance(PREFILL, Role.PREFILL)], decode=[instance(DECODE, Role.DECODE)]
    )
    first = select(placement, view)
    assert first is not None
    assert first.prefill is None
    placed = placement.start(first, request(), 0.0)
    placed.on_sent(DECODE, Phase.AGGREGATED, 0.0)
    # The next report includes the prompt, but the frontend can't know this yet.
    busy = LoadReport(DECODE, 2, 20, 0, 500, 0, 1000, 0, COST)
    placement.loads.on_report(busy, 0.01)
    second = select(placement, view)
    assert isinstance(second, SloSelection)
    assert second.chosen.path is Path.PREFILL_DECODE
    assert second.chosen.num_missed == 1


def elastic_view(**fields: Any) -> ModelView:
    """Return a view of a prefill worker, and of an elastic one that gets decode calls."""
    shares = Shares(0.0, 1.0)
    elastic = instance(DECODE, Role.ELASTIC, is_elastic=True, shares=shares, **fields)
    return model_view(prefill=[instance(PREFILL, Role.PREFILL)], decode=[elastic]).sharing()


def test_long_prompt_has_small_steps_beside_elastic_streams() -> None:
    loads = BUSY_PREFILLS | {DECODE: {"num_generating": 20}}
    found = chosen(loads, elastic_view(), request(2000))
    assert found.path is Path.ON_DECODE
    assert found.meets_slo
    # Six steps of 60 ms, a part of the limit, with 300 prompt tokens and 20 streams, and one with
    # 200 prompt tokens, after half of a step with these streams.
    assert found.ttft_s == pytest.approx(6 * 0.06 + 0.05 + 0.03 / 2)
    assert found.gap_s == pytest.approx(0.06)


def test_prompts_that_wait_delay_the_tokens_of_an_elastic_worker() -> None:
    loads = {DECODE: {"num_generating": 20, "queued_prefill_tokens": 500}}
    found = chosen(loads, elastic_view(can_aggregate=False))
    assert found.path is Path.PREFILL_DECODE
    # A step with 290 prompt tokens and 21 streams.
    assert found.gap_s == pytest.approx(0.06, rel=0.01)


def test_elastic_prefill_worker_generates_only_if_no_other_does() -> None:
    """One stream would let all its prompts have small steps."""
    elastic = instance(PREFILL, Role.ELASTIC, is_elastic=True, shares=Shares(1.0, 0.0))
    decode = instance(DECODE, Role.DECODE)
    pair = model_view(prefill=[elastic], decode=[decode]).sharing()
    found = chosen(FULL_DECODES, pair, request(300))
    assert found.path is Path.PREFILL_DECODE
    assert chosen({}, model_view(prefill=[elastic])).decode.id == PREFILL


def test_streams_go_to_elastic_workers_that_have_some() -> None:
    """One stream would let all prompts of a worker have small steps."""
    ids = (DECODE, OTHER_DECODE, THIRD_DECODE)
    view = model_view(decode=[instance(id_, Role.ELASTIC, is_elastic=True) for id_ in ids])
    found = chosen({DECODE: {"num_generating": 1}}, view, request(300))
    assert found.path is Path.PREFILL_DECODE
    assert found.decode.id == DECODE
    full = {DECODE: {"num_generating": MAX_STREAMS}}
    assert chosen(full, view, request(300)).decode.id != DECODE


def test_first_stream_of_a_worker_is_the_last_resort() -> None:
    """Measured in simulations: from one such stream on, two workers were overloaded for a minute."""
    view = model_view(
        prefill=[instance(id_, Role.ELASTIC, is_elastic=True) for id_ in (DECODE, OTHER_DECODE)]
    )
    # The prompt would be late at the other worker. With this worker for prefill and the other one
    # for decode, all limits are kept, too.
    loads = {DECODE: {"num_generating": 20}, OTHER_DECODE: {"queued_prefill_tokens": 9000}}
    for seed in range(20):
        found = select(placement_of(loads, seed=seed), view)
        assert isinstance(found, SloSelection)
        assert (found.chosen.path, found.decode.id) == (Path.ON_DECODE, DECODE)
        assert found.chosen.meets_slo
    # Without this path, the pair is better than a late first token.
    pairs_only = model_view(
        prefill=[
            instance(id_, Role.ELASTIC, is_elastic=True, can_aggregate=False)
            for id_ in (DECODE, OTHER_DECODE)
        ]
    )
    found_pair = chosen(loads, pairs_only)
    assert found_pair.decode.id == OTHER_DECODE
    assert found_pair.meets_slo


def test_whole_requests_go_to_elastic_workers_that_have_streams() -> None:
    view = model_view(
        decode=[instance(id_, Role.ELASTIC, is_elastic=True) for id_ in (DECODE, OTHER_DECODE)]
    )
    # No pair keeps the limits, because KV comes late. The other worker has lower pressure.
    late_kv = {"fetching_tokens": 20_000}
    found = chosen({DECODE: {"num_generating": 20, **late_kv}, OTHER_DECODE: late_kv}, view)
    assert (found.path, found.decode.id) == (Path.ON_DECODE, DECODE)
    assert found.meets_slo
    full = {"num_generating": MAX_STREAMS, **late_kv}
    found = chosen({DECODE: full, OTHER_DECODE: late_kv}, view)
    assert (found.path, found.decode.id) == (Path.ON_DECODE, OTHER_DECODE)


def test_first_stream_is_the_last_resort_among_pairing_keys() -> None:
    """Elastic workers of one key, and a pair of another key that has more to do."""
    layout = msgspec.structs.replace(instance(DECODE, Role.DECODE).layout, dtype="other")
    elastic = [instance(id_, Role.ELASTIC, can_aggregate=False) for id_ in (DECODE, OTHER_DECODE)]
    third = instance(THIRD_DECODE, Role.DECODE, layout=layout, can_aggregate=False)
    view = model_view(
        prefill=[
            instance(PREFILL, Role.PREFILL),
            instance(OTHER_PREFILL, Role.PREFILL, layout=layout),
        ],
        decode=[*elastic, third],
    )
    assert len(view.groups) == 2
    found = chosen({THIRD_DECODE: {"running": 20}}, view)
    assert (found.path, found.decode.id) == (Path.PREFILL_DECODE, THIRD_DECODE)
    late = {OTHER_PREFILL: {"queued_prefill_tokens": 20_000}}
    assert chosen(late, view).decode.id != THIRD_DECODE


def test_engine_that_cannot_aggregate_is_not_tried() -> None:
    for loads in (BUSY_PREFILLS, FULL_DECODES):
        assert chosen(loads, PAIRS_ONLY).path is Path.PREFILL_DECODE


def test_aggregated_worker_is_a_path_of_its_own() -> None:
    loads = BUSY_PREFILLS | FULL_DECODES
    assert chosen(loads, view_of(num_aggregated=1)).path is Path.ON_AGGREGATED


def test_without_decode_workers_prefill_runs_whole_requests() -> None:
    view = model_view(prefill=[instance(PREFILL, Role.PREFILL)])
    assert chosen(view=view).path is Path.ON_PREFILL


def test_wait_in_the_frontend_counts_for_the_first_token() -> None:
    assert chosen(waited_s=0.8).meets_slo
    # A time that is a little shorter than the limit may turn out longer.
    assert not chosen(waited_s=0.9).meets_slo
    late = chosen(waited_s=2.0)
    assert not late.meets_slo
    assert late.ttft_s == pytest.approx(2.0 + 0.065, abs=0.01)


def test_limits_of_the_request_replace_those_of_the_frontend() -> None:
    slow = decoding(25)
    assert chosen(slow).meets_slo
    strict = request(50, slo=RequestSlo(itl_s=0.03))
    found = chosen(slow, asked=strict)
    # A step of 26 streams takes 36 ms. A prefill worker is empty.
    assert found.path is Path.ON_PREFILL
    assert found.meets_slo


def test_request_cannot_allow_gaps_for_others() -> None:
    lenient = request(2000, slo=RequestSlo(itl_s=60.0))
    assert chosen(BUSY_PREFILLS | decoding(20), asked=lenient).path is Path.PREFILL_DECODE


def test_unreachable_limits_reject_the_first_attempt_only() -> None:
    placement = placement_of(BUSY_PREFILLS | decoding(20), rejects=True)
    late = request(2000)
    with pytest.raises(SloUnreachable, match=r"first token after \d+ ms \(limit 1000\)") as caught:
        select(placement, asked=late, may_reject=True)
    assert caught.value.retry_after_s == 2
    assert select(placement, asked=late, may_reject=False) is not None
    assert select(placement, asked=request(), may_reject=True) is not None


def test_a_rejection_names_only_what_is_missed() -> None:
    def why(loads: dict[int, dict[str, Any]], view: ModelView, waited_s: float = 0.0) -> str:
        with pytest.raises(SloUnreachable) as caught:
            select(placement_of(loads, rejects=True), view, may_reject=True, waited_s=waited_s)
        return caught.value.message

    almost_late = why({}, PAIRS_ONLY, 0.88)
    assert "(limit 1000, and the prediction may be wrong by a tenth)" in almost_late
    assert "gaps" not in almost_late
    full = why(FULL_DECODES, PAIRS_ONLY)
    assert "has no space in the batch or the KV cache of its worker; retry later" in full


def test_own_requests_count_before_they_are_reported() -> None:
    placement = placement_of()
    counts = Counter[int]()
    for _ in range(20):
        selection = select(placement)
        assert isinstance(selection, SloSelection)
        placement.start(selection, request(), 0.0)
        counts[selection.decode.id] += 1
    assert max(counts.values()) <= 13


def test_prompts_that_were_sent_delay_the_first_token() -> None:
    placement = placement_of({PREFILL: {"queued_prefill_tokens": 500}})
    view = model_view(
        prefill=[instance(PREFILL, Role.PREFILL)],
        decode=[instance(DECODE, Role.DECODE, can_aggregate=False)],
    )
    for _ in range(2):
        selection = select(placement, view)
        assert isinstance(selection, SloSelection)
        placement.start(selection, request(100), 0.0)
    selection = select(placement, view, request(100))
    assert isinstance(selection, SloSelection)
    # Two prompts were sent since the report, so 233 of 700 tokens are in the step that runs, which
    # is half over. The others and those of this prompt are in the next one.
    first_token_s = (0.01 + 0.0233) / 2 + (0.01 + 0.0567)
    assert selection.chosen.ttft_s == pytest.approx(first_token_s + 0.005)


def test_frontends_with_equal_reports_choose_differently() -> None:
    counts = Counter[tuple[int, int]]()
    for seed in range(200):
        selection = select(placement_of(seed=seed), PAIRS_ONLY)
        assert selection is not None
        assert selection.prefill is not None
        counts[selection.prefill.id, selection.decode.id] += 1
    assert len(counts) == 4
    assert max(counts.values()) < 90


def test_equal_seeds_choose_alike() -> None:
    found = [[select(placement_of(seed=seed)) for _ in range(3)] for seed in (4, 4)]
    assert [one and one.decode for one in found[0]] == [one and one.decode for one in found[1]]


def test_unknown_times_select_by_cost_and_say_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    placement = placement_of(cost=None)
    for _ in range(3):
        assert isinstance(select(placement), CostSelection)
    (line,) = caplog.messages
    assert "--router-mode slo selects as kv does" in line


def test_fits_of_equal_workers_fill_gaps() -> None:
    # Each role has measured the steps that it runs.
    prefill_only = msgspec.structs.replace(COST, decode=None, kv_transfer=None)
    decode_only = CostModel(decode=COST.decode, kv_transfer=COST.kv_transfer)
    loads = {id_: {"cost": prefill_only} for id_ in (PREFILL, OTHER_PREFILL)}
    loads |= {id_: {"cost": decode_only, "running": 20} for id_ in (DECODE, OTHER_DECODE)}
    for id_ in (PREFILL, OTHER_PREFILL):
        loads[id_]["queued_prefill_tokens"] = 20_000
    found = chosen(loads)
    assert found.path is Path.ON_DECODE
    assert found.gap_s == pytest.approx(0.08)


def test_times_of_few_prompt_tokens_do_not_count_for_prompts() -> None:
    # A decode worker that computes the last token of each prompt again.
    few_tokens = msgspec.structs.replace(linear_prefill_fit(0.5, 0.0), num_samples=99)
    own = msgspec.structs.replace(
        COST, prefill=few_tokens, first_token=prior_fit((0.0, 0.0, 0.5, 1.0)), step_tokens=4
    )
    loads = {id_: {"cost": own, "running": 20} for id_ in (DECODE, OTHER_DECODE)}
    assert chosen(BUSY_PREFILLS | loads).path is Path.ON_DECODE


def test_worker_that_stopped_reporting_is_not_predicted() -> None:
    placement = placement_of()
    report = LoadReport(DECODE, 2, 0, 0, 0, 0, 1000, 0)
    placement.loads.on_report(report, 2 * STALE_S)
    fresh = msgspec.structs.replace(report, instance_id=PREFILL)
    placement.loads.on_report(fresh, 2 * STALE_S)
    for _ in range(10):
        selection = placement.select(PAIRS_ONLY, PromptHashes(request()), NONE_OPEN, 2 * STALE_S)
        assert isinstance(selection, SloSelection)
        assert selection.chosen.prefill is not None
        assert (selection.chosen.prefill.id, selection.decode.id) == (PREFILL, DECODE)


def test_open_breakers_close_a_path() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=60.0))
    for pair in ((PREFILL, DECODE), (OTHER_PREFILL, DECODE), (PREFILL, OTHER_DECODE)):
        breakers.record_failure(pair, "broken", 0.0)
    placement = placement_of()
    for _ in range(10):
        selection = placement.select(PAIRS_ONLY, PromptHashes(request()), breakers, 0.0)
        assert selection is not None
        assert selection.prefill is not None
        assert (selection.prefill.id, selection.decode.id) == (OTHER_PREFILL, OTHER_DECODE)


def test_whole_requests_run_while_all_kv_transfers_fail() -> None:
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=60.0))
    pairs = [(prefill, decode) for prefill in (PREFILL, OTHER_PREFILL) for decode in (11, 12)]
    for pair in pairs:
        breakers.record_failure(pair, "broken", 0.0)
    placement = placement_of()
    selection = placement.select(view_of(), PromptHashes(request()), breakers, 0.0)
    assert isinstance(selection, SloSelection)
    assert selection.chosen.path is Path.ON_DECODE
    # Workers whose answers were wrong get no request.
    for pair in pairs:
        breakers.record_failure(pair, "wrong", 0.0, is_wrong=True)
    assert placement.select(view_of(), PromptHashes(request()), breakers, 0.0) is None


def test_whole_request_goes_to_decode_worker_that_is_not_wrong() -> None:
    view = model_view(
        prefill=[instance(PREFILL, Role.PREFILL)],
        decode=[instance(id_, Role.DECODE) for id_ in (DECODE, OTHER_DECODE, THIRD_DECODE)],
    )
    breakers = PairBreakers(BreakerLimits(failures=1, open_s=60.0))
    for decode in (DECODE, OTHER_DECODE):
        breakers.record_failure((PREFILL, decode), "wrong", 0.0, is_wrong=True)
    breakers.record_failure((PREFILL, THIRD_DECODE), "broken", 0.0)
    # The wrong ones have no streams, so they would have the shortest gaps.
    placement = placement_of({THIRD_DECODE: {"running": 5}})
    selection = placement.select(view, PromptHashes(request()), breakers, 0.0)
    assert isinstance(selection, SloSelection)
    assert (selection.chosen.path, selection.decode.id) == (Path.ON_DECODE, THIRD_DECODE)


def test_workers_that_were_not_probed_run_no_whole_requests() -> None:
    breakers = PairBreakers()
    breakers.withhold([(prefill, DECODE) for prefill in (PREFILL, OTHER_PREFILL)])
    placement = placement_of(BUSY_PREFILLS)
    for _ in range(10):
        selection = placement.select(view_of(), PromptHashes(request()), breakers, 0.0)
        assert selection is not None
        assert selection.decode.id == OTHER_DECODE


def test_prefill_worker_of_a_failed_transfer_is_avoided() -> None:
    for _ in range(10):
        selection = select(placement_of(), avoid=PREFILL)
        assert selection is not None
        assert selection.prefill is not None
        assert selection.prefill.id == OTHER_PREFILL


def test_data_parallel_rank_keeps_its_worker() -> None:
    asked = request(prefill_dp_rank=1)
    assert isinstance(select(placement_of(BUSY_PREFILLS), asked=asked), CostSelection)


def test_selection_of_random_loads_always_has_a_path() -> None:
    rnd = random.Random(5)
    for _ in range(300):
        loads = {
            id_: {
                "running": rnd.randrange(60),
                "waiting": rnd.randrange(9),
                "queued_prefill_tokens": rnd.randrange(30_000),
                "kv_blocks_used": rnd.randrange(1001),
                "num_generating": rnd.randrange(9),
            }
            for id_ in (PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE)
        }
        found = chosen(loads, asked=request(rnd.randrange(1, 9000)))
        assert found.ttft_s > 0
        assert found.gap_s > 0
        assert (found.num_missed == 0) == found.meets_slo

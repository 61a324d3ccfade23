"""Requests pass the real router and scheduler in virtual time, with exact results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.simulate.cluster import (
    SimulatedDeployment,
    simulate,
    simulate_closed_loop,
)
from dynamo_trtllm.simulate.outcomes import Slo, quantile
from dynamo_trtllm.simulate.workload import Arrival, Shape, arrivals_at, poisson_arrivals

STEP_S = 0.01
TIMES = {"step_s": STEP_S, "prefill_token_s": 1e-4, "prefill_tokens_per_step": 1000}


def worker(role: Role, **arguments: Any) -> WorkerConfig:
    return WorkerConfig(
        model_path="model",
        engine="mock",
        disaggregation_mode=role,
        override_engine_args=TIMES | arguments,
        publish_kv_events=bool(arguments.get("enable_prefix_caching")),
    )


def deployment(*workers: WorkerConfig, frontend_s: float = 0.0, **frontend: Any) -> Any:
    return SimulatedDeployment(
        frontend=FrontendConfig(**frontend),
        workers=workers,
        num_gpus=len(workers),
        frontend_s=frontend_s,
    )


def pair(**arguments: Any) -> list[WorkerConfig]:
    return [worker(Role.PREFILL, **arguments), worker(Role.DECODE, **arguments)]


def test_aggregated_request_takes_its_steps() -> None:
    (request,) = simulate(
        deployment(worker(Role.AGGREGATED)), arrivals_at(Shape(500, 11), [1.0])
    ).requests
    assert request.ttft_s == pytest.approx(STEP_S + 500 * 1e-4)
    assert request.mean_gap_s == pytest.approx(STEP_S)
    assert request.output_tokens == 11


@pytest.mark.parametrize("pause_ms", [0.0, 60.0])
def test_pair_takes_prefill_transfer_and_decode(pause_ms: float) -> None:
    times = {"kv_transfer_s": 0.02, "kv_transfer_block_s": 1e-3, "kv_block_size": 100}
    # The pause is not known before the first request.
    _, request = simulate(
        deployment(*pair(**times), frontend_s=0.003, early_token_pause_ms=pause_ms),
        arrivals_at(Shape(500, 11), [1.0, 3.0]),
    ).requests
    prefill_s = STEP_S + 500 * 1e-4
    transfer_s = 0.02 + 5 * 1e-3
    assert request.ttft_s == pytest.approx(0.003 + prefill_s + (0.0 if pause_ms else transfer_s))
    # The second token waits for the KV, and then for its step.
    pause_s = transfer_s if pause_ms else 0.0
    assert request.worst_gap_s == pytest.approx(pause_s + STEP_S)
    assert request.mean_gap_s == pytest.approx(STEP_S + pause_s / 10)


def test_kv_transfers_take_turns_with_the_network() -> None:
    times = {"kv_transfer_s": 0.02, "kv_transfer_block_s": 0.1, "kv_block_size": 100}
    # One step computes both prompts.
    found = simulate(
        deployment(*pair(**times), early_token_pause_ms=0.0),
        arrivals_at(Shape(400, 11), [1.0, 1.0]),
    ).requests
    prefill_s = STEP_S + 800 * 1e-4
    waits_s = sorted(request.ttft_s - prefill_s for request in found)
    assert waits_s == pytest.approx([0.02 + 0.4, 0.02 + 0.8])


def test_recomputed_token_waits_for_a_step() -> None:
    (request,) = simulate(
        deployment(*pair(recompute_last_token=True)),
        arrivals_at(Shape(500, 11), [1.0]),
    ).requests
    assert request.ttft_s == pytest.approx(STEP_S + 500 * 1e-4 + STEP_S)
    assert request.output_tokens == 11
    # The second token comes with the first one.
    assert request.mean_gap_s == pytest.approx(0.9 * STEP_S)


def test_planned_step_has_no_place_for_what_comes_later() -> None:
    # The second request comes within a step, when the next one is planned already.
    arrivals = arrivals_at(Shape(10, 20), [1.0, 1.015])
    found = [
        simulate(deployment(worker(Role.AGGREGATED, plan_ahead=ahead)), arrivals).requests[1]
        for ahead in (False, True)
    ]
    assert found[1].ttft_s - found[0].ttft_s == pytest.approx(STEP_S)


def test_decode_requests_take_tokens_of_a_step() -> None:
    # A prompt of a full step comes while a request decodes.
    arrivals = arrivals_at(Shape(500, 50), [1.0]) + arrivals_at(Shape(1000, 5), [1.1])
    found = [
        simulate(deployment(worker(Role.AGGREGATED, decodes_take_step_tokens=takes)), arrivals)
        for takes in (False, True)
    ]
    waits_s = [outcome.requests[1].ttft_s for outcome in found]
    # Its last token needs a step of its own.
    assert waits_s[1] - waits_s[0] == pytest.approx(STEP_S)


def test_prompts_that_are_not_split_wait_for_a_step() -> None:
    # Two prompts of 600 tokens, and steps of 1,000.
    arrivals = arrivals_at(Shape(600, 5), [1.0, 1.0])
    found = [
        simulate(deployment(worker(Role.AGGREGATED, splits_prompts=splits)), arrivals)
        for splits in (True, False)
    ]
    first_s = [[one.ttft_s for one in outcome.requests] for outcome in found]
    assert first_s[0] == pytest.approx([STEP_S + 0.1, 2 * STEP_S + 0.12])
    assert first_s[1] == pytest.approx([STEP_S + 0.06, 2 * STEP_S + 0.12])


def test_launch_of_a_prefill_step_splits_its_gap() -> None:
    # Results of the step before come when the step with the prompt is launched.
    arrivals = arrivals_at(Shape(500, 50), [1.0]) + arrivals_at(Shape(1100, 5), [1.1])
    prefill_s = STEP_S + 1100 * 1e-4
    found = [
        simulate(
            deployment(
                worker(Role.AGGREGATED, prefill_launch_s=launch_s, prefill_tokens_per_step=2000)
            ),
            arrivals,
        )
        for launch_s in (0.0, 0.04, 0.08)
    ]
    gaps_s = [outcome.requests[0].worst_gap_s for outcome in found]
    assert gaps_s == pytest.approx([prefill_s, prefill_s - 0.03, 0.08])
    assert len({outcome.requests[0].end_s for outcome in found}) == 1


def test_launch_of_a_short_prompt_is_in_a_graph() -> None:
    arrivals = arrivals_at(Shape(500, 50), [1.0]) + arrivals_at(Shape(900, 5), [1.1])
    (request, _) = simulate(
        deployment(worker(Role.AGGREGATED, prefill_launch_s=0.04)), arrivals
    ).requests
    assert request.worst_gap_s == pytest.approx(STEP_S + 900 * 1e-4)


def test_posting_a_transfer_pauses_other_streams() -> None:
    # The second request is prefilled while the first one decodes.
    arrivals = arrivals_at(Shape(500, 50), [1.0, 1.1])
    times = {"kv_post_block_s": 0.01, "kv_block_size": 100, "kv_transfer_s": 0.004}
    first, second = simulate(
        deployment(*pair(**times), early_token_pause_ms=0.0), arrivals
    ).requests
    assert first.worst_gap_s == pytest.approx(STEP_S + 0.05)
    # Its first token comes within a step, and its second one at the end of the next step.
    assert second.worst_gap_s == pytest.approx(STEP_S + 0.006)


def test_prefill_delays_streams_of_aggregated_workers_only() -> None:
    arrivals = arrivals_at(Shape(500, 50), [1.0, 1.1])
    aggregated = simulate(deployment(worker(Role.AGGREGATED)), arrivals).requests[0]
    split = simulate(deployment(*pair()), arrivals).requests[0]
    assert aggregated.worst_gap_s == pytest.approx(STEP_S + 500 * 1e-4)
    assert split.worst_gap_s == pytest.approx(STEP_S)


SLO = {"router_mode": "slo", "slo_ttft_ms": 1000.0, "slo_itl_ms": 70.0}


def test_requests_take_other_paths_if_a_pair_is_late() -> None:
    arrivals = poisson_arrivals(Shape(500, 50), 22.0, 300, seed=1)
    in_turn = simulate(deployment(*pair()), arrivals)
    by_time = simulate(deployment(*pair(), **SLO), arrivals)
    assert {request.path for request in in_turn.requests} == {""}
    assert len({request.path for request in by_time.requests}) > 1
    limits = Slo(ttft_s=1.0, worst_gap_s=0.07)
    assert by_time.attainment(limits) > 2 * in_turn.attainment(limits)


def test_requests_that_would_be_late_are_rejected() -> None:
    arrivals = poisson_arrivals(Shape(2000, 50), 30.0, 100, seed=1)
    outcome = simulate(deployment(*pair(), **SLO, slo_policy="reject"), arrivals)
    assert set(outcome.errors) == {"slo_unreachable"}
    limits = Slo(ttft_s=1.5, worst_gap_s=0.07)
    assert sum(map(limits.is_met, outcome.completed)) > 0.9 * len(outcome.completed) > 0


@pytest.mark.parametrize(
    "mode",
    [*({"router_mode": mode} for mode in ("round-robin", "random", "least-loaded", "kv")), SLO],
)
def test_equal_seeds_give_equal_outcomes(mode: dict[str, Any]) -> None:
    workers = [*pair(step_noise=0.1), *pair(step_noise=0.1)]
    arrivals = poisson_arrivals(Shape(300, 20), 20.0, 20, seed=1)
    found = [simulate(deployment(*workers, **mode), arrivals, seed).requests for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert all(request.output_tokens == 20 for request in found[0])


def test_prefix_cache_of_a_worker_is_found_by_kv_router() -> None:
    workers = [worker(Role.AGGREGATED, enable_prefix_caching=True) for _ in range(4)]
    shared = [Arrival(float(at), 1100, 5, (1, 2, 3 + at)) for at in range(5)]
    first, *later = simulate(deployment(*workers, router_mode="kv"), shared).requests
    assert first.cached_tokens == 0
    assert {request.cached_tokens for request in later} == {1024}


def test_full_queue_rejects_requests() -> None:
    arrivals = arrivals_at(Shape(500, 20), [1.0] * 5)
    outcome = simulate(deployment(worker(Role.AGGREGATED), max_inflight=1, max_queued=2), arrivals)
    assert outcome.errors == {"overloaded": 2}


def test_request_ends_at_its_time_limit() -> None:
    arrivals = arrivals_at(Shape(500, 1000), [1.0])
    outcome = simulate(deployment(worker(Role.AGGREGATED), request_timeout_s=1.0), arrivals)
    assert outcome.errors == {"deadline": 1}


def test_closed_loop_keeps_its_concurrency() -> None:
    outcome = simulate_closed_loop(deployment(worker(Role.AGGREGATED)), Shape(100, 11), 2, 6)
    begins = sorted(request.arrived_s for request in outcome.requests)
    ends = sorted(request.end_s for request in outcome.requests)
    assert begins[2:] == pytest.approx(ends[:4])


def test_request_beyond_the_context_is_an_error() -> None:
    small = deployment(worker(Role.AGGREGATED, max_seq_len=100))
    with pytest.raises(ConfigError, match="context of the workers is 100"):
        simulate(small, arrivals_at(Shape(100, 1), [0.0]))


def test_requests_in_excess_saturate_the_workers() -> None:
    def outcome_at(rate: float) -> Any:
        arrivals = poisson_arrivals(Shape(1000, 10), rate, 100, seed=1)
        return simulate(deployment(worker(Role.AGGREGATED)), arrivals)

    assert not outcome_at(4.0).is_saturated
    assert outcome_at(20.0).is_saturated


def test_trace_of_many_workers_is_complete(tmp_path: Path) -> None:
    arrivals = [Arrival(0.01 * n, 700, 10, (0, 1 + n % 7)) for n in range(200)]
    workers = [one for _ in range(8) for one in pair()]
    outcome = simulate(deployment(*workers, router_mode="least-loaded"), arrivals)
    assert sum(request.output_tokens for request in outcome.requests) == 2000


def test_elastic_workers_with_fixed_shares_are_like_a_pair() -> None:
    times = {"kv_transfer_s": 0.02, "kv_block_size": 100}
    elastic = [
        worker(Role.ELASTIC, **times).model_copy(update={"decode_share": 0.0}),
        worker(Role.ELASTIC, **times).model_copy(update={"prefill_share": 0.0}),
    ]
    arrivals = poisson_arrivals(Shape(500, 11), 10.0, 50, 1)
    split = simulate(deployment(*pair(**times)), arrivals)
    shared = simulate(deployment(*elastic), arrivals)
    assert [request.ttft_s for request in shared.requests] == pytest.approx(
        [request.ttft_s for request in split.requests]
    )


@pytest.mark.parametrize(("itl_ms", "step_s"), [(10, 0.045), (100, 0.06), (300, 0.11)])
def test_steps_of_elastic_workers_follow_the_limit(itl_ms: float, step_s: float) -> None:
    """Frontends send it with each call. A full step takes 110 ms."""
    arrivals = [*arrivals_at(Shape(100, 300), [0.0]), *arrivals_at(Shape(20_000, 2), [1.0, 2.0])]
    limits = {"router_mode": "slo", "slo_ttft_ms": 60_000, "slo_itl_ms": itl_ms}
    stream = simulate(deployment(worker(Role.ELASTIC), **limits), arrivals).requests[0]
    assert 0.9 * step_s < stream.worst_gap_s < 1.1 * step_s


def test_elastic_workers_with_even_shares_complete_all_requests() -> None:
    elastic = [worker(Role.ELASTIC, kv_block_size=100) for _ in range(3)]
    for mode in ("round-robin", "kv", "slo"):
        limits = {"slo_ttft_ms": 1000, "slo_itl_ms": 100} if mode == "slo" else {}
        outcome = simulate(
            deployment(*elastic, router_mode=mode, **limits),
            poisson_arrivals(Shape(500, 11), 20.0, 30, 1),
        )
        assert [request.output_tokens for request in outcome.requests] == [11] * 30


def test_planner_ends_a_burst_of_prompts() -> None:
    """As in dynamo#10528: prefill is saturated, and decode idles."""
    elastic = [
        worker(Role.ELASTIC).model_copy(update={"decode_share": 0.0}),
        *[worker(Role.ELASTIC).model_copy(update={"prefill_share": 0.0})] * 3,
    ]
    # One worker computes nine prompts a second.
    arrivals = poisson_arrivals(Shape(1000, 11), 15.0, 300, 1)
    fixed = deployment(*elastic, router_mode="least-loaded")
    assert simulate(fixed, arrivals).is_saturated
    planned = simulate(replace(fixed, planner=TimeLimits(ttft_s=1.0, itl_s=0.1)), arrivals)
    assert planned.num_share_changes in (1, 2)  # a change, and when the streams have ended
    late = [one.ttft_s for one in planned.requests if one.arrived_s >= arrivals[0].at_s + 6.0]
    assert quantile(late, 0.99) < 1.0
    assert all(request.is_ok for request in planned.requests)


def test_concurrency_above_all_requests_is_theirs() -> None:
    loads = [
        simulate_closed_loop(deployment(worker(Role.AGGREGATED)), Shape(10, 5), concurrency, 3)
        for concurrency in (3, 1 << 62)
    ]
    assert loads[0].figures() == loads[1].figures()


def test_rate_of_which_requests_never_come_is_refused() -> None:
    arrivals = poisson_arrivals(Shape(10, 5), 1e-300, 3, seed=1)
    with pytest.raises(ConfigError, match=r"the last request would come after .* raise the rate"):
        simulate(deployment(worker(Role.AGGREGATED)), arrivals)

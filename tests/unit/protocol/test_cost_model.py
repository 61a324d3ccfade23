"""Predicted times of steps: those of the fit, and those of streams that share them."""

from __future__ import annotations

import math

import pytest

from dynamo_trtllm.protocol.cost_model import (
    DECODE_TERMS,
    PREFILL_TERMS,
    CostModel,
    EngineWork,
    decode_features,
    decode_step_s,
    linear_decode_fit,
    linear_prefill_fit,
    prefill_features,
    prefill_step_s,
    prior_fit,
)
from dynamo_trtllm.protocol.messages import LoadReport, RequestSlo, Role
from dynamo_trtllm.protocol.mixed_steps import MIXED_STEP_S, mixed_step_target_s

DECODE = prior_fit([0.1 * (index + 1) for index in range(len(DECODE_TERMS))])
PREFILL = prior_fit([0.1 * (index + 1) for index in range(len(PREFILL_TERMS))])
FIRST_TOKEN = prior_fit((0.0, 0.0, 0.5, 1.0))


@pytest.mark.parametrize("requests", [0, 1, 32, 33, 128, 1000])
def test_decode_step_takes_the_time_of_its_features(requests: int) -> None:
    expected = DECODE.predict(decode_features(requests, 7000))
    assert decode_step_s(DECODE, requests, 7000) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [1, 64, 65, 256, 1024, 2048, 2049, 4096, 99_999])
def test_prefill_step_takes_the_time_of_its_features(tokens: int) -> None:
    expected = PREFILL.predict(prefill_features(9, 7000, tokens, 3e6))
    assert prefill_step_s(PREFILL, 9, 7000, tokens, 3e6) == pytest.approx(expected)


def test_longest_step_has_at_most_the_tokens_of_a_step() -> None:
    fits = linear_decode_fit(0.01, 0.001), linear_prefill_fit(0.01, 1e-4, 0.001)
    cost = CostModel(*fits, FIRST_TOKEN, 1000)
    work = EngineWork(decode_requests=5, queued_tokens=300)
    assert cost.longest_step_s(200, 0, work) == pytest.approx(0.01 + 500e-4 + 0.005)
    assert cost.longest_step_s(5000, 0, work) == pytest.approx(0.01 + 1000e-4 + 0.005)


def test_longest_step_adds_decode_steps_that_were_never_mixed() -> None:
    # A prefill worker has measured no step in which requests decode.
    cost = CostModel(linear_decode_fit(0.01, 0.001), linear_prefill_fit(0.02, 1e-4), None, 1000)
    assert cost.longest_step_s(100, 0, EngineWork(5)) == pytest.approx(0.02 + 0.01 + 0.01 + 0.005)
    assert cost.longest_step_s(100, 0, EngineWork()) == pytest.approx(0.02 + 0.01)


@pytest.mark.parametrize(
    ("itl_s", "step_s"), [(None, 0.045), (0.01, 0.045), (0.1, 0.06), (1.0, 0.6)]
)
def test_target_of_steps_is_a_part_of_the_limit(itl_s: float | None, step_s: float) -> None:
    assert mixed_step_target_s(itl_s) == pytest.approx(step_s)


def test_target_of_a_reported_engine_is_that_of_the_new_request() -> None:
    report = LoadReport(1, 1, 0, 0, 0, 0, 1000, 0)
    slos = (None, RequestSlo(ttft_s=1.0), RequestSlo(itl_s=0.1))
    targets = [report.work(Role.ELASTIC, slo=slo).mixed_step_s for slo in slos]
    assert targets == pytest.approx([0.045, 0.045, 0.06])
    assert report.work(Role.AGGREGATED, slo=slos[-1]).mixed_step_s == 0.0


@pytest.mark.parametrize("step_s", [MIXED_STEP_S, 0.1])
@pytest.mark.parametrize("requests", [0, 5, 30])
@pytest.mark.parametrize("token_s", [1e-6, 3e-5, 2e-4])
def test_steps_beside_streams_take_their_time(token_s: float, requests: int, step_s: float) -> None:
    prefill = linear_prefill_fit(0.005, token_s, 0.001)
    cost = CostModel(prefill=prefill, step_tokens=2048)
    tokens = cost.tokens_beside_streams(requests, 0, step_s)
    seconds = prefill_step_s(prefill, requests, 0, tokens)
    assert seconds <= step_s + 1e-9
    assert tokens == 2048 or seconds >= step_s - token_s - 1e-9


def test_prompts_are_divided_while_elastic_engines_have_streams() -> None:
    """One with a longer target needs fewer steps for a prompt, which take longer."""
    prefill = linear_prefill_fit(0.02, 1e-5)
    cost = CostModel(prefill=prefill, first_token=FIRST_TOKEN, step_tokens=8192)
    for target_s, num_steps, step_s in ((0.0, 1, 0.1), (0.0601, 2, 0.06), (0.0401, 4, 0.04)):
        work = EngineWork(5, mixed_step_s=target_s)
        expected_s = num_steps * 0.02 + 8000e-5
        assert cost.first_token_s(8000, 0, work) == pytest.approx(expected_s)
        assert cost.longest_step_s(8000, 0, work) == pytest.approx(step_s, rel=0.01)


def test_steps_beside_streams_have_some_prompt_tokens() -> None:
    slow = CostModel(prefill=linear_prefill_fit(0.06, 1e-4), step_tokens=8192)
    assert slow.tokens_beside_streams(3, 0, MIXED_STEP_S) == 128
    assert CostModel(step_tokens=8192).tokens_beside_streams(3, 0, MIXED_STEP_S) == 128
    free = CostModel(prefill=linear_prefill_fit(0.0, 0.0), step_tokens=8192)
    assert free.tokens_beside_streams(3, 0, MIXED_STEP_S) == 8192


def test_unknown_times_are_infinite() -> None:
    assert CostModel().longest_step_s(9, 0, EngineWork()) == math.inf
    assert CostModel().first_token_s(9, 0, EngineWork()) == math.inf


def test_cost_model_is_completed_by_an_equal_worker() -> None:
    prefill = CostModel(None, PREFILL, FIRST_TOKEN, 1000)
    decode = CostModel(DECODE)
    assert not prefill.is_complete
    assert not decode.is_complete
    assert decode.completed_by(prefill).is_complete
    assert decode.completed_by(prefill).decode is DECODE

"""Choosing tokens: greedy, filters, seeds, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dynamo_trtllm.engines.torch.random_numbers import uniform
from dynamo_trtllm.engines.torch.sampler import sample
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, token_ids
from tests.kit.cases import each_case
from tests.kit.torch_sequences import sequence_of


def row(
    index: int = 0, seed: int = 1, stop_ids: tuple[int, ...] = (), resumed: int = 0, **sampling: Any
) -> TorchSequence:
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(),
        sampling=Sampling(**{"max_tokens": 100, **sampling}),
        deadline=0.0,
        num_resumed_output_tokens=resumed,
    )
    output_ids = token_ids([0] * index)
    return sequence_of(
        request, max_new_tokens=100, stop_ids=stop_ids, seed=seed, output_ids=output_ids
    )


def draw(logits: list[float], count: int, **sampling: Any) -> list[int]:
    rows = [row(index=n, **sampling) for n in range(count)]
    return [choice.token_id for choice in sample(torch.tensor([logits] * count), rows)]


def test_uniform_draws_are_even_and_repeatable() -> None:
    draws = [uniform(7, n) for n in range(20_000)]
    assert all(0 <= value < 1 for value in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.01
    assert sum(value < 0.1 for value in draws) / len(draws) == pytest.approx(0.1, abs=0.01)
    assert draws[:5] == [uniform(7, n) for n in range(5)]
    assert uniform(8, 0) != draws[0]


def test_choose_when_temperature_is_zero_then_the_likeliest() -> None:
    assert draw([0.0, 3.0, 1.0], 3, temperature=0.0) == [1, 1, 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30])
def test_choose_with_tiny_temperature_takes_the_likeliest(temperature: float) -> None:
    assert draw([0.0, 3.0, 1.0], 3, temperature=temperature, top_p=0.5) == [1, 1, 1]


def test_choose_when_sampled_then_frequencies_follow_the_softmax() -> None:
    picked = draw([0.0, math.log(3.0), -torch.inf], 8000, temperature=1.0)
    assert picked.count(1) / 8000 == pytest.approx(0.75, abs=0.02)
    assert 2 not in picked


def test_choose_when_top_k_then_only_the_k_likeliest() -> None:
    assert set(draw([0.0, 0.2, 0.1, -0.1], 400, temperature=5.0, top_k=2)) == {1, 2}


def test_choose_when_top_p_then_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(value) for value in (0.1, 0.5, 0.3, 0.1)]
    assert set(draw(logits, 400, temperature=1.0, top_p=0.6)) == {1, 2}
    assert set(draw(logits, 50, temperature=1.0, top_p=0.01)) == {1}


def test_choose_with_min_p_drops_unlikely_tokens() -> None:
    logits = [math.log(value) for value in (0.05, 0.6, 0.3, 0.05)]
    assert set(draw(logits, 400, temperature=1.0, min_p=0.4)) == {1, 2}
    assert set(draw(logits, 400, temperature=1.0, min_p=0.6)) == {1}
    assert set(draw(logits, 800, temperature=1.0)) == {0, 1, 2, 3}


def test_choose_with_min_p_in_one_row_leaves_others() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.2]] * 400)
    rows = [row(index=n, min_p=1.0 if n % 2 else 0.0) for n in range(400)]
    picked = [choice.token_id for choice in sample(logits, rows)]
    assert set(picked[1::2]) == {2}
    assert set(picked[::2]) == {0, 1, 2}


def test_choose_resumed_continues_min_tokens_and_draws() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 2)
    rows = [row(index, stop_ids=(2,), resumed=5, min_tokens=2, temperature=0.0) for index in (1, 2)]
    assert [choice.token_id for choice in sample(logits, rows)] == [1, 2]
    drawn = torch.zeros(40, 50)
    begun = sample(drawn, [row(index, resumed=5) for index in range(40)])
    whole = sample(drawn, [row(index + 5) for index in range(40)])
    assert begun == whole


def test_choose_when_rows_differ_then_each_has_its_own_rules() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    rows = [
        row(temperature=0.0),
        row(temperature=1.0, top_k=1),
        row(temperature=0.0, min_tokens=1, stop_ids=(2,)),
    ]
    assert [choice.token_id for choice in sample(logits, rows)] == [2, 2, 1]


def test_choose_after_min_tokens_allows_stop_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert (
        sample(logits, [row(index=1, temperature=0.0, min_tokens=1, stop_ids=(2,))])[0].token_id
        == 2
    )


def test_choose_logprobs_are_of_raw_logits() -> None:
    logits = [math.log(value) for value in (0.1, 0.5, 0.4)]
    (choice,) = sample(torch.tensor([logits]), [row(temperature=0.1, top_k=1, logprobs=2)])
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in choice.logprob.top] == [1, 2]
    assert choice.logprob.top[1][1] == pytest.approx(math.log(0.4))
    assert sample(torch.tensor([logits]), [row()])[0].logprob is None


@each_case("temperature", [0.0, 1.0])
@each_case("bad", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_choose_with_non_finite_row_leaves_others(bad: list[float], temperature: float) -> None:
    good = [-math.inf, 1.0, 0.0]
    rows = [row(temperature=temperature, top_k=2, logprobs=1, index=n) for n in range(3)]
    alone = sample(torch.tensor([good] * 3), rows)
    assert sample(torch.tensor([good, bad, good]), rows) == [alone[0], None, alone[2]]
    assert sample(torch.tensor([good] * 3), rows, torch.tensor([True, False, True])) == [
        alone[0],
        None,
        alone[2],
    ]


def test_choose_with_all_tokens_excluded_is_not_non_finite() -> None:
    held = row(temperature=0.0, min_tokens=1, stop_ids=(0, 1, 2))
    assert sample(torch.tensor([[0.0, 1.0, 2.0]]), [held]) != [None]


def test_choose_in_large_batch_equals_each_row_alone() -> None:
    """A CPU draws from so large a vocabulary in several parts."""
    logits = torch.randn(5, 100_000, generator=torch.Generator().manual_seed(0))
    rows = [row(seed=seed, temperature=1.0, top_p=0.9) for seed in range(5)]
    alone = []
    for logits_row, one in zip(logits, rows, strict=True):
        alone += sample(logits_row[None], [one])
    assert sample(logits, rows) == alone
    assert len({choice.token_id for choice in alone}) == 5

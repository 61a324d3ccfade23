"""Penalties and biases on one row of logits, and that they go on where another worker ended."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dynamo_trtllm.engines.torch.logits_processor import LogitsProcessor, logits_processor_for
from dynamo_trtllm.engines.torch.sampler import sample
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, token_ids
from tests.unit.engines.torch.test_sampler import row

LOGITS = [2.0, -1.0, 0.5, 3.0, 0.0]


def logits_processor(
    prompt: tuple[int, ...] = (), resumed: int = 0, **sampling: Any
) -> LogitsProcessor:
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(prompt),
        sampling=Sampling(max_tokens=9, **sampling),
        deadline=0.0,
        num_resumed_output_tokens=resumed,
    )
    made = logits_processor_for(request, None)
    assert made is not None
    return made


def shaped(by: LogitsProcessor, *noted: int) -> list[float]:
    for token_id in noted:
        by.accept_token(token_id)
    logits = torch.tensor(LOGITS)
    by.apply(logits)
    return logits.tolist()


def test_request_that_changes_nothing_then_no_shaping() -> None:
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=9, min_p=0.1, temperature=2.0, min_tokens=3),
        deadline=0.0,
    )
    assert logits_processor_for(request, None) is None


def test_frequency_penalty_counts_answer_occurrences_only() -> None:
    assert shaped(logits_processor((3, 3), frequency_penalty=0.5), 0, 2, 0) == [
        1.0,
        -1.0,
        0.0,
        3.0,
        0.0,
    ]


def test_presence_penalty_then_taken_off_once() -> None:
    assert shaped(logits_processor((3,), presence_penalty=0.5), 0, 2, 0) == [
        1.5,
        -1.0,
        0.0,
        3.0,
        0.0,
    ]


def test_negative_penalties_then_added_and_both_add_up() -> None:
    by = logits_processor(frequency_penalty=-1.0, presence_penalty=0.25)
    assert shaped(by, 1, 1, 4) == [2.0, 0.75, 0.5, 3.0, 0.75]


def test_repetition_penalty_lowers_prompt_and_answer_tokens() -> None:
    assert shaped(logits_processor((3, 1), repetition_penalty=2.0), 2) == [
        2.0,
        -2.0,
        0.25,
        1.5,
        0.0,
    ]


def test_tiny_repetition_penalty_gives_finite_logits() -> None:
    logits = shaped(logits_processor((0, 1, 2, 3), repetition_penalty=5e-324))
    assert all(math.isfinite(logit) for logit in logits)


def test_logit_bias_then_added() -> None:
    assert shaped(logits_processor(logit_bias=((0, -100.0), (4, 5.5)))) == [
        -98.0,
        -1.0,
        0.5,
        3.0,
        5.5,
    ]


def test_all_at_once_then_each_has_its_effect() -> None:
    by = logits_processor(
        (3,),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((3, 1.0),),
    )
    assert shaped(by, 0) == [0.25, -1.0, 0.5, 2.5, 0.0]


@pytest.mark.parametrize(
    "fields", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.7}, {"presence_penalty": 1}]
)
def test_answer_that_another_worker_began_then_it_counts(fields: dict[str, Any]) -> None:
    assert shaped(logits_processor((3, 0, 2), 2, **fields), 4) == shaped(
        logits_processor((3,), **fields), 0, 2, 4
    )


def test_choose_with_shaping_leaves_others_untouched() -> None:
    logits = torch.tensor([LOGITS] * 2)
    rows = [row(temperature=0.0, logprobs=1), row(temperature=0.0, logprobs=1)]
    rows[0].logits_processor = logits_processor(logit_bias=((3, -100.0),))
    first, second = sample(logits, rows)
    assert (first.token_id, second.token_id) == (0, 3)
    assert first.logprob is not None
    assert second.logprob is not None
    assert first.logprob.top == second.logprob.top
    assert logits.tolist() == [LOGITS] * 2

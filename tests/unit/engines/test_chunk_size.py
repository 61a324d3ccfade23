"""How many prompt tokens a step of an elastic engine may have while streams run."""

from __future__ import annotations

import math

import pytest

from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.protocol.mixed_steps import MIXED_STEP_S, least_chunk_tokens

MAX_TOKENS = 8192


def after(chunk: ChunkSize, base_s: float, token_s: float, num_steps: int = 50) -> int:
    """Return the tokens after some full steps that take these times."""
    for _ in range(num_steps):
        chunk.measured(base_s + token_s * chunk.tokens, chunk.tokens, is_full=True)
    return chunk.tokens


def test_full_steps_come_to_take_their_time() -> None:
    chunk = ChunkSize(MAX_TOKENS)
    for base_s, token_s in ((0.02, 1e-4), (0.0, 1e-5), (0.045, 1e-5), (0.02, 1e-4)):
        tokens = after(chunk, base_s, token_s)
        assert abs(base_s + token_s * tokens - MIXED_STEP_S) < 0.1 * MIXED_STEP_S


@pytest.mark.parametrize(
    ("limits_s", "wanted"),
    [
        ([0.1], 5000),
        ([0.2, 0.1], 5000),
        # Shorter steps than MIXED_STEP_S would compute few prompt tokens for their time.
        ([0.1, 0.01], 3500),
        ([None], 3500),
        ([10.0, None], 3500),  # a stream without a limit has the usual target
        ([], 3500),
    ],
)
def test_target_is_the_shortest_of_all_streams(limits_s: list[float | None], wanted: int) -> None:
    chunk = ChunkSize(MAX_TOKENS)
    chunk.follow(limits_s)
    assert after(chunk, 0.01, 1e-5) == pytest.approx(wanted, rel=0.1)


def test_other_target_counts_for_the_next_step() -> None:
    chunk = ChunkSize(MAX_TOKENS)
    chunk.follow([0.2])
    before = after(chunk, 0.01, 2e-5)
    for _ in range(100):
        chunk.follow([0.2, 0.1])
        assert chunk.tokens == pytest.approx(before / 2, abs=1)
        chunk.follow([0.2])
        assert chunk.tokens == before
    # Bounds are no exception, whatever is measured at them.
    chunk.follow([600.0])
    assert after(chunk, 0.01, 2e-5) == MAX_TOKENS
    chunk.follow([0.2])
    assert chunk.tokens == before


def test_prompts_go_on_however_long_steps_take() -> None:
    chunk = ChunkSize(MAX_TOKENS)
    assert after(chunk, 1.0, 0.0) == least_chunk_tokens(MAX_TOKENS) == 128
    assert after(chunk, 0.0, 0.0) == MAX_TOKENS


def test_small_steps_are_their_own_limit() -> None:
    chunk = ChunkSize(8)
    assert chunk.tokens == least_chunk_tokens(8) == 8
    assert after(chunk, 1.0, 0.0) == 8


def test_step_that_is_not_full_says_nothing_about_larger_ones() -> None:
    chunk = ChunkSize(MAX_TOKENS)
    before = chunk.tokens
    chunk.measured(0.01, before, is_full=False)
    assert chunk.tokens == before
    chunk.measured(0.01, before, is_full=True)
    assert chunk.tokens == math.ceil(before * 1.1)
    # One that is too long does, whatever it has.
    chunk.measured(0.2, before, is_full=False)
    assert chunk.tokens == before / 2


def test_time_of_an_older_step_is_not_that_of_the_present_size() -> None:
    """With asynchronous scheduling, the next step is planned before this one is measured."""
    chunk = ChunkSize(MAX_TOKENS)
    planned = [chunk.tokens, chunk.tokens]
    for _ in range(12):
        tokens = planned.pop(0)
        chunk.measured(0.02 + 1e-4 * tokens, tokens, is_full=True)
        planned.append(chunk.tokens)
    assert abs(chunk.tokens - 250) < 25

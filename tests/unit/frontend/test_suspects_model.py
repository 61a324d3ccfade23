"""Many requests, workers and queries of death at random: whom a frontend gives up."""

from __future__ import annotations

import pytest

from benchmarks.suspects import NUM_TOKENS, Model, ModelRequest
from dynamo_trtllm.frontend.routing.suspects import MAX_DEATHS, SETTLED_TOKENS
from tests.kit.cases import each_case


@pytest.mark.parametrize("num_workers", [2, 6])
@pytest.mark.parametrize("seed", range(2))
def test_early_queries_of_death_give_up_no_other_request(num_workers: int, seed: int) -> None:
    """The condition: each is sent after the one before was given up, and ends workers early."""
    model = Model(seed, num_workers)
    deadly = [ModelRequest(model.random.randrange(SETTLED_TOKENS)) for _ in range(4)]
    model.run(deadly)
    assert {sent for sent in model.all if sent.is_given_up} == set(deadly)
    assert [sent.num_ended for sent in deadly] == [2] * 4


@each_case("num_workers", [1, 2, 6])
@each_case("seed", range(2))
def test_queries_of_death_at_any_point_end_two_workers(num_workers: int, seed: int) -> None:
    """The condition: each is sent after the one before was given up, and ends workers at the same
    token of its call.
    """
    model = Model(seed, num_workers)
    deadly = [ModelRequest(model.random.randrange(NUM_TOKENS // 2)) for _ in range(4)]
    model.run(deadly)
    assert [sent.num_ended for sent in deadly] == [2] * 4


@each_case("num_workers", [1, 2, 6])
@each_case("seed", range(2))
def test_overlapping_queries_of_death_end_a_bounded_number(num_workers: int, seed: int) -> None:
    """The condition: each is sent soon after the one before, and they explain each other's
    deaths.
    """
    model = Model(seed, num_workers)
    deadly = [ModelRequest(model.random.randrange(SETTLED_TOKENS)) for _ in range(6)]
    model.run(deadly, overlap=True)
    assert max(sent.num_ended for sent in deadly) <= MAX_DEATHS

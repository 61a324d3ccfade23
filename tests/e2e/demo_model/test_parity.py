"""Greedy tokens after a KV transfer between two processes equal those of one process.

Through `/v1/completions`, fp32, the demo model. Compared by text, token texts and the
log-probability of every token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.demo_model.torch_cluster import AGGREGATED
from tests.kit.cluster import TINY

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

OUTPUT_TOKENS = 16
LENGTHS = [1, 33, 129, 1000]
# Every boundary of a block and of the window is met in one process by
# tests/contract/test_engine_torch.py.
MORE_LENGTHS = [31, 32, 127, 128, 5000]
TOLERANCE = 1e-3  # of a log-probability: sums in another order


class Answer(NamedTuple):
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    chosen = random.Random(1000 * length + seed)
    return [chosen.randrange(200, 199_000) for _ in range(length)]


def complete(client: httpx.Client, model: str, prompt: Sequence[int]) -> Answer:
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
    }
    answer = client.post("/v1/completions", json=body | {"ignore_eos": True, "logprobs": 0})
    assert answer.status_code == 200, answer.text
    assert ("x-prefill-instance" in answer.headers) == (model == TINY)  # two calls, or one
    body = answer.json()
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == OUTPUT_TOKENS
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    return Answer(choice["text"], tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]))


@pytest.mark.parametrize(
    "length", [*LENGTHS, *(pytest.param(tokens, marks=pytest.mark.long) for tokens in MORE_LENGTHS)]
)
def test_tokens_with_remote_prefill_equal_one_process(tiny: httpx.Client, length: int) -> None:
    prompt = prompt_ids(length)
    disaggregated = complete(tiny, TINY, prompt)
    single = complete(tiny, AGGREGATED, prompt)
    assert disaggregated.tokens == single.tokens
    assert disaggregated.text == single.text
    assert disaggregated.logprobs == pytest.approx(single.logprobs, abs=TOLERANCE)


def test_tokens_when_prompts_differ_then_answers_differ(tiny: httpx.Client) -> None:
    """Or the comparison above would say nothing."""
    prompts = [prompt_ids(length, seed) for length in (32, 129) for seed in range(3)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = set(pool.map(lambda prompt: complete(tiny, TINY, prompt).logprobs, prompts))
    assert len(answers) > 3


def test_concurrent_tokens_differ_no_more_than_one_process(tiny: httpx.Client) -> None:
    prompts = [prompt_ids(20 + 17 * number, seed=7) for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:

        def at_once(model: str) -> list[Answer]:
            return list(pool.map(lambda prompt: complete(tiny, model, prompt), prompts))

        disaggregated = at_once(TINY)
        single = at_once(AGGREGATED)
        again = at_once(AGGREGATED)
    share = sum(a.tokens == b.tokens for a, b in zip(disaggregated, single, strict=True)) / len(
        prompts
    )
    itself = sum(a.tokens == b.tokens for a, b in zip(again, single, strict=True)) / len(prompts)
    assert share >= itself

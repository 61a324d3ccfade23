"""The memory of answers that are not streamed, and of streams that are read slowly: bounded for
each and for all.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests import output_budget, send_answer
from dynamo_trtllm.frontend.requests.choice import ChoiceDelta
from dynamo_trtllm.frontend.requests.output_budget import TOKEN_BYTES, OutputBudget, memory_units
from dynamo_trtllm.frontend.tokenization.output import Channel, Delta
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import Chunk, TokenLogprob, token_ids
from tests.kit.frontend_app import FakeFrontend, ScriptedRouter, chunk, stop
from tests.unit.frontend.test_choices import CHAT, TEXT, post

KIB = 1 << 10


@pytest.fixture(autouse=True)
def count_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_answer, "MIN_COUNTED_CHANGE", 0)


def served(*script: Any) -> FakeFrontend:
    return FakeFrontend(ScriptedRouter(list(script)), FrontendConfig())


def scored(text: str, alternatives: int) -> Chunk:
    top = tuple((ord(text), -1.0) for _ in range(alternatives))
    return Chunk(token_ids=token_ids([ord(text)]), logprobs=(TokenLogprob(ord(text), -1.0, top),))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        pytest.param(CHAT, {"n": 128, "max_tokens": 60}, "max_tokens", id="choices"),
        pytest.param(
            CHAT,
            {"n": 8, "max_tokens": 90, "logprobs": True, "top_logprobs": 20},
            "max_tokens",
            id="top",
        ),
        pytest.param(CHAT, {"n": 128, "max_completion_tokens": 60}, "max_tokens", id="other name"),
        pytest.param(TEXT, {"best_of": 128, "max_tokens": 60}, "max_tokens", id="best_of"),
        pytest.param(TEXT, {"prompt": ["a"] * 128, "max_tokens": 60}, "max_tokens", id="prompts"),
    ],
)
async def test_answer_that_may_be_too_large_is_413_at_once(
    path: str, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_budget, "MAX_OUTPUT_BYTES", 256 * KIB)
    frontend = served(stop("a"))
    response = await post(frontend, path, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        413,
        "payload_too_large",
        param,
    )
    assert f"lower n, best_of, {param}" in error["message"]
    assert "set stream to true" in error["message"]
    assert frontend.router.requests == []


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 60}, {"n": 1}, {"stream": True, "n": 1, "max_tokens": 90}]
)
async def test_answer_within_limit_or_of_unknown_length_runs(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_budget, "MAX_OUTPUT_BYTES", 4 * KIB)
    response = await post(served(chunk("a"), stop("b")), CHAT, **fields)
    assert response.status_code == 200


@pytest.mark.parametrize(("alternatives", "tokens"), [(None, 40), (20, 3)])
async def test_answer_growing_too_large_is_413(
    alternatives: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_budget, "MAX_OUTPUT_BYTES", 4 * KIB)
    chunks = [
        chunk("a") if alternatives is None else scored("a", alternatives) for _ in range(tokens)
    ]
    frontend = served(*chunks, asyncio.Event())
    fields: dict[str, Any] = (
        {} if alternatives is None else {"logprobs": True, "top_logprobs": alternatives}
    )
    response = await post(frontend, CHAT, **fields)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert "lower n, best_of, max_tokens" in response.json()["error"]["message"]
    assert frontend.router.running == 0


async def test_growing_answer_has_the_field_of_its_api_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_budget, "MAX_OUTPUT_BYTES", 4 * KIB)
    frontend = served(*[chunk("a") for _ in range(40)], asyncio.Event())
    response = await post(frontend, "/v1/responses", prompt=None, input="hi")
    assert response.status_code == 413
    assert "lower n, best_of, max_output_tokens" in response.json()["error"]["message"]


async def test_size_in_the_error_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_budget, "MAX_OUTPUT_BYTES", 18 << 20)
    fields = {"n": 128, "max_tokens": 60, "logprobs": True, "top_logprobs": 20}  # 18.9 MiB
    response = await post(served(stop("a")), CHAT, **fields)
    message = response.json()["error"]["message"]
    assert "may take 19 MiB of memory; an answer that is not streamed may take 18:" in message


async def test_large_answer_is_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"logprobs": True, "top_logprobs": 5}
    inline = await post(served(scored("a", 5), stop("b")), CHAT, **fields)
    monkeypatch.setattr(send_answer, "_INLINE_OUTPUT_BYTES", 0)
    threaded = await post(served(scored("a", 5), stop("b")), CHAT, **fields)
    assert inline.status_code == threaded.status_code == 200
    assert threaded.json()["choices"] == inline.json()["choices"]


def test_exceeded_total_ends_the_largest_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_budget, "MAX_TOTAL_OUTPUT_BYTES", 100 * KIB)
    budget = OutputBudget()
    ended = list[tuple[str, str, bool]]()

    def end_of(name: str) -> Any:
        def end(error: DynamoError, drops_output: bool) -> None:
            ended.append((name, error.code, drops_output))

        return end

    large = budget.open(end_of("large"), is_streamed=False, max_tokens_name="max_tokens")
    small = budget.open(end_of("small"), is_streamed=True, max_tokens_name="max_tokens")
    large.set(80 * KIB)
    small.set(20 * KIB)
    assert ended == []
    small.set(30 * KIB)
    assert ended == [("large", "overloaded", True)]
    assert budget.in_use == small.in_use == 30 * KIB
    small.set(0)
    small.close()
    large.close()
    assert (budget.in_use, budget.outputs) == (0, set())


def test_ended_answer_learns_that_it_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_budget, "MAX_TOTAL_OUTPUT_BYTES", 100 * KIB)
    budget = OutputBudget()
    messages = list[str]()
    outputs = [
        budget.open(
            lambda error, _: messages.append(error.message),
            is_streamed=True,
            max_tokens_name="max_tokens",
        )
        for _ in range(100)
    ]
    for output in outputs:
        output.set(KIB + 1)
    assert len(messages) == 1
    assert "and this request has the most of it" in messages[0]


def test_each_alternative_counts_for_the_memory() -> None:
    top = tuple((token, -1.0) for token in range(20))
    logprobs = (TokenLogprob(1, -1.0, top),)
    scored_delta = ChoiceDelta(
        tokens=1, deltas=(Delta(channel=Channel.CONTENT, text="a", logprobs=logprobs),)
    )
    of_prompt = ChoiceDelta(prompt_logprobs=logprobs)
    assert (
        memory_units(ChoiceDelta(tokens=1, deltas=(Delta(channel=Channel.CONTENT, text="a"),))) == 2
    )
    assert memory_units(scored_delta) * TOKEN_BYTES > 2000
    assert memory_units(of_prompt) * TOKEN_BYTES > 2000

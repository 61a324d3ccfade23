"""The OpenAI SDK, sync and async, against the demo model through real processes: chat, completions,
models.

Everything that comes is validated by the SDK's own types. `/v1/responses` and request fields have
files of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types import Completion

from tests.e2e.demo_model.guides import FIRST, REQUESTS
from tests.e2e.demo_model.sdk_answers import at_once, checked, content, streamed, whole
from tests.e2e.demo_model.torch_cluster import AGGREGATED
from tests.kit.cluster import TINY

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

HELLO: Any = [{"role": "user", "content": "Hello"}]
HEALTH: dict[str, Any] = {
    name: REQUESTS[FIRST][name] for name in ("model", "messages", "tools")
} | {"temperature": 0}
GREEDY: dict[str, Any] = {
    "model": TINY,
    "messages": HELLO,
    "temperature": 0,
    "reasoning_effort": "low",
}
LOGPROBS: dict[str, Any] = GREEDY | {"logprobs": True, "top_logprobs": 3}
REPEATING: dict[str, Any] = {
    "model": TINY,
    "prompt": "The the the",
    "max_tokens": 32,
    "temperature": 0,
    "logprobs": 0,
    "extra_body": {"ignore_eos": True},
}


class Verdict(pydantic.BaseModel):
    answer: Literal["yes", "no"]


@pytest.fixture(scope="module")
def said(sdk: openai.OpenAI) -> dict[str, Any]:
    """The long answers that need no other, asked for at once: a step of the model then serves all
    of them.
    """
    medium: dict[str, Any] = {"model": TINY, "messages": HELLO, "temperature": 0}
    low = {"reasoning_effort": "low"}
    asks: dict[str, Callable[[], Any]] = {
        "whole": partial(whole, sdk, **GREEDY),
        "streamed": partial(streamed, sdk, **GREEDY),
        "streamed with usage": partial(
            streamed, sdk, **GREEDY, stream_options={"include_usage": True}
        ),
        "logprobs": partial(whole, sdk, **LOGPROBS),
        "logprobs streamed": partial(streamed, sdk, **LOGPROBS),
        "medium effort": partial(whole, sdk, **medium),
        "args": partial(whole, sdk, **medium, extra_body={"chat_template_args": low}),
        "kwargs": partial(whole, sdk, **medium, extra_body={"chat_template_kwargs": low}),
        "at most 5": partial(whole, sdk, **GREEDY, max_completion_tokens=5),
        "just 60": partial(whole, sdk, **GREEDY, max_tokens=60, extra_body={"min_tokens": 60}),
        "no penalty": partial(sdk.completions.create, **REPEATING),
        "frequency_penalty": partial(sdk.completions.create, **REPEATING, frequency_penalty=2),
        "presence_penalty": partial(sdk.completions.create, **REPEATING, presence_penalty=2),
    }
    return dict(zip(asks, at_once(*asks.values()), strict=True))


# What is there


async def test_models_then_both_deployments_by_both_clients(
    sdk: openai.OpenAI, async_sdk: openai.AsyncOpenAI
) -> None:
    found = {model.id: checked(model) for model in sdk.models.list()}
    assert set(found) == {model.id async for model in async_sdk.models.list()} == {TINY, AGGREGATED}
    assert sdk.models.retrieve(TINY).to_dict() == found[TINY].to_dict()
    assert found[TINY].object == "model"


# Completions


def values(entry: Any) -> list[float] | None:
    """Return the log-probabilities of one token of vLLM's prompt_logprobs."""
    return None if entry is None else [logprob["logprob"] for logprob in entry.values()]


def test_echo_logprobs_equal_those_of_generation(sdk: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": TINY, "temperature": 0, "logprobs": 1}
    start = [1000, 2000]
    answer: Any = sdk.completions.create(
        prompt=start, max_tokens=16, extra_body={"return_token_ids": True}, **fields
    )
    (made,) = answer.choices
    for model in (TINY, AGGREGATED):
        asked = fields | {
            "model": model,
            "prompt": [*start, *made.token_ids],
            "echo": True,
            "max_tokens": 0,
        }
        choice: Any = sdk.completions.create(**asked, extra_body={"prompt_logprobs": 0}).choices[0]
        echoed = choice.logprobs
        assert [
            entry and entry[0] for entry in map(values, choice.prompt_logprobs)
        ] == echoed.token_logprobs
        assert echoed.token_logprobs[0] is None
        assert echoed.token_logprobs[2:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
        assert echoed.tokens[2:] == made.logprobs.tokens


# Chat


def test_streamed_chat_equals_unstreamed_with_one_finish(said: dict[str, Any]) -> None:
    answer = said["whole"]
    chunks = said["streamed"]
    assert content(chunks) == answer.choices[0].message.content
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finishes == [None] * (len(finishes) - 1) + [answer.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks)
    *parts, totals = said["streamed with usage"]
    assert all(part.usage is None for part in parts)
    assert answer.usage is not None
    # what the prefix cache had
    totals.usage.prompt_tokens_details = answer.usage.prompt_tokens_details
    assert (totals.choices, totals.usage) == ([], answer.usage)
    assert answer.usage.completion_tokens_details is not None
    assert (
        0
        < (answer.usage.completion_tokens_details.reasoning_tokens or 0)
        < answer.usage.completion_tokens
    )


async def test_async_chats_get_their_own_answers(async_sdk: openai.AsyncOpenAI) -> None:
    short = GREEDY | {"max_tokens": 24}
    asked = [
        short | {"messages": [{"role": "user", "content": f"What is {word}?"}]}
        for word in ("prefill", "etcd")
    ]

    async def said(body: dict[str, Any]) -> str:
        stream = await async_sdk.chat.completions.create(**body, stream=True)
        async with stream:
            return content([checked(chunk) async for chunk in stream])

    alone = [
        checked(await async_sdk.chat.completions.create(**body)).choices[0].message.content
        for body in asked
    ]
    assert await asyncio.gather(*map(said, asked)) == alone
    assert alone[0] != alone[1]


def test_chat_when_every_role_speaks_then_all_are_in_the_prompt(sdk: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Is it"}, {"type": "text", "text": "up?"}]
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_system_health", "arguments": "{}"},
    }
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts, "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": '{"status":"ok"}'}],
        },
    ]
    asked: dict[str, Any] = {"model": TINY, "tools": HEALTH["tools"], "max_tokens": 1}
    sizes = []
    for count in (3, 5):
        usage = whole(sdk, **asked, messages=messages[:count]).usage
        assert usage is not None
        sizes.append(usage.prompt_tokens)
    messages[2] = {"role": "user", "content": "Is it\nup?", "name": "ada"}
    usage = whole(sdk, **asked, messages=messages).usage
    assert usage is not None
    assert sizes[0] < sizes[1] == usage.prompt_tokens


def test_logprobs_cover_every_content_token(said: dict[str, Any]) -> None:
    (answer,) = said["logprobs"].choices
    assert answer.logprobs is not None
    tokens = answer.logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == answer.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert (token.token, token.logprob) == (
            token.top_logprobs[0].token,
            token.top_logprobs[0].logprob,
        )
    parts = [choice.logprobs for chunk in said["logprobs streamed"] for choice in chunk.choices]
    seen = [token for part in parts if part is not None for token in part.content or []]
    assert [token.token for token in seen] == [token.token for token in tokens]
    assert [token.logprob for token in seen] == pytest.approx(
        [token.logprob for token in tokens], abs=1e-3
    )


def test_sampling_of_only_the_likeliest_equals_greedy(sdk: openai.OpenAI) -> None:
    asked = GREEDY | {"max_tokens": 16}
    ways: list[Any] = [
        {"top_p": 1e-6},
        {"extra_body": {"top_k": 1}},
        {"extra_body": {"min_p": 1.0}},
    ]
    answers = at_once(
        *(
            partial(whole, sdk, **asked | way)
            for way in [{}, *({"temperature": 2} | way for way in ways)]
        )
    )
    expected, *messages = [answer.choices[0].message for answer in answers]
    assert messages == [expected] * len(ways)


def test_effort_when_formatted_three_ways_then_one_and_the_same(said: dict[str, Any]) -> None:
    messages = [said[way].choices[0].message for way in ("whole", "args", "kwargs")]
    assert messages[0] == messages[1] == messages[2] != said["medium effort"].choices[0].message


def test_stop_token_when_it_comes_then_the_answer_ends_before_it(sdk: openai.OpenAI) -> None:
    (answer,) = whole(sdk, **GREEDY, extra_body={"stop_token_ids": [0]}).choices  # "!"
    assert (answer.message.content, answer.finish_reason) == ("Hello", "stop")


def test_stop_when_whole_and_streamed_then_nothing_from_it_on(
    sdk: openai.OpenAI, said: dict[str, Any]
) -> None:
    free = said["whole"].choices[0].message.content
    stop = free[10:16]  # wherever tokens begin and end
    asked = GREEDY | {"stop": ["never said", stop]}
    answer, chunks = at_once(lambda: whole(sdk, **asked), lambda: streamed(sdk, **asked))
    (cut,) = answer.choices
    assert (cut.message.content, cut.finish_reason) == (free[: free.index(stop)], "stop")
    assert content(chunks) == cut.message.content


def test_lengths_when_bounded_from_both_sides_then_kept(said: dict[str, Any]) -> None:
    shorter = said["at most 5"]
    longer = said["just 60"]
    assert (shorter.choices[0].finish_reason, shorter.usage.completion_tokens) == ("length", 5)
    assert said["whole"].usage.completion_tokens < 60 == longer.usage.completion_tokens


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_penalty_when_given_then_tokens_come_again_less_often(
    said: dict[str, Any], penalty: str
) -> None:
    def kinds(answer: Completion) -> int:
        logprobs = checked(answer).choices[0].logprobs
        assert logprobs is not None
        return len(set(logprobs.tokens or []))

    assert kinds(said[penalty]) > kinds(said["no penalty"])


def test_schema_when_the_stream_helper_parses_then_an_instance(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(**GREEDY, response_format=Verdict) as stream:
        done = [event for event in stream if event.type == "content.done"]
    verdict = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(verdict, Verdict)
    assert [event.parsed for event in done] == [verdict]


# Completions


def test_completion_of_token_ids_then_text_and_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=TINY,
        prompt=[1000, 2000, 3000],
        max_tokens=8,
        temperature=0,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert checked(answer).usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)  # type: ignore[union-attr]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 8
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
    assert "".join(logprobs.tokens) == answer.choices[0].text


async def test_async_completions_stream_their_own_choices(async_sdk: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": TINY,
        "max_tokens": 6,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    texts = ["", ""]
    async for part in await async_sdk.completions.create(
        **asked, prompt=["KV", "NATS"], stream=True
    ):
        assert isinstance(part, Completion)
        for choice in part.choices:
            texts[choice.index] += choice.text
    alone = [
        (await async_sdk.completions.create(**asked, prompt=prompt)).choices[0].text
        for prompt in ("KV", "NATS")
    ]
    assert texts == alone

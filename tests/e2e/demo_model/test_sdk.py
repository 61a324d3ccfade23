"""The OpenAI SDK, sync and async, against the demo model through real processes: chat, completions, models.

Everything that comes is validated by the SDK's own types. `/v1/responses` and request fields have files of their own.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types import Completion

from tests.e2e.cluster import TINY
from tests.e2e.demo_model.conftest import AGGREGATED
from tests.e2e.demo_model.guides import FIRST, REQUESTS
from tests.e2e.demo_model.sdk_answers import checked, content, streamed, whole

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

HELLO: Any = [{"role": "user", "content": "Hello"}]
HEALTH: dict[str, Any] = {name: REQUESTS[FIRST][name] for name in ("model", "messages", "tools")} | {"temperature": 0}
GREEDY: dict[str, Any] = {"model": TINY, "messages": HELLO, "temperature": 0, "reasoning_effort": "low"}


class Verdict(pydantic.BaseModel):
    answer: Literal["yes", "no"]


# What is there


async def test_models_then_both_deployments_by_both_clients(sdk: openai.OpenAI, async_sdk: openai.AsyncOpenAI) -> None:
    found = {model.id: checked(model) for model in sdk.models.list()}
    assert set(found) == {model.id async for model in async_sdk.models.list()} == {TINY, AGGREGATED}
    assert sdk.models.retrieve(TINY).to_dict() == found[TINY].to_dict()
    assert found[TINY].object == "model"


# Chat


def test_chat_when_streamed_then_what_it_says_whole_and_one_finish(sdk: openai.OpenAI) -> None:
    answer = whole(sdk, **GREEDY)
    chunks = streamed(sdk, **GREEDY)
    assert content(chunks) == answer.choices[0].message.content
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finishes == [None] * (len(finishes) - 1) + [answer.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks)
    *parts, totals = streamed(sdk, **GREEDY, stream_options={"include_usage": True})
    assert all(part.usage is None for part in parts)
    assert (totals.choices, totals.usage) == ([], answer.usage)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens


async def test_async_chat_when_several_at_once_then_each_has_its_own_answer(async_sdk: openai.AsyncOpenAI) -> None:
    asked = [GREEDY | {"messages": [{"role": "user", "content": f"What is {word}?"}]} for word in ("prefill", "etcd")]

    async def said(body: dict[str, Any]) -> str:
        stream = await async_sdk.chat.completions.create(**body, stream=True)
        async with stream:
            return content([checked(chunk) async for chunk in stream])

    alone = [checked(await async_sdk.chat.completions.create(**body)).choices[0].message.content for body in asked]
    assert await asyncio.gather(*map(said, asked)) == alone
    assert alone[0] != alone[1]


def test_chat_when_every_role_speaks_then_all_are_in_the_prompt(sdk: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Is it"}, {"type": "text", "text": "up?"}]
    call = {"id": "c1", "type": "function", "function": {"name": "get_system_health", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts, "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": '{"status":"ok"}'}]},
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


def test_seed_when_several_choices_then_each_is_the_next_seed(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "messages": HELLO, "temperature": 2, "max_tokens": 12}
    both = whole(sdk, **asked, seed=5, n=2)
    alone = [whole(sdk, **asked, seed=seed) for seed in (5, 6)]
    assert [choice.message.to_dict() for choice in both.choices] == [
        answer.choices[0].message.to_dict() for answer in alone
    ]
    assert both.choices[0].message != both.choices[1].message


def test_logprobs_when_whole_and_streamed_then_of_every_token_of_the_content(sdk: openai.OpenAI) -> None:
    asked = GREEDY | {"logprobs": True, "top_logprobs": 3}
    answer = whole(sdk, **asked).choices[0]
    assert answer.logprobs is not None
    tokens = answer.logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == answer.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
    parts = [choice.logprobs for chunk in streamed(sdk, **asked) for choice in chunk.choices]
    seen = [token for part in parts if part is not None for token in part.content or []]
    assert [token.token for token in seen] == [token.token for token in tokens]
    assert [token.logprob for token in seen] == pytest.approx([token.logprob for token in tokens], abs=1e-3)


@pytest.mark.parametrize("fields", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}])
def test_sampling_when_all_but_the_likeliest_is_ruled_out_then_as_greedy(sdk: openai.OpenAI, fields: Any) -> None:
    asked = GREEDY | {"max_tokens": 16}
    expected = whole(sdk, **asked).choices[0].message
    assert whole(sdk, **asked | {"temperature": 2} | fields).choices[0].message == expected


def test_effort_when_formatted_three_ways_then_one_and_the_same(sdk: openai.OpenAI) -> None:
    ways: list[Any] = [
        {"reasoning_effort": "low"},
        {"extra_body": {"chat_template_args": {"reasoning_effort": "low"}}},
        {"extra_body": {"chat_template_kwargs": {"reasoning_effort": "low"}}},
    ]
    asked: dict[str, Any] = {"model": TINY, "messages": HELLO, "temperature": 0}
    messages = [whole(sdk, **asked, **way).choices[0].message for way in ways]
    assert messages[0] == messages[1] == messages[2] != whole(sdk, **asked).choices[0].message


def test_stop_token_when_it_comes_then_the_answer_ends_before_it(sdk: openai.OpenAI) -> None:
    (answer,) = whole(sdk, **GREEDY, extra_body={"stop_token_ids": [0]}).choices  # "!"
    assert (answer.message.content, answer.finish_reason) == ("Hello", "stop")


def test_stop_when_whole_and_streamed_then_nothing_from_it_on(sdk: openai.OpenAI) -> None:
    free = whole(sdk, **GREEDY).choices[0].message.content or ""
    stop = free[10:16]  # wherever tokens begin and end
    asked = GREEDY | {"stop": ["never said", stop]}
    cut = whole(sdk, **asked).choices[0]
    assert (cut.message.content, cut.finish_reason) == (free[: free.index(stop)], "stop")
    assert content(streamed(sdk, **asked)) == cut.message.content


def test_lengths_when_bounded_from_both_sides_then_kept(sdk: openai.OpenAI) -> None:
    answer = whole(sdk, **GREEDY, max_completion_tokens=5)
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)
    longer = whole(sdk, **GREEDY, max_tokens=90, extra_body={"min_tokens": 90})
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 90


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}])
def test_penalty_when_given_then_tokens_come_again_less_often(sdk: openai.OpenAI, penalty: dict[str, float]) -> None:
    asked: dict[str, Any] = {"model": TINY, "prompt": "The the the", "max_tokens": 48, "temperature": 0, "logprobs": 0}

    def kinds(**fields: Any) -> int:
        answer = sdk.completions.create(**asked, **fields, extra_body={"ignore_eos": True})
        logprobs = checked(answer).choices[0].logprobs
        assert logprobs is not None
        return len(set(logprobs.tokens or []))

    assert kinds(**penalty) > kinds()


def test_schema_when_the_stream_helper_parses_then_an_instance(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(**GREEDY, response_format=Verdict) as stream:
        done = [event for event in stream if event.type == "content.done"]
    verdict = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(verdict, Verdict)
    assert [event.parsed for event in done] == [verdict]


# Completions


def test_completion_of_token_ids_then_text_and_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=TINY, prompt=[1000, 2000, 3000], max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
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


async def test_async_completions_when_prompts_stream_together_then_each_choice_is_its_own(
    async_sdk: openai.AsyncOpenAI,
) -> None:
    asked: dict[str, Any] = {"model": TINY, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    texts = ["", ""]
    async for part in await async_sdk.completions.create(**asked, prompt=["KV", "NATS"], stream=True):
        assert isinstance(part, Completion)
        for choice in part.choices:
            texts[choice.index] += choice.text
    alone = [(await async_sdk.completions.create(**asked, prompt=prompt)).choices[0].text for prompt in ("KV", "NATS")]
    assert texts == alone

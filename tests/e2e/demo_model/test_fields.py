"""Request fields through the OpenAI SDK and real processes: choices, forced and guided output,
refusals by name.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.kit.cluster import TINY

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

HELLO: Any = [{"role": "user", "content": "Hello"}]
PLACE = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_system_health", "parameters": {"type": "object"}},
    },
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": PLACE | {"additionalProperties": False}},
    },
]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}


class Verdict(pydantic.BaseModel):
    answer: Literal["yes", "no"]
    score: Literal[1, 2, 3]


def test_response_format_when_the_sdk_parses_then_an_instance(sdk: openai.OpenAI) -> None:
    parsed = sdk.chat.completions.parse(
        model=TINY, messages=HELLO, response_format=Verdict, temperature=0, max_tokens=300
    )
    verdict = parsed.choices[0].message.parsed
    assert isinstance(verdict, Verdict)
    assert parsed.choices[0].finish_reason == "stop"


def test_json_object_when_streamed_then_the_content_is_an_object(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model=TINY,
        messages=HELLO,
        response_format={"type": "json_object"},
        max_tokens=60,
        seed=1,
        stream=True,
    )
    chunks = [chunk.choices[0] for chunk in stream]
    content = "".join(chunk.delta.content or "" for chunk in chunks)
    assert content.startswith("{")
    if chunks[-1].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_choice": ["a.b", "c|d"]}, r"a\.b|c\|d"),
        ({"structured_outputs": {"regex": "x/[0-9]{2}"}}, "x/[0-9]{2}"),
        ({"guided_grammar": 'root ::= "<" [0-9] ">"'}, "<[0-9]>"),
    ],
)
def test_vllm_output_format_shapes_content_and_completion(
    sdk: openai.OpenAI, fields: dict[str, Any], text: str
) -> None:
    asked: dict[str, Any] = {"model": TINY, "seed": 1, "max_tokens": 300, "extra_body": fields}
    content = sdk.chat.completions.create(messages=HELLO, **asked).choices[0].message.content
    assert re.fullmatch(text, content or ""), content
    assert re.fullmatch(text, sdk.completions.create(prompt="Hello", **asked).choices[0].text)


@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_required_tool_choice_calls_an_offered_tool(sdk: openai.OpenAI, choice: Any) -> None:
    answer = sdk.chat.completions.create(
        model=TINY, messages=HELLO, tools=TOOLS, tool_choice=choice, seed=1, max_tokens=300
    )
    (got,) = answer.choices
    assert got.message.tool_calls
    (call,) = got.message.tool_calls
    assert call.type == "function"
    names = ["get_weather"] if choice is WEATHER else ["get_system_health", "get_weather"]
    assert call.function.name in names
    if got.finish_reason == "tool_calls":
        assert isinstance(json.loads(call.function.arguments), dict)


def test_n_when_whole_then_as_many_choices_in_order(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=TINY, messages=HELLO, n=3, seed=5, temperature=2, max_tokens=20
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content or str(choice.message) for choice in answer.choices}) > 1


def test_logit_bias_when_it_forces_a_token_then_it_comes(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=TINY,
        prompt="a",
        max_tokens=3,
        logit_bias={"9906": 100},
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    plain = sdk.completions.create(
        model=TINY, prompt=[9906, 9906, 9906], max_tokens=1, echo=True, temperature=0
    )
    assert plain.choices[0].text.startswith(answer.choices[0].text)


def test_best_of_with_several_prompts_returns_choices_for_each(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=TINY, prompt=["a", "b"], n=1, best_of=2, max_tokens=4, echo=True, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text[0] for choice in answer.choices] == ["a", "b"]
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {"response_format": {"type": "json_object"}, "min_tokens": 3},
            "min_tokens",
            "invalid_request",
        ),
        ({"reasoning_effort": "none"}, "reasoning_effort", "unsupported_parameter"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            None,
        ),
        ({"logit_bias": {"201088": 1}}, "logit_bias", "invalid_request"),
        ({"verbosity": "high"}, "verbosity", "unsupported_parameter"),
    ],
)
def test_unsupported_field_is_named_by_the_sdk(
    sdk: openai.OpenAI, fields: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=TINY, messages=HELLO, extra_body=fields)
    assert caught.value.param == param
    assert caught.value.code == (code or "invalid_request")


def test_impossible_schema_is_rejected_with_reason(sdk: openai.OpenAI) -> None:
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}},
    }
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as caught:
        sdk.chat.completions.create(model=TINY, messages=HELLO, response_format=schema)
    assert caught.value.code == "engine_rejected"

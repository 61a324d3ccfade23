"""Tools through the OpenAI SDK's helpers, sync and async, against the demo model through real
processes.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ParsedChatCompletion

from tests.e2e.demo_model.guides import FIRST, REQUESTS
from tests.e2e.demo_model.sdk_answers import at_once, checked, streamed, whole
from tests.kit.cluster import TINY

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

GREEDY: dict[str, Any] = {
    "model": TINY,
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
}
HEALTH: dict[str, Any] = {
    name: REQUESTS[FIRST][name] for name in ("model", "messages", "tools")
} | {"temperature": 0}
PLACE = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": PLACE | {"additionalProperties": False},
    },
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}


class NoArguments(pydantic.BaseModel):
    """A function's arguments: none."""


class Health(NamedTuple):
    events: list[Any]
    added_up: ChatCompletion
    whole: ChatCompletion
    without_a_call: ChatCompletion
    parsed: ParsedChatCompletion[None]


@pytest.fixture(scope="module")
def health(sdk: openai.OpenAI) -> Health:
    """The same question in four ways, asked at once: a step of the model then serves all of
    them.
    """

    def helped() -> tuple[list[Any], ChatCompletion]:
        with sdk.chat.completions.stream(**HEALTH) as stream:
            return list(stream), stream.get_final_completion()

    function = HEALTH["tools"][0]["function"]
    tool = openai.pydantic_function_tool(
        NoArguments, name=function["name"], description=function["description"]
    )
    assert tool["function"].get("strict") is True
    (events, added_up), *others = at_once(
        helped,
        lambda: whole(sdk, **HEALTH),
        lambda: whole(sdk, **HEALTH, tool_choice="none"),
        lambda: sdk.chat.completions.parse(**HEALTH | {"tools": [tool]}),
    )
    return Health(events, added_up, *others)


def test_tool_call_reaches_the_stream_helper(health: Health) -> None:
    for event in health.events:
        if event.type == "chunk":
            checked(event.chunk)
    kinds = [event.type for event in health.events if event.type.startswith("tool_calls")]
    assert set(kinds[:-1]) == {"tool_calls.function.arguments.delta"}
    assert kinds[-1] == "tool_calls.function.arguments.done"
    (final,) = health.added_up.choices
    (expected,) = health.whole.choices
    assert final.finish_reason == expected.finish_reason == "tool_calls"
    assert (final.message.content or "", expected.message.content) == ("", None)
    (added_up,) = final.message.tool_calls or []
    (parsed,) = expected.message.tool_calls or []
    assert parsed.type == "function"
    assert (added_up.function.name, added_up.function.arguments) == (
        parsed.function.name,
        parsed.function.arguments,
    )
    assert added_up.id != parsed.id
    thought = (final.message.model_extra or {})["reasoning_content"]
    assert thought == (expected.message.model_extra or {})["reasoning_content"]


@pytest.mark.parametrize("choice", ["required", WEATHER])
async def test_required_tool_streams_arguments_early(
    async_sdk: openai.AsyncOpenAI, choice: Any
) -> None:
    asked = GREEDY | {"tools": [WEATHER_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    async with async_sdk.chat.completions.stream(**asked) as stream:
        events = [event async for event in stream]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    assert "".join(event.arguments_delta for event in deltas) == done.arguments
    assert len(deltas) > 1
    with pytest.raises(json.JSONDecodeError):
        json.loads(deltas[0].arguments_delta)
    assert done.name == "get_weather"
    assert json.loads(done.arguments)["city"] in ("Bern", "Oslo")
    (final,) = (await stream.get_final_completion()).choices
    assert final.finish_reason == "tool_calls"
    (call,) = final.message.tool_calls or []
    assert call.function.parsed_arguments == json.loads(done.arguments)


def test_tool_call_cut_off_keeps_partial_arguments(sdk: openai.OpenAI) -> None:
    cut = streamed(sdk, **GREEDY, tools=[WEATHER_TOOL], tool_choice=WEATHER, max_tokens=2)
    calls = [
        call for chunk in cut for choice in chunk.choices for call in choice.delta.tool_calls or []
    ]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert arguments.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    assert cut[-1].choices[0].finish_reason == "length"


def test_tools_when_none_may_be_called_then_words(health: Health) -> None:
    (choice,) = health.without_a_call.choices
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert choice.message.content


def test_tool_when_it_is_a_class_then_the_call_is_parsed_into_it(health: Health) -> None:
    (choice,) = health.parsed.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, NoArguments)

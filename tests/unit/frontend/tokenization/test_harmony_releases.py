"""Prompts and answers of gpt-oss are the same with every library that has the module
openai_harmony.

TensorRT-LLM pins openai-harmony 0.0.4; vLLM 0.24 has 0.0.8; vLLM 0.31 has oss-harmony 0.0.11, which
renders calls and tool results in another order. tests/data/harmony_ids.json has our prompts,
tests/data/harmony_library_ids.json what the libraries rendered for the conversation "tools"
(recorded with `harmony_library.rendered`).
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool, ToolCall
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.protocol.messages import token_ids
from tests.kit.answer_parts import fold
from tests.kit.cases import each_case
from tests.unit.frontend.tokenization import harmony_library

_DATA = Path(__file__).parents[3] / "data"
IDS: dict[str, list[int]] = json.loads((_DATA / "harmony_ids.json").read_text())
LIBRARIES: dict[str, list[int]] = json.loads((_DATA / "harmony_library_ids.json").read_text())
TODAY = date(2026, 1, 2)
PLACE = {
    "type": "string",
    "description": "City, e.g. “Zürich”",
    "minLength": 1,
    "examples": ["Bern"],
}
WEATHER = Tool(
    name="get_weather",
    description="Weather of a place\nof today",
    parameters={
        "type": "object",
        "properties": {
            "place": PLACE,
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": ["integer", "null"], "minimum": 1},
            "options": {"type": "object", "properties": {"wind": {"type": "boolean"}}},
            "points": {
                "type": "array",
                "items": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/p"}]},
            },
        },
        "required": ["place"],
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
)
NOW = Tool(name="now", description="")
CALL = ToolCall(id="call_1", name="get_weather", arguments='{"place": "Zürich"}')
CONVERSATIONS = {
    "question": Conversation(messages=(Message(role="user", content="Hello 🧑‍🚀 日本語"),)),
    "effort": Conversation(
        messages=(Message(role="user", content="1 + 1?"),), reasoning_effort="high"
    ),
    "instructions": Conversation(
        messages=(
            Message(role="system", content="Answer in verse."),
            Message(role="developer", content="No <|end|> here."),
            Message(role="user", content="Hi", name="ann"),
            Message(role="assistant", content="Hello."),
            Message(role="user", content="again"),
        ),
        answer_schema='{"type":"object"}',
    ),
    "tools": Conversation(
        messages=(
            Message(role="system", content="Use tools."),
            Message(role="user", content="And the weather?"),
            Message(role="assistant", reasoning="I need the weather.", tool_calls=(CALL,)),
            Message(role="tool", tool_call_id="call_1", content='{"t": 21}'),
        ),
        tools=(WEATHER, NOW),
        reasoning_effort="low",
    ),
}
THOUGHT = "<|channel|>analysis<|message|>Think 日本.<|end|><|start|>assistant"
ANSWER = (
    f'{THOUGHT}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{"a":'
    " 1}<|call|>"
)
ANSWERS = {  # the recipient before and after the channel
    "after, json": ANSWER,
    "after, code": ANSWER.replace("<|constrain|>json", "code"),
    "after, no type": ANSWER.replace(" <|constrain|>json", ""),
    "after, on analysis": ANSWER.replace("commentary", "analysis"),
    "before, json": (
        f'{THOUGHT} to=functions.now<|channel|>commentary <|constrain|>json<|message|>{{"a":'
        " 1}<|call|>"
    ),
    "before, plain json": (
        f'{THOUGHT} to=functions.now<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    ),
    "before, on analysis": (
        f'{THOUGHT} to=functions.now<|channel|>analysis code<|message|>{{"a": 1}}<|call|>'
    ),
}
# The example of the guide,
# https://github.com/openai/harmony/blob/ec7606d/docs/format.md#handling-tool-calls
GUIDE = (
    "<|start|>user<|message|>What is the weather like in SF?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Need to use function get_weather.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"location":"San Francisco"}<|call|>'
    "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
    '{"sunny": true, "temperature": 20}<|end|><|start|>assistant'
)


@pytest.fixture(scope="module")
def renderer() -> HarmonyRenderer:
    return HarmonyRenderer(today=lambda: TODAY)


def rendered(renderer: HarmonyRenderer, name: str) -> list[int]:
    return renderer.render(CONVERSATIONS[name]).tolist()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompt_of_any_release_has_the_recorded_ids(renderer: HarmonyRenderer, name: str) -> None:
    assert rendered(renderer, name) == IDS[name]


def test_prompt_with_call_equals_the_example_of_the_guide(renderer: HarmonyRenderer) -> None:
    call = ToolCall(id="c", name="get_weather", arguments='{"location":"San Francisco"}')
    messages = (
        Message(role="user", content="What is the weather like in SF?"),
        Message(
            role="assistant", reasoning="Need to use function get_weather.", tool_calls=(call,)
        ),
        Message(role="tool", tool_call_id="c", content='{"sunny": true, "temperature": 20}'),
    )
    text = renderer.decode(renderer.render(Conversation(messages=messages)))
    assert text.partition("<|end|>")[2] == GUIDE


@pytest.mark.parametrize("library", LIBRARIES)
def test_prompt_differs_among_releases_only_in_order(library: str) -> None:
    assert LIBRARIES[library] != IDS["tools"]
    assert harmony_library.in_our_order(LIBRARIES[library]) == IDS["tools"]


def test_installed_library_renders_as_a_recorded_one() -> None:
    assert harmony_library.rendered(CONVERSATIONS["tools"], TODAY) in LIBRARIES.values()


@each_case("name", ANSWERS)
def test_answer_of_any_release_parses_to_reasoning_and_call(
    renderer: HarmonyRenderer, name: str
) -> None:
    """However it is cut in two, and token by token."""
    ids: list[int] = renderer._control_text(ANSWERS[name]).tolist()
    cuts = [[ids[:at], ids[at:]] for at in range(len(ids))]
    for pushes in ([[token_id] for token_id in ids], *cuts):
        seen = fold(renderer.chat_parser(), map(token_ids, pushes))
        assert (seen.content, seen.reasoning, seen.calls) == (
            "",
            "Think 日本.",
            [["now", '{"a": 1}']],
        )


def test_answer_of_any_release_has_the_recorded_ids(renderer: HarmonyRenderer) -> None:
    assert renderer._control_text(ANSWER).tolist() == IDS["answer"]

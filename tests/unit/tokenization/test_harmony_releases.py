"""Prompts and answers of gpt-oss are the same with every openai-harmony, of which TensorRT-LLM pins 0.0.4.

The ids in tests/data/harmony_ids.json were rendered with 0.0.8.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.messages import token_ids
from dynamo_trtllm.tokenization.base import Conversation, Message, Tool, ToolCall
from dynamo_trtllm.tokenization.harmony import HarmonyRenderer
from tests.unit.tokenization.parser_helpers import fold

_DATA = Path(__file__).parents[2] / "data"
IDS: dict[str, list[int]] = json.loads((_DATA / "harmony_ids.json").read_text())
PLACE = {"type": "string", "description": "City, e.g. “Zürich”", "minLength": 1, "examples": ["Bern"]}
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
            "points": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/p"}]}},
        },
        "required": ["place"],
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
)
NOW = Tool(name="now", description="")
CALL = ToolCall(id="call_1", name="get_weather", arguments='{"place": "Zürich"}')
CONVERSATIONS = {
    "question": Conversation(messages=(Message(role="user", content="Hello 🧑‍🚀 日本語"),)),
    "effort": Conversation(messages=(Message(role="user", content="1 + 1?"),), reasoning_effort="high"),
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
ANSWER = (
    "<|channel|>analysis<|message|>Think 日本.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
)


@pytest.fixture(scope="module")
def renderer() -> HarmonyRenderer:
    return HarmonyRenderer(today=lambda: date(2026, 1, 2))


def rendered(renderer: HarmonyRenderer, name: str) -> list[int]:
    return renderer.render(CONVERSATIONS[name]).tolist()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompt_when_rendered_with_any_release_then_the_recorded_ids(renderer: HarmonyRenderer, name: str) -> None:
    assert rendered(renderer, name) == IDS[name]


def test_answer_when_parsed_with_any_release_then_its_reasoning_and_call(renderer: HarmonyRenderer) -> None:
    ids: Any = renderer._control_text(ANSWER)
    assert ids.tolist() == IDS["answer"]
    seen = fold(renderer.chat_parser(), [token_ids([token_id]) for token_id in ids])
    assert seen.reasoning == "Think 日本."
    assert seen.calls == [["now", '{"a": 1}']]

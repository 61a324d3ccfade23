"""Tools of chat that are no plain functions: custom tools, and those of a server."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.frontend.requests.preprocess import GenerationPlan, prepare_chat
from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import UnsupportedParameter
from tests.kit.step_splits import CHAT, RESPONSE, Case, deltas_of, served_by

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
HOSTED = [{"type": "web_search"}, {"type": "retrieval", "x": 1}]
TEXT = 'say "hi"'
CALLS = (
    "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>"
    + json.dumps({"input": TEXT})
    + "<|end|><|start|>assistant<|channel|>commentary to=functions.f"
    " <|constrain|>json<|message|>{}<|call|>"
)

harmony = functools.cache(lambda: o200k_tokenizer.load_tokenizer().harmony)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_by(HarmonyRenderer())


def asked(**fields: Any) -> tuple[ChatRequest, list[str]]:
    ignored = IgnoredFields(rejects_misspelled=True)
    sent = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True} | fields
    return parse(ChatRequest, json.dumps(sent).encode(), ignored), list(ignored)


def planned(served: ServedModel, body: ChatRequest) -> GenerationPlan:
    return prepare_chat(body, served, body.call("r", 0.0, ""))


def prompt_of(served: ServedModel, body: ChatRequest) -> str:
    return served.renderer.decode(planned(served, body).choices[0].request.token_ids)


def answered(
    served: ServedModel, steps: list[int], text: str = CALLS, **fields: Any
) -> tuple[Any, list[Any]]:
    """Return the message of an answer, by default one with two calls, and the deltas of its
    events.
    """
    body, _ = asked(**fields)
    plan = planned(served, body)
    case = Case(tuple(harmony().encode(text, allowed_special="all")))
    deltas, state = deltas_of(case, steps, plan)
    streamed = CHAT.builder(RESPONSE, body, plan)
    whole = CHAT.builder(RESPONSE, body, plan)
    data = (
        streamed.start()
        + b"".join(map(streamed.delta, deltas))
        + streamed.finish(state.usage(), {})
    )
    for delta in deltas:
        whole.push(delta)
    events = [
        json.loads(line.removeprefix("data: ")) for line in data.decode().strip().split("\n\n")[:-1]
    ]
    answer = whole.body(state.usage(), {})
    ChatCompletion.model_validate_json(
        json.dumps(answer | {"object": "chat.completion"}), strict=True
    )
    return answer["choices"][0]["message"], [
        choice["delta"] for event in events for choice in event["choices"]
    ]


def test_server_tools_are_omitted_and_named(served: ServedModel) -> None:
    body, ignored = asked(tools=[FUNCTION, *HOSTED])
    assert ignored == ["tools.web_search", "tools.retrieval"]
    shown = prompt_of(served, body)
    assert "type f = " in shown
    assert "retrieval" not in shown


def test_tool_choice_of_a_server_tool_is_rejected() -> None:
    with pytest.raises(UnsupportedParameter, match="demands 'web_search'"):
        asked(tools=[FUNCTION, *HOSTED], tool_choice={"type": "web_search"})


@pytest.mark.parametrize("steps", [[1], [5], [1000]], ids=str)
def test_custom_tool_call_has_the_text(served: ServedModel, steps: list[int]) -> None:
    message, deltas = answered(served, steps, tools=[CUSTOM, FUNCTION])
    custom, function = message["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "patch", "input": TEXT})
    assert function["function"] == {"name": "f", "arguments": "{}"}
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    # SDKs put a new call at the place of its index, and merge it with what is there.
    assert [call["index"] for call in calls if "id" in call] == [0, 1]
    of_custom = [call for call in calls if call["index"] == 0]
    assert of_custom[0]["type"] == "custom"
    assert "".join(call["custom"]["input"] for call in of_custom) == TEXT
    of_function = [call["function"] for call in calls if call["index"] == 1]
    assert of_function[0]["name"] == "f"
    assert "".join(call["arguments"] for call in of_function) == "{}"


def test_custom_tool_with_a_grammar_then_the_model_sees_it(served: ServedModel) -> None:
    body, _ = asked(tools=[{"type": "custom", "custom": CUSTOM["custom"] | {"format": GRAMMAR}}])  # type: ignore[operator]
    assert "[a-z]+" in prompt_of(served, body)


def test_required_custom_tool_call_forces_its_header(served: ServedModel) -> None:
    named = {"type": "custom", "custom": {"name": "patch"}}
    for choice in (
        named,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
    ):
        body, _ = asked(tools=[CUSTOM, FUNCTION], tool_choice=choice)
        assert prompt_of(served, body).endswith("to=functions.patch <|constrain|>json<|message|>")


def test_history_shows_a_custom_tool_call_to_the_model(served: ServedModel) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": TEXT}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    body, _ = asked(messages=messages, tools=[CUSTOM])
    shown = prompt_of(served, body)
    assert (
        'to=functions.patch <|constrain|>json<|message|>{"input":"say \\"hi\\""}<|call|>' in shown
    )
    assert "<|message|>done<|end|>" in shown

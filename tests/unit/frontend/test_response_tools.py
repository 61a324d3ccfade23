"""Tools of `/v1/responses` that are no plain functions: custom tools, shells, namespaces, and those
of a server.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.frontend.requests.preprocess import prepare_conversation
from dynamo_trtllm.frontend.responses_api import response_builder
from dynamo_trtllm.frontend.responses_api.items import normalized, with_ids
from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from tests.kit.step_splits import RESPONSE, Case, deltas_of, served_by
from tests.unit.frontend.responses_client import EVENT, ITEM

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
SHELL = {"type": "local_shell"}
NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "d",
    "tools": [FUNCTION, {"type": "mcp"}],
}
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation"},
    {"type": "mcp", "x": 1},
]
STEPS = pytest.mark.parametrize("steps", [[1], [7], [1000]], ids=str)

harmony = functools.cache(lambda: o200k_tokenizer.load_tokenizer().harmony)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_by(HarmonyRenderer())


def asked(**fields: Any) -> tuple[ResponseRequest, list[str]]:
    ignored = IgnoredFields(rejects_misspelled=True)
    sent = {"model": "m", "input": "hi", "stream": True, "store": False} | fields
    return parse(ResponseRequest, json.dumps(sent).encode(), ignored), list(ignored)


def prompt_of(served: ServedModel, body: ResponseRequest) -> str:
    plan = planned(served, body)
    return served.renderer.decode(plan.choices[0].request.token_ids)


def planned(served: ServedModel, body: ResponseRequest) -> Any:
    items = [normalized(item) for item in body.input]  # type: ignore[arg-type]
    conversation = response_builder._conversation(body, items)
    options = response_builder._options(body, served.card)
    return prepare_conversation(conversation, options, served, body.call("r", 0.0, ""))


def answered(
    served: ServedModel, text: str, steps: list[int], **fields: Any
) -> tuple[list[Any], list[Any]]:
    """Return the output items and all events of an answer, which have the types of the SDK."""
    body, _ = asked(**fields)
    plan = planned(served, body)
    case = Case(tuple(harmony().encode(text, allowed_special="all")))
    deltas, state = deltas_of(case, steps, plan)
    builder = response_builder.ResponseBuilder(RESPONSE, body, plan, 1 << 20)
    data = (
        builder.start() + b"".join(map(builder.delta, deltas)) + builder.finish(state.usage(), {})
    )
    events = [
        json.loads(line.partition("\ndata: ")[2]) for line in data.decode().strip().split("\n\n")
    ]
    for event in events:
        EVENT.validate_python(event)
    items = events[-1]["response"]["output"]
    for item in items:
        ITEM.validate_python(item)
    return items, events


def call(name: str, arguments: str) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def test_server_tools_are_omitted_and_named(served: ServedModel) -> None:
    body, ignored = asked(tools=[FUNCTION, *HOSTED], client_metadata={"session_id": "s"})
    assert [tool.name for tool in body.served_tools] == ["f"]
    assert set(ignored) == {
        "tools.web_search",
        "tools.image_generation",
        "tools.mcp",
        "client_metadata",
    }
    shown = prompt_of(served, body)
    assert "type f = " in shown
    assert "web_search" not in shown


def test_server_tools_with_strict_fields_are_rejected() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        parse(ResponseRequest, json.dumps({"model": "m", "input": "x", "tools": HOSTED}).encode())
    assert refused.value.field == "tools[0].type"


def test_tool_when_its_type_is_misspelled_then_rejected() -> None:
    with pytest.raises(UnsupportedParameter, match="did you mean 'function'"):
        asked(tools=[FUNCTION | {"type": "functon"}])


def test_tool_choice_of_a_server_tool_is_rejected() -> None:
    with pytest.raises(UnsupportedParameter, match="demands 'web_search'"):
        asked(tools=[FUNCTION, *HOSTED], tool_choice={"type": "web_search"})


def test_allowed_tools_when_some_are_of_a_server_then_the_others(served: ServedModel) -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}, HOSTED[0]],
    }
    body, _ = asked(tools=[FUNCTION, FUNCTION | {"name": "g"}, *HOSTED], tool_choice=allowed)
    shown = prompt_of(served, body)
    assert "type f = " in shown
    assert "type g = " not in shown


@STEPS
def test_custom_tool_then_its_call_has_the_text(served: ServedModel, steps: list[int]) -> None:
    text = call("apply_patch", json.dumps({"input": '*** Begin\n"x"'}))
    (item,), events = answered(served, text, steps, tools=[CUSTOM])
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        '*** Begin\n"x"',
    )
    names = [event["type"].removeprefix("response.") for event in events[2:-1]]
    assert names == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert events[2]["item"]["input"] == ""


def test_custom_tool_arguments_that_are_no_object_are_text(served: ServedModel) -> None:
    (item,), _ = answered(served, call("apply_patch", "*** Begin"), [1], tools=[CUSTOM])
    assert item["input"] == "*** Begin"


def test_custom_tool_with_a_grammar_then_the_model_sees_it(served: ServedModel) -> None:
    body, _ = asked(tools=[CUSTOM | {"format": GRAMMAR}])
    shown = prompt_of(served, body)
    assert "*** Begin Patch" in shown
    assert "type apply_patch = " in shown


@STEPS
def test_shell_then_its_call_has_an_action(served: ServedModel, steps: list[int]) -> None:
    arguments = {"command": ["ls", "-l"], "timeout_ms": 1000}
    (item,), events = answered(
        served, call("local_shell", json.dumps(arguments)), steps, tools=[SHELL]
    )
    assert item["type"] == "local_shell_call"
    assert item["action"] == {
        "type": "exec",
        "command": ["ls", "-l"],
        "env": {},
        "timeout_ms": 1000,
    }
    names = [event["type"].removeprefix("response.") for event in events[2:-1]]
    assert names == ["output_item.added", "output_item.done"]


@pytest.mark.parametrize(
    "arguments", ["ls", "{}", '{"command": "ls"}', '{"command": [1]}', "[1]", ""]
)
def test_shell_item_has_its_type_for_any_output(served: ServedModel, arguments: str) -> None:
    (item,), _ = answered(served, call("local_shell", arguments), [3], tools=[SHELL])
    assert all(isinstance(word, str) for word in item["action"]["command"])


@STEPS
def test_namespace_names_are_qualified_for_the_model(served: ServedModel, steps: list[int]) -> None:
    body, ignored = asked(tools=[FUNCTION, NAMESPACE])
    assert [tool.name for tool in body.served_tools] == ["f", "crm.f"]
    assert ignored == ["tools.mcp"]
    (item,), _ = answered(served, call("crm.f", '{"a": 1}'), steps, tools=[FUNCTION, NAMESPACE])
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "f", "crm")
    (item,), _ = answered(served, call("f", "{}"), steps, tools=[FUNCTION, NAMESPACE])
    assert (item["name"], "namespace" in item) == ("f", False)


def test_tool_choice_of_custom_or_namespaced_tool_is_forced(served: ServedModel) -> None:
    for choice, name in (
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "namespace": "crm", "name": "f"}, "crm.f"),
        ({"type": "local_shell"}, "local_shell"),
    ):
        body, _ = asked(tools=[CUSTOM, NAMESPACE, SHELL], tool_choice=choice)
        assert prompt_of(served, body).endswith(f"to=functions.{name} <|constrain|>json<|message|>")


HISTORY = [
    {"role": "user", "content": "go"},
    {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a "b"'},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c2",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "lsh_1", "output": "files"},
    {"type": "function_call", "call_id": "c3", "namespace": "crm", "name": "f", "arguments": "{}"},
    {
        "type": "function_call_output",
        "call_id": "c3",
        "namespace": "crm",
        "output": [{"type": "input_text", "text": "ok"}],
    },
]


def test_history_calls_and_results_reach_the_model(served: ServedModel) -> None:
    body, ignored = asked(input=HISTORY, tools=[CUSTOM, SHELL, NAMESPACE])
    assert ignored == ["tools.mcp"]
    shown = prompt_of(served, body)
    for name, arguments, result in (
        ("apply_patch", '{"input":"a \\"b\\""}', "patched"),
        ("local_shell", '{"command":["ls"]}', "files"),
        ("crm.f", "{}", "ok"),
    ):
        assert f"to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>" in shown
        assert (
            f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{result}<|end|>"
            in shown
        )
    for item in with_ids([normalized(item) for item in body.input], "resp_1"):  # type: ignore[arg-type]
        assert item["id"]


@pytest.mark.parametrize("number", [2, 4, 6])
def test_history_when_a_result_has_no_call_then_invalid(served: ServedModel, number: int) -> None:
    body, _ = asked(input=[HISTORY[0], HISTORY[number]])
    with pytest.raises(InvalidRequest, match="no earlier"):
        prompt_of(served, body)

"""The tools that gpt-oss was trained with, from their declaration to the call and back, for each
API.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.messages import OutputFormat
from tests.kit import step_splits
from tests.kit.generation_plans import CITY, WEATHER
from tests.kit.step_splits import Case, served_by
from tests.unit.frontend import test_chat_tools, test_response_tools
from tests.unit.frontend.test_event_order import harmony

STEPS = pytest.mark.parametrize("steps", [[1], [5], [1000]], ids=str)
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
BROWSER = {"type": "function", "function": {"name": "browser.search", "parameters": QUERY}}
PYTHON = {"type": "custom", "custom": {"name": "python"}}
NAMESPACE = {
    "type": "namespace",
    "name": "browser",
    "tools": [
        {"type": "function", "name": "search", "parameters": QUERY},
        {"type": "function", "name": "open"},
    ],
}
CODE = 'print("1")'
SEARCHED = '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}'
RAN = f"<|channel|>analysis to=python code<|message|>{CODE}"
OUTPUT = f"{SEARCHED}<|call|><|start|>assistant{RAN}<|call|>"


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_by(HarmonyRenderer())


def results(*authors: str) -> str:
    return "".join(
        f"<|start|>{name} to=assistant<|channel|>analysis<|message|>RESULT<|end|>"
        for name in authors
    )


@STEPS
def test_chat_then_calls_come_back_and_their_results_go_in(
    served: ServedModel, steps: list[int]
) -> None:
    tools = [BROWSER, PYTHON]
    message, _ = test_chat_tools.answered(served, steps, OUTPUT, tools=tools)
    searched, ran = message["tool_calls"]
    assert searched["function"] == {"name": "browser.search", "arguments": '{"query": "x"}'}
    assert ran["custom"] == {"name": "python", "input": CODE}
    history = [
        {"role": "tool", "tool_call_id": call["id"], "content": "RESULT"}
        for call in message["tool_calls"]
    ]
    history[0]["name"] = "browser.search"
    messages = [{"role": "user", "content": "hi"}, message, *history]
    body, _ = test_chat_tools.asked(tools=tools, messages=messages)
    shown = test_chat_tools.prompt_of(served, body)
    assert "## browser" in shown.partition("<|end|>")[0]
    assert shown.endswith(f"{OUTPUT}{results('browser.search', 'python')}<|start|>assistant")


@STEPS
def test_responses_then_calls_come_back_and_their_results_go_in(
    served: ServedModel, steps: list[int]
) -> None:
    tools = [NAMESPACE, {"type": "custom", "name": "python"}]
    (searched, ran), _ = test_response_tools.answered(served, OUTPUT, steps, tools=tools)
    assert (searched["type"], searched["namespace"], searched["name"]) == (
        "function_call",
        "browser",
        "search",
    )
    assert (ran["type"], ran["input"]) == ("custom_tool_call", CODE)
    outputs = [
        {"type": "function_call_output", "call_id": searched["call_id"], "output": "RESULT"},
        {"type": "custom_tool_call_output", "call_id": ran["call_id"], "output": "RESULT"},
    ]
    items = [{"role": "user", "content": "hi"}, searched, ran, *outputs]
    body, _ = test_response_tools.asked(tools=tools, input=items)
    shown = test_response_tools.prompt_of(served, body)
    assert "type open = " in shown.partition("<|end|>")[0]
    assert shown.endswith(f"{OUTPUT}{results('browser.search', 'python')}<|start|>assistant")


def test_call_of_undeclared_builtin_tool_is_a_function_call(served: ServedModel) -> None:
    expected = [
        ("browser.search", '{"query": "x"}'),
        ("python", json.dumps({"input": CODE}, separators=(",", ":"))),
    ]
    message, _ = test_chat_tools.answered(served, [1], OUTPUT)
    assert [tuple(call["function"].values()) for call in message["tool_calls"]] == expected
    assert message["content"] is None
    items, _ = test_response_tools.answered(served, OUTPUT, [1])
    assert [(item["name"], item["arguments"]) for item in items] == expected
    case = Case(tuple(harmony().encode(OUTPUT, allowed_special="all")))
    blocks = step_splits.messages(served, case, [1])["message"]["content"]
    assert [(block["name"], block["input"]) for block in blocks] == [
        (name, json.loads(arguments)) for name, arguments in expected
    ]


@pytest.mark.parametrize(
    ("tool", "header", "schema"),
    [(BROWSER, "browser.search", QUERY), (PYTHON, "python", None)],
    ids=["browser", "python"],
)
def test_tool_choice_forces_the_call_in_the_model_format(
    served: ServedModel, tool: dict[str, Any], header: str, schema: Any
) -> None:
    body, _ = test_chat_tools.asked(tools=[tool], tool_choice="required")
    (choice,) = test_chat_tools.planned(served, body).choices
    shown = served.renderer.decode(choice.request.token_ids)
    assert shown.endswith(f"<|start|>assistant<|channel|>analysis to={header} code<|message|>")
    guided = choice.request.sampling.guided
    wanted = None if schema is None else (OutputFormat(json_schema=json.dumps(schema)),)
    assert (None if guided is None else guided.alternatives) == wanted


def test_required_builtin_tools_and_functions_have_headers(served: ServedModel) -> None:
    body, _ = test_chat_tools.asked(tools=[WEATHER, BROWSER, PYTHON], tool_choice="required")
    (choice,) = test_chat_tools.planned(served, body).choices
    assert served.renderer.decode(choice.request.token_ids).endswith(
        "<|start|>assistant<|channel|>"
    )
    guided = choice.request.sampling.guided
    assert guided is not None
    function, browser, python = guided.alternatives
    assert function.prefix == "commentary to=functions.get_weather <|constrain|>json<|message|>"
    assert (json.loads(function.json_schema), json.loads(browser.json_schema)) == (CITY, QUERY)
    assert browser.prefix == "analysis to=browser.search code<|message|>"
    assert (python.prefix, bool(python.regex)) == ("analysis to=python code<|message|>", True)


def test_strict_builtin_tool_constrains_functions(served: ServedModel) -> None:
    strict = [
        {"type": "function", "function": tool["function"] | {"strict": True}}
        for tool in (WEATHER, BROWSER)
    ]
    body, _ = test_chat_tools.asked(tools=[*strict, PYTHON])
    plan = test_chat_tools.planned(served, body)
    guided = plan.choices[0].request.sampling.guided
    assert guided is not None
    assert [json.loads(form.json_schema) for form in guided.alternatives] == [CITY]
    assert plan.ignored == ("tools.strict",)
    body, _ = test_chat_tools.asked(tools=[PYTHON])
    assert test_chat_tools.planned(served, body).ignored == ()

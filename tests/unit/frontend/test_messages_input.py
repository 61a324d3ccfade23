"""What a request of `/v1/messages` asks of a model: messages, tools, options, ignored fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.api.messages import MessagesRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.messages_api.message_builder import prepare_messages
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, ToolCall
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from tests.kit import generation_plans
from tests.kit.cases import each_case
from tests.kit.frontend_app import CALL, FakeFrontend, front, stop
from tests.kit.generation_plans import TemplateModels
from tests.kit.messages_client import COUNT, HI, PATH, TOOL, check_error, made, post

IGNORED = "x-dynamo-ignored-fields"
CACHED = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": "é"}} | CACHED
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"} | CACHED
BASH = {"type": "bash_20250124", "name": "bash"}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


async def conversation(**fields: Any) -> Conversation:
    """Return the conversation of a request."""
    served = front(stop("x"))
    await made(served, **fields)
    return served.catalog.renderer.conversations[0]


def card_of(served: FakeFrontend, renderer: str, *variables: str, **fields: Any) -> None:
    """Give the model another prompt format."""
    (name,) = served.catalog.served
    model = served.catalog.served[name]
    card = msgspec.structs.replace(model.card, renderer=renderer, **fields)
    served.catalog.renderer.variables = frozenset({"tools", *variables})
    served.catalog.served[name] = type(model)(card, model.renderer)


async def test_conversation_with_every_block_then_its_messages() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    made_of = await conversation(
        system=[text("be"), text("brief") | CACHED],
        messages=[
            turn("user", text("a"), text("b") | CACHED),
            turn("assistant", hidden, thought, text("I look."), USE),
            turn("user", RESULT, text("and?")),
        ],
        tools=[TOOL | CACHED],
    )
    call = ToolCall(id="toolu_1", name="f", arguments='{"x":"é"}')
    assert made_of.messages == (
        Message(role="system", content="be\nbrief"),
        Message(role="user", content="a\nb"),
        Message(role="assistant", content="I look.", reasoning="hm", tool_calls=(call,)),
        Message(role="tool", content="42", tool_call_id="toolu_1"),
        Message(role="user", content="and?"),
    )


def test_conversation_then_the_prompt_of_the_same_chat_request(
    harmony: ServedModel,
    make_template: TemplateModels,
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    said = {"role": "assistant", "content": "I look."}
    asked = [
        {"role": "system", "content": "be"},
        *HI,
        said | {"reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    blocks = [text("I look."), {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]
    turns = [
        *HI,
        turn("assistant", {"type": "thinking", "thinking": "hm"}, *blocks),
        turn("user", {"type": "tool_result", "tool_use_id": "c", "content": "42"}),
    ]
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for model in (harmony, make_template()):
        chat = generation_plans.chat(model, messages=asked, tools=[tool])
        fields = {"messages": turns, "system": "be", "max_tokens": 9}
        fields |= {"model": "m", "tools": [{"name": "f", "input_schema": schema}]}
        body = parse(MessagesRequest, json.dumps(fields).encode())
        plan = prepare_messages(body, model, body.call("r", 0.0, ""))
        assert generation_plans.prompt(plan, model) == generation_plans.prompt(chat, model)


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": [{"type": "tool_reference", "tool_name": "grep"}]}, "grep"),
        ({"content": None}, ""),
    ],
)
async def test_result_of_a_tool_then_its_text(fields: dict[str, Any], content: str) -> None:
    messages = [*HI, turn("assistant", USE), turn("user", RESULT | fields)]
    assert (await conversation(messages=messages)).messages[-1].content == content


async def test_results_after_text_then_they_follow_their_call() -> None:
    messages = [*HI, turn("assistant", USE), turn("user", text("next"), RESULT)]
    roles = [message.role for message in (await conversation(messages=messages)).messages]
    assert roles == ["user", "assistant", "tool", "user"]


async def test_turns_of_one_role_then_one_message_each() -> None:
    messages = [
        *HI,
        *HI,
        turn("assistant", text("a")),
        turn("assistant", USE),
        turn("user", RESULT),
    ]
    found = (await conversation(messages=messages)).messages
    assert [message.content for message in found] == ["hi\nhi", "a", "42"]
    assert len(found[1].tool_calls) == 1


async def test_turn_with_nothing_to_show_then_it_is_left_out() -> None:
    messages = [*HI, turn("assistant", {"type": "redacted_thinking", "data": "x"}), *HI]
    found = (await conversation(messages=messages)).messages
    assert [message.role for message in found] == ["user", "user"]


async def test_billing_line_of_claude_code_is_not_in_the_prompt() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=ea12;"
    for system in ([text(line), text("You are")], f"{line}\nYou are"):
        first = (await conversation(system=system)).messages[0]
        assert first == Message(role="system", content="You are")


@pytest.mark.parametrize(("renderer", "role"), [("harmony", "system"), ("chat_template", "user")])
async def test_late_system_message_gets_an_existing_role(renderer: str, role: str) -> None:
    served = front(stop("x"))
    card_of(served, renderer)
    messages = [*HI, turn("assistant", text("a")), turn("system", text("left: 9"))]
    await made(served, messages=messages)
    last = served.catalog.renderer.conversations[0].messages[-1]
    assert last == Message(role=role, content="left: 9")


# --- tools ------------------------------------------------------------------------------


async def test_client_tools_are_functions_and_others_are_named() -> None:
    served = front(stop("x"))
    kinds = ("text_editor_20250728", "memory_20250818", "computer_20250124")
    others = [{"type": kind, "name": kind} for kind in kinds]
    tools = [BASH, SEARCH, *others, TOOL | {"type": "custom"}, {"type": "mcp_toolset"}]
    response = await post(served, tools=tools)
    assert response.status_code == 200, response.text
    left_out = ("web_search_20250305", "computer_20250124", "mcp_toolset")
    assert response.headers[IGNORED] == ", ".join(f"tools.{kind}" for kind in left_out)
    found = {tool.name: tool for tool in served.catalog.renderer.conversations[0].tools}
    assert list(found) == ["bash", *kinds[:2], "get_system_health"]
    assert all(tool.parameters["type"] == "object" for tool in found.values())
    assert set(found["bash"].parameters["properties"]) == {"command", "restart"}


@pytest.mark.parametrize(("version", "has_insert_text"), [("20250124", False), ("20250429", True)])
async def test_text_editor_then_the_parameters_of_its_version(
    version: str,
    has_insert_text: bool,
) -> None:
    tool = {"type": f"text_editor_{version}", "name": "edit"}
    (found,) = (await conversation(tools=[tool])).tools
    properties = found.parameters["properties"]
    assert ("insert_text" in properties) == has_insert_text
    assert ("undo_edit" in properties["command"]["enum"]) != has_insert_text


async def test_server_tool_with_strict_fields_is_400() -> None:
    response = await post(front(unknown_fields="reject"), tools=[SEARCH])
    message = check_error(response, 400, "invalid_request_error", "unsupported_parameter")
    assert "web_search_20250305" in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice demands 'web_search', which this server does not run",
        ),
        ({"tools": [TOOL | {"type": "custm"}]}, "did you mean 'custom'?"),
    ],
    ids=["demanded", "misspelled"],
)
async def test_essential_unserved_tool_is_400(fields: dict[str, Any], words: str) -> None:
    response = await post(front(), **fields)
    assert words in check_error(response, 400, "invalid_request_error", "unsupported_parameter")


async def test_only_server_tools_with_required_choice_is_400() -> None:
    response = await post(front(), tools=[SEARCH], tool_choice={"type": "any"})
    check_error(response, 400, "invalid_request_error", "invalid_request")


@pytest.mark.parametrize(
    ("choice", "num_tools", "is_forced"),
    [
        (None, 1, False),
        ({"type": "auto"}, 1, False),
        ({"type": "none"}, 0, False),
        ({"type": "any"}, 1, True),
        ({"type": "tool", "name": "get_system_health"}, 1, True),
    ],
)
async def test_tool_choice_then_as_in_chat(choice: Any, num_tools: int, is_forced: bool) -> None:
    served = front(stop("{}"))
    await made(served, tools=[TOOL], tool_choice=choice)
    assert len(served.catalog.renderer.conversations[0].tools) == num_tools
    assert (served.router.requests[0].token_ids[-1] == CALL) == is_forced


# --- options ------------------------------------------------------------------------------


@each_case(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10_000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31_999}}, "high"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "low"),
        ({"output_config": {"effort": "max"}}, "max"),
    ],
)
async def test_effort_then_the_one_of_the_request(fields: dict[str, Any], effort: str) -> None:
    assert (await conversation(**fields)).reasoning_effort == effort


async def test_effort_without_template_support_is_named() -> None:
    served = front(stop("x"))
    card_of(served, "chat_template")
    response = await post(served, output_config={"effort": "high"})
    assert response.headers[IGNORED] == "output_config.effort"


@pytest.mark.parametrize(
    ("kind", "reasoning_parser", "args"),
    [
        ("disabled", "none", {"enable_thinking": False}),
        ("disabled", "deepseek_r1", {}),
        ("adaptive", "deepseek_r1", {"enable_thinking": True}),
    ],
)
async def test_thinking_when_the_template_has_a_switch_then_it_is_set(
    kind: str, reasoning_parser: str, args: dict[str, Any]
) -> None:
    served = front(stop("x"))
    card_of(served, "chat_template", "enable_thinking", reasoning_parser=reasoning_parser)
    await made(served, thinking={"type": kind})
    assert served.catalog.renderer.conversations[0].template_args == args


async def test_sampling_then_the_engine_gets_it() -> None:
    served = front(stop("x"))
    await made(served, temperature=0.5, top_p=0.9, top_k=7)
    sampling = served.router.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


async def test_format_then_the_output_follows_its_schema() -> None:
    served = front(stop("{}"))
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    await made(served, output_config={"format": {"type": "json_schema", "schema": schema}})
    guided = served.router.requests[0].sampling.guided
    assert guided is not None
    assert '"a"' in guided.alternatives[0].json_schema


async def test_claude_code_fields_without_effect_are_named() -> None:
    fields: dict[str, Any] = {
        "metadata": {"user_id": "user_1"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "container": "c",
        "betas": ["x"],
        "mcp_servers": [],
    }
    response = await post(front(stop("x")), f"{PATH}?beta=true", **fields)
    assert response.status_code == 200, response.text
    named = {"context_management", "container", "betas", "mcp_servers"}
    assert set(response.headers[IGNORED].split(", ")) == named


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x"}}
OPEN = [*HI, turn("assistant", USE)]


@each_case(
    ("fields", "code", "param"),
    [
        ({"max_tokens": None}, "invalid_request", "max_tokens"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": [turn("user", IMAGE)]}, "unsupported_parameter", "messages[0].content"),
        ({"messages": [turn("user", USE)]}, "unsupported_parameter", "messages[0].content"),
        ({"messages": [turn("user", {})]}, "invalid_request", "messages[0].content"),
        ({"messages": [turn("robot", text("a"))]}, "invalid_request", "messages[0].role"),
        (
            {"messages": [*HI, turn("assistant", text("The"))]},
            "unsupported_parameter",
            "messages[1]",
        ),
        (
            {"messages": [turn("user", text("a"), RESULT)]},
            "invalid_request",
            "messages[0].content[1].tool_use_id",
        ),
        (
            {"messages": [*OPEN, turn("user", RESULT | {"content": [IMAGE]})]},
            "unsupported_parameter",
            "messages[2].content[0].content",
        ),
        (
            {"messages": [*HI, turn("assistant", USE | {"input": "x"}), *HI]},
            "invalid_request",
            "messages[1].content[0].input",
        ),
        ({"system": [IMAGE]}, "unsupported_parameter", "system"),
        ({"tools": [{"name": "f"}]}, "invalid_request", "tools[0].input_schema"),
        ({"tools": [BASH | {"name": None}]}, "invalid_request", "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "invalid_request", "tools"),
        ({"tool_choice": {"type": "tool"}}, "invalid_request", "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "invalid_request",
            "tool_choice",
        ),
        ({"stop_sequences": ["x"] * 17}, "invalid_request", "stop_sequences"),
        ({"thinking": {"type": "on"}}, "invalid_request", "thinking.type"),
        ({"output_format": {}}, "unsupported_parameter", "output_format"),
        ({"max_token": 1}, "unsupported_parameter", "max_token"),
        ({"n": 2}, "unsupported_parameter", "n"),
    ],
)
async def test_request_that_is_wrong_then_400_with_its_field(
    fields: dict[str, Any],
    code: str,
    param: str,
) -> None:
    response = await post(front(), **fields)
    check_error(response, 400, "invalid_request_error", code)
    assert response.json()["error"]["param"] == param


async def test_server_tool_in_token_count_is_named() -> None:
    response = await post(front(), COUNT, tools=[SEARCH])
    assert response.headers[IGNORED] == "tools.web_search_20250305"

"""The tools that gpt-oss was trained with: in the prompt as in openai-harmony, and calls as gpt-oss
writes them.
"""

from __future__ import annotations

from datetime import date
from typing import Any

import openai_harmony as oh
import pytest

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool, ToolCall
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.text_input import SCHEMA, arguments_of
from tests.kit.cases import each_case

TODAY = date(2026, 1, 2)
USER = Message(role="user", content="q")
QUERY = {"type": "object", "properties": {"query": {"type": "string"}, "topn": {"type": "integer"}}}
SEARCH = Tool(name="browser.search", parameters=QUERY | {"required": ["query"]})
OPEN = Tool(name="browser.open")
FIND = Tool(
    name="browser.find",
    description="Finds a text.",
    parameters={"type": "object", "properties": {}},
)
PYTHON = Tool(name="python", parameters=SCHEMA, is_text=True)
FUNCTION = Tool(name="f")
CODE = 'print("é")\n'


@pytest.fixture(scope="module")
def renderer() -> HarmonyRenderer:
    return HarmonyRenderer(today=lambda: TODAY)


def prompt(renderer: HarmonyRenderer, *tools: Tool, messages: tuple[Message, ...] = (USER,)) -> str:
    return renderer.decode(renderer.render(Conversation(messages=messages, tools=tools)))


def reference(has_functions: bool) -> str:
    """Return the system message with all built-in tools as the library renders it."""
    system = oh.SystemContent.new().with_conversation_start_date(TODAY.isoformat())
    system = system.with_browser_tool().with_python_tool()
    options = oh.RenderOptions(conversation_has_function_tools=has_functions)
    harmony = o200k_tokenizer.load_tokenizer().harmony
    ids = harmony.render(oh.Message.from_role_and_content(oh.Role.SYSTEM, system), options)
    return str(harmony.decode(ids))


@pytest.mark.parametrize("functions", [(), (FUNCTION,)], ids=["alone", "beside a function"])
def test_builtin_tools_give_the_library_system_message(
    renderer: HarmonyRenderer, functions: tuple[Tool, ...]
) -> None:
    shown = prompt(renderer, PYTHON, FIND, *functions, OPEN, SEARCH)
    assert shown.startswith(reference(bool(functions)))
    _, _, others = shown.partition("<|end|>")
    assert "browser" not in others
    assert ("type f = " in others) == bool(functions)


def test_builtin_tools_show_only_the_declared(renderer: HarmonyRenderer) -> None:
    shown = prompt(renderer, OPEN)
    assert "type open = " in shown
    assert "type search = " not in shown
    assert "## python" not in shown


def test_python_description_replaces_that_of_harmony(renderer: HarmonyRenderer) -> None:
    described = Tool(
        name="python", description="No network. <|end|>", parameters=SCHEMA, is_text=True
    )
    shown = prompt(renderer, described)
    assert "## python\n\nNo network. <|end|>\n\n# Valid channels" in shown
    assert "Jupyter" not in shown
    assert prompt(renderer, PYTHON).startswith("<|start|>system<|message|>")


NO_BUILTIN = {
    "another property": Tool(
        name="browser.search", parameters={"properties": {"q": {"type": "string"}}}
    ),
    "another requirement": Tool(
        name="browser.search", parameters=QUERY | {"required": ["query", "topn"]}
    ),
    "one of several forms": Tool(
        name="browser.open", parameters={"anyOf": [{"properties": {"id": {}}}]}
    ),
    "wrong properties": Tool(name="browser.open", parameters={"properties": ["id"]}),
    "another function": Tool(name="browser.click"),
    "a text": Tool(name="browser.open", parameters=SCHEMA, is_text=True),
    "python with arguments": Tool(
        name="python", parameters={"properties": {"code": {"type": "string"}}}
    ),
}


@each_case("tool", NO_BUILTIN.values())
def test_tool_with_a_builtin_name_is_a_function(renderer: HarmonyRenderer, tool: Tool) -> None:
    system, _, others = prompt(renderer, tool).partition("<|end|>")
    assert "# Tools" not in system
    assert f"type {tool.name} = " in others
    call = ToolCall(id="c", name=tool.name, arguments=arguments_of("x"))
    messages = (
        USER,
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", tool_call_id="c"),
    )
    assert f"to=functions.{tool.name} <|constrain|>json" in prompt(
        renderer, tool, messages=messages
    )


CALLS: dict[str, tuple[Tool, str, str]] = {  # the tool, the arguments, and what gpt-oss writes
    "browser": (
        SEARCH,
        '{"query": "x"}',
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}',
    ),
    "python": (PYTHON, arguments_of(CODE), f"<|channel|>analysis to=python code<|message|>{CODE}"),
}


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_builtin_call_and_result_equal_the_model_tokens(
    renderer: HarmonyRenderer, name: str, is_declared: bool
) -> None:
    tool, arguments, written = CALLS[name]
    tools = (tool,) if is_declared else ()
    call = ToolCall(id="c", name=tool.name, arguments=arguments)
    messages = (
        USER,
        Message(role="assistant", reasoning="Hm.", tool_calls=(call,)),
        Message(role="tool", tool_call_id="c", content="RESULT"),
    )
    ids = renderer.render(Conversation(messages=messages, tools=tools)).tolist()
    asked = renderer.render(Conversation(messages=(USER,), tools=tools))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    before = [*asked, *renderer._control_text(f"{thought}{written}<|call|>")]
    assert ids[: len(before)] == before
    result = (
        f"<|start|>{tool.name}"
        " to=assistant<|channel|>analysis<|message|>RESULT<|end|><|start|>assistant"
    )
    assert renderer.decode(renderer.render(Conversation(messages=messages, tools=tools))).endswith(
        result
    )


def test_earlier_function_named_python_stays_a_function(renderer: HarmonyRenderer) -> None:
    """Also without its declaration, as in a last request without tools."""
    call = ToolCall(id="c", name="python", arguments='{"code": "1"}')
    shown = prompt(renderer, messages=(USER, Message(role="assistant", tool_calls=(call,))))
    assert 'to=functions.python <|constrain|>json<|message|>{"code": "1"}<|call|>' in shown


@pytest.mark.parametrize("name", CALLS)
def test_call_header_then_that_of_the_model(renderer: HarmonyRenderer, name: str) -> None:
    tool, _, written = CALLS[name]
    header: Any = renderer.call_header(tool)
    assert renderer.decode(header) == written.partition("<|message|>")[0] + "<|message|>"

"""Describe the tools that gpt-oss was trained with, a browser and Python, and format their calls.

The client runs these tools. Harmony describes them in the system message. Their calls have another
recipient and another channel than calls of functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import openai_harmony as oh

from dynamo_trtllm.frontend.tokenization.conversation import Tool, ToolCall
from dynamo_trtllm.frontend.tokenization.text_input import text_of

PYTHON: Final = "python"  # name of the tool whose input is a text, and recipient of its calls
CHANNEL: Final = "analysis"  # channel of the calls and their results
# Content type of the calls, even if their arguments are JSON.
CONTENT_TYPE: Final = "code"
_BROWSER: Final = oh.ToolNamespaceConfig.browser()
_FUNCTIONS: Final[Mapping[str, oh.ToolDescription]] = {
    f"{_BROWSER.name}.{tool.name}": tool for tool in _BROWSER.tools
}
PYTHON_DESCRIPTION: Final = oh.ToolNamespaceConfig.python().description or ""
# Keywords of a JSON Schema that do not change which of Harmony's arguments it accepts.
_NEUTRAL: Final = frozenset({"$schema", "type", "title", "description", "additionalProperties"})


def is_builtin(tool: Tool) -> bool:
    """Return whether gpt-oss was trained with a tool of this name whose arguments fit the declared
    parameters.
    """
    if tool.name == PYTHON:
        return tool.is_text
    known = _FUNCTIONS.get(tool.name)
    return known is not None and not tool.is_text and _fits(tool.parameters, known.parameters or {})


def _fits(parameters: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether a tool with these parameters takes the arguments that gpt-oss was trained to
    write.
    """
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if not parameters.keys() <= {*_NEUTRAL, "properties", "required"}:
        return False
    is_known = properties.keys() <= known["properties"].keys()
    return is_known and all(name in known.get("required", ()) for name in required)


def call_text(call: ToolCall, functions: frozenset[str]) -> str | None:
    """Return the text of an earlier call of a built-in tool, as gpt-oss wrote it; None for a call
    of a function.

    Args:
        call: the call.
        functions: the names of the tools of the request that are not built-in.
    """
    if call.name in functions:
        return None
    if call.name == PYTHON:
        return text_of(call.arguments)
    return call.arguments if call.name in _FUNCTIONS else None


def add_to(system: oh.SystemContent, names: frozenset[str]) -> oh.SystemContent:
    """Return the system message with the built-in tools of these names, in Harmony's order."""
    functions = [tool for name, tool in _FUNCTIONS.items() if name in names]
    if functions:
        browser = oh.ToolNamespaceConfig(
            name=_BROWSER.name, description=_BROWSER.description, tools=functions
        )
        system = system.with_tools(browser)
    return system.with_python_tool() if PYTHON in names else system

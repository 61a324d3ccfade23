"""Convert the calls of a client's tools between items of the Responses API and calls of functions.

The functions are pure.

The model sees a function for each tool (`frontend.api.response_tools`). The arguments of this
function contain the text of a custom tool, or are the action of a shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from dynamo_trtllm.frontend.api.response_tools import LOCAL_SHELL, ServedTool, qualified_name
from dynamo_trtllm.frontend.tokenization.conversation import ToolCall
from dynamo_trtllm.frontend.tokenization.text_input import arguments_of

Item = dict[str, Any]

CALLS: Final = ("function_call", "custom_tool_call", "local_shell_call")
OUTPUTS: Final = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# What the ids of items begin with, by type.
ITEM_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
}


def tool_call(item: Item) -> ToolCall:
    """Return the call of a function that an item stands for."""
    match item["type"]:
        case "custom_tool_call":
            arguments = arguments_of(item["input"])
            return ToolCall(id=item["call_id"], name=_name(item), arguments=arguments)
        case "local_shell_call":
            action = {
                name: value
                for name, value in item["action"].items()
                if name != "type" and value is not None
            }
            arguments = orjson.dumps(action).decode()
            return ToolCall(id=item["call_id"], name=LOCAL_SHELL, arguments=arguments)
        case _:
            return ToolCall(id=item["call_id"], name=_name(item), arguments=item["arguments"])


def _name(item: Item) -> str:
    return qualified_name(item["name"], item.get("namespace"))


def call_head(tool: ServedTool | None, name: str) -> Item:
    """Return the fields of a call's item that are known when it begins, with its type.

    `tool` is the tool of this name, or None if the request has no such tool.
    """
    if tool is None:
        return {"type": "function_call", "name": name}
    if tool.kind == "local_shell":
        return {"type": "local_shell_call"}
    kind = "custom_tool_call" if tool.kind == "custom" else "function_call"
    namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
    return {"type": kind, "name": tool.own_name, **namespace}


def shell_action(arguments: str) -> Item:
    """Return the action of a shell call. Other arguments become a command of one word."""
    given = _object(arguments)
    command = given.get("command")
    is_valid = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if not is_valid:
        command = [arguments] if arguments else []
    action: Item = {"type": "exec", "command": command, "env": {}}
    for name, kind in (("timeout_ms", int), ("working_directory", str)):
        if isinstance(given.get(name), kind):
            action[name] = given[name]
    return action


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}

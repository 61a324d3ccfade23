"""Convert items of the Responses API to the conversation that a renderer takes. Pure.

A normalized item is the JSON object that `input_items` lists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from dynamo_trtllm.api.responses import FunctionCallItem, FunctionOutputItem, MessageItem, ReasoningItem
from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.frontend.generation.responses.response_store import input_id
from dynamo_trtllm.tokenization.base import Message, ToolCall

Item: TypeAlias = dict[str, Any]

_TURN_ORDER: Final = {"reasoning": 0, "message": 1, "function_call": 2}  # Harmony's, within an assistant's turn
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def normalized(item: MessageItem | ReasoningItem | FunctionCallItem | FunctionOutputItem) -> Item:
    """Return the item as it is stored and listed. `named` adds an id if it has none."""
    if isinstance(item, MessageItem):
        part = {"type": "output_text", "annotations": []} if item.role == "assistant" else {"type": "input_text"}
        content = [{**part, "text": text} for text in item.content]
        return {"id": item.id, "type": "message", "role": item.role, "status": "completed", "content": content}
    output = {"output": "\n".join(item.output)} if isinstance(item, FunctionOutputItem) else {}
    return item.model_dump() | {"status": item.status or "completed"} | output


def named(items: Iterable[Item], response_id: str) -> list[Item]:
    """Return the items with an id each. Ids from clients are not changed."""
    return [
        item if item["id"] else item | {"id": input_id(_PREFIXES[item["type"]], response_id, index)}
        for index, item in enumerate(items)
    ]


def characters(items: Iterable[Item]) -> int:
    """Return the number of characters of the items' texts."""
    return sum(
        len(item.get("output", ""))
        + len(item.get("arguments", ""))
        + sum(len(part["text"]) for name in ("content", "summary") for part in item.get(name, ()))
        for item in items
    )


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Convert items to messages. Raises InvalidRequest for a function result without a call."""
    all_items = list(items)
    answered = {item["call_id"] for item in all_items if item["type"] == "function_call_output"}
    called: set[str] = set()
    messages: list[Message] = []
    turn: list[Item] = []  # of the assistant
    for item in all_items:
        kind = item["type"]
        if kind == "function_call" and item["status"] == "incomplete" and item["call_id"] not in answered:
            continue  # the call was cut off and never made
        is_assistant = kind != "function_call_output" and item.get("role", "assistant") == "assistant"
        if turn and not (is_assistant and _TURN_ORDER[kind] >= _TURN_ORDER[turn[-1]["type"]]):
            messages += _assistant(turn)
            turn = []
        if is_assistant:
            turn.append(item)
        elif kind == "message":
            messages.append(Message(role=item["role"], content=_said(item["content"])))
        else:
            messages.append(_result(item, called))
        if kind == "function_call":
            called.add(item["call_id"])
    return messages + _assistant(turn)


def _assistant(turn: Iterable[Item]) -> list[Message]:
    """Return the message of an assistant's turn. Reasoning without text or calls is dropped."""
    by_type: defaultdict[str, list[Item]] = defaultdict(list)
    for item in turn:
        by_type[item["type"]].append(item)
    content = "\n".join(_said(item["content"]) for item in by_type["message"])
    reasoning = "\n".join(_said(item["content"] or item["summary"]) for item in by_type["reasoning"])
    calls = tuple(
        ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"])
        for item in by_type["function_call"]
    )
    if not by_type["message"] and not calls:
        return []
    return [Message(role="assistant", content=content, reasoning=reasoning or None, tool_calls=calls)]


def _said(parts: Iterable[Item]) -> str:
    return "\n".join(part["text"] for part in parts)


def _result(item: Item, called: set[str]) -> Message:
    if item["call_id"] not in called:
        raise InvalidRequest(
            f"input has a function_call_output with call_id {item['call_id']!r}, but no earlier function_call with "
            "that call_id; send the call too, or the previous_response_id of its response",
            field="input",
        )
    return Message(role="tool", content=item["output"], tool_call_id=item["call_id"])

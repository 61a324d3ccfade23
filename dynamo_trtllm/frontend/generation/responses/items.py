"""Convert items of the Responses API to the conversation that a renderer takes. Pure.

A normalized item is the JSON object that `input_items` lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from dynamo_trtllm.api.responses import FunctionCallItem, FunctionOutputItem, MessageItem, ReasoningItem
from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.frontend.generation.responses.response_store import input_id
from dynamo_trtllm.tokenization.base import Message, ToolCall

Item: TypeAlias = dict[str, Any]

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


class _Turn:
    """An assistant's turn, built item by item in Harmony's order: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[ToolCall] = []

    def take(self) -> list[Message]:
        """Return the turn as a message and start the next. Reasoning without text or calls is dropped."""
        reasoning, content, calls = self.reasoning, self.content, self.calls
        self.reasoning, self.content, self.calls = [], [], []
        if not content and not calls:
            return []
        return [
            Message(
                role="assistant",
                content="\n".join(content),
                reasoning="\n".join(reasoning) or None,
                tool_calls=tuple(calls),
            )
        ]


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Convert items to messages. Raises InvalidRequest for a function result without a call."""
    all_items = list(items)
    answered = {item["call_id"] for item in all_items if item["type"] == "function_call_output"}
    called: set[str] = set()
    messages: list[Message] = []
    turn = _Turn()
    for item in all_items:
        match item["type"]:
            case "reasoning":
                if turn.content or turn.calls:
                    messages += turn.take()
                turn.reasoning.append(_said(item["content"] or item["summary"]))
            case "function_call":
                if item["status"] == "incomplete" and item["call_id"] not in answered:
                    continue  # the call was cut off and never made
                called.add(item["call_id"])
                turn.calls.append(ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"]))
            case "message" if item["role"] == "assistant":
                if turn.calls:
                    messages += turn.take()
                turn.content.append(_said(item["content"]))
            case "message":
                messages += turn.take()
                messages.append(Message(role=item["role"], content=_said(item["content"])))
            case _:
                messages += turn.take()
                messages.append(_result(item, called))
    return messages + turn.take()


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

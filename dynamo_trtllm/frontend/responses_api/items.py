"""Convert items of the Responses API to a conversation, and build output items from deltas.

The module does no I/O.

A normalized item is the JSON object that `input_items` lists. Each change of the output gives one
event: a JSON object without its sequence number. Events that occur per token are formatted from a
template. Streamed and aggregated responses share this code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from dynamo_trtllm.frontend.api.response_tools import ServedTool
from dynamo_trtllm.frontend.api.responses import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    LocalShellCallItem,
    LocalShellOutputItem,
    MessageItem,
    ReasoningItem,
)
from dynamo_trtllm.frontend.requests.choice import ChoiceDelta
from dynamo_trtllm.frontend.requests.completions import tool_call_id
from dynamo_trtllm.frontend.requests.logprobs import chat_logprobs
from dynamo_trtllm.frontend.responses_api.response_store import item_id
from dynamo_trtllm.frontend.responses_api.tool_items import (
    CALLS,
    ITEM_PREFIXES,
    OUTPUTS,
    call_head,
    shell_action,
    tool_call,
)
from dynamo_trtllm.frontend.tokenization.conversation import Message
from dynamo_trtllm.frontend.tokenization.output import Channel, Delta
from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.frontend.tokenization.text_input import input_of
from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.protocol.messages import TokenLogprob

Item: TypeAlias = dict[str, Any]
Event: TypeAlias = dict[str, Any]

COMMENTARY: Final = "commentary"  # the phase of messages before calls or before the final answer
FINAL_ANSWER: Final = "final_answer"
_OutputItem: TypeAlias = FunctionOutputItem | CustomOutputItem | LocalShellOutputItem
_CallItem: TypeAlias = FunctionCallItem | CustomCallItem | LocalShellCallItem


def normalized(item: MessageItem | ReasoningItem | _CallItem | _OutputItem) -> Item:
    """Return the item as it is stored and listed. `with_ids` adds an id if it has none."""
    if isinstance(item, MessageItem):
        head: Item = {"id": item.id, "type": "message", "role": item.role}
        part: Item = {"type": "input_text"}
        if item.role == "assistant":
            part = {"type": "output_text", "annotations": []}
            if item.phase is not None:
                head["phase"] = item.phase
        content = [{**part, "text": text} for text in item.content]
        return {**head, "status": "completed", "content": content}
    fields = item.model_dump() | {"status": item.status or "completed"}
    if isinstance(item, LocalShellOutputItem):
        fields["call_id"] = item.call_id or item.id
    if isinstance(item, _OutputItem):
        fields["output"] = "\n".join(item.output)
    if "namespace" in fields and fields["namespace"] is None:
        del fields["namespace"]
    return fields


def with_ids(items: Iterable[Item], response_id: str) -> list[Item]:
    """Return the items with an id each, and no id twice.

    Ids from clients are not changed, except that of an item whose id an earlier item has: a page
    of items begins after the item with a given id, so with equal ids, the pages would never end.
    """
    identified = []
    used: set[str] = set()
    for index, item in enumerate(items):
        if not item["id"] or item["id"] in used:
            item = item | {"id": item_id(ITEM_PREFIXES[item["type"]], response_id, "i", index)}
        used.add(item["id"])
        identified.append(item)
    return identified


def characters(items: Iterable[Item]) -> int:
    """Return the number of characters of the items' texts."""
    count = 0
    for item in items:
        for field in ("output", "arguments", "input"):
            count += len(item.get(field, ""))
        command = item.get("action", {}).get("command", ())
        count += sum(len(word) for word in command)
        for field in ("content", "summary"):
            count += sum(len(part["text"]) for part in item.get(field, ()))
    return count


def messages_of(items: Iterable[Item]) -> list[Message]:
    """Convert items to messages. Raises InvalidRequest for a function result without a call."""
    all_items = list(items)
    answered = {item["call_id"] for item in all_items if item["type"] in OUTPUTS}
    # The call ids of the calls so far, by call id and by id of the item. A result may name either.
    called: dict[str, str] = {}
    messages: list[Message] = []
    turn: list[Item] = []  # items of the assistant that become one message
    for item in all_items:
        kind = item["type"]
        is_call = kind in CALLS
        if is_call and item["status"] == "incomplete" and item["call_id"] not in answered:
            # The call was cut off, so the client has not made it.
            continue
        is_assistant = kind not in OUTPUTS and item.get("role", "assistant") == "assistant"
        continues_turn = bool(turn) and is_assistant and _can_follow(item, turn[-1])
        if turn and not continues_turn:
            messages += _assistant(turn)
            turn = []
        if is_assistant:
            turn.append(item)
        elif kind == "message":
            messages.append(Message(role=item["role"], content=_visible_text(item["content"])))
        else:
            messages.append(_result(item, called))
        if is_call:
            called[item["call_id"]] = item["call_id"]
            if item["id"]:
                called[item["id"]] = item["call_id"]
    return messages + _assistant(turn)


def _can_follow(item: Item, before: Item) -> bool:
    """Return whether one message may hold both items. Calls follow commentary, not an answer."""
    if item["type"] in CALLS and before.get("phase") == FINAL_ANSWER:
        return False
    return _rank(item) >= _rank(before)


def _rank(item: Item) -> int:
    """Return the place of the assistant's item in Harmony's order of a turn."""
    if item.get("phase") == COMMENTARY:
        return 1
    return {"reasoning": 0, "message": 2}.get(item["type"], 3)


def _assistant(turn: Iterable[Item]) -> list[Message]:
    """Return the message of an assistant's turn. A turn that has only reasoning has no message."""
    by_type: defaultdict[str, list[Item]] = defaultdict(list)
    for item in turn:
        kind = item["type"]
        if item.get("phase") == COMMENTARY:
            kind = COMMENTARY
        elif kind in CALLS:
            kind = "call"
        by_type[kind].append(item)
    preamble = "\n".join(_visible_text(item["content"]) for item in by_type[COMMENTARY])
    content = "\n".join(_visible_text(item["content"]) for item in by_type["message"])
    reasoning = "\n".join(
        _visible_text(item["content"] or item["summary"]) for item in by_type["reasoning"]
    )
    calls = tuple(map(tool_call, by_type["call"]))
    if not (by_type["message"] or by_type[COMMENTARY] or calls):
        return []
    return [
        Message(
            role="assistant",
            preamble=preamble,
            content=content,
            reasoning=reasoning or None,
            tool_calls=calls,
        )
    ]


def _visible_text(parts: Iterable[Item]) -> str:
    return "\n".join(part["text"] for part in parts)


def _result(item: Item, called: Mapping[str, str]) -> Message:
    """Return the message of the output of a tool. `called`: as in `messages_of`."""
    call_id = called.get(item["call_id"])
    if call_id is None:
        kind = item["type"]
        call = kind.removesuffix("_output")
        raise InvalidRequest(
            f"input has a {kind} with call_id {item['call_id']!r}, but no earlier {call} with "
            "that call_id; send the call too, or the previous_response_id of its response",
            field="input",
        )
    return Message(role="tool", content=item["output"], tool_call_id=call_id)


# --- output ---------------------------------------------------------------------------------------


class TextDelta(NamedTuple):
    """An event that only adds text to the open item."""

    template: Event  # the event without its text
    prefix: bytes  # the bytes of the event before its text
    text: str = ""


def _text_delta(event: Event) -> TextDelta:
    """Return the constant part of an item's text deltas."""
    open_object = orjson.dumps(event)[:-1]  # the object without its last brace
    return TextDelta(event, formatted_head(event) + open_object + b',"delta":')


def formatted_head(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: "


OutputEvent: TypeAlias = Event | TextDelta


class _Kind(NamedTuple):
    """What distinguishes a kind of items on the wire."""

    head: Mapping[str, Any]  # the fields between the item's id and status
    event: str  # the name of the events of its text
    # The content part that has the text; None: the text is a call's arguments.
    part: Mapping[str, Any] | None = None


_REASONING: Final = _Kind(
    {"type": "reasoning", "summary": []}, "reasoning_text", {"type": "reasoning_text"}
)
_CALL: Final = _Kind({"type": "function_call"}, "function_call_arguments")


def _message_kind(**phase: str) -> _Kind:
    head = {"type": "message", "role": "assistant", **phase}
    return _Kind(head, "output_text", {"type": "output_text", "annotations": []})


_KINDS: Final = {
    Channel.REASONING: _REASONING,
    Channel.COMMENTARY: _message_kind(phase=COMMENTARY),
    Channel.FINAL: _message_kind(phase=FINAL_ANSWER),
    Channel.CONTENT: _message_kind(),
    Channel.CALL: _CALL,
}


class _Item:
    """An item whose text is built delta by delta.

    `call`: the fields of a function call before its arguments.
    """

    def __init__(self, kind: _Kind, response_id: str, index: int, **call: Any) -> None:
        self.kind = kind
        item_type = call.get("type", kind.head["type"])
        self._id = item_id(ITEM_PREFIXES[item_type], response_id, "o", index)
        self._index = index
        self._call = call
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        empty_delta = self._event(f"{kind.event}.delta", **self._with_logprobs([]))
        self._delta = _text_delta(empty_delta)

    def item(self, status: str) -> Item:
        text = "".join(self._texts)
        if self.kind.part is None:
            body = {**self._call, "arguments": text}
        else:
            body = {"content": [self._part(text)]}
        return {"id": self._id, **self.kind.head, "status": status, **body}

    def start(self) -> Iterator[Event]:
        item = self.item("in_progress")
        if self.kind.part is None:
            yield _event("output_item.added", self._index, item=item)
        else:
            yield _event("output_item.added", self._index, item=item | {"content": []})
            yield self._event("content_part.added", part=self._part(""))

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> OutputEvent | None:
        """Add a text. Return the event of the text; None if the item has events only at its end."""
        self._texts.append(text)
        if not logprobs:
            return TextDelta(self._delta.template, self._delta.prefix, text)
        self._logprobs.extend(logprobs)
        return self._delta.template | {"delta": text, "logprobs": _without_bytes(logprobs)}

    def finish(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        field = "arguments" if self.kind.part is None else "text"
        fields = {field: text, **self._with_logprobs(_without_bytes(self._logprobs))}
        yield self._event(f"{self.kind.event}.done", **fields)
        if self.kind.part is not None:
            yield self._event("content_part.done", part=self._part(text))
        yield _event("output_item.done", self._index, item=self.item(status))

    def _event(self, kind: str, **fields: Any) -> Event:
        content = {} if self.kind.part is None else {"content_index": 0}
        return _event(kind, self._index, item_id=self._id, **content, **fields)

    def _part(self, text: str) -> dict[str, Any]:
        return {**(self.kind.part or {}), "text": text, **self._with_logprobs(list(self._logprobs))}

    def _with_logprobs(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind.event == "output_text" else {}


class _WholeCall(_Item):
    """A call of a custom tool or a shell.

    Its item has an input or an action, which is read from the complete arguments.
    """

    def start(self) -> Iterator[Event]:
        yield _event("output_item.added", self._index, item=self.item("in_progress"))

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> OutputEvent | None:
        self._texts.append(text)
        return None

    def item(self, status: str) -> Item:
        is_complete = status != "in_progress"
        arguments = "".join(self._texts) if is_complete else ""
        if self._call["type"] == "custom_tool_call":
            body: Item = {"input": input_of(arguments) if is_complete else ""}
        else:
            body = {"action": shell_action(arguments)}
        return {"id": self._id, "status": status, **self._call, **body}

    def finish(self, status: str) -> Iterator[Event]:
        item = self.item(status)
        if "input" in item:
            text = item["input"]
            yield self._event("custom_tool_call_input.delta", delta=text)
            yield self._event("custom_tool_call_input.done", input=text)
        yield _event("output_item.done", self._index, item=item)


class OutputBuilder:
    """The output of one response, built delta by delta. At most one item is open, the last one.

    `tools` are the tools that the model saw, by name.
    """

    def __init__(
        self,
        response_id: str,
        renderer: Renderer,
        tools: Mapping[str, ServedTool] = MappingProxyType({}),
    ) -> None:
        self._response_id = response_id
        self._tools = tools
        self._renderer = renderer
        self._done: list[Item] = []
        self._open: _Item | None = None
        # Log-probabilities of tokens whose text has not arrived yet.
        self._logprobs: list[TokenLogprob] = []
        self._scored_kind: _Kind | None = None  # the kind of the item that the text will belong to

    def push(self, delta: ChoiceDelta) -> list[OutputEvent]:
        """Add the output of a step. Return its events."""
        events: list[OutputEvent] = []
        for part in delta.deltas:
            kind = _KINDS[part.channel]
            if part.text or part.name is not None:
                item = self._item(kind, part, events)
                if part.text:
                    event = item.add_text(part.text, self._take_logprobs(kind, part.logprobs))
                    if event is not None:
                        events.append(event)
            elif part.logprobs:
                # These log-probabilities wait for the text of their tokens. If others of another
                # item wait, their tokens have no text, so they are dropped.
                if self._scored_kind is not kind:
                    self._logprobs.clear()
                self._logprobs.extend(part.logprobs)
                self._scored_kind = kind
        return events

    def finish(self, status: str) -> list[OutputEvent]:
        """Close the open item with `status`: "completed", or "incomplete" if it was cut off."""
        if self._open is None:
            return []
        events: list[OutputEvent] = []
        logprobs = self._take_logprobs(self._open.kind)
        if logprobs:
            event = self._open.add_text("", logprobs)
            if event is not None:
                events.append(event)
        finish_events = list(self._open.finish(status))
        events += finish_events
        # The last event has the whole item.
        self._done.append(finish_events[-1]["item"])
        self._open = None
        return events

    def items(self, status: str) -> list[Item]:
        """Return all items so far. An open item gets `status`."""
        if self._open is None:
            return list(self._done)
        return [*self._done, self._open.item(status)]

    def _item(self, kind: _Kind, delta: Delta, events: list[OutputEvent]) -> _Item:
        """Return the item of a delta. Add the events that close another item and open this one."""
        if self._open is not None and self._open.kind is kind and delta.name is None:
            return self._open
        events += self.finish("completed")
        index = len(self._done)
        if kind is _CALL:
            item = self._call(delta.name or "", index)
        else:
            item = _Item(kind, self._response_id, index)
        self._open = item
        events += item.start()
        return item

    def _call(self, name: str, index: int) -> _Item:
        head = call_head(self._tools.get(name), name)
        call = {"call_id": tool_call_id(), **head}
        if head["type"] == "function_call":
            return _Item(_CALL, self._response_id, index, **call)
        return _WholeCall(_CALL, self._response_id, index, **call)

    def _take_logprobs(self, kind: _Kind, more: Sequence[TokenLogprob] = ()) -> list[Item]:
        """Return the waiting log-probabilities of an item, and then `more` of them.

        Their form is that of chat completions, except that unknown bytes are []: the Responses API
        does not allow null.
        """
        waiting = self._logprobs if self._scored_kind is kind else ()
        if not waiting and not more:
            return []
        tokens: list[Item] = chat_logprobs([*waiting, *more], self._renderer)["content"]
        for token in tokens:
            for scored in (token, *token["top_logprobs"]):
                scored["bytes"] = scored["bytes"] or []
        self._logprobs.clear()
        return tokens


def _event(kind: str, index: int, **fields: Any) -> Event:
    return {"type": f"response.{kind}", "output_index": index, **fields}


def _without_bytes(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities without bytes, for events. The finished text has the bytes."""
    shown = []
    for scored in logprobs:
        top = [
            {"token": alternative["token"], "logprob": alternative["logprob"]}
            for alternative in scored["top_logprobs"]
        ]
        shown.append({"token": scored["token"], "logprob": scored["logprob"], "top_logprobs": top})
    return shown

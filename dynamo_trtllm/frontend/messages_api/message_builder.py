"""Adapt `/v1/messages`: build content blocks and events from deltas.

Streamed and aggregated messages share this code.
Events that occur per token are formatted from a template.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any, ClassVar, Final

import orjson
from msgspec.structs import replace

from dynamo_trtllm.frontend.api.error_bodies import messages_error
from dynamo_trtllm.frontend.api.messages import CountTokensRequest, MessagesRequest
from dynamo_trtllm.frontend.api.nvext import Extras
from dynamo_trtllm.frontend.api.response_schemas import MessageUsage, ResponseMeta, StopReason
from dynamo_trtllm.frontend.messages_api.json_object import ObjectScanner
from dynamo_trtllm.frontend.messages_api.turns import messages_input
from dynamo_trtllm.frontend.requests.choice import ChoiceDelta, Usage
from dynamo_trtllm.frontend.requests.preprocess import (
    GenerationPlan,
    conversation_prompt,
    prepare_conversation,
)
from dynamo_trtllm.frontend.tokenization.output import Channel, Delta
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.http_status import to_response
from dynamo_trtllm.protocol.messages import GenerateRequest, TokenIds

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_BLANKS: Final = " \t\r\n"  # blanks between the tokens of JSON
_END: Final = b"}}\n\n"  # the end of the event of a delta


def _event(kind: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


# --- blocks ----------------------------------------------------------------------


class _TextBlock:
    """A text block whose text is built delta by delta."""

    delta_kind: ClassVar[str] = "text_delta"
    field: ClassVar[str] = "text"  # the field of the delta

    def __init__(self, index: int, channel: Channel) -> None:
        self.channel = channel
        self._index = index
        self._texts: list[str] = []
        head = {"type": "content_block_delta", "index": index, "delta": {"type": self.delta_kind}}
        # The two braces of `_END` are left out.
        before = orjson.dumps(head)[:-2]
        field = b',"%b":' % self.field.encode()
        self._prefix = b"event: content_block_delta\ndata: " + before + field

    def content(self) -> dict[str, Any]:
        """Return the block."""
        return {"type": "text", "text": "".join(self._texts)}

    def start(self) -> bytes:
        """Return the event that opens the block."""
        return _event("content_block_start", index=self._index, content_block=self._empty())

    def add(self, text: str) -> bytes:
        """Add text. Return its event."""
        self._texts.append(text)
        return self._delta(text)

    def finish(self) -> bytes:
        """Return the events that close the block."""
        return _event("content_block_stop", index=self._index)

    def _empty(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def _delta(self, text: str) -> bytes:
        return self._prefix + orjson.dumps(text) + _END


class _ThinkingBlock(_TextBlock):
    """A block of reasoning. Nothing is signed here, so its signature is empty."""

    field = "thinking"
    delta_kind = "thinking_delta"

    def content(self) -> dict[str, Any]:
        return self._empty() | {"thinking": "".join(self._texts)}

    def finish(self) -> bytes:
        signature = {"type": "signature_delta", "signature": ""}
        return _event("content_block_delta", index=self._index, delta=signature) + super().finish()

    def _empty(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}


class _ToolUseBlock(_TextBlock):
    """A tool call.

    Arguments that begin like an object are sent as the model writes them, up to the end of the
    object or the first error: clients that parse each part, as Anthropic's SDK does, would fail.
    All other arguments are sent once they are complete, converted to an object.
    """

    delta_kind = "input_json_delta"
    field = "partial_json"

    def __init__(self, index: int, channel: Channel, name: str) -> None:
        super().__init__(index, channel)
        self._call = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}
        self._is_object: bool | None = None  # None: there were only blanks so far
        self._scanner = ObjectScanner()

    def content(self) -> dict[str, Any]:
        return {**self._call, "input": orjson.Fragment(arguments_object("".join(self._texts)))}

    def add(self, text: str) -> bytes:
        self._texts.append(text)
        if self._is_object is None:
            stripped = text.lstrip(_BLANKS)
            if stripped:
                self._is_object = stripped[0] == "{"
                text = stripped
        shown = self._scanner.valid_part(text) if self._is_object else ""
        return self._delta(shown) if shown else b""

    def finish(self) -> bytes:
        if self._is_object:
            return super().finish()
        return self._delta(arguments_object("".join(self._texts))) + super().finish()

    def _empty(self) -> dict[str, Any]:
        return {**self._call, "input": {}}


def arguments_object(arguments: str) -> str:
    """Return the arguments of a call as JSON text of an object, which clients expect.

    An object that the model wrote as a JSON string is taken out of the string. Text after an object
    is left out. Arguments that are no object become an empty object. The client checks this object
    against the tool's schema, so that the model can repeat the call.
    """
    value = _loaded(arguments)
    if isinstance(value, str):
        arguments = value
    scanner = ObjectScanner()
    found = scanner.valid_part(arguments.lstrip(_BLANKS))
    is_object = scanner.is_complete and isinstance(_loaded(found), dict)
    return found if is_object else "{}"


def _loaded(text: str) -> Any:
    """Return the value of JSON text; None for any other text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


# --- the message ----------------------------------------------------------------------


class MessageBuilder:
    """One message in progress.

    It encodes the events of a streamed message, and aggregates any other message. It does no I/O.
    """

    def __init__(self, meta: ResponseMeta, plan: GenerationPlan) -> None:
        self._request_id = meta.request_id
        self._base = {"id": meta.id, "type": "message", "role": "assistant", "model": meta.model}
        self._prompt_tokens = len(plan.choices[0].request.token_ids)
        self._blocks: list[_TextBlock] = []
        self._open: _TextBlock | None = None  # the last block, unless it is closed
        self._finish = ""  # the finish reason; "": the output goes on
        self._stop: str | None = None  # the stop string that has ended the output

    # --- complete ----------------------------------------------------------------------

    def push(self, delta: ChoiceDelta) -> None:
        self.delta(delta)

    def body(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        """Return the complete message. Called once, after the last delta."""
        content = [block.content() for block in self._blocks]
        return {
            **self._base,
            "content": content,
            **self._ending(),
            "usage": _usage(usage),
            **extras,
        }

    def _ending(self) -> dict[str, Any]:
        reason = self._stop_reason()
        return {
            "stop_reason": reason,
            "stop_sequence": self._stop if reason == "stop_sequence" else None,
        }

    def _stop_reason(self) -> StopReason:
        """Return why the message ended.

        Complete calls matter more to clients than a stop string after them.
        """
        if self._finish == "length":
            return "max_tokens"
        if any(isinstance(block, _ToolUseBlock) for block in self._blocks):
            return "tool_use"
        return "end_turn" if self._stop is None else "stop_sequence"

    # --- streamed ----------------------------------------------------------------------

    def start(self) -> bytes:
        """Return the event before the first delta. The cached tokens are known at the end."""
        usage = _usage(Usage(prompt_tokens=self._prompt_tokens))
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message=self._base | empty)

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta, b"" for an empty one."""
        events: list[bytes] = []
        for part in delta.deltas:
            block = self._open
            is_new_call = part.name is not None
            if block is None or is_new_call or block.channel is not part.channel:
                if not (part.text or is_new_call):
                    continue
                events.append(self._close())
                block = self._begin(part)
                events.append(block.start())
            if part.text:
                events.append(block.add(part.text))
        if delta.finish is not None:
            self._finish = delta.finish
            self._stop = delta.stop
        return b"".join(events)

    def finish(self, usage: Usage, extras: Extras) -> bytes:
        """Return the last events."""
        ending = _event("message_delta", delta=self._ending(), usage=_usage(usage), **extras)
        return self._close() + ending + _event("message_stop")

    def error(self, error: DynamoError) -> bytes:
        """Return the event that ends a stream with an error after its headers were sent."""
        response = to_response(error, messages_error, request_id=self._request_id)
        return b"event: error\ndata: " + orjson.dumps(response.body) + b"\n\n"

    def _begin(self, delta: Delta) -> _TextBlock:
        """Open the block of a delta."""
        index = len(self._blocks)
        block: _TextBlock
        if delta.channel is Channel.CALL:
            block = _ToolUseBlock(index, delta.channel, delta.name or "")
        elif delta.channel is Channel.REASONING:
            block = _ThinkingBlock(index, delta.channel)
        else:
            block = _TextBlock(index, delta.channel)
        self._blocks.append(block)
        self._open = block
        return block

    def _close(self) -> bytes:
        """Close the open block. Return its events."""
        block = self._open
        self._open = None
        return b"" if block is None else block.finish()


def _usage(usage: Usage) -> MessageUsage:
    """Return the usage. The sum of the three kinds of input tokens is the prompt's length."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


# --- the endpoints ----------------------------------------------------------------------


class MessagesAdapter:
    """The adapter of `/v1/messages`."""

    endpoint = "messages"
    id_prefix = "msg_"
    body = MessagesRequest
    prompt_fields = frozenset({"messages", "system", "tools"})
    ping = PING

    async def resolve(
        self,
        body: MessagesRequest,
        served: ServedModel,
        call: GenerateRequest,
        owner: str,
    ) -> tuple[Callable[[], GenerationPlan], int]:
        """Return the work that plans the request, which refers to nothing stored."""
        return functools.partial(prepare_messages, body, served, call), 0

    def builder(
        self,
        meta: ResponseMeta,
        body: MessagesRequest,
        plan: GenerationPlan,
    ) -> MessageBuilder:
        return MessageBuilder(meta, plan)

    async def on_complete(self, builder: MessageBuilder, client: str) -> None:
        pass


def prepare_messages(
    body: MessagesRequest,
    served: ServedModel,
    call: GenerateRequest,
) -> GenerationPlan:
    """Plan a request. `call` is the call of the body, which has no prompt and sampling values yet.

    Raises:
        InvalidRequest, UnsupportedParameter, ContextTooLong: `field` is the wrong field.
    """
    conversation, options, ignored = messages_input(body, served)
    plan = prepare_conversation(conversation, options, served, call)
    if not ignored:
        return plan
    return replace(plan, ignored=(*plan.ignored, *ignored))


def messages_prompt(body: CountTokensRequest, served: ServedModel) -> TokenIds:
    """Return the prompt of a request, of any length. Raises as `prepare_messages`."""
    conversation, options, _ = messages_input(body, served)
    return conversation_prompt(conversation, options, served).ids

"""Adapt `/v1/responses`: resolve references, build a response from deltas, and store it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from msgspec.structs import replace

from dynamo_trtllm.frontend.api.chat import ToolChoice
from dynamo_trtllm.frontend.api.nvext import Extras
from dynamo_trtllm.frontend.api.request_model import MAX_TEXT
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.api.response_tools import NamedTool, echoed
from dynamo_trtllm.frontend.api.responses import (
    InputItem,
    ItemReference,
    JsonSchemaFormat,
    ResponseRequest,
    ResponsesAllowedTools,
)
from dynamo_trtllm.frontend.requests.choice import ChoiceDelta, Usage
from dynamo_trtllm.frontend.requests.conversation import GenerationOptions, sampling_of
from dynamo_trtllm.frontend.requests.preprocess import (
    GenerationPlan,
    conversation_prompt,
    prepare_conversation,
)
from dynamo_trtllm.frontend.responses_api.items import (
    Item,
    OutputBuilder,
    OutputEvent,
    TextDelta,
    characters,
    formatted_head,
    messages_of,
    normalized,
    with_ids,
)
from dynamo_trtllm.frontend.responses_api.response_store import (
    References,
    ResponseStore,
    StoredResponse,
)
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import (
    Cancelled,
    CapacityError,
    DynamoError,
    InvalidRequest,
    RequestError,
)
from dynamo_trtllm.protocol.messages import GenerateRequest, ModelDeploymentCard, TokenIds, encode

# The names of this API's fields, by internal names (see `GenerationOptions.names`).
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def _conversation(body: ResponseRequest, items: Sequence[Item]) -> Conversation:
    """Return the conversation.

    `instructions` apply to this turn only and become the first message.
    """
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    tools = tuple(
        Tool(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            is_text=tool.is_text,
        )
        for tool in body.served_tools
    )
    return Conversation(
        messages=(*system, *messages_of(items)),
        tools=tools,
        reasoning_effort=body.reasoning.effort or "medium",
    )


def _options(body: ResponseRequest, card: ModelDeploymentCard) -> GenerationOptions:
    return GenerationOptions(
        sampling=sampling_of(body, card, body.output_tokens, body.logprobs),
        stop=tuple(body.stop),
        tool_choice=_chat_tool_choice(body),
        strict_tools=frozenset(tool.name for tool in body.served_tools if tool.is_strict),
        parallel_tool_calls=body.parallel_tool_calls,
        output_format=body.output_format,
        effort_given=body.reasoning.effort is not None,
        names=_NAMES,
    )


def _chat_tool_choice(body: ResponseRequest) -> ToolChoice:
    match body.tool_choice:
        case NamedTool(function=name):
            return ToolChoice(mode="named", name=name)
        case ResponsesAllowedTools(mode=mode, functions=functions):
            return ToolChoice(mode=mode, allowed=functions)
        case mode:
            return ToolChoice(mode=mode)


class ResponseBuilder:
    """One response in progress.

    It encodes the numbered events of a streamed response, and aggregates any other response.
    """

    def __init__(
        self, meta: ResponseMeta, body: ResponseRequest, plan: GenerationPlan, max_stored_bytes: int
    ) -> None:
        self.id = meta.id
        self._owner = meta.owner
        self.stored = body.store
        self.packed: bytes | None = None  # the complete response as stored; None: it is not stored
        tools = {tool.name: tool for tool in body.served_tools}
        self._output = OutputBuilder(self.id, plan.choices[0].renderer, tools)
        self._items = plan.items
        self._base = _echo(meta, body, plan)
        self._finish = ""  # the finish reason; "": the output goes on
        self._max_stored_bytes = max_stored_bytes
        self._next_number = 0  # sequence number of the next event

    def in_progress(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._response("in_progress", "in_progress")

    def cancelled(self) -> dict[str, Any]:
        """Return the response after its cancellation."""
        return self._response("cancelled", "incomplete")

    def _response(self, status: str, open_item: str, **fields: Any) -> dict[str, Any]:
        """Return the response with these fields.

        `open_item`: the status of an item that is not complete.
        """
        return self._base | {"status": status, "output": self._output.items(open_item)} | fields

    def input_items(self) -> list[Item]:
        return with_ids(self._items, self.id)

    def pack(self, response: dict[str, Any]) -> bytes | None:
        """Serialize the response for the store.

        None: `store` is false, or the response is too large. In the second case, its `store` is set
        to false.
        """
        if not self.stored:
            return None
        stored = StoredResponse(response=response, items=self.input_items(), owner=self._owner)
        packed = encode(stored)
        if len(packed) <= self._max_stored_bytes:
            return packed
        response["store"] = False
        return None

    # --- complete ---------------------------------------------------------------------------------

    def push(self, delta: ChoiceDelta) -> list[OutputEvent]:
        """Add a delta. Return its events, for the stream."""
        self._finish = delta.finish or self._finish
        return self._output.push(delta)

    def body(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        """Return the complete response. Called once, after the last delta."""
        status = self._final_status
        self._output.finish(status)
        completed_at = None
        incomplete_details = None
        if status == "incomplete":
            incomplete_details = {"reason": "max_output_tokens"}
        else:
            completed_at = int(time.time())
        final = self._response(
            status,
            "completed",
            completed_at=completed_at,
            incomplete_details=incomplete_details,
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **extras,
        )
        self.packed = self.pack(final)
        return final

    @property
    def _final_status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    # --- streamed ---------------------------------------------------------------------------------

    def start(self) -> bytes:
        response = orjson.Fragment(orjson.dumps(self.in_progress()))
        return self._encoded(
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        )

    def delta(self, delta: ChoiceDelta) -> bytes:
        return self._encoded(*self.push(delta))

    def finish(self, usage: Usage, extras: Extras) -> bytes:
        events = self._output.finish(self._final_status)
        final = self.body(usage, extras)
        return self._encoded(*events, {"type": f"response.{final['status']}", "response": final})

    def error(self, error: DynamoError) -> bytes:
        """Return the last events after an error.

        The API has no event for a cancelled response, so it ends with `response.incomplete`. If the
        error came before the first delta, the events of the start come first.
        """
        start_events = b"" if self._next_number else self.start()
        return start_events + self._last_events(error)

    def _last_events(self, error: DynamoError) -> bytes:
        """Return the events with which a stream ends after an error."""
        events = self._output.finish("incomplete")
        if isinstance(error, Cancelled):
            last = {"type": "response.incomplete", "response": self.cancelled()}
            return self._encoded(*events, last)
        reason = {"code": _error_code(error), "message": error.message}
        failed = self._response("failed", "incomplete", error=reason)
        return self._encoded(
            *events,
            {"type": "error", "code": error.code, "message": error.message, "param": error.field},
            {"type": "response.failed", "response": failed},
        )

    def _encoded(self, *events: OutputEvent) -> bytes:
        """Return numbered events as they are sent."""
        data = b""
        for number, event in enumerate(events, self._next_number):
            if isinstance(event, TextDelta):
                end = b',"sequence_number":%d}\n\n' % number
                data += event.prefix + orjson.dumps(event.text) + end
            else:
                event["sequence_number"] = number
                data += formatted_head(event) + orjson.dumps(event) + b"\n\n"
        self._next_number += len(events)
        return data


def _error_code(error: DynamoError) -> str:
    """Return the closest of the few codes that this API defines.

    The `error` event has the server's own code.
    """
    if isinstance(error, CapacityError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"


def _echo(meta: ResponseMeta, body: ResponseRequest, plan: GenerationPlan) -> dict[str, Any]:
    """Return the response as it is at the start: the request's fields and no output."""
    sampling = plan.choices[0].request.sampling
    return {
        "id": meta.id,
        "object": "response",
        "created_at": meta.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "model": meta.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": _format(body), "verbosity": "medium"},
        "tool_choice": _tool_choice(body),
        "tools": echoed(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _tool_choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _format(body: ResponseRequest) -> dict[str, Any]:
    wanted = body.text.format
    if isinstance(wanted, JsonSchemaFormat):
        return {"type": wanted.type, "name": wanted.name, "schema": wanted.schema_, "strict": True}
    return {"type": wanted.type}


class ResponsesAdapter:
    """The adapter of `/v1/responses`."""

    endpoint = "responses"
    body = ResponseRequest
    prompt_fields = frozenset({"input"})
    ping = b""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self.id_prefix = store.id_prefix

    async def resolve(
        self, body: ResponseRequest, served: ServedModel, call: GenerateRequest, owner: str
    ) -> tuple[Callable[[], GenerationPlan], int]:
        """Read all items that the request refers to. Arguments as for `ApiAdapter.resolve`.

        Returns:
            The work that plans the request, and the characters of the conversation.

        Raises:
            ResponseNotFound: the request refers to a response that is not stored.
            InvalidRequest: the conversation is too long.
        """
        items, size = await self._items(body, owner)
        if body.store and size + len(body.instructions or "") > self._store.max_bytes:
            raise InvalidRequest(
                f"the conversation has {size} characters; a stored response may have at most"
                f" {self._store.max_bytes} bytes of conversation (--response-store-entry-bytes);"
                " set store to false",
                field="store",
            )

        def prepare() -> GenerationPlan:
            conversation = _conversation(body, items)
            options = _options(body, served.card)
            plan = prepare_conversation(conversation, options, served, call)
            return replace(plan, items=tuple(items))

        return prepare, size

    async def resolve_prompt(
        self, body: ResponseRequest, served: ServedModel, owner: str
    ) -> tuple[Callable[[], TokenIds], int]:
        """Read all items that the request refers to. `owner` as for `resolve`.

        Returns:
            The work that renders the prompt, and the characters of the conversation.

        Raises:
            ResponseNotFound: the request refers to a response that is not stored.
            InvalidRequest: the conversation is too long.
        """
        items, size = await self._items(body, owner)

        def prepare() -> TokenIds:
            conversation = _conversation(body, items)
            options = _options(body, served.card)
            return conversation_prompt(conversation, options, served).ids

        return prepare, size

    async def _items(self, body: ResponseRequest, owner: str) -> tuple[list[Item], int]:
        """Return the items of the whole conversation, and their characters."""
        items: list[Item] = []
        references = References(self._store, owner)
        if body.previous_response_id is not None:
            items += await references.conversation(
                body.previous_response_id, "previous_response_id"
            )
        items += await _resolve_references(body.input, references)
        size = characters(items)
        if size > MAX_TEXT:
            raise InvalidRequest(
                f"the conversation, with all referenced items, has {size} characters; at most"
                f" {MAX_TEXT} are allowed",
                field="input",
            )
        return items, size

    def builder(
        self, meta: ResponseMeta, body: ResponseRequest, plan: GenerationPlan
    ) -> ResponseBuilder:
        return ResponseBuilder(meta, body, plan, self._store.max_bytes)

    async def on_complete(self, builder: ResponseBuilder, client: str) -> None:
        if builder.packed is not None:
            await self._store.put(builder.id, builder.packed, client)


async def _resolve_references(given: Sequence[InputItem], references: References) -> list[Item]:
    """Return the request's items with references resolved."""
    items = []
    for index, item in enumerate(given):
        if isinstance(item, ItemReference):
            items.append(await references.item(item.id, f"input[{index}].id"))
        else:
            items.append(normalized(item))
    return items

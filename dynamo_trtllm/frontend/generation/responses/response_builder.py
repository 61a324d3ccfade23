"""Build the response object of `/v1/responses` from deltas: its events, and the complete object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from dynamo_trtllm import codec
from dynamo_trtllm.api.common import Stats
from dynamo_trtllm.api.responses import JsonSchemaFormat, NamedTool, ResponseRequest, ResponsesAllowedTools
from dynamo_trtllm.errors import Cancelled, CapacityError, DynamoError, RequestError
from dynamo_trtllm.frontend.generation.api_adapter import PreparedRequest
from dynamo_trtllm.frontend.generation.conversation import sampling_of
from dynamo_trtllm.frontend.generation.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.frontend.generation.options import GenerationOptions, ToolChoice, ToolChoiceMode
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan, RequestContext, prepare_conversation
from dynamo_trtllm.frontend.generation.responses.items import Item, messages_of, named
from dynamo_trtllm.frontend.generation.responses.output_builder import (
    OutputBuilder,
    OutputEvent,
    TextDelta,
    formatted_head,
)
from dynamo_trtllm.frontend.generation.responses.response_store import StoredResponse
from dynamo_trtllm.messages import Conversation, Message, ModelDeploymentCard, Tool
from dynamo_trtllm.tokenization.base import ServedModel

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan(GenerationPlan):
    """A generation plan with the items of its conversation."""

    items: tuple[Item, ...]  # those of earlier turns, then those of the request


def prepare_turn(
    body: ResponseRequest, items: Sequence[Item], served: ServedModel, context: RequestContext
) -> ResponsePlan:
    """Plan a request. Raises as `prepare_chat`, with this API's field names."""
    plan = prepare_conversation(_conversation(body, items), _options(body, served.card), served, context)
    return ResponsePlan(choices=plan.choices, items=tuple(items))


def _conversation(body: ResponseRequest, items: Sequence[Item]) -> Conversation:
    """Return the conversation. `instructions` apply to this turn only and become the first message."""
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    return Conversation(
        messages=(*system, *messages_of(items)),
        tools=tuple(
            Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in body.tools
        ),
        reasoning_effort=body.reasoning.effort or "medium",
    )


def _options(body: ResponseRequest, card: ModelDeploymentCard) -> GenerationOptions:
    return GenerationOptions(
        sampling=sampling_of(body, card, body.output_tokens, body.logprobs),
        stop=tuple(body.stop),
        tool_choice=_chat_tool_choice(body),
        strict_tools=frozenset(tool.name for tool in body.tools if tool.strict),
        parallel_tool_calls=body.parallel_tool_calls,
        json_schema=body.json_schema,
        cache_salt=body.salt,
        effort_given=body.reasoning.effort is not None,
        names=_NAMES,
    )


def _chat_tool_choice(body: ResponseRequest) -> ToolChoice:
    match body.tool_choice:
        case NamedTool(name=name):
            return ToolChoice(mode=ToolChoiceMode.NAMED, name=name)
        case ResponsesAllowedTools(mode=mode, tools=tools):
            return ToolChoice(mode=ToolChoiceMode(mode), allowed=tuple(tool.name for tool in tools))
        case str(mode):
            return ToolChoice(mode=ToolChoiceMode(mode))


class ResponseBuilder:
    """The state of one response in progress, for streamed and aggregated responses."""

    def __init__(self, prepared: PreparedRequest[ResponseRequest], max_stored_bytes: int) -> None:
        assert isinstance(prepared.plan, ResponsePlan)
        self.id = prepared.meta.id
        self.client = prepared.meta.client
        self.stored = prepared.body.store
        self.output = OutputBuilder(self.id, prepared.renderer)
        self._items = prepared.plan.items
        self._base = _echo(prepared)
        self._finish = ""
        self._max_stored_bytes = max_stored_bytes
        self.final: dict[str, Any] | None = None  # the complete response, set by `close`
        self.packed: bytes | None = None  # the response as stored; None: it is not stored

    def push(self, delta: ChoiceDelta) -> list[OutputEvent]:
        self._finish = delta.finish or self._finish
        return self.output.push(delta)

    def in_progress(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._base | {"status": "in_progress", "output": self.output.items("in_progress")}

    def cancelled(self) -> dict[str, Any]:
        """Return the response after its cancellation."""
        return self._base | {"status": "cancelled", "output": self.output.items("incomplete")}

    def failed(self, error: DynamoError) -> dict[str, Any]:
        event = {"code": _error_code(error), "message": error.message}
        return self._base | {"status": "failed", "error": event, "output": self.output.items("incomplete")}

    def close(self, usage: Usage, stats: Stats | None) -> list[OutputEvent]:
        """Set `final` and return the events that close the last item."""
        is_incomplete = self._finish == "length"
        events = self.output.finish("incomplete" if is_incomplete else "completed")
        self.final = self._base | {
            "status": "incomplete" if is_incomplete else "completed",
            "completed_at": None if is_incomplete else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": self.output.items("completed"),
            "usage": usage_object(usage),
        }
        if stats is not None:
            self.final["dynamo_trtllm"] = stats
        self.packed = self.pack(self.final)
        return events

    def pack(self, response: dict[str, Any]) -> bytes | None:
        """Serialize the response for the store. None if `store` is false; it is set to false if it is too large."""
        if not self.stored:
            return None
        packed = codec.encode(StoredResponse(response=response, items=self.input_items()))
        if len(packed) <= self._max_stored_bytes:
            return packed
        response["store"] = False
        return None

    def input_items(self) -> list[Item]:
        return named(self._items, self.id)


class ResponseSseEncoder:
    """An encoder of a streamed response as numbered events."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self.builder = builder
        self._next = 0

    def start(self) -> bytes:
        response = orjson.Fragment(orjson.dumps(self.builder.in_progress()))
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._encoded({"type": kind, "response": response}) for kind in kinds)

    def delta(self, delta: ChoiceDelta) -> bytes:
        return b"".join(map(self._encoded, self.builder.push(delta)))

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        events = self.builder.close(usage, stats)
        final = self.builder.final
        assert final is not None
        events.append({"type": f"response.{final['status']}", "response": final})
        return b"".join(map(self._encoded, events))

    def error(self, error: DynamoError) -> bytes:
        """Return the last events after an error. The API has no event for "cancelled", so that is "incomplete"."""
        events = self.builder.output.finish("incomplete")
        if isinstance(error, Cancelled):
            events.append({"type": "response.incomplete", "response": self.builder.cancelled()})
        else:
            events.append({"type": "error", "code": error.code, "message": error.message, "param": error.field})
            events.append({"type": "response.failed", "response": self.builder.failed(error)})
        return b"".join(map(self._encoded, events))

    def _encoded(self, event: OutputEvent) -> bytes:
        number = self._next
        self._next += 1
        if isinstance(event, TextDelta):
            return event.template.prefix + orjson.dumps(event.text) + b',"sequence_number":%d}\n\n' % number
        event["sequence_number"] = number
        return formatted_head(event) + orjson.dumps(event) + b"\n\n"


class ResponseAggregator:
    """Aggregate deltas into a complete response."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self.builder = builder

    def push(self, delta: ChoiceDelta) -> None:
        self.builder.push(delta)

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        self.builder.close(usage, stats)
        assert self.builder.final is not None
        return self.builder.final


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_code(error: DynamoError) -> str:
    """Return the closest of the few codes that this API defines. The `error` event has the server's own code."""
    if isinstance(error, CapacityError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"


def _echo(prepared: PreparedRequest[ResponseRequest]) -> dict[str, Any]:
    """Return the response as it is at the start: the request's fields and no output."""
    body, meta, sampling = prepared.body, prepared.meta, prepared.plan.choices[0].request.sampling
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
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _format(body: ResponseRequest) -> dict[str, Any]:
    wanted = body.text.format
    if isinstance(wanted, JsonSchemaFormat):
        return {"type": wanted.type, "name": wanted.name, "schema": wanted.schema_, "strict": True}
    return {"type": wanted.type}


def _tool_choice(body: ResponseRequest) -> str | dict[str, Any]:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, NamedTool | ResponsesAllowedTools) else choice

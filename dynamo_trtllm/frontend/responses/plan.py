"""A request for a response → what the pipeline runs, with the items that the model is shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_trtllm.api.responses import AllowedTools, NamedTool, ResponseRequest
from dynamo_trtllm.frontend.conversation import sampling_of
from dynamo_trtllm.frontend.model_registry import ServedModel
from dynamo_trtllm.frontend.options import CallMode, Options, ToolChoice
from dynamo_trtllm.frontend.preprocess import Identity, Plan, prepare_conversation
from dynamo_trtllm.frontend.responses.items import Item, messages_of
from dynamo_trtllm.messages import Conversation, Message, ModelCard, Tool

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan(Plan):
    """A plan that knows the items it was made of."""

    items: tuple[Item, ...]  # of the turns before, then those of the request


def prepare_turn(body: ResponseRequest, items: Sequence[Item], served: ServedModel, identity: Identity) -> TurnPlan:
    """Raises as `prepare_chat`, in the words of this API."""
    plan = prepare_conversation(_conversation(body, items), _options(body, served.card), served, identity)
    return TurnPlan(choices=plan.choices, items=tuple(items))


def _conversation(body: ResponseRequest, items: Sequence[Item]) -> Conversation:
    """Instructions are of this turn only, and come before everything."""
    told = [Message(role="system", content=body.instructions)] if body.instructions else []
    return Conversation(
        messages=(*told, *messages_of(items)),
        tools=tuple(
            Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in body.tools
        ),
        reasoning_effort=body.reasoning.effort or "medium",
    )


def _options(body: ResponseRequest, card: ModelCard) -> Options:
    return Options(
        sampling=sampling_of(body, card, body.output_tokens, body.logprobs),
        stop=tuple(body.stop),
        tool_choice=_tool_choice(body),
        strict_tools=frozenset(tool.name for tool in body.tools if tool.strict),
        parallel_tool_calls=body.parallel_tool_calls,
        json_schema=body.json_schema,
        cache_salt=body.salt,
        effort_given=body.reasoning.effort is not None,
        names=_NAMES,
    )


def _tool_choice(body: ResponseRequest) -> ToolChoice:
    match body.tool_choice:
        case NamedTool(name=name):
            return ToolChoice(mode=CallMode.NAMED, name=name)
        case AllowedTools(mode=mode, tools=tools):
            return ToolChoice(mode=CallMode(mode), allowed=tuple(tool.name for tool in tools))
        case str(mode):
            return ToolChoice(mode=CallMode(mode))

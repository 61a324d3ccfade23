"""A request for a response → what the pipeline runs, with the items that the model is shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_trtllm.api.responses import NamedTool, ResponseRequest, ResponsesAllowedTools
from dynamo_trtllm.frontend.conversation import sampling_of
from dynamo_trtllm.frontend.model_registry import ServedModel
from dynamo_trtllm.frontend.options import GenerationOptions, ToolChoice, ToolChoiceMode
from dynamo_trtllm.frontend.preprocess import GenerationPlan, RequestContext, prepare_conversation
from dynamo_trtllm.frontend.responses.items import Item, messages_of
from dynamo_trtllm.messages import Conversation, Message, ModelDeploymentCard, Tool

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan(GenerationPlan):
    """A plan that knows the items it was made of."""

    items: tuple[Item, ...]  # of the turns before, then those of the request


def prepare_turn(
    body: ResponseRequest, items: Sequence[Item], served: ServedModel, identity: RequestContext
) -> ResponsePlan:
    """Raises as `prepare_chat`, in the words of this API."""
    plan = prepare_conversation(_conversation(body, items), _options(body, served.card), served, identity)
    return ResponsePlan(choices=plan.choices, items=tuple(items))


def _conversation(body: ResponseRequest, items: Sequence[Item]) -> Conversation:
    """Instructions are of this turn only, and come before everything."""
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
            return ToolChoice(mode=ToolChoiceMode.NAMED, name=name)
        case ResponsesAllowedTools(mode=mode, tools=tools):
            return ToolChoice(mode=ToolChoiceMode(mode), allowed=tuple(tool.name for tool in tools))
        case str(mode):
            return ToolChoice(mode=ToolChoiceMode(mode))

"""Convert content blocks of Anthropic's Messages API to a conversation and its options.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import orjson

from dynamo_trtllm.frontend.api.chat import ToolChoice
from dynamo_trtllm.frontend.api.messages import (
    CountTokensRequest,
    MessageText,
    MessageTool,
    RedactedThinking,
    ResultBlock,
    ThinkingText,
    ToolResult,
    ToolUse,
    Turn,
)
from dynamo_trtllm.frontend.requests.conversation import GenerationOptions, sampling_of
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool, ToolCall
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import InvalidRequest

_BILLING: Final = "x-anthropic-billing-header"  # begins a line of Claude Code's system prompt
# The names of this API's fields, by internal names (see `GenerationOptions.names`).
_NAMES: Final = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_EFFORT: Final = "reasoning_effort"
# Variables of templates that turn reasoning on and off.
_SWITCHES: Final = ("enable_thinking", "thinking")
_LOW_BUDGET: Final = 4096  # tokens
_MEDIUM_BUDGET: Final = 16384


# --- messages ----------------------------------------------------------------------


def messages_of(
    system: Iterable[MessageText],
    turns: Sequence[Turn],
    *,
    allows_later_system: bool,
) -> tuple[Message, ...]:
    """Return the messages of a conversation.

    Args:
        system: the system prompt.
        turns: the turns. Consecutive turns of a role count as one turn.
        allows_later_system: False: later system messages become the user's, because the model's
            prompt format may not have them.

    Raises:
        InvalidRequest: a tool result without an earlier call.
    """
    messages = []
    instructions = _instructions(block.text for block in system)
    if instructions:
        messages.append(Message(role="system", content=instructions))
    called: set[str] = set()
    for role, turns_of_role in _runs(turns, allows_later_system=allows_later_system):
        if role == "assistant":
            messages += _answer(turns_of_role, called)
        elif role == "user":
            messages += _question(turns_of_role, called)
        else:
            content = _instructions(_texts(turns_of_role))
            messages.append(Message(role="system", content=content))
    return tuple(messages)


class _Placed(NamedTuple):
    """A turn and its place in the request."""

    place: int
    turn: Turn


class _Run(NamedTuple):
    """Consecutive turns of one role."""

    role: str
    turns: list[_Placed]


def _runs(turns: Sequence[Turn], *, allows_later_system: bool) -> list[_Run]:
    """Return the turns as runs, each of one role."""
    runs: list[_Run] = []
    for index, turn in enumerate(turns):
        role: str = turn.role
        if role == "system" and not allows_later_system:
            role = "user"
        if not runs or runs[-1].role != role:
            runs.append(_Run(role, []))
        runs[-1].turns.append(_Placed(index, turn))
    return runs


def _instructions(texts: Iterable[str]) -> str:
    """Return the text of a system message, without billing lines and empty texts."""
    kept = [_without_billing(text) for text in texts]
    return "\n".join(text for text in kept if text)


def _without_billing(text: str) -> str:
    """Return the text without Claude Code's billing line.

    The line changes with each request, so a prefix cache would find nothing of the prompt after it.
    """
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2]


def _texts(run: Iterable[_Placed]) -> list[str]:
    blocks = (block for placed in run for block in placed.turn.content)
    return [block.text for block in blocks if isinstance(block, MessageText)]


def _answer(run: Iterable[_Placed], called: set[str]) -> list[Message]:
    """Return the message of an assistant's turn, and add the ids of its calls to `called`.

    A turn without text, reasoning and calls has no message.
    """
    reasoning = []
    texts = []
    calls = []
    for placed in run:
        for block in placed.turn.content:
            match block:
                case ThinkingText():
                    reasoning.append(block.thinking)
                case MessageText():
                    texts.append(block.text)
                case ToolUse():
                    arguments = orjson.dumps(block.input).decode()
                    calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
                case RedactedThinking() | ToolResult():
                    pass
    called.update(call.id for call in calls)
    if not (any(reasoning) or texts or calls):
        return []
    return [
        Message(
            role="assistant",
            content="\n".join(texts),
            reasoning="\n".join(reasoning) or None,
            tool_calls=tuple(calls),
        )
    ]


def _question(run: Sequence[_Placed], called: set[str]) -> list[Message]:
    """Return the messages of a user's turn: results, which follow their calls, then text."""
    messages = []
    for place, turn in run:
        for index, block in enumerate(turn.content):
            if not isinstance(block, ToolResult):
                continue
            if block.tool_use_id not in called:
                field = f"messages[{place}].content[{index}].tool_use_id"
                raise InvalidRequest(
                    f"{field} is {block.tool_use_id!r}, but no earlier tool_use block has this id",
                    field=field,
                )
            text = _result(block.content)
            if block.is_error:
                text = f"Error: {text}"
            messages.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
    texts = _texts(run)
    if texts or not messages:
        messages.append(Message(role="user", content="\n".join(texts)))
    return messages


def _result(blocks: Iterable[ResultBlock]) -> str:
    texts = [block.text if isinstance(block, MessageText) else block.tool_name for block in blocks]
    return "\n".join(texts)


# --- options ----------------------------------------------------------------------


class MessagesInput(NamedTuple):
    """A request in the form that all endpoints share."""

    conversation: Conversation
    options: GenerationOptions
    ignored: tuple[str, ...]  # fields that have no effect on this model


def messages_input(body: CountTokensRequest, served: ServedModel) -> MessagesInput:
    """Return what a request asks of a model. Raises as `messages_of`."""
    is_harmony = served.card.renderer == "harmony"
    effort, ignored = _effort(body, served)
    conversation = Conversation(
        messages=messages_of(body.system, body.messages, allows_later_system=is_harmony),
        tools=tuple(map(_function, body.functions)),
        reasoning_effort=effort or "medium",
        template_args=_template_args(body, served),
    )
    options = GenerationOptions(
        sampling=sampling_of(body, served.card, body.max_tokens, None),
        stop=body.stops,
        tool_choice=_tool_choice(body),
        strict_tools=frozenset(tool.name for tool in body.functions if tool.strict),
        parallel_tool_calls=not body.tool_choice.disable_parallel_tool_use,
        output_format=body.output_format,
        shows_reasoning=_shows_reasoning(body),
        fits_context=True,
        names=_NAMES,
    )
    return MessagesInput(conversation, options, ignored)


def _function(tool: MessageTool) -> Tool:
    return Tool(name=tool.name, description=tool.description, parameters=tool.input_schema)


def _tool_choice(body: CountTokensRequest) -> ToolChoice:
    match body.tool_choice.type:
        case "any":
            return ToolChoice(mode="required")
        case "tool":
            return ToolChoice(mode="named", name=body.tool_choice.name or "")
        case mode:
            return ToolChoice(mode=mode)


def _shows_reasoning(body: CountTokensRequest) -> bool:
    """Return whether the answer has thinking blocks.

    It has them only on request, because many clients read nothing but the first block.
    """
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        return False
    return thinking.display != "omitted"


def _effort(body: CountTokensRequest, served: ServedModel) -> tuple[str | None, tuple[str, ...]]:
    """Return the reasoning effort, and the fields that have no effect.

    The model's default is used if the request has no effort.
    """
    thinking = body.thinking
    effort = body.output_config.effort
    field = "output_config.effort"
    chosen: str | None = effort
    if effort is None and thinking is not None:
        field = "thinking.budget_tokens"
        if thinking.type == "disabled":
            chosen = "low"
        elif thinking.budget_tokens is not None:
            chosen = _effort_of(thinking.budget_tokens)
    if chosen is not None and _EFFORT not in served.renderer.variables:
        # "disabled" has an effect nevertheless: a variable of the template turns reasoning off, or
        # the answer does not show it.
        is_turned_off = effort is None and thinking is not None and thinking.type == "disabled"
        ignored = () if is_turned_off else (field,)
        return None, ignored
    return chosen, ()


def _effort_of(budget_tokens: int) -> str:
    """Return the effort for a number of tokens: reasoning has no limit of its own here."""
    if budget_tokens <= _LOW_BUDGET:
        return "low"
    return "medium" if budget_tokens <= _MEDIUM_BUDGET else "high"


def _template_args(body: CountTokensRequest, served: ServedModel) -> dict[str, Any]:
    """Return the variables that turn the reasoning of a chat template on or off."""
    if body.thinking is None or served.card.renderer == "harmony":
        return {}
    is_on = body.thinking.type != "disabled"
    if not is_on and served.card.reasoning_parser == "deepseek_r1":
        # For this parser, an output without the end of reasoning is reasoning.
        return {}
    return {name: is_on for name in _SWITCHES if name in served.renderer.variables}

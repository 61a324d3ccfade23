"""Convert request bodies to a conversation and options, and render the prompt.

A value that the model's prompt format would silently drop is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dynamo_trtllm.api.chat import AssistantMessage, ChatMessage, ChatRequest, ToolMessage
from dynamo_trtllm.api.sampling import SamplingFields
from dynamo_trtllm.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.frontend.generation.options import GenerationOptions, reject
from dynamo_trtllm.messages import ModelDeploymentCard, Sampling, TokenIds
from dynamo_trtllm.tokenization.base import Conversation, Message, ServedModel, Tool, ToolCall

_EFFORT = "reasoning_effort"
_ABRIDGED_CHARS = 16


def chat_conversation(body: ChatRequest) -> Conversation:
    """Return the conversation of a chat request, with its tools."""
    return Conversation(
        messages=tuple(_message(message) for message in body.messages),
        tools=tuple(
            Tool(name=t.function.name, description=t.function.description, parameters=t.function.parameters)
            for t in body.tools
        ),
        reasoning_effort=body.effort or "medium",
        template_args={name: value for name, value in body.template_args.items() if name != _EFFORT},
    )


def chat_options(body: ChatRequest, card: ModelDeploymentCard) -> GenerationOptions:
    formats = body.output_formats()
    names = format_names(formats)
    if body.reasoning_effort is None and _EFFORT in body.template_args:
        names[_EFFORT] = body.template_arg_path(_EFFORT)
    return GenerationOptions(
        sampling=msgspec.structs.replace(
            sampling_of(body, card, body.output_tokens, body.top_logprobs if body.logprobs else None),
            prompt_logprobs=body.prompt_logprobs,
        ),
        stop=tuple(body.stop),
        n=body.n,
        tool_choice=body.tool_choice,
        strict_tools=frozenset(tool.function.name for tool in body.tools if tool.function.strict),
        parallel_tool_calls=body.parallel_tool_calls,
        output_format=next(iter(formats.values()), None),
        cache_salt=body.salt,
        shows_reasoning=body.include_reasoning,
        returns_token_ids=body.return_token_ids,
        skip_special_tokens=body.skip_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        effort_given=body.reasoning_effort is not None,
        names=names,
    )


def format_names(formats: Iterable[str]) -> dict[str, str]:
    """Return the client's name of the output format. `formats`: all names that it was given under."""
    name = next(iter(formats), None)
    return {} if name is None else {"response_format": name}


def sampling_of(
    body: SamplingFields, card: ModelDeploymentCard, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    """Return the sampling values: from the request, else from the model's card, else the API's defaults."""
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    chosen = {name: getattr(body, name) for name in fields}
    chosen |= {name: v for name, v in card.sampling_defaults.given().items() if name not in body.model_fields_set}
    chosen["top_k"] = max(0, chosen["top_k"])
    return Sampling(
        **chosen,
        max_tokens=max_tokens or 0,
        min_tokens=body.min_tokens,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.past_eos,
        logprobs=logprobs,
    )


def _message(message: ChatMessage) -> Message:
    if isinstance(message, AssistantMessage):
        return Message(
            role=message.role,
            content=message.content,
            name=message.name,
            reasoning=message.any_reasoning,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in message.tool_calls
            ),
        )
    call_id = message.tool_call_id if isinstance(message, ToolMessage) else None
    return Message(role=message.role, content=message.content, name=message.name, tool_call_id=call_id)


def render_prompt(conversation: Conversation, served: ServedModel, options: GenerationOptions) -> TokenIds:
    """Render the prompt. Template arguments that the prompt format does not use have no effect.

    Raises:
        UnsupportedParameter: the model's prompt format would silently drop a value.
        InvalidRequest: the conversation is wrong.
    """
    card, known = served.card, served.renderer.variables
    if options.effort_given and _EFFORT not in known:
        reject(options.name(_EFFORT), card, "its chat template does not use a reasoning effort")
    if conversation.tools and "tools" not in known:
        reject(options.name("tools"), card, "its chat template does not use tools")
    conversation = msgspec.structs.replace(
        conversation, messages=_without_implied(conversation.messages, card, options)
    )
    try:
        ids = served.renderer.render(conversation)
    except InvalidRequest as exc:
        raise type(exc)(exc.message, field=exc.field and options.name(exc.field)) from exc
    _check_names(conversation, served, options)
    return ids


def _without_implied(
    messages: tuple[Message, ...], card: ModelDeploymentCard, options: GenerationOptions
) -> tuple[Message, ...]:
    """Return the messages without redundant names of tool results, and with `developer` as `system` for templates.

    A tool result's name repeats that of the called function. Many chat templates would drop `developer` messages.

    Raises:
        InvalidRequest: a tool result names another function than the one that was called.
    """
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    normalized = []
    for index, message in enumerate(messages):
        name = called.get(message.tool_call_id or "")
        if message.role == "tool" and message.name is not None and name is not None:
            if message.name != name:
                field = f"{options.name('messages')}[{index}].name"
                raise InvalidRequest(f"{field} is {message.name!r}, but the called function is {name!r}", field=field)
            message = msgspec.structs.replace(message, name=None)
        if message.role == "developer" and card.renderer == "chat_template":
            message = msgspec.structs.replace(message, role="system")
        normalized.append(message)
    return tuple(normalized)


def _check_names(conversation: Conversation, served: ServedModel, options: GenerationOptions) -> None:
    """Reject a message name that the prompt format drops. Formats treat all messages of a role alike."""
    for index, message in enumerate(conversation.messages):
        if message.name is None:
            continue
        kind = message.role, bool(conversation.tools)
        if kind not in served.writes_names:
            served.writes_names[kind] = _writes_name(conversation, index, served)
        if not served.writes_names[kind]:
            field = f"{options.name('messages')}[{index}].name"
            raise UnsupportedParameter(
                f"{field} is not supported: the prompt format of {served.card.name} drops the name of a "
                f"{message.role} message; put it into the content",
                field=field,
            )


def _writes_name(conversation: Conversation, index: int, served: ServedModel) -> bool:
    """Return whether the prompt with shortened texts is another one without the name of message `index`."""
    messages = [_abridged(message) for message in conversation.messages]
    short = msgspec.structs.replace(conversation, messages=tuple(messages), tools=conversation.tools[:1])
    messages[index] = msgspec.structs.replace(messages[index], name=None)
    nameless = msgspec.structs.replace(short, messages=tuple(messages))
    return served.renderer.render(short) != served.renderer.render(nameless)


def _abridged(message: Message) -> Message:
    """Return the message with texts shortened to a few characters and the structure unchanged."""
    calls = tuple(msgspec.structs.replace(call, arguments="{}") for call in message.tool_calls)
    reasoning = message.reasoning and message.reasoning[:_ABRIDGED_CHARS]
    content = message.content[:_ABRIDGED_CHARS]
    return msgspec.structs.replace(message, content=content, reasoning=reasoning, tool_calls=calls)

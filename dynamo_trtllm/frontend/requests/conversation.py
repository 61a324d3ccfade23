"""Convert request bodies to a conversation, options, a prompt, and constraints on the output.

A value that the model's engine, prompt format or output format does not support, or would silently
drop, is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn

import msgspec

from dynamo_trtllm.frontend.api.chat import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    ToolChoice,
    ToolMessage,
)
from dynamo_trtllm.frontend.api.sampling import ANY_OBJECT, SamplingFields
from dynamo_trtllm.frontend.api.schemas import call_schema
from dynamo_trtllm.frontend.requests.format_limits import check_formats
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool, ToolCall
from dynamo_trtllm.frontend.tokenization.renderer import NO_FORCED_IDS
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.protocol.messages import (
    ModelDeploymentCard,
    OutputFormat,
    Sampling,
    StructuredOutput,
    TokenIds,
)

_AUTO = ToolChoice()
_DEFAULTS = msgspec.structs.asdict(Sampling(max_tokens=0))
_EFFORT = "reasoning_effort"
_STRICT = "tools.strict"  # the name of `strict` among the ignored fields
_ABRIDGED_CHARS = 16
_ANY_TEXT = r"(.|\n)+"  # a regular expression


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a generation beside its conversation."""

    # The requested values, without `guided`. max_tokens 0: the output may fill the context.
    sampling: Sampling
    stop: tuple[str, ...] = ()
    n: int = 1
    tool_choice: ToolChoice = _AUTO
    custom_tools: frozenset[str] = frozenset()  # names of tools that take a text
    strict_tools: frozenset[str] = frozenset()  # names of tools whose schema must be followed
    parallel_tool_calls: bool = True  # False: the output ends before the second call
    # The format of the text of the output. Its prefix is empty.
    output_format: OutputFormat | None = None
    shows_reasoning: bool = True
    returns_token_ids: bool = False
    skip_special_tokens: bool = True
    # The prompt is cut to this many of its last tokens. -1: to as many as the context allows. None:
    # the prompt is not cut.
    truncate_prompt_tokens: int | None = None
    fits_context: bool = False  # max_tokens is lowered to what the prompt leaves of the context
    effort_given: bool = False  # the client set the conversation's reasoning_effort
    # The API's names of fields, by internal names, where they differ.
    names: Mapping[str, str] = msgspec.field(default_factory=dict)

    def name(self, field: str) -> str:
        """Return the API's name of a field, for errors."""
        return self.names.get(field, field)


def reject_unsupported(
    options: GenerationOptions, cache_salt: str | None, card: ModelDeploymentCard
) -> None:
    """Raise UnsupportedParameter if the request sets a field that the engine does not support."""
    for unsupported in card.unsupported_features:
        if unsupported == "cache_salt":
            given = cache_salt
        else:
            given = getattr(options.sampling, unsupported, None)
        # Both are None for a feature that is not a sampling value, and without a cache salt.
        if given != _DEFAULTS.get(unsupported):
            reject(options.name(unsupported), card)


def reject(
    name: str, card: ModelDeploymentCard, reason: str = "its engine does not support it"
) -> NoReturn:
    """Raise UnsupportedParameter.

    `name` is the API's name, with "=value" if only that value is rejected.
    """
    raise UnsupportedParameter(
        f"{name} is not supported by {card.name}: {reason}; leave it out",
        field=name.partition("=")[0],
    )


def chat_conversation(body: ChatRequest) -> Conversation:
    """Return the conversation of a chat request, with its tools."""
    text_tools = body.text_tools
    tools = tuple(
        Tool(
            name=function.name,
            description=function.description,
            parameters=function.parameters,
            is_text=function.name in text_tools,
        )
        for function in body.functions
    )
    template_args = {name: value for name, value in body.template_args.items() if name != _EFFORT}
    return Conversation(
        messages=tuple(_message(message) for message in body.messages),
        tools=tools,
        reasoning_effort=body.effort or "medium",
        template_args=template_args,
    )


def chat_options(body: ChatRequest, card: ModelDeploymentCard) -> GenerationOptions:
    formats = body.output_formats()
    names = format_names(formats)
    if body.reasoning_effort is None and _EFFORT in body.template_args:
        names[_EFFORT] = body.template_arg_path(_EFFORT)
    logprobs = body.top_logprobs if body.logprobs else None
    sampling = sampling_of(body, card, body.output_tokens, logprobs)
    return GenerationOptions(
        sampling=msgspec.structs.replace(sampling, prompt_logprobs=body.prompt_logprobs),
        stop=tuple(body.stop),
        n=body.n,
        tool_choice=body.tool_choice,
        custom_tools=body.custom_tools,
        strict_tools=frozenset(function.name for function in body.functions if function.strict),
        parallel_tool_calls=body.parallel_tool_calls,
        output_format=next(iter(formats.values()), None),
        shows_reasoning=body.include_reasoning,
        returns_token_ids=body.return_token_ids,
        skip_special_tokens=body.skip_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        effort_given=body.reasoning_effort is not None,
        names=names,
    )


def format_names(fields: Iterable[str]) -> dict[str, str]:
    """Return an entry of `GenerationOptions.names` for the output format, if there is one.

    `fields`: the names of the fields that set the format. The first one is used.
    """
    name = next(iter(fields), None)
    return {} if name is None else {"response_format": name}


def sampling_of(
    body: SamplingFields, card: ModelDeploymentCard, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    """Return the sampling values of a request.

    A value that the request does not set comes from the model's card, or is the API's default.
    """
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    chosen = {name: getattr(body, name) for name in fields}
    defaults = card.sampling_defaults.given()
    chosen |= {name: value for name, value in defaults.items() if name not in body.model_fields_set}
    chosen["top_k"] = max(0, chosen["top_k"])
    return Sampling(
        **chosen,
        max_tokens=0 if max_tokens is None else max_tokens,
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
    return Message(
        role=message.role, content=message.content, name=message.name, tool_call_id=call_id
    )


class RenderedPrompt(NamedTuple):
    """A prompt, and whether it would be the same without the name of a message."""

    ids: TokenIds
    drops_names: bool


def render_prompt(
    conversation: Conversation, served: ServedModel, options: GenerationOptions
) -> RenderedPrompt:
    """Render the prompt. Template arguments that the prompt format does not use have no effect.

    Raises:
        UnsupportedParameter: the model's prompt format would silently drop a value.
        InvalidRequest: the conversation is wrong.
    """
    card = served.card
    known = served.renderer.variables
    if options.effort_given and _EFFORT not in known:
        reject(options.name(_EFFORT), card, "its chat template does not use a reasoning effort")
    if conversation.tools and "tools" not in known:
        reject(options.name("tools"), card, "its chat template does not use tools")
    conversation = msgspec.structs.replace(
        conversation, messages=_normalized(conversation.messages, card, options)
    )
    try:
        ids = served.renderer.render(conversation)
    except InvalidRequest as exc:
        # The renderer uses the internal name of the field. The client knows the name of the API.
        field = exc.field or ""
        message = exc.message
        name = options.name(field)
        if field and message.startswith(f"{field} "):
            message = name + message.removeprefix(field)
        raise type(exc)(message, field=name or None) from exc
    return RenderedPrompt(ids, drops_names=_drops_a_name(conversation, served))


def _normalized(
    messages: tuple[Message, ...], card: ModelDeploymentCard, options: GenerationOptions
) -> tuple[Message, ...]:
    """Return the messages as prompt formats know them.

    For chat templates, tool results get the name of the called function, which some templates
    write, and `developer` becomes `system`, because many templates would drop `developer` messages.
    For Harmony, tool results lose their name: the renderer takes it from the call.

    Raises:
        InvalidRequest: a tool result names another function than the one that was called.
    """
    is_template = card.renderer == "chat_template"
    # The names of the functions that were called so far, by the ids of the calls. Some servers use
    # an id again in a later turn.
    called: dict[str, str] = {}
    normalized = []
    for index, message in enumerate(messages):
        called.update((call.id, call.name) for call in message.tool_calls)
        called_name = called.get(message.tool_call_id or "")
        if message.role == "tool" and called_name is not None:
            if message.name not in (None, called_name):
                field = f"{options.name('messages')}[{index}].name"
                reason = f"is {message.name!r}, but the called function is {called_name!r}"
                raise InvalidRequest(f"{field} {reason}", field=field)
            message = msgspec.structs.replace(message, name=called_name if is_template else None)
        if message.role == "developer" and is_template:
            message = msgspec.structs.replace(message, role="system")
        normalized.append(message)
    return tuple(normalized)


def _drops_a_name(conversation: Conversation, served: ServedModel) -> bool:
    """Return whether the prompt format drops the name of a message.

    The result is stored by role, and by whether there are tools, because formats treat all messages
    of a role alike. If it were not stored, the conversations of agents would be rendered twice more
    for each request, because agent frameworks name all messages.
    """
    for index, message in enumerate(conversation.messages):
        # The name of a tool result repeats that of the called function.
        if message.name is None or message.role == "tool":
            continue
        kind = (message.role, bool(conversation.tools))
        if kind not in served.writes_names:
            served.writes_names[kind] = _writes_name(conversation, index, served)
        if not served.writes_names[kind]:
            return True
    return False


def _writes_name(conversation: Conversation, index: int, served: ServedModel) -> bool:
    """Return whether the prompt changes when message `index` loses its name.

    The two prompts that are compared have shortened texts.
    """
    messages = [_abridged(message) for message in conversation.messages]
    short = msgspec.structs.replace(
        conversation, messages=tuple(messages), tools=conversation.tools[:1]
    )
    messages[index] = msgspec.structs.replace(messages[index], name=None)
    nameless = msgspec.structs.replace(short, messages=tuple(messages))
    return served.renderer.render(short) != served.renderer.render(nameless)


def _abridged(message: Message) -> Message:
    """Return the message with texts shortened to a few characters and the structure unchanged."""
    calls = tuple(msgspec.structs.replace(call, arguments="{}") for call in message.tool_calls)
    reasoning = message.reasoning
    if reasoning is not None:
        reasoning = reasoning[:_ABRIDGED_CHARS]
    return msgspec.structs.replace(
        message,
        content=message.content[:_ABRIDGED_CHARS],
        preamble=message.preamble[:_ABRIDGED_CHARS],
        reasoning=reasoning,
        tool_calls=calls,
    )


# --- constraints on the output --------------------------------------------------------------------


class Constraints(NamedTuple):
    """The constraints on the output of a generation."""

    forced_ids: TokenIds = NO_FORCED_IDS  # appended to the prompt as the beginning of the output
    guided: StructuredOutput | None = None
    field: str = ""  # the API's name of the field that `guided` follows from
    ignored: tuple[str, ...] = ()  # fields that can't be enforced


def visible_tools(tools: tuple[Tool, ...], options: GenerationOptions) -> tuple[Tool, ...]:
    """Return the tools that go into the prompt.

    Raises InvalidRequest if `tool_choice` names an unknown tool.
    """
    choice = options.tool_choice
    known = {tool.name for tool in tools}
    wanted = choice.allowed or ()
    if choice.mode == "named":
        wanted = (choice.name,)
    for name in wanted:
        if name not in known:
            raise InvalidRequest(
                f"{options.name('tool_choice')} names the function {name!r}, which is not among the"
                " tools",
                field=options.name("tool_choice"),
            )
    if choice.mode == "none":
        return ()
    visible = tools
    if choice.allowed is not None:
        visible = tuple(tool for tool in tools if tool.name in choice.allowed)
    if choice.mode == "required" and not visible:
        raise InvalidRequest(
            f"{options.name('tool_choice')} requires a call, but there are no tools",
            field=options.name("tool_choice"),
        )
    return visible


def constraints_of(
    tools: tuple[Tool, ...], options: GenerationOptions, served: ServedModel
) -> Constraints:
    """Return how the output is constrained. `tools`: the tools in the prompt.

    Raises:
        InvalidRequest: a format exceeds a limit.
        UnsupportedParameter: the output format or the engine does not support the constraint.
    """
    constraints = _constraints_of(tools, options, served)
    if constraints.guided is not None:
        check_formats(constraints.guided, constraints.field)
    return constraints


def _constraints_of(
    tools: tuple[Tool, ...], options: GenerationOptions, served: ServedModel
) -> Constraints:
    choice = options.tool_choice
    if choice.mode == "named":
        tools = tuple(tool for tool in tools if tool.name == choice.name)
    if choice.mode in ("named", "required"):
        if len(tools) == 1:
            call = _one_call(tools[0], options, served)
        else:
            call = _some_call(tools, options, served)
        return call._replace(field=options.name("tool_choice"))
    answer = None
    if options.output_format is not None:
        answer = _formatted_answer(options.output_format, tools, options, served)
    # Calls of built-in tools begin in a special form, which does not trigger a schema.
    builtins = served.renderer.builtin_tools(tools)
    functions = tuple(tool for tool in tools if tool.name not in builtins)
    strict_tools = [tool for tool in tools if tool.name in options.strict_tools]
    has_strict_functions = any(tool.name not in builtins for tool in strict_tools)
    # A tool whose input is a text has no schema.
    has_strict_builtins = any(tool.name in builtins and not tool.is_text for tool in strict_tools)
    # The beginning of each call, up to the name of its tool.
    opening_ids = None
    if has_strict_functions and _supports_guided(served):
        opening_ids = served.renderer.call_header(None)
    if opening_ids is not None:
        guided = _strict_call(functions, opening_ids, options, served)
        if answer is not None:
            guided = msgspec.structs.replace(
                guided, otherwise=answer, unfinished_ids=answer.unfinished_ids
            )
        ignored = (_STRICT,) if has_strict_builtins else ()
        return Constraints(guided=guided, field=options.name("tools"), ignored=ignored)
    # Agent frameworks make all tools strict. So `strict` is no error where nothing can enforce it.
    ignored = (_STRICT,) if has_strict_functions or has_strict_builtins else ()
    return Constraints(guided=answer, field=options.name("response_format"), ignored=ignored)


def _supports_guided(served: ServedModel) -> bool:
    return "guided" not in served.card.unsupported_features


def text_format(options: GenerationOptions, served: ServedModel) -> StructuredOutput | None:
    """Return the format of a text completion, from its first token on.

    Raises the errors of `constraints_of`.
    """
    if options.output_format is None:
        return None
    _check_guidable(options, "response_format", served)
    guided = StructuredOutput(alternatives=(options.output_format,))
    check_formats(guided, options.name("response_format"))
    return guided


def _one_call(tool: Tool, options: GenerationOptions, served: ServedModel) -> Constraints:
    """Force the header of one call, and constrain its arguments to the tool's schema.

    This is done for tools that are not strict, too. Without a constraint, a model that would not
    have called the tool may continue with prose.
    """
    is_strict = tool.name in options.strict_tools
    header = _call_header(tool, options, served)
    if _is_written_as_text(tool, served):
        return Constraints(forced_ids=header)
    engine_guides = _supports_guided(served)
    if is_strict and engine_guides:
        _check_guidable(options, "tool_choice", served)
    # The schema of a call does not allow tokens after its end.
    demands_more_tokens = options.sampling.ignore_eos or options.sampling.min_tokens > 0
    if demands_more_tokens or not engine_guides:
        ignored = (_STRICT,) if is_strict else ()
        return Constraints(forced_ids=header, ignored=ignored)
    guided = StructuredOutput(alternatives=(OutputFormat(json_schema=_schema(tool)),))
    return Constraints(forced_ids=header, guided=guided)


def _some_call(
    tools: tuple[Tool, ...], options: GenerationOptions, served: ServedModel
) -> Constraints:
    """Require a call of one of the tools.

    The common part of the headers is forced if the format allows it.
    """
    _check_guidable(options, "tool_choice", served)
    forced_ids = served.renderer.call_header(None) or NO_FORCED_IDS
    if served.renderer.builtin_tools(tools):
        # The headers of built-in tools and of functions have only the first token in common.
        forced_ids = forced_ids[:1]
    alternatives = tuple(_alternatives(tools, forced_ids, options, served))
    return Constraints(forced_ids=forced_ids, guided=StructuredOutput(alternatives=alternatives))


def _strict_call(
    tools: tuple[Tool, ...], opening_ids: TokenIds, options: GenerationOptions, served: ServedModel
) -> StructuredOutput:
    """Let the model decide about calls, and constrain a call once the model has begun it.

    `opening_ids` is the header of a call up to the name. Tools that are not strict take any object.
    """
    _check_guidable(options, "tools", served)
    # A model may merge the last token of the opening, ".", with the text that follows.
    trigger_ids = opening_ids[:-1]
    alternatives = []
    formats = _alternatives(tools, trigger_ids, options, served)
    for tool, output_format in zip(tools, formats, strict=True):
        if tool.name not in options.strict_tools:
            output_format = msgspec.structs.replace(output_format, json_schema=ANY_OBJECT)
        alternatives.append(output_format)
    return StructuredOutput(
        alternatives=tuple(alternatives),
        trigger=served.renderer.decode(trigger_ids),
        trigger_ids=trigger_ids,
    )


def _alternatives(
    tools: tuple[Tool, ...], shared_ids: TokenIds, options: GenerationOptions, served: ServedModel
) -> list[OutputFormat]:
    """Return the format of each tool's call after `shared_ids`, with which all calls begin."""
    shared_text = served.renderer.decode(shared_ids)
    alternatives = []
    for tool in tools:
        header = served.renderer.decode(_call_header(tool, options, served))
        prefix = header.removeprefix(shared_text)
        if _is_written_as_text(tool, served):
            alternatives.append(OutputFormat(prefix=prefix, json_schema="", regex=_ANY_TEXT))
        else:
            alternatives.append(OutputFormat(prefix=prefix, json_schema=_schema(tool)))
    return alternatives


def _is_written_as_text(tool: Tool, served: ServedModel) -> bool:
    """Return whether the model writes the input of a tool as it is, not as arguments in JSON."""
    return tool.is_text and tool.name in served.renderer.builtin_tools((tool,))


def _call_header(tool: Tool, options: GenerationOptions, served: ServedModel) -> TokenIds:
    header = served.renderer.call_header(tool)
    if header is None:
        reject(
            options.name("tool_choice"),
            served.card,
            "its output format does not allow forced calls",
        )
    return header


def _formatted_answer(
    output_format: OutputFormat,
    tools: tuple[Tool, ...],
    options: GenerationOptions,
    served: ServedModel,
) -> StructuredOutput:
    """Return the constraint on an answer in a format. With tools, a call may take its place.

    In Harmony, a header shows whether an answer or a call begins. Other formats have no headers, so
    the forms of calls are alternatives to the form of the answer.
    """
    _check_guidable(options, "response_format", served)
    header, ids = served.renderer.answer_header()
    forms = [output_format]
    answer_stops = served.renderer.stop_token_ids
    if tools and served.renderer.call_header(None) is not None:
        # A call may end the output in place of an answer.
        call_stops = served.renderer.call_stop_token_ids
        answer_stops = tuple(stop for stop in answer_stops if stop not in call_stops)
    elif tools:
        forms += _calls_as_text(tools, options, served)
    if len(ids) > 1:
        # The trigger ends before the last token of the header, and the format begins with this
        # token. Otherwise, "final <|constrain|>json", which models write, too, would bypass the
        # trigger.
        last = served.renderer.decode(ids[-1:])
        header = header.removesuffix(last)
        ids = ids[:-1]
        forms[0] = msgspec.structs.replace(output_format, prefix=last)
    # These stop tokens are forbidden only in the free text before a trigger.
    unfinished_ids = answer_stops if len(ids) > 0 else ()
    return StructuredOutput(
        alternatives=tuple(forms),
        trigger=header,
        trigger_ids=ids,
        unfinished_ids=unfinished_ids,
    )


def _calls_as_text(
    tools: tuple[Tool, ...], options: GenerationOptions, served: ServedModel
) -> list[OutputFormat]:
    """Return the forms of calls in an output format whose calls have no header."""
    opening = served.renderer.call_opening
    if opening is None:
        name = options.name("response_format")
        reject(name, served.card, "its output format cannot combine it with tool calls")
    schemas = [json.dumps(call_schema(tool.name, json.loads(_schema(tool)))) for tool in tools]
    return [OutputFormat(prefix=opening, json_schema=schema) for schema in schemas]


def _check_guidable(options: GenerationOptions, field: str, served: ServedModel) -> None:
    """Reject guided output if the engine lacks it, or if a field demands tokens after its end."""
    name = options.name(field)
    if not _supports_guided(served):
        reject(name, served.card, "its engine does not support guided decoding")
    for other in ("ignore_eos", "min_tokens"):
        if getattr(options.sampling, other):
            raise InvalidRequest(
                f"{options.name(other)} cannot be combined with {name}, which ends the output"
                " itself; leave it out",
                field=options.name(other),
            )


def _schema(tool: Tool) -> str:
    return json.dumps(dict(tool.parameters) or {"type": "object"})

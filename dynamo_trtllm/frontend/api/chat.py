"""Define the request of `POST /v1/chat/completions`.

`frontend/requests/preprocess` translates it for an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from dynamo_trtllm.frontend.api import custom_tools, rejected_fields
from dynamo_trtllm.frontend.api.hosted_tools import (
    HOSTED,
    HostedTool,
    reject_demanded,
    tag_of,
    without_hosted,
)
from dynamo_trtllm.frontend.api.request_model import (
    MAX_ITEMS,
    MAX_LABEL,
    Id,
    Label,
    List,
    LongText,
    RequestModel,
    check_object,
    check_size,
    check_unknown,
    first_repeated,
    invalid,
    kind_of,
    quoted,
    single_value,
    unsupported,
)
from dynamo_trtllm.frontend.api.sampling import NO_OPS, CompletionFields, MaxTokens
from dynamo_trtllm.frontend.api.schemas import Schema, ToolSchema, schema_text
from dynamo_trtllm.frontend.tokenization.text_input import SCHEMA, arguments_of
from dynamo_trtllm.protocol.messages import OutputFormat
from dynamo_trtllm.protocol.number_types import MAX_LOGPROBS

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 256 << 10  # JSON size of all tools together
MAX_TOOL_CALLS = 512  # per message
MAX_ARGUMENTS = 1 << 20  # characters, per call
MAX_TEMPLATE_ARGS = 64
MAX_TEMPLATE_BYTES = 64 << 10  # JSON size of all template arguments together

# A model may support only some of these.
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def part_texts(
    value: Any, types: Sequence[str], fields: frozenset[str], info: ValidationInfo
) -> list[str]:
    """Return the texts of a string or of a list of text parts.

    Args:
        value: what the client sent.
        types: the types that a part may have. An error proposes the first one.
        fields: the names of a part's fields. All other fields are treated as unknown fields.
        info: the info of the validator that calls this.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        invalid(f"must be a string or a list of text parts, not {kind_of(value)}")
    if len(value) > MAX_ITEMS:
        invalid(f"may hold {MAX_ITEMS} parts at most, not {len(value)}")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in types:
            fix = f"use {types[0]!r}" if kind.endswith("text") else "only text is supported"
            unsupported(f"holds a part of type {quoted(kind)} at index {index}; {fix}")
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(kind, str) or not isinstance(text, str):
            form = f'{{"type": "{types[0]}", "text": "…"}}'
            invalid(f"must hold parts of the form {form}; the part at index {index} does not")
        for name in part.keys() - fields:
            # `null` counts as absent.
            if part[name] is not None:
                place = f"holds a part with {quoted(name)} at index {index}, which "
                check_unknown(name, fields, info, place)
        texts.append(text)
    return texts


def _text(value: Any, info: ValidationInfo) -> str:
    return "\n".join(part_texts(value, ("text",), _PART_FIELDS, info))


class TextPart(RequestModel):
    hints: ClassVar = frozenset({"prompt_cache_breakpoint"})

    type: Literal["text"]
    text: LongText


_PART_FIELDS = frozenset({"type", "text", *TextPart.hints})
_Parts = Annotated[List[TextPart], Field(max_length=MAX_ITEMS)]
Text = Annotated[LongText, BeforeValidator(_text, json_schema_input_type=LongText | _Parts)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", max_length=64)]
# The name of who wrote a message, with the characters that OpenAI's API accepts.
_Author = Annotated[str, Field(pattern=r"^[^\s<|\\/>]{1,64}$", max_length=64)]
# Only the functions of gpt-oss's browser have a dot in their names.
FunctionName = Annotated[
    str, Field(pattern=r"^([a-zA-Z0-9_-]{1,64}|browser\.(search|open|find))$", max_length=64)
]
Arguments = Annotated[str, Field(max_length=MAX_ARGUMENTS)]


def _none_if_empty(name: Any) -> Any:
    """Return a name. An empty one counts as absent."""
    return None if name == "" else name


Author = Annotated[_Author | None, BeforeValidator(_none_if_empty)]


class SystemMessage(RequestModel):
    role: Literal["system", "developer"]
    content: Text = ""
    name: Author = None


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Text
    name: Author = None


class CalledFunction(RequestModel):
    name: Id
    arguments: Arguments = "{}"


# Clients send back the index that a call had in a stream. It has no effect, because a message lists
# its calls in order. A model makes fewer than 128 calls in one message.
_INDEX_IN_STREAM = {"index": tuple(range(128))}


class AssistantToolCall(RequestModel):
    no_ops: ClassVar = _INDEX_IN_STREAM

    id: Id
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(RequestModel):
    name: Id
    input: Arguments


class AssistantCustomCall(RequestModel):
    no_ops: ClassVar = _INDEX_IN_STREAM

    id: Id
    type: Literal["custom"]
    custom: CalledCustom

    @property
    def function(self) -> CalledFunction:
        """The call of the function that the model saw."""
        return CalledFunction(name=self.custom.name, arguments=arguments_of(self.custom.input))


def _tag_of_call(value: Any) -> str:
    """Return the union tag of a call, which is a dict when it is parsed and a model later."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind or 'function'}>"


_ToolCall = Annotated[
    Annotated[AssistantToolCall, Tag("<function>")]
    | Annotated[AssistantCustomCall, Tag("<custom>")],
    Discriminator(_tag_of_call),
]


class AssistantMessage(RequestModel):
    hints: ClassVar = frozenset({"annotations"})  # sources of parts of the text
    no_ops: ClassVar = {"prefix": (False,), "refusal": ("",)}
    unsupported: ClassVar = rejected_fields.OF_ASSISTANT_MESSAGES

    role: Literal["assistant"]
    content: Text = ""
    name: Author = None
    reasoning_content: LongText | None = None
    # The name of `reasoning_content` in other servers.
    reasoning: LongText | None = None
    tool_calls: List[_ToolCall] = Field(default_factory=list, max_length=MAX_TOOL_CALLS)

    @model_validator(mode="after")
    def _has_one_reasoning(self) -> AssistantMessage:
        _ = self.any_reasoning  # reading this property rejects two different texts
        return self

    @property
    def any_reasoning(self) -> str | None:
        """The reasoning, under either name. A validator has rejected two different texts."""
        return single_value(
            {"reasoning_content": self.reasoning_content, "reasoning": self.reasoning}
        )


class ToolMessage(RequestModel):
    role: Literal["tool"]
    content: Text = ""
    tool_call_id: Id
    name: Annotated[FunctionName | None, BeforeValidator(_none_if_empty)] = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


Description = Annotated[str, Field(max_length=MAX_TOOLS_BYTES)]


class Function(RequestModel):
    name: FunctionName
    description: Description = ""
    strict: bool = False  # declared before `parameters`, whose check reads it
    parameters: ToolSchema = Field(default_factory=dict)


class FunctionTool(RequestModel):
    type: Literal["function"]
    function: Function


class ChatGrammarFormat(RequestModel):
    type: Literal["grammar"]
    grammar: custom_tools.Grammar


class Custom(RequestModel):
    """A tool whose input is a text."""

    name: Name
    description: Description = ""
    format: Annotated[custom_tools.AnyText | ChatGrammarFormat, Discriminator("type")] = (
        custom_tools.AnyText()
    )

    def function(self) -> Function:
        """Return the function that the model sees."""
        grammar = self.format.grammar if isinstance(self.format, ChatGrammarFormat) else None
        return Function(
            name=self.name,
            description=custom_tools.described(self.description, grammar),
            parameters=dict(SCHEMA),
            strict=True,
        )


class ChatCustomTool(RequestModel):
    type: Literal["custom"]
    custom: Custom


_TOOL_TYPES = ("function", "custom")
_Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[ChatCustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(tag_of(*_TOOL_TYPES)),
    BeforeValidator(without_hosted(*_TOOL_TYPES)),
]
# The limit exists because the prompt contains all tools.
ToolsSize = BeforeValidator(lambda tools: check_size(tools, MAX_TOOLS_BYTES))
Tools = Annotated[
    List[_Tool],
    Field(max_length=MAX_TOOLS, description=f"At most {MAX_TOOLS_BYTES} bytes of JSON together."),
    ToolsSize,
]


def _template_args(value: Any) -> Any:
    check_size(value, MAX_TEMPLATE_BYTES)
    return check_object(value, most=MAX_TEMPLATE_ARGS, key_chars=MAX_LABEL)


TemplateArgs = Annotated[
    dict[Label, Any],
    Field(max_length=MAX_TEMPLATE_ARGS, description=f"At most {MAX_TEMPLATE_BYTES} bytes of JSON."),
    BeforeValidator(_template_args),
]


class JsonSchema(RequestModel):
    """The schema of a `response_format`.

    Output always follows the schema, whatever `strict` says.
    """

    hints: ClassVar = frozenset({"description"})
    unsupported: ClassVar = rejected_fields.OF_JSON_SCHEMAS

    name: Name
    schema_: Schema = Field(default_factory=dict, alias="schema")
    strict: bool = False


class ResponseFormat(RequestModel):
    """The format of the answer, in OpenAI's form, or with `schema`, as llama.cpp, Together and some
    of their clients send it.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        needs_schema = self.type == "json_schema"
        has_schema = self.json_schema is not None
        if needs_schema and not has_schema and self.schema_ is None:
            invalid("is required with type 'json_schema'", field="json_schema")
        if has_schema and not needs_schema:
            invalid("is only allowed with type 'json_schema'", field="json_schema")
        if self.schema_ and self.type == "text":
            invalid("is not allowed with type 'text'", field="schema")
        if self.json_schema is not None and self.schema_ not in (None, self.json_schema.schema_):
            invalid("differs from json_schema.schema; send one of them", field="schema")
        return self

    @property
    def wanted_schema(self) -> dict[str, Any]:
        """The schema of the answer. {}: any object."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_ or {}


class ToolChoice(RequestModel):
    """The tools that the model may or must call, normalized from any of the forms of
    `tool_choice`.
    """

    # "none": the prompt contains no tools
    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: Label = ""  # name of the function, if the mode is "named"
    # The names of the functions that the prompt contains. None: the prompt contains all.
    allowed: Annotated[tuple[Label, ...], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


# The next classes are the objects that clients send as `tool_choice`.


class NameOnly(RequestModel):
    name: Label


class NamedFunction(RequestModel):
    type: Literal["function"]
    function: NameOnly


class NamedCustomTool(RequestModel):
    type: Literal["custom"]
    custom: NameOnly

    @property
    def function(self) -> NameOnly:
        """The function that the model sees."""
        return self.custom


_AnyNamed = Annotated[
    Annotated[NamedFunction, Tag("<function>")]
    | Annotated[NamedCustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(tag_of("function", "custom")),
    BeforeValidator(without_hosted("function", "custom")),
]


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: List[_AnyNamed] = Field(max_length=MAX_TOOLS)


class AllowedToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ChoiceSent: TypeAlias = (
    Literal["auto", "none", "required"] | NamedFunction | NamedCustomTool | AllowedToolsChoice
)


def _tool_choice(value: Any, info: ValidationInfo) -> ToolChoice:
    """Return the normalized form of a `tool_choice`. Reject one that demands a hosted tool."""
    match value:
        case "auto" | "none" | "required":
            return ToolChoice(mode=value)
        case {"type": "function"}:
            named = NamedFunction.model_validate(value, context=info.context)
            return ToolChoice(mode="named", name=named.function.name)
        case {"type": "allowed_tools"}:
            allowed = AllowedToolsChoice.model_validate(value, context=info.context).allowed_tools
            served = [tool for tool in allowed.tools if not isinstance(tool, HostedTool)]
            return ToolChoice(
                mode=allowed.mode, allowed=tuple(tool.function.name for tool in served)
            )
        case {"type": "custom"}:
            custom = NamedCustomTool.model_validate(value, context=info.context)
            return ToolChoice(mode="named", name=custom.custom.name)
        case {"type": "auto" | "any" | "none" | "required" | "tool"}:
            pass  # a form of Anthropic's API
        case {"type": str(kind)}:
            reject_demanded(kind)
    invalid(
        "must be 'auto', 'none', 'required', or an object that names a function or allowed tools"
    )


class ChatRequest(CompletionFields):
    """A chat completion request; valid for any model."""

    no_ops: ClassVar = NO_OPS | {
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        **rejected_fields.neutral(rejected_fields.OF_CHAT),
    }
    unsupported: ClassVar = {**CompletionFields.unsupported, **rejected_fields.OF_CHAT}

    messages: List[ChatMessage] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: MaxTokens = None
    tools: Tools = Field(default_factory=list)
    tool_choice: Annotated[
        ToolChoice, BeforeValidator(_tool_choice, json_schema_input_type=ChoiceSent)
    ] = ToolChoice()
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    reasoning_effort: Effort | None = None
    chat_template_args: TemplateArgs = Field(default_factory=dict)
    chat_template_kwargs: TemplateArgs = Field(default_factory=dict)
    response_format: ResponseFormat | None = None
    include_reasoning: bool = True
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            invalid("is only allowed with logprobs set to true", field="top_logprobs")
        single_value(
            {"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens}
        )
        if (name := first_repeated(function.name for function in self.functions)) is not None:
            invalid(f"names the function {name!r} twice", field="tools")
        self._check_template_args()
        return self

    def _check_template_args(self) -> None:
        """Reject arguments and a reasoning effort that are given twice with different values."""
        in_both = self.chat_template_args.keys() & self.chat_template_kwargs.keys()
        for name in sorted(in_both):
            if self.chat_template_args[name] != self.chat_template_kwargs[name]:
                invalid(
                    f"and chat_template_kwargs give {quoted(name)} two values",
                    field="chat_template_args",
                )
        effort = self.template_args.get("reasoning_effort")
        if effort is not None and effort not in get_args(Effort):
            invalid(
                f"must be one of {', '.join(get_args(Effort))}",
                self.template_arg_path("reasoning_effort"),
            )
        single_value(
            {
                self.template_arg_path("reasoning_effort"): effort,
                "reasoning_effort": self.reasoning_effort,
            }
        )

    @property
    def functions(self) -> Sequence[Function]:
        """The functions that the model sees for `tools`."""
        return [
            tool.function if isinstance(tool, FunctionTool) else tool.custom.function()
            for tool in self.tools
            if not isinstance(tool, HostedTool)
        ]

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the tools whose input is a text."""
        return frozenset(
            tool.custom.name for tool in self.tools if isinstance(tool, ChatCustomTool)
        )

    @property
    def text_tools(self) -> frozenset[str]:
        """The names of those `custom_tools` whose input follows no grammar."""
        tools = (tool.custom for tool in self.tools if isinstance(tool, ChatCustomTool))
        return frozenset(tool.name for tool in tools if tool.format.type == "text")

    @property
    def template_args(self) -> dict[str, Any]:
        """The arguments of the chat template, under either name."""
        return self.chat_template_args | self.chat_template_kwargs

    def template_arg_path(self, name: str) -> str:
        """Return the path of a template argument as the client sent it, for errors."""
        return f"chat_template_{'args' if name in self.chat_template_args else 'kwargs'}.{name}"

    @property
    def effort(self) -> str | None:
        """The requested reasoning effort, from the top-level field or from a template argument."""
        return self.reasoning_effort or self.template_args.get("reasoning_effort")

    @property
    def output_tokens(self) -> int | None:
        """The maximum number of tokens to generate. None: as many as the context allows."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def output_formats(self) -> dict[str, OutputFormat]:
        formats = super().output_formats()
        if self.response_format is None or self.response_format.type == "text":
            return formats
        text = schema_text(self.response_format.wanted_schema)
        return {"response_format": OutputFormat(json_schema=text)} | formats

"""Define the request of `POST /v1/messages`, Anthropic's Messages API, and of its `count_tokens`.

`frontend/messages_api` translates it for an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from dynamo_trtllm.frontend.api import chat, rejected_fields
from dynamo_trtllm.frontend.api.client_tools import client_tool
from dynamo_trtllm.frontend.api.hosted_tools import (
    HOSTED,
    HostedTool,
    reject_demanded,
    tag_of,
    without_hosted,
)
from dynamo_trtllm.frontend.api.request_model import (
    MAX_ITEMS,
    Id,
    Label,
    List,
    LongText,
    RequestModel,
    check_object,
    check_size,
    first_repeated,
    invalid,
    kind_of,
    quoted,
    single_value,
    unsupported,
)
from dynamo_trtllm.frontend.api.sampling import MAX_STOPS, NO_OPS, SamplingFields, Stop
from dynamo_trtllm.frontend.api.schemas import Schema, ToolSchema, schema_text
from dynamo_trtllm.protocol.messages import OutputFormat

# Fields that only this endpoint supports.
_SUPPORTED_HERE: Final = frozenset({"stop_sequences", "service_tier"})


# --- content blocks ----------------------------------------------------------------------


class MessageText(RequestModel):
    """A text block."""

    hints: ClassVar = frozenset({"cache_control", "citations"})

    type: Literal["text"]
    text: LongText


class ThinkingText(RequestModel):
    """Reasoning of an earlier answer. Nothing is signed here, so no signature is checked."""

    hints: ClassVar = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: LongText


class RedactedThinking(RequestModel):
    """Encrypted reasoning, which has no effect: only the server that wrote it can read it."""

    hints: ClassVar = frozenset({"data"})

    type: Literal["redacted_thinking"]


def _input(value: Any) -> Any:
    check_object(value, most=MAX_ITEMS, key_chars=chat.MAX_ARGUMENTS)
    return check_size(value, chat.MAX_ARGUMENTS)


_Key = Annotated[str, Field(max_length=chat.MAX_ARGUMENTS)]
Input = Annotated[
    dict[_Key, Any],
    Field(max_length=MAX_ITEMS, description=f"At most {chat.MAX_ARGUMENTS} bytes of JSON."),
    BeforeValidator(_input),
]


class ToolUse(RequestModel):
    """A tool call of an earlier answer."""

    hints: ClassVar = frozenset({"cache_control", "caller"})

    type: Literal["tool_use"]
    id: Id
    name: Id
    input: Input = Field(default_factory=dict)


class ToolReference(RequestModel):
    """The name of a tool that a search has found. All tools are in the prompt anyway."""

    hints: ClassVar = frozenset({"cache_control"})

    type: Literal["tool_reference"]
    tool_name: Id


def _blocks(value: Any, types: Sequence[str]) -> Any:
    """Return the content as a list of blocks. `types` are the supported types of blocks."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        invalid(f"must be a string or a list of blocks, not {kind_of(value)}")
    if len(value) > MAX_ITEMS:
        invalid(f"may hold {MAX_ITEMS} blocks at most, not {len(value)}")
    for index, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            invalid(f"must hold blocks with a type; the one at index {index} has none")
        if kind not in types:
            supported = ", ".join(types)
            what = f"a block of type {quoted(kind)} at index {index}"
            unsupported(f"holds {what}; supported types are {supported}")
    return value


def _tag(block: Any) -> str:
    """Return the union tag of a block. Errors leave tags out of the path of a field.

    A block is a dict when it is parsed, and a model when it is serialized.
    """
    kind = block["type"] if isinstance(block, dict) else block.type
    return f"<{kind}>"


def _texts_only(value: Any) -> Any:
    return _blocks(value, ("text",))


def _result_blocks(value: Any) -> Any:
    return _blocks(value, ("text", "tool_reference"))


ResultBlock = Annotated[
    Annotated[MessageText, Tag("<text>")] | Annotated[ToolReference, Tag("<tool_reference>")],
    Discriminator(_tag),
]
_ResultBlocks = Annotated[List[ResultBlock], Field(max_length=MAX_ITEMS)]


class ToolResult(RequestModel):
    """The result of a tool call."""

    hints: ClassVar = frozenset({"cache_control"})

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Annotated[
        _ResultBlocks,
        BeforeValidator(_result_blocks, json_schema_input_type=LongText | _ResultBlocks),
    ] = Field(default_factory=list)
    is_error: bool = False


Block: TypeAlias = MessageText | ThinkingText | RedactedThinking | ToolUse | ToolResult
_Block = Annotated[
    Annotated[MessageText, Tag("<text>")]
    | Annotated[ThinkingText, Tag("<thinking>")]
    | Annotated[RedactedThinking, Tag("<redacted_thinking>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")],
    Discriminator(_tag),
]
_BLOCKS_OF: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def _turn_blocks(value: Any, info: ValidationInfo) -> Any:
    # If the role is wrong, `info.data` has none, and the client gets the error of the role.
    role = str(info.data.get("role"))
    return _blocks(value, _BLOCKS_OF.get(role, ("text",)))


_TurnBlocks = Annotated[List[_Block], Field(max_length=MAX_ITEMS)]


class Turn(RequestModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        _TurnBlocks,
        BeforeValidator(_turn_blocks, json_schema_input_type=LongText | _TurnBlocks),
    ]


_SystemBlocks = Annotated[List[MessageText], Field(max_length=MAX_ITEMS)]
System = Annotated[
    _SystemBlocks,
    BeforeValidator(_texts_only, json_schema_input_type=LongText | _SystemBlocks),
]


# --- tools ----------------------------------------------------------------------


class MessageTool(RequestModel):
    """A function that the client runs."""

    hints: ClassVar = frozenset(
        {
            "cache_control",
            "defer_loading",
            "allowed_callers",
            "input_examples",
            "eager_input_streaming",
        }
    )

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$", max_length=128)
    description: chat.Description = ""
    strict: bool = False  # declared before `input_schema`, whose check reads it
    input_schema: ToolSchema


def _as_function(tool: Any) -> Any:
    """Return the function of a tool that the client runs; any other value unchanged.

    A tool in the form of OpenAI's APIs is rejected: to leave it out would lose a function that the
    client runs.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "function":
        form = "leave it out, and send name, description and input_schema"
        unsupported(f"'function' belongs to OpenAI's APIs; {form}", field="type")
    function = client_tool(kind, tool.get("name")) if isinstance(kind, str) else None
    return tool if function is None else function


_AnyTool = Annotated[
    Annotated[MessageTool, Tag("<custom>")] | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(tag_of("custom", default="custom")),
    BeforeValidator(without_hosted("custom", default="custom")),
    BeforeValidator(_as_function),  # the last validator runs first
]
MessageTools = Annotated[
    List[_AnyTool],
    Field(
        max_length=chat.MAX_TOOLS,
        description=f"At most {chat.MAX_TOOLS_BYTES} bytes of JSON together.",
    ),
    chat.ToolsSize,
]


class MessageToolChoice(RequestModel):
    """How the model may call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None  # name of the tool, if the type is "tool"
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_its_name(self) -> MessageToolChoice:
        needs_name = self.type == "tool"
        has_name = self.name is not None
        if needs_name and not has_name:
            invalid("is required with type 'tool'", field="name")
        if has_name and not needs_name:
            invalid("is only allowed with type 'tool'", field="name")
        return self


# --- reasoning and output ----------------------------------------------------------------------


class ThinkingConfig(RequestModel):
    """Whether the answer contains the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Label | None = None  # "omitted": the reasoning is not part of the answer


class MessageFormat(RequestModel):
    """The JSON Schema that the answer follows."""

    hints: ClassVar = frozenset({"name", "strict"})  # output always follows the schema

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(RequestModel):
    """The effort and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


# --- requests ----------------------------------------------------------------------


class CountTokensRequest(SamplingFields):
    """A conversation whose tokens are counted.

    Fields that do not change the prompt have no effect.
    """

    hints: ClassVar = SamplingFields.hints | {"service_tier", "cache_control", "inference_geo"}
    # `NO_OPS` and `SamplingFields.unsupported` also list fields that only this endpoint supports.
    no_ops: ClassVar = {
        name: values for name, values in NO_OPS.items() if name not in _SUPPORTED_HERE
    } | rejected_fields.neutral(rejected_fields.OF_MESSAGES)
    unsupported: ClassVar = {
        name: reason
        for name, reason in {**SamplingFields.unsupported, **rejected_fields.OF_MESSAGES}.items()
        if name not in _SUPPORTED_HERE
    }

    messages: List[Turn] = Field(min_length=1, max_length=MAX_ITEMS)
    system: System = Field(default_factory=list)
    tools: MessageTools = Field(default_factory=list)
    tool_choice: MessageToolChoice = MessageToolChoice(type="auto")
    stop_sequences: List[Stop] = Field(default_factory=list, max_length=MAX_STOPS)
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _message_fields_agree(self) -> CountTokensRequest:
        if self.n != 1:
            unsupported("is not supported, except as 1; leave it out", field="n")
        if self.stream_options.continuous_usage_stats:
            field = "stream_options.continuous_usage_stats"
            unsupported("is not supported, except as false; leave it out", field=field)
        # An empty list counts as absent. Different values are rejected.
        single_value({"stop_sequences": self.stop_sequences or None, "stop": self.stop or None})
        if (name := first_repeated(tool.name for tool in self.functions)) is not None:
            invalid(f"names the tool {name!r} twice", field="tools")
        return self

    @model_validator(mode="after")
    def _choice_is_served(self) -> CountTokensRequest:
        demanded = self.tool_choice.name
        served = {tool.name for tool in self.functions}
        left_out = {tool.name for tool in self.tools if isinstance(tool, HostedTool)}
        # A function may have the same name as a hosted tool.
        if demanded is not None and demanded in left_out - served:
            reject_demanded(demanded, field="tool_choice")
        return self

    @property
    def functions(self) -> Sequence[MessageTool]:
        """The functions that the model sees for `tools`."""
        return [tool for tool in self.tools if isinstance(tool, MessageTool)]

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, under either name."""
        return tuple(self.stop_sequences or self.stop)

    @property
    def output_format(self) -> OutputFormat | None:
        """The format that the output must follow. None: any text."""
        wanted = self.output_config.format
        if wanted is None:
            return None
        return OutputFormat(json_schema=schema_text(wanted.schema_))


class MessagesRequest(CountTokensRequest):
    """A request for the next message of a conversation; valid for any model."""

    max_tokens: int = Field(ge=1)

    @model_validator(mode="after")
    def _begins_a_message(self) -> MessagesRequest:
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            reason = "an answer always begins a new message; end with a message of the user"
            unsupported(f"can't be continued: {reason}", field=f"messages[{last}]")
        return self

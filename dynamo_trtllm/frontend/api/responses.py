"""Define the request of `POST /v1/responses`.

`frontend/responses_api/items` interprets its items.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from dynamo_trtllm.frontend.api import chat, rejected_fields
from dynamo_trtllm.frontend.api.hosted_tools import (
    HOSTED,
    HostedTool,
    reject_demanded,
    without_hosted,
)
from dynamo_trtllm.frontend.api.request_model import (
    MAX_ITEMS,
    MAX_TEXT,
    Id,
    Label,
    List,
    LongText,
    RequestModel,
    first_repeated,
    invalid,
    kind_of,
    quoted,
    single_value,
    unsupported,
)
from dynamo_trtllm.frontend.api.response_tools import NamedTool, ServedTool, Tools, served_tools
from dynamo_trtllm.frontend.api.sampling import NO_OPS, MaxTokens, SamplingFields
from dynamo_trtllm.frontend.api.schemas import Schema, schema_text
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.protocol.messages import OutputFormat
from dynamo_trtllm.protocol.number_types import MAX_LOGPROBS

Status = Literal["in_progress", "completed", "incomplete"]

_TEXT_PARTS = ("input_text", "output_text")
_OUTPUT_PARTS = (*_TEXT_PARTS, "text")  # tools of MCP write "text"
_PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})
_NAMED_TYPES = ("function", "custom", "local_shell")  # types of tools that a tool_choice can name
# The types of items that the input may have.
_ITEM_TYPES = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "item_reference",
)


def _texts(value: Any, info: ValidationInfo) -> list[str]:
    return chat.part_texts(value, _TEXT_PARTS, _PART_FIELDS, info)


class Part(RequestModel):
    """A text part of a message, as clients send it."""

    hints: ClassVar = _PART_FIELDS - {"type", "text"}

    type: Literal["input_text", "output_text"]
    text: LongText


def _outputs(value: Any, info: ValidationInfo) -> list[str]:
    return chat.part_texts(value, _OUTPUT_PARTS, _PART_FIELDS, info)


class OutputPart(RequestModel):
    """A text part of the output of a tool."""

    hints: ClassVar = Part.hints

    type: Literal["input_text", "output_text", "text"]
    text: LongText


_Parts = Annotated[List[Part], Field(max_length=MAX_ITEMS)]
_OutputParts = Annotated[List[OutputPart], Field(max_length=MAX_ITEMS)]
Texts = Annotated[
    List[LongText],
    Field(max_length=MAX_ITEMS),
    BeforeValidator(_texts, json_schema_input_type=LongText | _Parts),
]

Outputs = Annotated[
    List[LongText],
    Field(max_length=MAX_ITEMS),
    BeforeValidator(_outputs, json_schema_input_type=LongText | _OutputParts),
]


class MessageItem(RequestModel):
    """A message of the input or of an earlier response, in the short form (role and content) or the
    full form.
    """

    hints: ClassVar = frozenset({"status"})

    type: Literal["message"] = "message"
    id: Label | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts
    phase: Literal["commentary", "final_answer"] | None = None  # of an assistant's message


class SummaryText(RequestModel):
    type: Literal["summary_text"]
    text: LongText


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: LongText


class ReasoningItem(RequestModel):
    """Reasoning of an earlier response.

    Encrypted reasoning has no effect: only the server that wrote it can read it.
    """

    hints: ClassVar = frozenset({"encrypted_content"})

    type: Literal["reasoning"]
    id: Label | None = None
    summary: List[SummaryText] = Field(default_factory=list, max_length=MAX_ITEMS)
    content: List[ReasoningText] = Field(default_factory=list, max_length=MAX_ITEMS)
    status: Status | None = None


class FunctionCallItem(RequestModel):
    hints: ClassVar = frozenset({"created_by"})
    no_ops: ClassVar = {"async": (False,), "caller": ({"type": "direct"},)}

    type: Literal["function_call"]
    id: Label | None = None
    call_id: Id
    name: Id
    namespace: Id | None = None
    arguments: chat.Arguments
    status: Status | None = None


class FunctionOutputItem(RequestModel):
    hints: ClassVar = frozenset({"created_by", "name", "namespace"})
    no_ops: ClassVar = {"caller": ({"type": "direct"},)}

    type: Literal["function_call_output"]
    id: Label | None = None
    call_id: Id
    output: Outputs
    status: Status | None = None


class CustomCallItem(RequestModel):
    hints: ClassVar = frozenset({"created_by"})

    type: Literal["custom_tool_call"]
    id: Label | None = None
    call_id: Id
    name: Id
    namespace: Id | None = None
    input: chat.Arguments
    status: Status | None = None


class CustomOutputItem(RequestModel):
    hints: ClassVar = frozenset({"created_by", "name", "namespace"})

    type: Literal["custom_tool_call_output"]
    id: Label | None = None
    call_id: Id
    output: Outputs
    status: Status | None = None


class ShellAction(RequestModel):
    hints: ClassVar = frozenset({"env", "user"})  # the model can't set them

    type: Literal["exec"] = "exec"
    command: List[LongText] = Field(max_length=MAX_ITEMS)
    timeout_ms: int | None = None
    working_directory: LongText | None = None


class LocalShellCallItem(RequestModel):
    type: Literal["local_shell_call"]
    id: Label | None = None
    call_id: Id
    action: ShellAction
    status: Status | None = None


class LocalShellOutputItem(RequestModel):
    """The output of a shell. OpenAI sends the id of the call as `id`, and Codex as `call_id`."""

    type: Literal["local_shell_call_output"]
    id: Label | None = None
    call_id: Id | None = None
    output: Outputs
    status: Status | None = None

    @model_validator(mode="after")
    def _has_an_id(self) -> LocalShellOutputItem:
        if self.id is None and self.call_id is None:
            invalid("is required", field="id")
        return self


class ItemReference(RequestModel):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


# Items without a text for the model. Other servers, which run these tools, have returned them.
_ITEMS_OF_HOSTED = ("web_search_call", "file_search_call", "mcp_list_tools")


def _supported_item(value: Any) -> Any:
    """Return the item. Reject it if its type is not supported."""
    if not isinstance(value, dict):
        invalid(f"must be an object, not {kind_of(value)}")
    kind = _kind(value)
    if not isinstance(kind, str):
        invalid("must be a string", field="type")
    if kind not in _ITEM_TYPES:
        unsupported(
            f"{quoted(kind)} is not supported; supported item types are {', '.join(_ITEM_TYPES)}",
            field="type",
        )
    return value


def _kind(value: Any) -> Any:
    """Return the type of an item. Without a type, it is a message or, by its id, a reference."""
    if value.get("type") is not None:
        return value["type"]
    return "item_reference" if "id" in value and "role" not in value else "message"


Item = (
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[LocalShellCallItem, Tag("<local_shell_call>")]
    | Annotated[LocalShellOutputItem, Tag("<local_shell_call_output>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
)
InputItem = Annotated[
    Item, Discriminator(lambda value: f"<{_kind(value)}>"), BeforeValidator(_supported_item)
]


LOGPROBS = "message.output_text.logprobs"
# no effect: the reasoning is returned as plain text
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Results of tools that this server does not run, see `hosted_tools`. Clients that list such a tool
# ask for its results on their own.
INCLUDES_OF_HOSTED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
MAX_INSTRUCTIONS = 256 << 10  # characters; every event that contains the response repeats them
MAX_INCLUDED = 16


class Reasoning(RequestModel):
    no_ops: ClassVar = {
        # there is no summarizer: the reasoning itself is returned as `content`
        "summary": ("auto", "concise", "detailed"),
        "generate_summary": ("auto", "concise", "detailed"),
        "context": ("auto", "current_turn"),
        "mode": ("standard",),
    }

    effort: chat.Effort | None = None


class TextFormat(RequestModel):
    unsupported: ClassVar = rejected_fields.OF_RESPONSES_FORMATS

    type: Literal["text", "json_object"]


class JsonSchemaFormat(RequestModel):
    hints: ClassVar = frozenset({"description", "strict"})  # output always follows the schema

    type: Literal["json_schema"]
    name: chat.Name
    schema_: Schema = Field(alias="schema")


def _format(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        invalid("must be 'text', 'json_object' or 'json_schema'", field="type")
    return value


Format = Annotated[
    Annotated[TextFormat, Tag("<text>")] | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(lambda value: "<json_schema>" if value["type"] == "json_schema" else "<text>"),
    BeforeValidator(_format),
]


class TextConfig(RequestModel):
    no_ops: ClassVar = {"verbosity": ("medium",)}

    format: Format = TextFormat(type="text")


def _tag_of_named(value: Any) -> str:
    if isinstance(value, HostedTool) or _type_of_named(value) not in _NAMED_TYPES:
        return HOSTED
    return "<named>"


def _type_of_named(value: Any) -> Any:
    if isinstance(value, dict):
        return value.get("type") or "function"
    return getattr(value, "type", None)


_ToolNamed = Annotated[
    Annotated[NamedTool, Tag("<named>")] | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(_tag_of_named),
    BeforeValidator(without_hosted(*_NAMED_TYPES, default="function")),
]


class ResponsesAllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: List[_ToolNamed] = Field(min_length=1, max_length=chat.MAX_TOOLS)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the functions of the tools that are served."""
        return tuple(tool.function for tool in self.tools if isinstance(tool, NamedTool))


def _tool_choice(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            invalid(f"must be 'auto', 'none', 'required' or an object, not {quoted(value)}")
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        invalid(f"must be a string or an object with a type, not {kind_of(value)}")
    if kind in ("auto", "any", "none", "required", "tool"):  # a form of Anthropic's API
        invalid("must be 'auto', 'none', 'required', or an object that names a tool and its type")
    if kind not in (*_NAMED_TYPES, "allowed_tools"):
        reject_demanded(kind)
    choice = ResponsesAllowedTools if kind == "allowed_tools" else NamedTool
    return choice.model_validate(value, context=info.context)


def _input(value: Any, info: ValidationInfo) -> Any:
    """Return the input as a list of items, without those that have no text for the model."""
    if not isinstance(value, str | list):
        invalid(f"must be a string or a list of items, not {kind_of(value)}")
    if not value:
        invalid("may not be empty")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        invalid(f"may have {MAX_TEXT} characters at most, not {len(value)}")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    ignored: IgnoredFields | None = info.context
    if ignored is None:
        return value  # unknown fields are rejected, so `_supported_item` rejects such items, too
    items = []
    for item in value:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind in _ITEMS_OF_HOSTED:
            ignored.add((f"input.{kind}",))
        else:
            items.append(item)
    return items


def _include(value: Any, info: ValidationInfo) -> Any:
    """Return the included fields, without the fields that only hosted tools have."""
    if not isinstance(value, list):
        invalid(f"must be a list, not {kind_of(value)}")
    ignored: IgnoredFields | None = info.context
    included = []
    for name in value:
        if name in (LOGPROBS, ENCRYPTED_REASONING):
            included.append(name)
        elif name in INCLUDES_OF_HOSTED and ignored is not None:
            ignored.add((f"include.{name}",))
        else:
            unsupported(f"of {quoted(name)} is not supported; {LOGPROBS!r} is")
    return included


ChoiceSent: TypeAlias = Literal["auto", "none", "required"] | NamedTool | ResponsesAllowedTools
Items = Annotated[List[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
InputSent: TypeAlias = Annotated[LongText, Field(min_length=1)] | Items
Included = Annotated[
    List[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
    Field(max_length=MAX_INCLUDED),
]


class ResponseRequest(SamplingFields):
    """A request for a response; valid for any model."""

    # Unlike other endpoints, this one accepts only one value of `prompt_cache_options`, and `store`
    # has an effect.
    hints: ClassVar = frozenset({"prompt_cache_retention"})
    no_ops: ClassVar = {name: values for name, values in NO_OPS.items() if name != "store"} | {
        "background": (False,),
        "truncation": ("disabled",),
        "skip_special_tokens": (True,),
        "prompt_cache_options": ({"mode": "implicit"},),
        **rejected_fields.neutral(rejected_fields.OF_RESPONSES),
    }
    unsupported: ClassVar = {**SamplingFields.unsupported, **rejected_fields.OF_RESPONSES}

    input: Annotated[Items, BeforeValidator(_input, json_schema_input_type=InputSent)]
    instructions: str | None = Field(None, max_length=MAX_INSTRUCTIONS)
    previous_response_id: Id | None = None
    store: bool = True
    tools: Tools = Field(default_factory=list)
    tool_choice: Annotated[ChoiceSent, BeforeValidator(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    # no effect: it limits built-in tools, and there are none
    max_tool_calls: int | None = Field(None, ge=1)
    max_output_tokens: MaxTokens = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Annotated[Included, BeforeValidator(_include)] = Field(default_factory=list)
    reasoning: Reasoning = Reasoning()
    text: TextConfig = Field(default_factory=TextConfig)

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponseRequest:
        if self.n != 1:
            unsupported("is not supported, except as 1; leave it out", field="n")
        if self.stream_options.continuous_usage_stats:
            unsupported(
                "is not supported, except as false; leave it out",
                field="stream_options.continuous_usage_stats",
            )
        single_value({"max_output_tokens": self.max_output_tokens, "max_tokens": self.max_tokens})
        if (name := first_repeated(tool.name for tool in self.served_tools)) is not None:
            invalid(f"names the function {name!r} twice", field="tools")
        return self

    @functools.cached_property
    def served_tools(self) -> tuple[ServedTool, ...]:
        """The functions that the model sees for `tools`."""
        return tuple(served_tools(self.tools))

    @property
    def output_tokens(self) -> int | None:
        """The maximum number of tokens to generate, also from `max_tokens`.

        None: as many as the context allows.
        """
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives per token. None: no log-probabilities at all."""
        if self.top_logprobs:
            return self.top_logprobs
        return 0 if LOGPROBS in self.include else None

    @property
    def output_format(self) -> OutputFormat | None:
        """The format that the output must follow. None: any text."""
        wanted = self.text.format
        if wanted.type == "text":
            return None
        return OutputFormat(
            json_schema=schema_text(wanted.schema_ if isinstance(wanted, JsonSchemaFormat) else {})
        )

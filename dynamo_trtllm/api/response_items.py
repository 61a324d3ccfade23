"""The input items of `POST /v1/responses`: messages, reasoning, function calls, their results, references.

Items that an answer held come back as they were, so every field an answer has is taken here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from dynamo_trtllm.api.chat import Arguments
from dynamo_trtllm.api.request_model import (
    MAX_ITEMS,
    Id,
    Label,
    List,
    LongText,
    RequestModel,
    invalid,
    kind_of,
    shown,
    unsupported,
)

Status = Literal["in_progress", "completed", "incomplete"]

_TEXT_PARTS = ("input_text", "output_text")
_PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})
_TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference")


def texts(value: Any) -> Any:
    """A string or a list of text parts, as a list of strings."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        invalid(f"must be a string or a list of parts, not {kind_of(value)}")
    if len(value) > MAX_ITEMS:
        invalid(f"may hold {MAX_ITEMS} parts at most, not {len(value)}")
    return [_text(part, index) for index, part in enumerate(value)]


def _text(part: Any, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        invalid(f'must hold parts of the form {{"type": "input_text", "text": "…"}}; the one at index {index} is not')
    if part["type"] not in _TEXT_PARTS:
        unsupported(f"holds a part of type {shown(part['type'])} at index {index}; only text is supported")
    for name in part.keys() - _PART_FIELDS:
        unsupported(f"holds a part with the field {shown(name)} at index {index}, which is not supported; leave it out")
    if part.get("annotations"):
        unsupported(f"holds a part with annotations at index {index}, which are not supported; leave them out")
    text = part.get("text")
    if not isinstance(text, str):
        invalid(f"must hold parts with text; the one at index {index} has {kind_of(text)}")
    return text


class Part(RequestModel):
    """A text part as it may be sent."""

    hints: ClassVar = _PART_FIELDS - {"type", "text", "annotations"}
    no_ops: ClassVar = {"annotations": ([],)}

    type: Literal["input_text", "output_text"]
    text: LongText


_Parts = Annotated[List[Part], Field(max_length=MAX_ITEMS)]
Texts = Annotated[
    List[LongText], Field(max_length=MAX_ITEMS), BeforeValidator(texts, json_schema_input_type=LongText | _Parts)
]


class MessageItem(RequestModel):
    """Short (role and content) and full form, of input and of an earlier answer."""

    hints: ClassVar = frozenset({"status", "phase"})

    type: Literal["message"] = "message"
    id: Label | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts


class SummaryText(RequestModel):
    type: Literal["summary_text"]
    text: LongText


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: LongText


class ReasoningItem(RequestModel):
    refused: ClassVar = frozenset({"encrypted_content"})

    type: Literal["reasoning"]
    id: Label | None = None
    summary: List[SummaryText] = Field(default_factory=list, max_length=MAX_ITEMS)
    content: List[ReasoningText] = Field(default_factory=list, max_length=MAX_ITEMS)
    status: Status | None = None


class FunctionCallItem(RequestModel):
    hints: ClassVar = frozenset({"created_by"})
    no_ops: ClassVar = {"async": (False,), "caller": ({"type": "direct"},)}
    refused: ClassVar = frozenset({"namespace"})

    type: Literal["function_call"]
    id: Label | None = None
    call_id: Id
    name: Id
    arguments: Arguments
    status: Status | None = None


class FunctionOutputItem(RequestModel):
    hints: ClassVar = frozenset({"created_by", "name"})
    no_ops: ClassVar = {"caller": ({"type": "direct"},)}
    refused: ClassVar = frozenset({"namespace"})

    type: Literal["function_call_output"]
    id: Label | None = None
    call_id: Id
    output: Texts
    status: Status | None = None


class ItemReference(RequestModel):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


def _typed(value: Any) -> Any:
    """Refuses what is no item of ours by its type."""
    if not isinstance(value, dict):
        invalid(f"must be an object, not {kind_of(value)}")
    kind = _kind(value)
    if not isinstance(kind, str):
        invalid("must be a string", field="type")
    if kind not in _TYPES:
        unsupported(f"{shown(kind)} is not supported; the types of items taken are {', '.join(_TYPES)}", field="type")
    return value


def _kind(value: Any) -> Any:
    if value.get("type") is not None:
        return value["type"]
    return "item_reference" if "id" in value and "role" not in value else "message"


def _tag(value: Any) -> str:
    return f"<{_kind(value)}>"


Item = (
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
)
InputItem = Annotated[Item, Discriminator(_tag), BeforeValidator(_typed)]

"""Define custom tools, whose input is a text. The model sees a function with one string."""

from __future__ import annotations

from typing import Literal

from dynamo_trtllm.frontend.api.request_model import LongText, RequestModel


class AnyText(RequestModel):
    type: Literal["text"] = "text"


class Grammar(RequestModel):
    """The grammar of an input. The prompt contains it, but the model's output is not checked."""

    syntax: Literal["lark", "regex"]
    definition: LongText


def described(description: str, grammar: Grammar | None) -> str:
    """Return the description that the model sees, with the grammar of the input."""
    if grammar is None:
        return description
    rule = f"The input follows this {grammar.syntax} grammar:\n{grammar.definition}"
    return f"{description}\n\n{rule}".strip()

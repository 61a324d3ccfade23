"""Define the request of `POST /v1/completions`: plain prompts, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from dynamo_trtllm.frontend.api import rejected_fields
from dynamo_trtllm.frontend.api.request_model import (
    MAX_VALUES,
    List,
    LongText,
    invalid,
    kind_of,
    quoted,
    single_value,
    unsupported,
)
from dynamo_trtllm.frontend.api.sampling import MAX_CHOICES, NO_OPS, CompletionFields, TokenId

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts as a list.

    `value` is a string, a list of token ids, or a list of either.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        invalid(f"must be a string, a list of token ids, or a list of them, not {kind_of(value)}")
    if not value:
        invalid("is empty; send at least one token")
    # A list of token ids is one prompt.
    if not isinstance(value[0], str | list):
        return [_checked_ids(value, "")]
    if len(value) > MAX_CHOICES:
        invalid(f"may hold {MAX_CHOICES} prompts at most, not {len(value)}")
    return [
        prompt if isinstance(prompt, str) else _checked_ids(prompt, f"[{index}]")
        for index, prompt in enumerate(value)
    ]


def _checked_ids(value: Any, where: str) -> list[int]:
    """Return the value if it is a list of token ids, and reject it otherwise.

    `where` is the place of the value in the field, for errors.
    """
    if not isinstance(value, list):
        invalid(f"must hold strings or lists of token ids; {kind_of(value)} at {where} is neither")
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item < 1 << 32:
            invalid(
                f"must be a list of token ids; {quoted(item)} at {where}[{index}] is not a token id"
            )
    return value


# `PromptSent` is what clients may send, and `Prompts` what `_prompts` makes of it.
_Text = Annotated[LongText, Field(min_length=1)]
_Ids = Annotated[List[TokenId], Field(min_length=1, max_length=MAX_VALUES)]
PromptSent: TypeAlias = (
    _Text | _Ids | Annotated[List[_Text | _Ids], Field(min_length=1, max_length=MAX_CHOICES)]
)
Prompts = Annotated[
    List[LongText | Annotated[List[int], Field(max_length=MAX_VALUES)]],
    Field(max_length=MAX_CHOICES),
]


class CompletionRequest(CompletionFields):
    """A text completion request; valid for any model."""

    no_ops: ClassVar = NO_OPS | {
        "add_special_tokens": (True,),
        **rejected_fields.neutral(rejected_fields.OF_TEXT_COMPLETIONS),
    }
    unsupported: ClassVar = {
        **CompletionFields.unsupported,
        **rejected_fields.OF_TEXT_COMPLETIONS,
    }

    prompt: Annotated[Prompts, BeforeValidator(_prompts, json_schema_input_type=PromptSent)]
    max_tokens: int | None = Field(None, ge=0)
    # A field of chat requests. Some load generators send both names to both endpoints.
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        if self.candidates < self.n:
            invalid(f"is {self.candidates} and less than n, {self.n}", field="best_of")
        if self.stream and self.candidates > self.n:
            unsupported(
                "is not supported with stream unless it equals n; set stream to false", "best_of"
            )
        length = single_value(
            {"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens}
        )
        if length == 0 and not self.echo:
            field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            invalid("is 0, which is only allowed with echo", field=field)
        if self.num_choices > MAX_CHOICES:
            field = "best_of" if self.best_of else "n"
            text = (
                f"times the number of prompts is {self.num_choices} choices; at most {MAX_CHOICES}"
                " are allowed"
            )
            invalid(text, field=field)
        return self

    @property
    def output_tokens(self) -> int | None:
        """The maximum number of tokens to generate. None: DEFAULT_MAX_TOKENS."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def candidates(self) -> int:
        """The number of choices that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * self.candidates

"""`POST /v1/completions`: one plain prompt, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from dynamo_trtllm.openai.sampling import NO_OPS, SamplingFields
from dynamo_trtllm.openai.wire import invalid, kind_of, unsupported

DEFAULT_MAX_TOKENS = 16  # the API's own


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            unsupported("as a list of prompts is not supported; send one request per prompt")
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        invalid(f"must be a string or a list of token ids, not {kind_of(value)}")
    for index, item in enumerate(value):
        if type(item) is not int or item < 0:
            invalid(f"must be a list of token ids; {item!r} at index {index} is none")
    return value


class CompletionRequest(SamplingFields):
    """A text completion request; valid for any model."""

    no_ops: ClassVar = NO_OPS | {"best_of": (1,), "echo": (False,), "suffix": ("",), "add_special_tokens": (True,)}

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    logprobs: int | None = Field(None, ge=0, le=5)

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        self.check_stream_options()
        return self

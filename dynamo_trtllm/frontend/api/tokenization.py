"""Define the requests of `POST /tokenize` and `POST /detokenize`. Their names are vLLM's."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from dynamo_trtllm.frontend.api.chat import ChatMessage, ChatRequest
from dynamo_trtllm.frontend.api.request_model import (
    MAX_ITEMS,
    MAX_VALUES,
    Id,
    List,
    LongText,
    RequestModel,
    invalid,
    unsupported,
)
from dynamo_trtllm.frontend.api.sampling import TokenId

# Fields that chat requests lack. `text` is not reported as the format of an answer here.
_OWN = ("prompt", "add_special_tokens", "add_generation_prompt", "text")


class TokenizeRequest(ChatRequest):
    """The prompt of a text completion, or a chat request.

    Fields of a chat request that do not change its prompt have no effect.
    """

    no_ops: ClassVar = {
        name: values for name, values in ChatRequest.no_ops.items() if name not in _OWN
    }
    unsupported: ClassVar = {
        name: reason for name, reason in ChatRequest.unsupported.items() if name not in _OWN
    }

    prompt: LongText | None = None
    messages: List[ChatMessage] = Field(default_factory=list, max_length=MAX_ITEMS)
    add_special_tokens: bool | None = None  # default: true with `prompt`, false with `messages`
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_prompt(self) -> TokenizeRequest:
        if self.prompt is None and not self.messages:
            invalid("is required, or messages", field="prompt")
        if self.prompt is not None and self.messages:
            invalid("cannot be combined with messages; send one of them", field="prompt")
        if self.messages and self.add_special_tokens:
            reason = "is only supported with prompt: the chat format has its own; leave it out"
            unsupported(reason, field="add_special_tokens")
        return self


class DetokenizeRequest(RequestModel):
    """Token ids whose text the client wants."""

    model: Id
    tokens: List[TokenId] = Field(max_length=MAX_VALUES)

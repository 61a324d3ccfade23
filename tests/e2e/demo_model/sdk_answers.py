"""Answers as the OpenAI SDK gives them, each validated by the SDK's own types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import openai
import pydantic
from openai.types.chat import ChatCompletion, ChatCompletionChunk

Kind = TypeVar("Kind", bound=pydantic.BaseModel)


def checked(value: Kind) -> Kind:
    """The SDK builds its objects without looking; this looks."""
    type(value).model_validate(value.to_dict(mode="python"), strict=True)  # type: ignore[attr-defined]
    return value


def content(chunks: Iterable[ChatCompletionChunk], index: int = 0) -> str:
    choices = (choice for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(choice.delta.content or "" for choice in choices)


def streamed(sdk: openai.OpenAI, **asked: Any) -> list[ChatCompletionChunk]:
    with sdk.chat.completions.create(**asked, stream=True) as stream:
        return [checked(chunk) for chunk in stream]


def whole(sdk: openai.OpenAI, **asked: Any) -> ChatCompletion:
    answer = checked(sdk.chat.completions.create(**asked))
    assert isinstance(answer, ChatCompletion)
    return answer


def at_once(*asks: Callable[[], Any]) -> list[Any]:
    """The answers to requests that need not wait for each other: one step of the model serves them
    all.
    """
    with ThreadPoolExecutor(len(asks)) as pool:
        return [asked.result() for asked in [pool.submit(ask) for ask in asks]]

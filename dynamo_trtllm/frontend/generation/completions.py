"""Encode deltas as `text_completion` events, and aggregate them into a `text_completion` object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from dynamo_trtllm.api.common import Stats
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.api_adapter import PreparedRequest
from dynamo_trtllm.frontend.generation.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.frontend.generation.events import (
    PLACEHOLDER,
    SseEnvelope,
    event,
    finite,
    split_at_placeholder,
    whole_body,
)
from dynamo_trtllm.messages import TokenLogprob, token_ids
from dynamo_trtllm.tokenization.base import Renderer


class TextSseEncoder:
    """An encoder of `text_completion` events."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._envelope = SseEnvelope("text_completion", prepared.meta, include_usage=prepared.body.include_usage)
        self._choices = [
            _TextChoice(index, self._envelope, echo, prepared.renderer) for index, echo in enumerate(_echoes(prepared))
        ]

    def start(self) -> bytes:
        return b"".join(choice.start() for choice in self._choices)

    def delta(self, delta: ChoiceDelta) -> bytes:
        return self._choices[delta.index].delta(delta)

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        return self._envelope.finish(usage, stats)

    def error(self, error: DynamoError) -> bytes:
        return self._envelope.error(error)


class _TextChoice:
    def __init__(self, index: int, envelope: SseEnvelope, echo: str, renderer: Renderer) -> None:
        self._index = index
        self._envelope = envelope
        self._echo = echo
        self._renderer = renderer
        self._offset = 0  # characters of the tokens whose log-probabilities were sent
        self._around_text = split_at_placeholder(self._chunk(PLACEHOLDER))

    def start(self) -> bytes:
        return event(self._chunk(self._echo)) if self._echo else b""

    def delta(self, delta: ChoiceDelta) -> bytes:
        data = self._text(delta)
        return data if delta.finish is None else data + event(self._chunk("", finish=delta.finish))

    def _text(self, delta: ChoiceDelta) -> bytes:
        if delta.logprobs:
            logprobs, self._offset = _text_logprobs(delta.logprobs, self._renderer, self._offset)
            return event(self._chunk(delta.content, logprobs=logprobs))
        if delta.content:
            before, after = self._around_text
            return before + orjson.dumps(delta.content) + after
        return b""

    def _chunk(self, text: str, *, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return self._envelope.wrap({"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish})


class TextAggregator:
    """Aggregate deltas into a `text_completion` object."""

    def __init__(self, prepared: PreparedRequest[Any]) -> None:
        self._meta = prepared.meta
        self._choices = [
            _TextChoiceAggregate(index, echo, prepared.renderer) for index, echo in enumerate(_echoes(prepared))
        ]

    def push(self, delta: ChoiceDelta) -> None:
        self._choices[delta.index].push(delta)

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        return whole_body("text_completion", self._meta, [choice.body() for choice in self._choices], usage, stats)


class _TextChoiceAggregate:
    def __init__(self, index: int, echo: str, renderer: Renderer) -> None:
        self._index = index
        self._renderer = renderer
        self._text = [echo]
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None

    def push(self, delta: ChoiceDelta) -> None:
        self._text.append(delta.content)
        self._logprobs.extend(delta.logprobs)
        self._finish = delta.finish

    def body(self) -> dict[str, Any]:
        logprobs = _text_logprobs(self._logprobs, self._renderer, 0)[0] if self._logprobs else None
        return {"index": self._index, "text": "".join(self._text), "logprobs": logprobs, "finish_reason": self._finish}


def _echoes(prepared: PreparedRequest[Any]) -> list[str]:
    """Return the text with which each choice of the response begins; "" without `echo`."""
    plan = prepared.plan
    return [choice_request.echo for choice_request in plan.choices[:: plan.candidates] for _ in range(plan.keep)]


def _text_logprobs(logprobs: Sequence[TokenLogprob], renderer: Renderer, offset: int) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` object and the offset after its tokens, in characters from the start of the response."""
    tokens, offsets, top = [], [], []
    for each in logprobs:
        text = renderer.decode(token_ids((each.token_id,)))
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        top.append({renderer.decode(token_ids((token_id,))): finite(logprob) for token_id, logprob in each.top})
    values = [finite(each.logprob) for each in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}, offset

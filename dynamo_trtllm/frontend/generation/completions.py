"""Adapt `/v1/chat/completions` and `/v1/completions`: encode deltas as events, or aggregate them into a body.

Each engine step gives one event. The constant part of a choice's events is built once; per event only text is encoded.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

import orjson

from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import CompletionRequest
from dynamo_trtllm.api.nvext import Extras
from dynamo_trtllm.api.response_schemas import ResponseMeta
from dynamo_trtllm.api.sampling import SamplingFields
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta, Usage
from dynamo_trtllm.frontend.generation.logprobs import chat_logprobs, prompt_logprobs, text_logprobs
from dynamo_trtllm.frontend.generation.preprocess import B, ChoiceRequest, GenerationPlan, prepare_chat, prepare_text
from dynamo_trtllm.http_server.errors import to_response
from dynamo_trtllm.messages import TokenLogprob
from dynamo_trtllm.tokenization.base import Renderer, ServedModel, ToolCallDelta

DONE = b"data: [DONE]\n\n"
CHAT_COMPLETION = "chat.completion"
PLACEHOLDER = "\x00"  # \u0000 in JSON, which no other value contains
_END = b"}\n\n"  # of an event; JSON has no line breaks, so it occurs nowhere else
_NO_USAGE = b'"usage":null' + _END
_Wrap: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class CompletionSseEncoder:
    """An encoder of the events of chat and text completions. Pure: it returns bytes and sends nothing."""

    def __init__(
        self, kind: str, choice: type[_TextChoice], meta: ResponseMeta, body: SamplingFields, plan: GenerationPlan
    ) -> None:
        self._base = _base(kind, meta)
        self._include_usage = body.include_usage
        returned = _returned(plan)
        self._choices = [choice(at, first, self._wrap, plan) for at, first in enumerate(returned)]
        # Tokens of each prompt and of each output so far, if every event has them, as in vLLM.
        self._counts = [[len(each.request.token_ids), 0] for each in returned] if body.continuous_usage else None

    def start(self) -> bytes:
        """Return the events before the first delta. Called once, right before it."""
        return b"".join(self._counted(choice.start(), index, 0) for index, choice in enumerate(self._choices))

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of one choice's delta, b"" for an empty delta. `delta.finish` ends the choice."""
        data = self._choices[delta.index].delta(delta)
        return data if self._counts is None else self._counted(data, delta.index, delta.tokens)

    def finish(self, usage: Usage, extras: Extras) -> bytes:
        """Return the last events of the stream: totals if the client asked for them, and the end mark."""
        if not self._include_usage and not extras:
            return DONE
        return event(_complete(self._base, [], usage, extras)) + DONE

    def error(self, error: DynamoError) -> bytes:
        """Return the events that end a stream with an error after its headers were sent."""
        return event(to_response(error).body) + DONE

    def _counted(self, events: bytes, index: int, tokens: int) -> bytes:
        """Return the events with the usage so far in place of `"usage": null`, if the client asked for it."""
        if self._counts is None:
            return events
        counts = self._counts[index]
        counts[1] += tokens
        return events.replace(_NO_USAGE, b'"usage":' + orjson.dumps(_token_counts(*counts)) + _END)

    def _wrap(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the object around a choice."""
        chunk = self._base | {"choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk


@dataclass(slots=True)
class _Output:
    """The collected output of one choice."""

    content: list[str]
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None

    def push(self, delta: ChoiceDelta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        for call in delta.tool_calls:
            if call.name is not None:
                self.calls[call.index] = (call.name, [])
            self.calls[call.index][1].append(call.arguments)
        self.finish = delta.finish


class CompletionAggregator:
    """Aggregate deltas into the body of a chat or text completion."""

    def __init__(
        self,
        kind: str,
        choice: Callable[[_Output, Renderer], dict[str, Any]],
        meta: ResponseMeta,
        body: SamplingFields,
        plan: GenerationPlan,
    ) -> None:
        """`choice` returns the fields of a choice beside its index, finish reason and token ids."""
        self._base = _base(kind, meta)
        self._is_chat = kind == CHAT_COMPLETION
        self._choice = choice
        self._renderer = plan.renderer
        self._returned = _returned(plan)
        self._outputs = [_Output([each.echo]) for each in self._returned]

    def push(self, delta: ChoiceDelta) -> None:
        self._outputs[delta.index].push(delta)

    def body(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        """Return the response body. Called once, after each choice's delta with `finish`."""
        choices = [
            {"index": index, **self._choice(output, self._renderer), "finish_reason": output.finish}
            for index, output in enumerate(self._outputs)
        ]
        base = self._base
        for choice, requested, output in zip(choices, self._returned, self._outputs, strict=True):
            if requested.options.returns_token_ids:
                choice["token_ids"] = output.token_ids
                (base if self._is_chat else choice).update(_first_fields(requested))
            if output.prompt_logprobs:
                scored = prompt_logprobs(output.prompt_logprobs, self._renderer)
                (base if self._is_chat else choice)["prompt_logprobs"] = scored
        return _complete(base, choices, usage, extras)


def _base(kind: str, meta: ResponseMeta) -> dict[str, Any]:
    return {"id": meta.id, "object": kind, "created": meta.created, "model": meta.model}


def _complete(base: dict[str, Any], choices: list[dict[str, Any]], usage: Usage, extras: Extras) -> dict[str, Any]:
    body = base | {
        "choices": choices,
        "usage": _token_counts(usage.prompt_tokens, usage.completion_tokens)
        | {
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
    }
    return body | extras


def _token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _returned(plan: GenerationPlan) -> list[ChoiceRequest]:
    """Return a request for each choice of the response. The candidates of a prompt differ only in their seeds."""
    return [choice_request for choice_request in plan.choices[:: plan.candidates] for _ in range(plan.keep)]


def _split_at_placeholder(value: Any) -> tuple[bytes, bytes]:
    """Return the parts of the event before and after its only `PLACEHOLDER`."""
    before, after = event(value).split(b'"\\u0000"')
    return before, after


class _TextChoice:
    """The events of one choice."""

    _key = "text"  # the field with the delta
    _last: Any = ""  # the delta of the last event

    def __init__(self, index: int, choice_request: ChoiceRequest, wrap: _Wrap, plan: GenerationPlan) -> None:
        self._index = index
        self._wrap = wrap
        self._echo = choice_request.echo
        self._renderer = plan.renderer
        self._first = _first_fields(choice_request)
        self._offset = 0  # characters of the tokens whose log-probabilities were sent
        self._around_delta = _split_at_placeholder(self._chunk(PLACEHOLDER))

    def start(self) -> bytes:
        first, self._first = self._first, {}
        return event(self._chunk(self._echo, **first)) if self._echo or first else b""

    def delta(self, delta: ChoiceDelta) -> bytes:
        data = self._delta(delta)
        return data if delta.finish is None else data + event(self._chunk(self._last, finish=delta.finish))

    def _delta(self, delta: ChoiceDelta) -> bytes:
        if delta.logprobs or delta.token_ids:
            logprobs = None
            if delta.logprobs:
                logprobs, self._offset = text_logprobs(delta.logprobs, self._renderer, self._offset)
            return event(self._chunk(delta.content, logprobs=logprobs, **_token_ids(delta)))
        if delta.content:
            before, after = self._around_delta
            return before + orjson.dumps(delta.content) + after
        return b""

    def _chunk(self, delta: Any, *, finish: str | None = None, logprobs: Any = None, **more: Any) -> dict[str, Any]:
        choice = {"index": self._index, self._key: delta, "logprobs": logprobs, "finish_reason": finish}
        return self._wrap(choice | more)


class _ChatChoice(_TextChoice):
    _key, _last = "delta", {}

    def __init__(self, index: int, choice_request: ChoiceRequest, wrap: _Wrap, plan: GenerationPlan) -> None:
        super().__init__(index, choice_request, wrap, plan)
        before, after = self._around_delta
        self._before_content, self._before_reasoning = before + b'{"content":', before + b'{"reasoning_content":'
        self._after_text = b"}" + after

    def start(self) -> bytes:
        first, self._first = self._first, {}
        return event(self._chunk({"role": "assistant", "content": "", "refusal": None}) | first)

    def delta(self, delta: ChoiceDelta) -> bytes:
        if delta.content and not (
            delta.finish or delta.reasoning or delta.tool_calls or delta.logprobs or delta.token_ids
        ):  # most deltas
            return self._before_content + orjson.dumps(delta.content) + self._after_text
        return super().delta(delta)

    def _delta(self, delta: ChoiceDelta) -> bytes:
        if delta.logprobs or delta.token_ids:
            logprobs = chat_logprobs(delta.logprobs, self._renderer) if delta.logprobs else None
            return event(self._chunk(_chat_delta(delta), logprobs=logprobs, **_token_ids(delta)))
        if delta.tool_calls or (delta.content and delta.reasoning):
            before, after = self._around_delta
            return before + orjson.dumps(_chat_delta(delta)) + after
        if delta.content:
            return self._before_content + orjson.dumps(delta.content) + self._after_text
        if delta.reasoning:
            text = orjson.dumps(delta.reasoning)
            return self._before_reasoning + text + b',"reasoning":' + text + self._after_text
        return b""


def _first_fields(choice_request: ChoiceRequest) -> dict[str, Any]:
    """Return the fields of only the first event of a choice: in chat around the choice, else in it, as in vLLM."""
    ids = choice_request.request.token_ids
    return {"prompt_token_ids": ids.tolist()} if choice_request.options.returns_token_ids else {}


def _token_ids(delta: ChoiceDelta) -> dict[str, Any]:
    return {"token_ids": list(delta.token_ids)} if delta.token_ids else {}


def _chat_delta(delta: ChoiceDelta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields |= _reasoning(delta.reasoning)
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
    return fields


def _reasoning(text: str) -> dict[str, str]:
    """Return the reasoning under the name that clients know from Dynamo and DeepSeek, and under vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": tool_call_id(), "type": "function", "function": function}


def _chat_choice(output: _Output, renderer: Renderer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(output.content), "refusal": None}
    if reasoning := "".join(output.reasoning):
        message |= _reasoning(reasoning)
    if output.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": tool_call_id(), "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
            for name, arguments in output.calls.values()
        ]
    return {"message": message, "logprobs": chat_logprobs(output.logprobs, renderer) if output.logprobs else None}


def _text_choice(output: _Output, renderer: Renderer) -> dict[str, Any]:
    logprobs = text_logprobs(output.logprobs, renderer, 0)[0] if output.logprobs else None
    return {"text": "".join(output.content), "logprobs": logprobs}


def tool_call_id() -> str:
    """Return a new id. It is unique, because clients send it back in later turns together with other ids."""
    return f"call-{secrets.token_hex(8)}"


@dataclass(slots=True, kw_only=True)
class CompletionAdapter(Generic[B]):
    """The adapter of an endpoint for completions, which stores nothing."""

    endpoint: str
    id_prefix: str
    body: type[B]
    prompt: frozenset[str]
    prepare: Callable[[B, ServedModel, str, float], GenerationPlan]
    encoder: Callable[[ResponseMeta, B, GenerationPlan], CompletionSseEncoder]
    aggregator: Callable[[ResponseMeta, B, GenerationPlan], CompletionAggregator]

    async def resolve(
        self, body: B, served: ServedModel, request_id: str, deadline: float
    ) -> tuple[Callable[[], GenerationPlan], int]:
        return functools.partial(self.prepare, body, served, request_id, deadline), 0

    async def on_complete(self, answer: object) -> None:
        pass


CHAT = CompletionAdapter(
    endpoint="chat_completions",
    id_prefix="chatcmpl-",
    body=ChatRequest,
    prompt=frozenset({"messages", "tools"}),
    prepare=prepare_chat,
    encoder=functools.partial(CompletionSseEncoder, "chat.completion.chunk", _ChatChoice),
    aggregator=functools.partial(CompletionAggregator, CHAT_COMPLETION, _chat_choice),
)
TEXT = CompletionAdapter(
    endpoint="completions",
    id_prefix="cmpl-",
    body=CompletionRequest,
    prompt=frozenset({"prompt"}),
    prepare=prepare_text,
    encoder=functools.partial(CompletionSseEncoder, "text_completion", _TextChoice),
    aggregator=functools.partial(CompletionAggregator, "text_completion", _text_choice),
)

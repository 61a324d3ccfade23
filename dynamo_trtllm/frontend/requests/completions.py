"""Adapt `/v1/chat/completions` and `/v1/completions`: encode or aggregate deltas.

The output of an engine step is one event for a choice. It is several events if clients would read
the fields of one event in another order than the model wrote them. The constant part of the events
is built once for a choice, and only text is encoded for each event.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

import orjson

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.frontend.api.nvext import Extras
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.api.sampling import SamplingFields
from dynamo_trtllm.frontend.requests.choice import ChoiceDelta, Usage
from dynamo_trtllm.frontend.requests.logprobs import (
    TextOffsets,
    chat_logprobs,
    prompt_logprobs,
    prompt_offsets,
    text_logprobs,
)
from dynamo_trtllm.frontend.requests.preprocess import (
    B,
    ChoiceRequest,
    GenerationPlan,
    prepare_chat,
    prepare_text,
)
from dynamo_trtllm.frontend.tokenization.output import Channel, Delta
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.frontend.tokenization.text_input import input_of
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.http_status import to_response
from dynamo_trtllm.protocol.messages import GenerateRequest, TokenLogprob

DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\x00"  # \u0000 in JSON, which no other value contains
# The end of an event. JSON has no line breaks, so no other part of the event is equal to it.
_END = b"}\n\n"
_NO_USAGE = b'"usage":null' + _END
_CALL = Channel.CALL
_REASONING = Channel.REASONING
# The order in which clients read the fields of an event.
_RANKS = {
    Channel.REASONING: 0,
    Channel.COMMENTARY: 1,
    Channel.FINAL: 1,
    Channel.CONTENT: 1,
    Channel.CALL: 2,
}


@dataclass(slots=True)
class _RunningUsage:
    """The tokens of a choice so far."""

    prompt_tokens: int
    completion_tokens: int = 0


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class CompletionBuilder:
    """The response to one chat or text completion, without I/O.

    For a stream, it encodes events. Otherwise, it collects the deltas of the body.
    """

    def __init__(
        self,
        choice_type: type[_TextChoice],
        meta: ResponseMeta,
        body: SamplingFields,
        plan: GenerationPlan,
    ) -> None:
        kind = choice_type.event_kind if body.stream else choice_type.kind
        self._base = {"id": meta.id, "object": kind, "created": meta.created, "model": meta.model}
        self._include_usage = body.stream_options.include_usage
        self._choice_type = choice_type
        # One request for each choice of the response. The candidates of a prompt differ only in
        # their seeds, so the first one stands for all that are returned.
        self._returned: list[ChoiceRequest] = []
        for choice_request in plan.one_choice_per_prompt:
            self._returned += [choice_request] * plan.keep
        # The usage of each choice, if every event of a stream has it, as in vLLM.
        self._usages: list[_RunningUsage] | None = None
        if body.stream_options.continuous_usage_stats:
            self._usages = [
                _RunningUsage(len(choice_request.request.token_ids))
                for choice_request in self._returned
            ]

    @functools.cached_property
    def _choices(self) -> list[_TextChoice]:
        """The choices, which are created when the first one begins.

        128 choices take 80 KB, and a thousand requests may wait in the queue.
        """
        end = {"usage": None} if self._include_usage else {}
        return [
            self._choice_type(index, choice_request, self._base, end)
            for index, choice_request in enumerate(self._returned)
        ]

    # --- complete ---------------------------------------------------------------------------------

    def push(self, delta: ChoiceDelta) -> None:
        self._choices[delta.index].push(delta)

    def body(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        """Return the response body. Called once, after each choice's delta with `finish`."""
        return self._complete([choice.body() for choice in self._choices], usage, extras)

    # --- streamed ---------------------------------------------------------------------------------

    def start(self) -> bytes:
        """Return the events before the first delta. Called once, right before it."""
        starts = [choice.start() for choice in self._choices]
        if self._usages is not None:
            starts = [
                _with_usage(events, usage)
                for events, usage in zip(starts, self._usages, strict=True)
            ]
        return b"".join(starts)

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of one choice's delta, b"" for an empty delta.

        `delta.finish` ends the choice.
        """
        events = self._choices[delta.index].delta(delta)
        if self._usages is None:
            return events
        usage = self._usages[delta.index]
        usage.completion_tokens += delta.tokens
        return _with_usage(events, usage)

    def finish(self, usage: Usage, extras: Extras) -> bytes:
        """Return the last events: totals if the client asked for them, and the end mark."""
        if not self._include_usage and not extras:
            return DONE
        return event(self._complete([], usage, extras)) + DONE

    def error(self, error: DynamoError) -> bytes:
        """Return the events that end a stream with an error after its headers were sent."""
        return event(to_response(error, openai_error).body) + DONE

    def _complete(
        self, choices: list[dict[str, Any]], usage: Usage, extras: Extras
    ) -> dict[str, Any]:
        details = {
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        }
        counts = _token_counts(usage.prompt_tokens, usage.completion_tokens)
        return {**self._base, "choices": choices, "usage": counts | details, **extras}


def _with_usage(events: bytes, usage: _RunningUsage) -> bytes:
    """Return the events of a choice with its usage so far in place of `"usage": null`."""
    counts = _token_counts(usage.prompt_tokens, usage.completion_tokens)
    return events.replace(_NO_USAGE, b'"usage":' + orjson.dumps(counts) + _END)


def _token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(slots=True)
class _CollectedCall:
    """A tool call of a choice that is not streamed."""

    name: str
    arguments: list[str] = field(default_factory=list)


class _TextChoice:
    """One choice of a completion: its events, or the output that is collected from its deltas.

    Args:
        base: the fields of the response before its choices.
        end: the fields of an event after its choice.
    """

    kind = "text_completion"
    event_kind = "text_completion"
    # Where the fields of the prompt are. True: in the choice. False: in the response.
    _has_prompt = True
    _delta_field = "text"  # the field that has the delta
    _last_delta: ClassVar[Any] = ""  # the delta of the last event

    def __init__(
        self,
        index: int,
        choice_request: ChoiceRequest,
        base: dict[str, Any],
        end: Mapping[str, Any],
    ) -> None:
        self._index = index
        self._base = base
        self._end = end
        self._request = choice_request
        self._renderer = choice_request.renderer
        # Fields that only the first event has. As in vLLM, they are part of the choice in a text
        # completion, and stand beside the choices in a chat.
        self._first_fields: dict[str, Any] = {}
        if choice_request.options.returns_token_ids:
            self._first_fields["prompt_token_ids"] = choice_request.request.token_ids.tolist()
        # The output of a choice that is not streamed.
        self._content = [choice_request.echo]
        self._reasoning: list[str] = []
        self._calls: dict[int, _CollectedCall] = {}
        self._custom_tools = choice_request.options.custom_tools
        # Texts of the calls of custom tools in a stream, by index.
        self._inputs: dict[int, list[str]] = {}
        self._logprobs: list[TokenLogprob] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._finish: str | None = None

    @functools.cached_property
    def _offsets(self) -> TextOffsets:
        """The offsets of the tokens with log-probabilities. Most choices have none of these."""
        request = self._request
        in_prompt: Iterable[int] = ()
        if request.echo_logprobs is not None:
            in_prompt = prompt_offsets(request.request.token_ids, request.echo, self._renderer)
        return TextOffsets(request.make_parser(), in_prompt, request.echo)

    # --- complete ---------------------------------------------------------------------------------

    def push(self, delta: ChoiceDelta) -> None:
        for part in delta.deltas:
            self._logprobs.extend(part.logprobs)
            if part.channel is Channel.REASONING:
                self._reasoning.append(part.text)
            elif part.channel is not Channel.CALL:
                self._content.append(part.text)
            else:
                call = self._calls.setdefault(part.call_index, _CollectedCall(part.name or ""))
                call.arguments.append(part.text)
        self._token_ids.extend(delta.token_ids)
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
        self._finish = delta.finish

    def body(self) -> dict[str, Any]:
        """Return the complete choice. Called once."""
        choice = {"index": self._index, **self._output(), "finish_reason": self._finish}
        # The fields of the prompt go into the choice, or into `_base`: the fields of the response.
        prompt_fields = choice if self._has_prompt else self._base
        if self._request.options.returns_token_ids:
            choice["token_ids"] = self._token_ids
        prompt_fields.update(self._first_fields)
        if self._prompt_logprobs:
            scored_prompt = prompt_logprobs(self._prompt_logprobs, self._renderer)
            prompt_fields["prompt_logprobs"] = scored_prompt
        return choice

    def _output(self) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = text_logprobs(self._logprobs, self._renderer, self._offsets)
        return {"text": "".join(self._content), "logprobs": logprobs}

    # --- streamed ---------------------------------------------------------------------------------

    def start(self) -> bytes:
        """Return the events before the first delta. Build the constant part of other events."""
        self._around_delta = _split_at_placeholder(self._chunk(PLACEHOLDER))
        echo = self._request.echo
        if not echo and not self._first_fields:
            return b""
        return event(self._chunk(echo, **self._first_fields))

    def delta(self, delta: ChoiceDelta) -> bytes:
        data = self._delta(delta)
        if delta.finish is None:
            return data
        return data + event(self._chunk(self._last_delta, finish=delta.finish))

    def _delta(self, delta: ChoiceDelta) -> bytes:
        # Most deltas have one text, and nothing beside it.
        if len(delta.deltas) == 1 and not delta.deltas[0].logprobs and not delta.token_ids:
            before, after = self._around_delta
            return before + orjson.dumps(delta.deltas[0].text) + after
        text = "".join(part.text for part in delta.deltas)
        scored = _logprobs(delta.deltas)
        if scored or delta.token_ids:
            logprobs = None
            if scored:
                logprobs = text_logprobs(scored, self._renderer, self._offsets)
            return event(self._chunk(text, logprobs=logprobs, **_token_ids(delta)))
        if text:
            before, after = self._around_delta
            return before + orjson.dumps(text) + after
        return b""

    def _chunk(
        self, delta: Any, *, finish: str | None = None, logprobs: Any = None, **more: Any
    ) -> dict[str, Any]:
        choice = {
            "index": self._index,
            self._delta_field: delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        return {**self._base, "choices": [choice | more], **self._end}


def _split_at_placeholder(value: Any) -> tuple[bytes, bytes]:
    """Return the parts of the event before and after its only `PLACEHOLDER`."""
    before, after = event(value).split(b'"\\u0000"')
    return before, after


class _ChatChoice(_TextChoice):
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    _has_prompt = False
    _delta_field = "delta"
    _last_delta: ClassVar[Any] = {}

    def _output(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(self._content),
            "refusal": None,
        }
        if reasoning := "".join(self._reasoning):
            message |= _reasoning(reasoning)
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                self._call(call.name, "".join(call.arguments)) for call in self._calls.values()
            ]
        logprobs = None
        if self._logprobs:
            logprobs = chat_logprobs(self._logprobs, self._renderer)
        return {"message": message, "logprobs": logprobs}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        if name in self._custom_tools:
            custom = {"name": name, "input": input_of(arguments)}
            return {"id": tool_call_id(), "type": "custom", "custom": custom}
        function = {"name": name, "arguments": arguments}
        return {"id": tool_call_id(), "type": "function", "function": function}

    def start(self) -> bytes:
        self._around_delta = _split_at_placeholder(self._chunk(PLACEHOLDER))
        before, after = self._around_delta
        self._before_content = before + b'{"content":'
        self._before_reasoning = before + b'{"reasoning_content":'
        self._after_text = b"}" + after
        first = self._chunk({"role": "assistant", "content": "", "refusal": None})
        return event(first | self._first_fields)

    def delta(self, delta: ChoiceDelta) -> bytes:
        deltas = delta.deltas
        # Most deltas have one text, and nothing beside it.
        if len(deltas) == 1 and delta.finish is None and not delta.token_ids:
            (only,) = deltas
            channel = only.channel
            if only.text and channel is not _CALL and not only.logprobs:
                text = orjson.dumps(only.text)
                if channel is not _REASONING:
                    return self._before_content + text + self._after_text
                return self._before_reasoning + text + b',"reasoning":' + text + self._after_text
        return super().delta(delta)

    def _delta(self, delta: ChoiceDelta) -> bytes:
        data = b""
        ids = _token_ids(delta)
        events = _by_event(delta.deltas)
        if not events and ids:
            # Tokens without a text have an event of their own.
            events = [[]]
        for deltas in events:
            fields = self._fields(deltas)
            scored = _logprobs(deltas)
            if scored or ids:
                logprobs = chat_logprobs(scored, self._renderer) if scored else None
                data += event(self._chunk(fields, logprobs=logprobs, **ids))
                # Only the first event has the ids.
                ids = {}
            elif fields:
                before, after = self._around_delta
                data += before + orjson.dumps(fields) + after
        if delta.finish is not None:
            data += self._custom_inputs()
        return data

    def _fields(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the fields of one event.

        The inputs of custom tools are collected, and sent at the end of the choice.
        """
        if not self._custom_tools:
            return _chat_delta(deltas)
        shown = []
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.channel is not _CALL:
                shown.append(delta)
            elif delta.name in self._custom_tools:
                self._inputs[delta.call_index] = [delta.text]
                custom = {"name": delta.name, "input": ""}
                call = {"index": delta.call_index, "id": tool_call_id(), "type": "custom"}
                calls.append(call | {"custom": custom})
            elif delta.call_index in self._inputs:
                self._inputs[delta.call_index].append(delta.text)
            else:
                shown.append(delta)
        fields = _chat_delta(shown)
        if calls:
            # Clients insert a new call at its index, so an earlier call must come first.
            calls += fields.get("tool_calls", ())
            fields["tool_calls"] = sorted(calls, key=lambda call: call["index"])
        return fields

    def _custom_inputs(self) -> bytes:
        """Return the events with the inputs of custom tools."""
        data = b""
        before, after = self._around_delta
        for index, texts in self._inputs.items():
            call = {"index": index, "custom": {"input": input_of("".join(texts))}}
            data += before + orjson.dumps({"tool_calls": [call]}) + after
        self._inputs.clear()
        return data


def _token_ids(delta: ChoiceDelta) -> dict[str, Any]:
    return {"token_ids": list(delta.token_ids)} if delta.token_ids else {}


def _logprobs(deltas: Sequence[Delta]) -> Sequence[TokenLogprob]:
    if len(deltas) == 1:
        return deltas[0].logprobs
    logprobs: list[TokenLogprob] = []
    for delta in deltas:
        logprobs += delta.logprobs
    return logprobs


def _by_event(deltas: Sequence[Delta]) -> Sequence[Sequence[Delta]]:
    """Divide deltas into events. Clients read reasoning first, then content, then calls."""
    if len(deltas) == 1:
        return [deltas]
    events: list[list[Delta]] = []
    last_rank = 0
    for delta in deltas:
        rank = _RANKS[delta.channel]
        if not events or rank < last_rank:
            events.append([])
        events[-1].append(delta)
        last_rank = rank
    return events


def _chat_delta(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Return the fields of one event, whose deltas are in the order of its fields."""
    fields: dict[str, Any] = {}
    for delta in deltas:
        if delta.channel is _CALL:
            fields.setdefault("tool_calls", []).append(_tool_call(delta))
        elif delta.text:
            if delta.channel is _REASONING:
                fields |= _reasoning(delta.text)
            else:
                fields["content"] = fields.get("content", "") + delta.text
    return fields


def _reasoning(text: str) -> dict[str, str]:
    """Return the reasoning under two names: one of Dynamo and DeepSeek, and one of vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(call: Delta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.call_index, "function": {"arguments": call.text}}
    function = {"name": call.name, "arguments": call.text}
    return {
        "index": call.call_index,
        "id": tool_call_id(),
        "type": "function",
        "function": function,
    }


def tool_call_id() -> str:
    """Return a new id.

    It is unique, because clients send it back in later turns together with other ids.
    """
    return f"call-{secrets.token_hex(8)}"


@dataclass(slots=True, kw_only=True)
class CompletionAdapter(Generic[B]):
    """The adapter of an endpoint for completions, which stores nothing."""

    endpoint: str
    id_prefix: str
    body: type[B]
    prompt_fields: frozenset[str]
    prepare: Callable[[B, ServedModel, GenerateRequest], GenerationPlan]
    choice_type: type[_TextChoice]
    ping: bytes = b""

    async def resolve(
        self, body: B, served: ServedModel, call: GenerateRequest, owner: str
    ) -> tuple[Callable[[], GenerationPlan], int]:
        num_stored_chars = 0
        return functools.partial(self.prepare, body, served, call), num_stored_chars

    def builder(self, meta: ResponseMeta, body: B, plan: GenerationPlan) -> CompletionBuilder:
        return CompletionBuilder(self.choice_type, meta, body, plan)

    async def on_complete(self, builder: object, client: str) -> None:
        pass


CHAT = CompletionAdapter(
    endpoint="chat_completions",
    id_prefix="chatcmpl-",
    body=ChatRequest,
    prompt_fields=frozenset({"messages", "tools"}),
    prepare=prepare_chat,
    choice_type=_ChatChoice,
)
TEXT = CompletionAdapter(
    endpoint="completions",
    id_prefix="cmpl-",
    body=CompletionRequest,
    prompt_fields=frozenset({"prompt"}),
    prepare=prepare_text,
    choice_type=_TextChoice,
)

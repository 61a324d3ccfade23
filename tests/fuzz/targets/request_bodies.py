"""Fuzz the bodies of requests, from JSON up to the calls to workers."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import orjson

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.error_bodies import messages_error, openai_error
from dynamo_trtllm.frontend.api.messages import CountTokensRequest, MessagesRequest
from dynamo_trtllm.frontend.api.request_model import RequestModel, parse
from dynamo_trtllm.frontend.api.responses import ItemReference, ResponseRequest
from dynamo_trtllm.frontend.api.tokenization import DetokenizeRequest, TokenizeRequest
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.frontend.http import tokenization
from dynamo_trtllm.frontend.messages_api.message_builder import messages_prompt, prepare_messages
from dynamo_trtllm.frontend.requests.output_budget import check_answer_size
from dynamo_trtllm.frontend.requests.preprocess import (
    GenerationPlan,
    prepare_chat,
    prepare_conversation,
    prepare_text,
)
from dynamo_trtllm.frontend.responses_api import response_builder
from dynamo_trtllm.frontend.responses_api.items import normalized
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import DynamoError, RequestError
from dynamo_trtllm.protocol.http_status import to_response
from dynamo_trtllm.protocol.messages import GenerateRequest, decode, encode
from tests.fuzz.target import Form, Target
from tests.kit.generation_plans import CARD, WEATHER, TemplateModels

_DEADLINE = 5.0
_MAX_ERROR_CHARS = 4_200
_HI = [{"role": "user", "content": "hi"}]


@functools.cache
def _models() -> tuple[ServedModel, ...]:
    """Return a model with Harmony, and one with a chat template."""
    harmony = ServedModel(CARD, HarmonyRenderer(today=lambda: date(2026, 1, 2)))
    with tempfile.TemporaryDirectory() as folder:
        template = TemplateModels(Path(folder))(tool_call_parser="hermes")
    return harmony, template


def _check(
    model: type[RequestModel], plan: Callable[[Any, ServedModel], object], data: bytes
) -> None:
    """Parse a body, and plan its generations for two models. Errors are those of requests."""
    for unknown in (None, IgnoredFields(rejects_misspelled=True)):
        try:
            body = parse(model, data, unknown)
        except RequestError as error:
            _check_error(error)
            continue
        for served in _models():
            try:
                plan(body, served)
            except RequestError as error:
                _check_error(error)


def _check_error(error: DynamoError) -> None:
    """Check that an error can be sent in the forms of both APIs."""
    assert len(error.message) <= _MAX_ERROR_CHARS
    for form in (openai_error, messages_error):
        response = to_response(error, form, request_id="r")
        assert 400 <= response.status < 500
        orjson.dumps(response.body)


def _check_plan(plan: GenerationPlan) -> None:
    """Check that workers read the calls as they were planned."""
    assert plan.choices
    for choice in plan.choices:
        data = encode(choice.request)
        assert decode(data, GenerateRequest) == choice.request
    try:
        check_answer_size(plan)
    except RequestError as error:
        _check_error(error)


# --- the APIs ---------------------------------------------------------------------------------------


def _plan_chat(body: ChatRequest, served: ServedModel) -> None:
    _check_plan(prepare_chat(body, served, body.call("r", _DEADLINE, "session")))


def _plan_text(body: CompletionRequest, served: ServedModel) -> None:
    _check_plan(prepare_text(body, served, body.call("r", _DEADLINE, "")))


def _plan_message(body: MessagesRequest, served: ServedModel) -> None:
    _check_plan(prepare_messages(body, served, body.call("r", _DEADLINE, "")))


def _plan_response(body: ResponseRequest, served: ServedModel) -> None:
    # References to stored items are resolved before.
    items = [normalized(item) for item in body.input if not isinstance(item, ItemReference)]
    conversation = response_builder._conversation(body, items)
    options = response_builder._options(body, served.card)
    call = body.call("r", _DEADLINE, "")
    plan = prepare_conversation(conversation, options, served, call)
    _check_plan(plan)
    meta = response_builder.ResponseMeta(id="resp_" + "a" * 40, model="m", created=0)
    builder = response_builder.ResponseBuilder(
        meta, body, msgspec.structs.replace(plan, items=tuple(items)), 1 << 20
    )
    assert builder.start()


def check_chat(data: bytes) -> None:
    """Plan a request of /v1/chat/completions."""
    _check(ChatRequest, _plan_chat, data)


def check_completions(data: bytes) -> None:
    """Plan a request of /v1/completions."""
    _check(CompletionRequest, _plan_text, data)


def check_responses(data: bytes) -> None:
    """Plan a request of /v1/responses."""
    _check(ResponseRequest, _plan_response, data)


def check_messages(data: bytes) -> None:
    """Plan a request of /v1/messages, and count the tokens of one."""
    _check(MessagesRequest, _plan_message, data)
    _check(CountTokensRequest, messages_prompt, data)


def check_tokenize(data: bytes) -> None:
    """Tokenize and detokenize. The text of a prompt comes back from its tokens."""
    _check(TokenizeRequest, _tokenize, data)
    _check(DetokenizeRequest, _detokenize, data)


def _tokenize(body: TokenizeRequest, served: ServedModel) -> None:
    answer = tokenization._tokenized(body, served)
    orjson.dumps(answer)
    if body.prompt is not None and served is _models()[0]:
        ids = served.renderer.encode(body.prompt)
        assert served.renderer.decode(ids) == body.prompt


def _detokenize(body: DetokenizeRequest, served: ServedModel) -> None:
    ids = tokenization.checked_ids(body.tokens, served, "tokens")
    orjson.dumps({"prompt": served.renderer.decode(ids)})


# --- inputs to begin with ---------------------------------------------------------------------------


def _bodies(*bodies: dict[str, Any]) -> Iterator[bytes]:
    for body in bodies:
        yield json.dumps({"model": "m"} | body).encode()


def _chats() -> Iterator[bytes]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turns = [
        {"role": "system", "content": "be brief"},
        *_HI,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
    ]
    schema = {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    yield from _bodies(
        {"messages": _HI},
        {
            "messages": turns,
            "tools": [WEATHER],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
        {"messages": _HI, "tools": [WEATHER], "tool_choice": named},
        {"messages": _HI, "response_format": {"type": "json_schema", "json_schema": schema}},
        {"messages": _HI, "response_format": {"type": "json_object"}, "n": 2, "seed": 5},
        {"messages": _HI, "guided_regex": "a+", "max_tokens": 5},
        {"messages": _HI, "guided_grammar": 'root ::= "a"', "temperature": 0, "top_k": 5},
        {"messages": _HI, "structured_outputs": {"choice": ["a", "b"]}, "stop": ["x", "y"]},
        {"messages": _HI, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": 1.5}},
        {"messages": _HI, "stream": True, "stream_options": {"include_usage": True}},
        {
            "messages": _HI,
            "chat_template_kwargs": {"enable_thinking": True},
            "reasoning_effort": "low",
        },
        {"messages": _HI, "nvext": {"priority": 1}, "cache_salt": "s", "truncate_prompt_tokens": 5},
    )


def _completions() -> Iterator[bytes]:
    yield from _bodies(
        {"prompt": "hi"},
        {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 5, "echo": True, "logprobs": 1},
        {"prompt": [1, 2, 3], "prompt_logprobs": 2, "truncate_prompt_tokens": -1},
        {"prompt": [[1], [2]], "stop": "x", "seed": -1, "response_format": {"type": "json_object"}},
        {"prompt": "hi", "min_p": 0.5, "repetition_penalty": 1.1, "stop_token_ids": [5]},
    )


def _responses() -> Iterator[bytes]:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
        {
            "type": "local_shell_call",
            "call_id": "c3",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "c3", "output": "z"},
    ]
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    yield from _bodies(
        {"input": "hi"},
        {"input": items, "tools": [function, {"type": "custom", "name": "g"}], "store": False},
        {"input": "hi", "text": {"format": schema}, "reasoning": {"effort": "low"}},
        {"input": "hi", "tools": [function], "tool_choice": {"type": "function", "name": "f"}},
        {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": "hi", "tools": [{"type": "local_shell"}], "metadata": {"a": "b"}},
    )


def _messages() -> Iterator[bytes]:
    tool = {"name": "f", "input_schema": {"type": "object"}, "description": "d"}
    turns = [
        *_HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4"}]},
    ]
    yield from _bodies(
        {"messages": _HI, "max_tokens": 5},
        {"messages": turns, "max_tokens": 5, "tools": [tool], "system": "be brief"},
        {"messages": _HI, "max_tokens": 5, "tools": [tool], "tool_choice": {"type": "any"}},
        {
            "messages": _HI,
            "max_tokens": 2000,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        {"messages": _HI, "max_tokens": 5, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 5},
    )


def _texts() -> Iterator[bytes]:
    yield from _bodies(
        {"prompt": "hi é\U0001f9d1 <|end|>"},
        {"messages": _HI, "add_generation_prompt": False, "return_token_strs": True},
        {"messages": _HI, "tools": [WEATHER]},
        {"tokens": [1, 2, 200002]},
        {"tokens": []},
    )


_FILES = (
    "frontend/api/request_model.py",
    "frontend/api/sampling.py",
    "frontend/requests/preprocess.py",
    "frontend/requests/conversation.py",
)
_SHARED_WORDS = (
    *(b"model", b"m", b"messages", b"role", b"user", b"assistant", b"system", b"content", b"text"),
    *(b"type", b"name", b"tools", b"tool_choice", b"temperature", b"top_p", b"top_k", b"stop"),
    *(b"seed", b"n", b"stream", b"max_tokens", b"logprobs", b"logit_bias", b"priority", b"nvext"),
    *(b"cache_salt", b"min_tokens", b"ignore_eos", b"stop_token_ids", b"presence_penalty"),
    *(b"schema", b"properties", b"required", b"object", b"string", b"$ref", b"#/$defs/a", b"$defs"),
)
_CHAT_WORDS = (
    *(b"tool_calls", b"function", b"arguments", b"tool_call_id", b"tool", b"developer", b"auto"),
    *(b"none", b"required", b"json_schema", b"json_object", b"response_format", b"guided_regex"),
    *(
        b"guided_json",
        b"guided_grammar",
        b"guided_choice",
        b"structured_outputs",
        b"structural_tag",
    ),
    *(b"chat_template_kwargs", b"reasoning_effort", b"include_reasoning", b"top_logprobs"),
    *(b"continue_final_message", b"add_generation_prompt", b"image_url", b"refusal", b"audio"),
)


def _api_target(
    summary: str,
    check: Callable[[bytes], None],
    seeds: Callable[[], Iterator[bytes]],
    file: str,
    words: tuple[bytes, ...],
) -> Target:
    return Target(
        summary=summary,
        check=check,
        files=(file, *_FILES),
        seeds=seeds,
        form=Form.JSON,
        words=(*_SHARED_WORDS, *words),
        max_bytes=3000,
    )


TARGETS = {
    "chat": _api_target(
        "bodies of /v1/chat/completions", check_chat, _chats, "frontend/api/chat.py", _CHAT_WORDS
    ),
    "completions": _api_target(
        "bodies of /v1/completions",
        check_completions,
        _completions,
        "frontend/api/completions.py",
        (b"prompt", b"best_of", b"echo", b"suffix", b"prompt_logprobs", b"truncate_prompt_tokens"),
    ),
    "responses": _api_target(
        "bodies of /v1/responses",
        check_responses,
        _responses,
        "frontend/api/responses.py",
        (
            *(b"input", b"instructions", b"function_call", b"function_call_output", b"call_id"),
            *(b"output", b"reasoning", b"summary", b"custom_tool_call", b"local_shell_call"),
            *(
                b"item_reference",
                b"id",
                b"status",
                b"incomplete",
                b"completed",
                b"phase",
                b"action",
            ),
            *(b"allowed_tools", b"web_search", b"custom", b"grammar", b"namespace", b"input_text"),
            *(b"output_text", b"refusal", b"input_image", b"previous_response_id", b"store"),
        ),
    ),
    "messages": _api_target(
        "bodies of /v1/messages and of its token counts",
        check_messages,
        _messages,
        "frontend/api/messages.py",
        (
            *(
                b"thinking",
                b"tool_use",
                b"tool_result",
                b"tool_use_id",
                b"input_schema",
                b"signature",
            ),
            *(b"is_error", b"budget_tokens", b"cache_control", b"ephemeral", b"stop_sequences"),
            *(b"redacted_thinking", b"image", b"document", b"disable_parallel_tool_use", b"any"),
        ),
    ),
    "tokenize": _api_target(
        "bodies of /tokenize and /detokenize",
        check_tokenize,
        _texts,
        "frontend/api/tokenization.py",
        (b"prompt", b"tokens", b"add_special_tokens", b"return_token_strs"),
    ),
}

"""Every field is honoured, a no-op, or refused by name, in words a person can act on."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dynamo_trtllm.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.openai.chat import AssistantMessage, ChatRequest
from dynamo_trtllm.openai.completions import CompletionRequest
from dynamo_trtllm.openai.wire import parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, orjson.dumps(CHAT | fields))


def text(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, orjson.dumps(TEXT | fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"store": True}, "store"),
        ({"nvext": {"greed_sampling": True}}, "nvext.greed_sampling"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_field_we_do_not_honour_then_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        chat(**fields)
    assert refused.value.field == param
    assert refused.value.message.startswith(param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "model is required"),
        ({"messages": []}, "messages must have at least 1 item"),
        ({"messages": ["x"]}, "messages[0] must be an object, not a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is required"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content is required when there are no tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id is required"),
        ({"temperature": 3}, "temperature must be less than or equal to 2, not 3"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, not 0"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens differs from max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop may hold 4 strings at most, not 5"),
        ({"stop": ""}, "stop may not hold an empty string"),
        ({"stream": "yes"}, "stream must be a boolean, not 'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options is only allowed with stream set to true"),
        ({"top_logprobs": 2}, "top_logprobs is only allowed with logprobs set to true"),
        ({"reasoning_effort": "max"}, "reasoning_effort must be 'low', 'medium' or 'high', not 'max'"),
        ({"chat_template_args": {"reasoning_effort": 1}}, "chat_template_args reasoning_effort must be"),
        ({"reasoning_effort": "low", "chat_template_args": {"reasoning_effort": "high"}}, "reasoning_effort differs"),
    ],
)
def test_invalid_value_then_a_message_to_act_on(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.message.startswith(message)
    assert "Input should" not in refused.value.message


def test_unknown_role_then_the_known_ones_are_listed() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role must be one of 'system'.*not 'boss'"):
        chat(messages=[{"role": "boss", "content": "x"}])


def test_misspelled_field_then_the_nearest_name_is_offered() -> None:
    with pytest.raises(UnsupportedParameter, match="did you mean 'max_tokens'"):
        chat(max_token=3)


@pytest.mark.parametrize("body", [b"", b"{", b'{"a":}', b'{"a":NaN}', b'"\xff"', b"[" * 5000])
def test_body_that_is_no_json_then_the_position_is_named(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"not valid JSON at line \d+, column \d+"):
        parse(ChatRequest, body)


def test_no_op_values_then_accepted() -> None:
    chat(n=1, frequency_penalty=0.0, logit_bias={}, parallel_tool_calls=True, store=False, seed=None, user="u")
    text(echo=False, best_of=1, suffix=None, n=1)


def test_content_as_parts_then_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


def test_assistant_message_as_a_server_sent_it_then_accepted() -> None:
    calls = [{"id": "call-1", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    sent = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "r", "tool_calls": calls}
    (message,) = chat(messages=[sent]).messages
    assert isinstance(message, AssistantMessage)
    assert (message.content, message.reasoning_content, message.tool_calls[0].function.name) == ("", "r", "f")


@pytest.mark.parametrize(("prompt", "expected"), [("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[1, 2]], [1, 2])])
def test_one_prompt_in_any_form_then_taken(prompt: Any, expected: Any) -> None:
    assert text(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_several_prompts_then_refused(prompt: Any) -> None:
    with pytest.raises(UnsupportedParameter, match="one request per prompt"):
        text(prompt=prompt)


@pytest.mark.parametrize("prompt", [5, [1, "a"], [1, -1], [1, True], {}])
def test_prompt_that_is_none_then_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be"):
        text(prompt=prompt)

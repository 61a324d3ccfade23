"""Every field is supported, changes nothing, or is rejected by name with an error that says what to
do.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dynamo_trtllm.frontend.api.chat import AssistantMessage, ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from tests.kit.cases import each_case

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
FUNCTION = {"name": "f", "arguments": "{}"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, orjson.dumps(CHAT | fields))


def text(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, orjson.dumps(TEXT | fields))


@each_case(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"verbosity": "low"}, "verbosity"),
        ({"service_tier": "turbo"}, "service_tier"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"nvext": {"agent_hints": {"strict_priority": 1}}}, "nvext.agent_hints.strict_priority"),
        ({"nvext": {"greed_sampling": True}}, "nvext.greed_sampling"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_field_we_do_not_honour_then_refused_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        chat(**fields)
    assert refused.value.field == param
    assert refused.value.message.startswith(param)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"service_tier": "turbo"}, '"auto" to "priority"'),
        ({"length_penalty": 2}, "1"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": FUNCTION, "index": 200}],
                    }
                ]
            },
            "0 to 127",
        ),
    ],
)
def test_field_error_names_all_allowed_values(fields: dict[str, Any], values: str) -> None:
    with pytest.raises(
        UnsupportedParameter, match=f"is not supported, except as {values}; leave it out"
    ):
        chat(**fields)


@each_case(
    ("fields", "message"),
    [
        ({"model": None}, "model is required"),
        ({"messages": []}, "messages must have at least 1 item"),
        ({"messages": ["x"]}, "messages[0] must be an object, not a string"),
        # The log has the message, and this text is a prompt.
        ({"messages": "a prompt"}, "messages must be a list, not a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id is required"),
        ({"temperature": 3}, "temperature must be less than or equal to 2, not 3"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, not 0"),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens differs from max_completion_tokens",
        ),
        ({"stop": ["a", ""]}, "stop may not hold an empty string"),
        ({"stream": "yes"}, "stream must be a boolean, not 'yes'"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options is only allowed with stream set to true",
        ),
        ({"top_logprobs": 2}, "top_logprobs is only allowed with logprobs set to true"),
        ({"reasoning_effort": "most"}, "reasoning_effort must be 'none', 'minimal', 'low'"),
        ({"n": 0}, "n must be greater than or equal to 1, not 0"),
        ({"n": 129}, "n must be less than or equal to 128, not 129"),
        ({"n": True}, "n must be an integer"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be less than or equal to 2, not 2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than 0, not 0"),
        ({"min_p": -0.1}, "min_p must be greater than or equal to 0, not -0.1"),
        ({"logit_bias": [1]}, "logit_bias must be an object of token ids and numbers, not a list"),
        ({"logit_bias": {"x": 1}}, "logit_bias must have token ids as keys; 'x' is not a token id"),
        (
            {"logit_bias": {"-1": 1}},
            "logit_bias must have token ids as keys; '-1' is not a token id",
        ),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias must have numbers from -100 to 100 as values, not 101 for token 5",
        ),
        (
            {"logit_bias": {"5": True}},
            "logit_bias must have numbers from -100 to 100 as values, not True",
        ),
        ({"tool_choice": "any"}, "tool_choice must be 'auto', 'none', 'required', or an object"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function is required"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [1]},
                }
            },
            "tool_choice.allowed_tools.tools[0] must be an object, not a number",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema'",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema is required with type 'json_schema'",
        ),
        ({"cache_salt": ""}, "cache_salt must have at least 1 character"),
        (
            {"chat_template_args": {"reasoning_effort": 1}},
            "chat_template_args.reasoning_effort must be",
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": 1}},
            "chat_template_kwargs.reasoning_effort must be",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort differs from chat_template_kwargs.reasoning_effort",
        ),
    ],
)
def test_invalid_value_then_a_message_to_act_on(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.message.startswith(message)
    assert "Input should" not in refused.value.message


def test_unknown_role_then_the_known_ones_are_listed() -> None:
    with pytest.raises(
        InvalidRequest, match=r"messages\[0\]\.role must be one of 'system'.*not 'boss'"
    ):
        chat(messages=[{"role": "boss", "content": "x"}])


def test_misspelled_field_then_the_nearest_name_is_offered() -> None:
    with pytest.raises(UnsupportedParameter, match="did you mean 'max_tokens'"):
        chat(max_token=3)


@pytest.mark.parametrize("name", ["zebra", "prompt_adapter"])
def test_unknown_field_then_no_unlike_name_is_offered(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match=f"^{name} is not a known field; leave it out$"):
        chat(**{name: 1})


@each_case("body", [b"", b"{", b'{"a":}', b'{"a":NaN}', b"[" * 5000])
def test_body_that_is_no_json_then_the_position_is_named(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"not valid JSON at line \d+, column \d+"):
        parse(ChatRequest, body)


def test_no_op_values_then_accepted() -> None:
    chat(
        n=1,
        frequency_penalty=0.0,
        logit_bias={},
        functions=[],
        verbosity="medium",
        store=False,
        seed=None,
        user="u",
    )
    text(echo=False, best_of=1, suffix=None, n=1)


def test_content_as_parts_then_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


def test_assistant_message_as_a_server_sent_it_then_accepted() -> None:
    calls = [
        {
            "id": "call-1",
            "index": 0,
            "type": "function",
            "function": {"name": "f", "arguments": "{}"},
        }
    ]
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "r",
        "tool_calls": calls,
    }
    (message,) = chat(messages=[sent]).messages
    assert isinstance(message, AssistantMessage)
    assert (message.content, message.reasoning_content, message.tool_calls[0].function.name) == (
        "",
        "r",
        "f",
    )


@each_case(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        (["a"], ["a"]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_in_any_form_then_a_list_of_them(prompt: Any, expected: Any) -> None:
    assert text(prompt=prompt).prompt == expected


@each_case("prompt", [5, [1, "a"], [1, -1], [1, True], {}, [], [["a"]], ["a", 5], ["a"] * 129])
def test_prompt_that_is_none_then_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt "):
        text(prompt=prompt)


@each_case(
    ("fields", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2 and less than n, 3"),
        ({"best_of": 2, "stream": True}, "best_of is not supported with stream unless it equals n"),
        ({"max_tokens": 0}, "max_tokens is 0, which is only allowed with echo"),
        ({"suffix": "end"}, "suffix is not supported"),
        (
            {"prompt": ["a"] * 65, "n": 2},
            "n times the number of prompts is 130 choices; at most 128 are allowed",
        ),
        (
            {"prompt": ["a"] * 65, "best_of": 2},
            "best_of times the number of prompts is 130 choices",
        ),
    ],
)
def test_choices_that_do_not_go_together_then_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        text(**fields)
    assert refused.value.message.startswith(message)
    assert refused.value.field == message.split(" ", 1)[0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_assistant_message_with_only_reasoning_is_accepted(name: str) -> None:
    """Agents send back an answer that was cut off while the model reasoned."""
    message = {"role": "assistant", "content": None, name: "why"}
    body = orjson.dumps({"model": "m", "messages": [message]})
    (parsed,) = parse(ChatRequest, body).messages
    assert isinstance(parsed, AssistantMessage)
    assert (parsed.content, parsed.any_reasoning) == ("", "why")


def test_part_type_of_another_api_suggests_the_right_one() -> None:
    body = {"model": "m", "input": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    with pytest.raises(
        UnsupportedParameter, match=r"part of type 'text' at index 0; use 'input_text'"
    ):
        parse(ResponseRequest, orjson.dumps(body))
    part = {"type": "input_text", "text": "hi"}
    chat = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(
        UnsupportedParameter, match=r"part of type 'input_text' at index 0; use 'text'"
    ):
        parse(ChatRequest, orjson.dumps(chat))

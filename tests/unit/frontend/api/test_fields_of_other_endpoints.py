"""A field of one endpoint that is sent to another one: it is rejected with the name to use if the
answer would be another one with it.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.messages import MessagesRequest
from dynamo_trtllm.frontend.api.request_model import RequestModel, parse
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.tokenization import TokenizeRequest
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from tests.kit.cases import each_case

USER = {"role": "user", "content": "hi"}
BODIES: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [USER]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
    ResponseRequest: {"model": "m", "input": "hi"},
    MessagesRequest: {"model": "m", "max_tokens": 5, "messages": [USER]},
}
# Fields of other endpoints that are ignored and named: without them, an answer reasons more or
# less, or lacks additional output. Clients of several servers send some of them on their own.
_ADDITIONAL = {"echo", "include", "logprobs", "prompt_logprobs", "return_token_ids"}
_REASONING = {"include_reasoning", "reasoning", "thinking"}
_TEMPLATE = {"chat_template_args", "chat_template_kwargs"}
IGNORED: dict[type[RequestModel], set[str]] = {
    ChatRequest: {"include", "max_tool_calls", "reasoning", "thinking"},
    CompletionRequest: _REASONING
    | _TEMPLATE
    | {"include", "max_tool_calls", "parallel_tool_calls", "reasoning_effort", "top_logprobs"},
    ResponseRequest: (_ADDITIONAL - {"include"}) | _TEMPLATE | {"include_reasoning", "thinking"},
    MessagesRequest: _ADDITIONAL
    | _TEMPLATE
    | {"include_reasoning", "max_tool_calls", "reasoning", "skip_special_tokens", "top_logprobs"},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
SENT = [
    (CompletionRequest, {"max_output_tokens": 3}, "use max_tokens"),
    (CompletionRequest, {"response_format": FORMAT}, "use structured_outputs"),
    (CompletionRequest, {"text": "hi"}, "use prompt"),
    (ChatRequest, {"max_output_tokens": 3}, "use max_tokens"),
    (ChatRequest, {"instructions": "be brief"}, "send a message with the role system"),
    (ChatRequest, {"text": {"format": {"type": "json_object"}}}, "use response_format"),
    (ChatRequest, {"output_config": {"effort": "low", "format": FORMAT}}, "use response_format"),
    (ChatRequest, {"previous_response_id": "resp_1"}, "use /v1/responses"),
    (ResponseRequest, {"system": "be brief"}, "use instructions"),
    (ResponseRequest, {"guided_json": {"type": "object"}}, "use text.format"),
    (MessagesRequest, {"instructions": "be brief"}, "use system"),
    (MessagesRequest, {"max_output_tokens": 3}, "use max_tokens"),
    (MessagesRequest, {"parallel_tool_calls": False}, "disable_parallel_tool_use"),
    (MessagesRequest, {"guided_regex": "a"}, "use output_config.format"),
]
SCHEMA = {"type": "object", "properties": {"a": {}}}
# Forms of other servers and endpoints, whose schema would be lost.
FORMS = [
    (
        ChatRequest,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **SCHEMA}}},
        "response_format.json_schema.properties",
    ),
    (
        ResponseRequest,
        {"text": {"format": {"type": "json_object", "schema": SCHEMA}}},
        "text.format.schema",
    ),
]
HARMLESS = [
    (CompletionRequest, {"response_format": {"type": "text"}, "tool_choice": "auto", "tools": []}),
    (ChatRequest, {"instructions": "", "output_config": {}, "text": None}),
    (ChatRequest, {"text": {"format": {"type": "text"}}}),
    (ResponseRequest, {"functions": [], "function_call": "auto", "best_of": 1, "system": ""}),
    (MessagesRequest, {"parallel_tool_calls": True, "instructions": "", "documents": []}),
]


def parsed(model: type[RequestModel], fields: dict[str, Any]) -> tuple[RequestModel, set[str]]:
    """Return the request, and the names of its ignored fields."""
    ignored = IgnoredFields(rejects_misspelled=True)
    request = parse(model, orjson.dumps(BODIES[model] | fields), ignored)
    return request, set(ignored)


@pytest.mark.parametrize("model", BODIES)
def test_each_field_of_another_endpoint_is_listed(model: type[RequestModel]) -> None:
    everywhere = {
        field.alias or name for other in BODIES for name, field in other.model_fields.items()
    }
    own = {field.alias or name for name, field in model.model_fields.items()}
    listed = own | model.hints | set(model.no_ops) | set(model.unsupported)
    assert everywhere - listed == IGNORED[model]


@each_case(("model", "fields", "hint"), SENT)
def test_field_that_changes_the_answer_names_the_right_one(
    model: type[RequestModel], fields: dict[str, Any], hint: str
) -> None:
    (name,) = fields
    with pytest.raises(UnsupportedParameter, match=hint) as refused:
        parsed(model, fields)
    assert refused.value.field == name


@each_case(("model", "fields", "field"), FORMS)
def test_form_of_another_server_is_rejected(
    model: type[RequestModel], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        parsed(model, fields)
    assert refused.value.field == field


@pytest.mark.parametrize("kind", ["auto", "any", "none", "tool"])
@pytest.mark.parametrize("model", [ChatRequest, ResponseRequest])
def test_choice_in_the_form_of_anthropic_gets_the_right_form(
    model: type[RequestModel], kind: str
) -> None:
    with pytest.raises(InvalidRequest, match="'auto', 'none', 'required', or an object that names"):
        parsed(model, {"tool_choice": {"type": kind}})


def test_text_is_no_field_of_tokenize() -> None:
    with pytest.raises(InvalidRequest, match="prompt is required"):
        parse(TokenizeRequest, b'{"model": "m", "text": "hi"}', IgnoredFields())


@each_case(("model", "fields"), HARMLESS)
def test_value_without_effect_is_accepted(
    model: type[RequestModel], fields: dict[str, Any]
) -> None:
    _, ignored = parsed(model, fields)
    assert ignored == set()


@each_case("name", ["output_config", "text"])
def test_effort_of_another_endpoint_is_ignored_and_named(name: str) -> None:
    """LiteLLM sends the `output_config` of Claude Code to chat, beside its translation."""
    _, ignored = parsed(ChatRequest, {name: {"effort": "medium", "format": None}})
    assert ignored == {name}
    body = BODIES[ChatRequest] | {name: {"effort": "medium"}}
    with pytest.raises(UnsupportedParameter, match="use response_format"):
        parse(ChatRequest, orjson.dumps(body))  # with --unknown-fields reject


def test_tool_in_the_form_of_openai_is_no_hosted_tool() -> None:
    nested = {"type": "function", "function": {"name": "f", "parameters": {}}}
    flat = {"type": "function", "name": "f", "parameters": {}}
    for tool in (nested, flat):
        with pytest.raises(UnsupportedParameter, match="input_schema") as refused:
            parsed(MessagesRequest, {"tools": [tool]})
        assert refused.value.field == "tools[0].type"


def test_completion_takes_the_length_by_the_name_of_chat() -> None:
    """Load generators, such as guidellm, send both names to both endpoints."""
    body = BODIES[CompletionRequest]
    for fields in ({"max_completion_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 7}):
        parsed = parse(CompletionRequest, orjson.dumps(body | fields), IgnoredFields())
        assert parsed.output_tokens == 7
    different = {"max_completion_tokens": 7, "max_tokens": 8}
    with pytest.raises(InvalidRequest, match="max_tokens differs from max_completion_tokens"):
        parse(CompletionRequest, orjson.dumps(body | different), IgnoredFields())
    with pytest.raises(InvalidRequest, match="max_completion_tokens is 0, which is only allowed"):
        parse(CompletionRequest, orjson.dumps(body | {"max_completion_tokens": 0}), IgnoredFields())

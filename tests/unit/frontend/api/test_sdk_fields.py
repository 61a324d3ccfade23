"""Every field that the installed SDK can send is supported, changes nothing, or is rejected by its
name.
"""

from __future__ import annotations

import typing
from typing import Any

import orjson
import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.shared_params import FunctionDefinition
from openai.types.shared_params.response_format_json_schema import JSONSchema

from dynamo_trtllm.frontend.api import chat as wire_chat
from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.request_model import RequestModel, parse
from dynamo_trtllm.frontend.api.sampling import StreamOptions
from dynamo_trtllm.protocol.errors import UnsupportedParameter
from tests.kit.cases import each_case

PAIRS: list[tuple[Any, type[RequestModel]]] = [
    (chat_create_params.CompletionCreateParamsNonStreaming, ChatRequest),
    (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
    (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    (chat.ChatCompletionStreamOptionsParam, StreamOptions),
    (chat.ChatCompletionSystemMessageParam, wire_chat.SystemMessage),
    (chat.ChatCompletionDeveloperMessageParam, wire_chat.SystemMessage),
    (chat.ChatCompletionUserMessageParam, wire_chat.UserMessage),
    (chat.ChatCompletionAssistantMessageParam, wire_chat.AssistantMessage),
    (chat.ChatCompletionToolMessageParam, wire_chat.ToolMessage),
    (chat.ChatCompletionMessageFunctionToolCallParam, wire_chat.AssistantToolCall),
    (chat.ChatCompletionContentPartTextParam, wire_chat.TextPart),
    (chat.ChatCompletionFunctionToolParam, wire_chat.FunctionTool),
    (FunctionDefinition, wire_chat.Function),
    (JSONSchema, wire_chat.JsonSchema),
]
WITHOUT_EFFECT = {"prediction", "web_search_options"}  # ignored and named, like unknown fields
BODIES: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
}


@each_case(("sent", "taken"), PAIRS)
def test_sdk_fields_when_walked_then_each_is_listed(sent: Any, taken: type[RequestModel]) -> None:
    fields = {field.alias or name for name, field in taken.model_fields.items()}
    rejected = set(taken.no_ops) | set(taken.unsupported)
    listed = fields | taken.hints | rejected
    assert set(typing.get_type_hints(sent)) - listed <= WITHOUT_EFFECT
    assert len(fields) + len(taken.hints) + len(rejected) == len(listed), "a field is in two lists"


@pytest.mark.parametrize("model", BODIES)
def test_unsupported_fields_are_rejected_by_name(model: type[RequestModel]) -> None:
    for name in sorted({*model.unsupported, *model.no_ops}):
        with pytest.raises(UnsupportedParameter) as refused:
            parse(model, orjson.dumps(BODIES[model] | {name: "something"}))
        assert refused.value.field == name
        assert refused.value.message.startswith(f"{name} is not supported")
        assert model.unsupported.get(name, "leave it out") in refused.value.message


@pytest.mark.parametrize("model", BODIES)
def test_harmless_values_and_hints_and_null_when_sent_then_taken(model: type[RequestModel]) -> None:
    for name, values in model.no_ops.items():
        for value in values:
            parse(model, orjson.dumps(BODIES[model] | {name: value}))
    for name in sorted(model.hints):
        parse(model, orjson.dumps(BODIES[model] | {name: {"any": "thing"}}))
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    parse(model, orjson.dumps(BODIES[model] | dict.fromkeys({*optional, *model.unsupported})))

"""Creates generation plans from request bodies, with models, tools and formats for them."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import orjson

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.requests.preprocess import GenerationPlan, prepare_chat, prepare_text
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.frontend.tokenization.template import ChatTemplateRenderer
from dynamo_trtllm.protocol.messages import ModelDeploymentCard
from tests.kit.small_tokenizer import CONTROL, write_tokenizer

CARD = ModelDeploymentCard(
    name="m",
    context_length=2000,
    vocab_size=201088,
    eos_token_ids=(200002, 200012),
    renderer="harmony",
)
REQUEST_ID = "id"
DEADLINE = 5.0
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CITY},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
HEADER = "<|channel|>commentary to=functions."
REST = " <|constrain|>json<|message|>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content"
    " }}\n{% endfor %}{% if enable_thinking %}think{% endif %}"
)


def harmony_model() -> ServedModel:
    return ServedModel(CARD, HarmonyRenderer(today=lambda: date(2026, 1, 2)))


class TemplateModels:
    """Creates models with a small tokenizer and a chat template."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = write_tokenizer(folder).read_bytes()

    def __call__(self, template: str = TEMPLATE, *, tool_call_parser: str = "none") -> ServedModel:
        config = json.dumps({"chat_template": template}).encode()
        files = {"tokenizer.json": self._tokenizer, "tokenizer_config.json": config}
        stops = (CONTROL["<|end|>"],)
        card = msgspec.structs.replace(
            CARD,
            renderer="chat_template",
            vocab_size=320,
            eos_token_ids=stops,
            tool_call_parser=tool_call_parser,
        )
        return ServedModel(
            card,
            ChatTemplateRenderer(files, stop_token_ids=stops, tool_call_parser=tool_call_parser),
        )


def chat(served: ServedModel, **fields: Any) -> GenerationPlan:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    request = parse(ChatRequest, orjson.dumps(body))
    return prepare_chat(request, served, request.call(REQUEST_ID, DEADLINE, ""))


def text(served: ServedModel, **fields: Any) -> GenerationPlan:
    body = {"model": "m", "prompt": "hi"} | fields
    request = parse(CompletionRequest, orjson.dumps(body))
    return prepare_text(request, served, request.call(REQUEST_ID, DEADLINE, ""))


def refusing(served: ServedModel, *fields: str) -> ServedModel:
    return ServedModel(
        msgspec.structs.replace(served.card, unsupported_features=fields), served.renderer
    )


def prompt(plan: GenerationPlan, served: ServedModel) -> str:
    return served.renderer.decode(plan.choices[0].request.token_ids)

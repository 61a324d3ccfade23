"""Build `/openapi.json`: the paths with every status that they can return, request models and response schemas."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import dynamo_trtllm
from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import CompletionRequest
from dynamo_trtllm.api.request_model import request_schemas
from dynamo_trtllm.api.response_schemas import ANSWERS, TEXT, Schema, ref
from dynamo_trtllm.api.responses import ResponseRequest
from dynamo_trtllm.http_server.errors import RETRY_LATER, TABLE

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
DONE: Final = "[DONE]"
ANY_ERROR: Final = frozenset(row.status for row in TABLE.values())  # a generation may return any error
LOOKED_UP: Final = frozenset({400, 404, 502, 503, 504})  # a store may be unreachable or contain unreadable data
MEANINGS: Final = {
    200: "success",
    400: "the request is wrong; param names the field",
    404: "the model or the response was not found",
    408: "the request arrived too slowly",
    409: "cancelled by another request",
    413: "the body is too large",
    415: "the Content-Type or Content-Encoding is not supported",
    429: "the server is at capacity",
    431: "the request line and headers are too large",
    500: "internal server error",
    502: "a worker or a KV transfer failed",
    503: "no worker is available",
    504: "the deadline passed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    id: str
    about: str
    answer: str  # schema of the 200 response
    media: str = JSON
    body: str | None = None  # schema of the request
    event: str | None = None  # schema of one event, if the response may be streamed
    query: tuple[tuple[str, Schema], ...] = ()
    errors: frozenset[int] = frozenset()
    otherwise: tuple[tuple[int, str], ...] = ()  # statuses whose body is not an Error, with its schema


_LIMIT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}
_ORDER: Final[Schema] = {"enum": ["asc", "desc"], "default": "desc"}

OPERATIONS: Final = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        id="createChatCompletion",
        about="Create the next message of a conversation.",
        body="ChatRequest",
        answer="ChatCompletion",
        event="ChatCompletionChunk",
        errors=ANY_ERROR,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        id="createCompletion",
        about="Complete a plain prompt.",
        body="CompletionRequest",
        answer="TextCompletion",
        event="TextCompletion",
        errors=ANY_ERROR,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        id="createResponse",
        about="Create a response. Later responses can continue it.",
        body="ResponseRequest",
        answer="Response",
        event="ResponseEvent",
        errors=ANY_ERROR,
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}",
        id="retrieveResponse",
        about="Get a stored response.",
        answer="Response",
        errors=LOOKED_UP,
    ),
    Operation(
        method="delete",
        path="/v1/responses/{id}",
        id="deleteResponse",
        about="Delete a stored response.",
        answer="ResponseDeleted",
        errors=LOOKED_UP,
    ),
    Operation(
        method="post",
        path="/v1/responses/{id}/cancel",
        id="cancelResponse",
        about="Cancel a response that is in progress.",
        answer="Response",
        errors=LOOKED_UP,
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}/input_items",
        id="listInputItems",
        about="List the input items of a response.",
        answer="ResponseItems",
        query=(("limit", _LIMIT), ("order", _ORDER), ("after", TEXT)),
        errors=LOOKED_UP,
    ),
    Operation(method="get", path="/v1/models", id="listModels", about="List the available models.", answer="ModelList"),
    Operation(
        method="get",
        path="/v1/models/{id}",
        id="retrieveModel",
        about="Get one model. Its id may contain slashes.",
        answer="Model",
        errors=frozenset({404}),
    ),
    Operation(
        method="get",
        path="/v1/models/{id}/ready",
        id="modelReady",
        about="Check whether the model can be served now, and if not, what is missing.",
        answer="Ready",
        errors=frozenset({404}),
        otherwise=((503, "Ready"),),
    ),
    Operation(
        method="get",
        path="/health",
        id="health",
        about="Get the state of the deployment: instances, and what is missing. Always 200.",
        answer="Health",
    ),
    Operation(
        method="get",
        path="/ready",
        id="ready",
        about="Check whether this frontend accepts requests, and if not, why. Does not depend on workers.",
        answer="FrontendReady",
        otherwise=((503, "FrontendReady"),),
    ),
    Operation(method="get", path="/live", id="live", about="Check that this process responds.", answer="Live"),
    Operation(
        method="get", path="/metrics", id="metrics", about="Get Prometheus metrics.", answer="", media="text/plain"
    ),
)


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dynamo_trtllm",
            "version": dynamo_trtllm.__version__,
            "description": "OpenAI's API over disaggregated workers. A field is supported or rejected by name; "
            "null counts as absent.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": request_schemas(ChatRequest, CompletionRequest, ResponseRequest) | ANSWERS},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.about,
        "parameters": _parameters(operation),
        "responses": {str(status): answer for status, answer in sorted(_answers(operation).items())},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(operation.body)}}}
    return described


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", operation.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query]
    if operation.body is not None:
        parameters += [
            {"name": name, "in": "header", "description": about, "schema": TEXT}
            for name, about in (
                ("x-request-id", "Up to 128 visible ASCII characters. Returned, and part of the request's log lines."),
                ("x-dynamo-stats", "1: the response contains its workers and timings."),
            )
        ]
    return parameters


def _answers(operation: Operation) -> dict[int, dict[str, Any]]:
    content: dict[str, Any] = {operation.media: {"schema": ref(operation.answer) if operation.answer else TEXT}}
    if operation.event is not None:
        content[EVENTS] = {"schema": _event(operation.event, ends=operation.event != "ResponseEvent")}
    answers = {200: _answer(200, content)}
    for status in operation.errors | {500}:
        answers[status] = _answer(status, {JSON: {"schema": ref("Error")}})
    for status, name in operation.otherwise:
        answers[status] = _answer(status, {JSON: {"schema": ref(name)}})
    if operation.event is not None:
        for name in ("x-prefill-instance", "x-decode-instance"):
            answers[200]["headers"][name] = {"schema": TEXT}
    return answers


def _event(name: str, *, ends: bool) -> Schema:
    """Return the schema of one event: OpenAPI 3.1 cannot describe a stream. `ends`: the last event is not JSON."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [ref(name), ref("Error")]}}
    return {
        "type": "object",
        "properties": {"event": TEXT, "data": {"anyOf": [data, {"const": DONE}]} if ends else data},
        "required": ["data"],
    }


def _answer(status: int, content: dict[str, Any]) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-request-id": {"required": True, "schema": TEXT}}
    if status in RETRY_LATER:
        headers["retry-after"] = {"required": True, "schema": {"type": "string", "pattern": "^[0-9]+$"}}
    return {"description": MEANINGS[status], "headers": headers, "content": content}

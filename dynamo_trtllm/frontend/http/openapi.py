"""Build `/openapi.json`: the paths with every status that they can return, request models and
response schemas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import dynamo_trtllm
from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import CompletionRequest
from dynamo_trtllm.api.messages import CountTokensRequest, MessagesRequest
from dynamo_trtllm.api.request_model import REF, request_schemas
from dynamo_trtllm.api.response_schemas import Schema, response_schemas
from dynamo_trtllm.api.responses import ResponseRequest
from dynamo_trtllm.api.tokenization import DetokenizeRequest, TokenizeRequest
from dynamo_trtllm.http_server.errors import RETRY_LATER, STATUS

TEXT: Final[Schema] = {"type": "string"}
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
DONE: Final = "[DONE]"
ANY_ERROR: Final = frozenset(STATUS.values())  # a generation may return any error
# a store may be unreachable or contain unreadable data
LOOKED_UP: Final = frozenset({400, 404, 502, 503, 504})
MEANINGS: Final = {
    200: "success",
    400: "the request is wrong; param names the field",
    404: "the model or the response was not found",
    408: "the request arrived too slowly",
    409: "cancelled by another request",
    413: "the body is too large",
    415: "the Content-Type or Content-Encoding is not supported",
    422: "workers end when they run this request",
    429: "the server is at capacity",
    431: "the request line and headers are too large",
    500: "internal server error",
    502: "a worker or a KV transfer failed",
    503: "no worker is available",
    504: "the deadline passed",
}


class Operation(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    id: str
    about: str
    answer: str  # schema of the 200 response; "": text
    body: str | None = None  # schema of the request
    # schema of one event of the stream. It generates: any error may be returned
    event: str | None = None
    errors: frozenset[int] = frozenset()
    query: Mapping[str, Schema] = {}
    is_503_answer: bool = False  # the body of a 503 is `answer` and no error
    error: str = "Error"  # schema of errors


_BODY_HEADERS: Final = {
    "x-request-id": (
        "Up to 128 visible ASCII characters. Returned, and part of the request's log lines."
    ),
}
_GENERATION_HEADERS: Final = {
    **_BODY_HEADERS,
    "x-dynamo-stats": "1: the response contains its workers and timings.",
    "x-session-id": "Up to 256 characters: the conversation, unless the body names one.",
}
_CHAT, _TEXT, _RESPONSES, _RESPONSE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{id}",
)
_MODEL, _MESSAGES = "/v1/models/{id}", "/v1/messages"
_PAGE: Final[Mapping[str, Schema]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": TEXT,
}
_LISTED: Final[Mapping[str, Schema]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 100}
}
_CREATE_CHAT = "Create the next message of a conversation."
_CREATE_TEXT = "Complete a plain prompt."
_CREATE_RESPONSE = "Create a response. Later responses can continue it."
_CANCEL = "Cancel a response that is in progress."
_LIST_ITEMS = "List the input items of a response."
_MODEL_READY = "Check whether the model can be served now, and if not, what is missing."
_HEALTH = "Get the state of the deployment: instances, and what is missing. Always 200."
_READY = (
    "Check whether this frontend accepts requests, and if not, why. Does not depend on workers."
)
_TOKENIZE = "Tokenize a prompt or a conversation, as vLLM does."
_DETOKENIZE = "Return the text of token ids, as vLLM does."
_CREATE_MESSAGE = "Create the next message of a conversation, as Anthropic's API does."
_COUNT_MESSAGES = "Count the tokens of the prompt that a request for a message would have."
_COUNT_INPUT = "Count the tokens of the prompt that a request for a response would have."
_NOT_FOUND: Final = frozenset({404})
# of a body that is tokenized
_RECEIVED: Final = frozenset({400, 404, 408, 413, 415, 429, 503, 504})

OPERATIONS: Final = (
    Operation(
        "post",
        _CHAT,
        "createChatCompletion",
        _CREATE_CHAT,
        "ChatCompletion",
        "ChatRequest",
        "ChatCompletionChunk",
    ),
    Operation(
        "post",
        _TEXT,
        "createCompletion",
        _CREATE_TEXT,
        "TextCompletion",
        "CompletionRequest",
        "TextCompletion",
    ),
    Operation(
        "post",
        _RESPONSES,
        "createResponse",
        _CREATE_RESPONSE,
        "Response",
        "ResponseRequest",
        "ResponseEvent",
    ),
    Operation(
        *("post", f"{_RESPONSES}/input_tokens", "countInputTokens", _COUNT_INPUT),
        "InputTokens",
        "ResponseRequest",
        errors=_RECEIVED | LOOKED_UP,
    ),
    Operation(
        "get", _RESPONSE, "retrieveResponse", "Get a stored response.", "Response", errors=LOOKED_UP
    ),
    Operation(
        "delete",
        _RESPONSE,
        "deleteResponse",
        "Delete a stored response.",
        "ResponseDeleted",
        errors=LOOKED_UP,
    ),
    Operation(
        "post", f"{_RESPONSE}/cancel", "cancelResponse", _CANCEL, "Response", errors=LOOKED_UP
    ),
    Operation(
        "get",
        f"{_RESPONSE}/input_items",
        "listInputItems",
        _LIST_ITEMS,
        "ResponseItems",
        errors=LOOKED_UP,
        query=_PAGE,
    ),
    Operation(
        *("post", _MESSAGES, "createMessage", _CREATE_MESSAGE, "Message", "MessagesRequest"),
        "MessageEvent",
        error="MessagesError",
    ),
    Operation(
        *("post", f"{_MESSAGES}/count_tokens", "countMessageTokens", _COUNT_MESSAGES),
        *("MessageTokens", "CountTokensRequest"),
        errors=_RECEIVED,
        error="MessagesError",
    ),
    Operation(
        "post",
        "/tokenize",
        "tokenize",
        _TOKENIZE,
        "Tokenization",
        "TokenizeRequest",
        errors=_RECEIVED,
    ),
    Operation(
        *("post", "/detokenize", "detokenize", _DETOKENIZE),
        "Detokenization",
        "DetokenizeRequest",
        errors=_RECEIVED,
    ),
    Operation("get", "/version", "version", "Get the version of this server.", "Version"),
    Operation("get", "/v1/models", "listModels", "List the available models.", "ModelList"),
    Operation(
        "get",
        _MODEL,
        "retrieveModel",
        "Get one model. Its id may contain slashes.",
        "Model",
        errors=_NOT_FOUND,
    ),
    Operation(
        "get",
        f"{_MODEL}/ready",
        "modelReady",
        _MODEL_READY,
        "Ready",
        errors=_NOT_FOUND,
        is_503_answer=True,
    ),
    Operation(
        "get", "/health", "health", _HEALTH, "Health", errors=frozenset({400}), query=_LISTED
    ),
    Operation("get", "/ready", "ready", _READY, "FrontendReady", is_503_answer=True),
    Operation("get", "/live", "live", "Check that this process responds.", "Live"),
    Operation("get", "/metrics", "metrics", "Get Prometheus metrics.", ""),
)


_REQUESTS: Final = (
    *(ChatRequest, CompletionRequest, ResponseRequest),
    *(TokenizeRequest, DetokenizeRequest, MessagesRequest, CountTokensRequest),
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
            "description": (
                "OpenAI's API over disaggregated workers. A field is supported or rejected by name;"
                " null counts as absent."
            ),
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": request_schemas(*_REQUESTS) | response_schemas()},
    }


def ref(name: str) -> Schema:
    return {"$ref": REF.format(model=name)}


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.about,
        "parameters": _parameters(operation),
        "responses": {
            str(status): answer for status, answer in sorted(_answers(operation).items())
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": ref(operation.body)}},
        }
    return described


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", operation.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    headers = _GENERATION_HEADERS if operation.event is not None else _BODY_HEADERS
    if operation.body is not None:
        parameters += [
            {"name": name, "in": "header", "description": about, "schema": TEXT}
            for name, about in headers.items()
        ]
    return parameters


def _answers(operation: Operation) -> dict[int, dict[str, Any]]:
    answer = ref(operation.answer)
    content: dict[str, Any] = (
        {JSON: {"schema": answer}} if operation.answer else {"text/plain": {"schema": TEXT}}
    )
    if operation.event is not None:
        content[EVENTS] = {"schema": _event(operation)}
    answers = {200: _answer(200, content)}
    for status in {*operation.errors, *(ANY_ERROR if operation.event else ()), 500}:
        answers[status] = _answer(status, {JSON: {"schema": ref(operation.error)}})
    if operation.is_503_answer:
        answers[503] = _answer(503, {JSON: {"schema": answer}})
    if operation.event is not None:
        for name in ("x-prefill-instance", "x-decode-instance"):
            answers[200]["headers"][name] = {"schema": TEXT}
    return answers


def _event(operation: Operation) -> Schema:
    """Return the schema of one event: OpenAPI 3.1 cannot describe a stream.

    The last event may not be JSON.
    """
    kinds = [ref(name) for name in (operation.event, operation.error) if name is not None]
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": kinds}}
    ends = operation.event not in ("ResponseEvent", "MessageEvent")
    return {
        "type": "object",
        "properties": {"event": TEXT, "data": {"anyOf": [data, {"const": DONE}]} if ends else data},
        "required": ["data"],
    }


def _answer(status: int, content: dict[str, Any]) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-request-id": {"required": True, "schema": TEXT}}
    if status in RETRY_LATER:
        headers["retry-after"] = {
            "required": True,
            "schema": {"type": "string", "pattern": "^[0-9]+$"},
        }
    return {"description": MEANINGS[status], "headers": headers, "content": content}

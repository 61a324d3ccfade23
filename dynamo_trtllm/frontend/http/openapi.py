"""Build `/openapi.json`: paths with every status, request models and response schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import dynamo_trtllm
from dynamo_trtllm.access.access_control import PUBLIC_PATHS
from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.messages import CountTokensRequest, MessagesRequest
from dynamo_trtllm.frontend.api.request_model import REF, request_schemas
from dynamo_trtllm.frontend.api.response_schemas import Schema, response_schemas
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.tokenization import DetokenizeRequest, TokenizeRequest
from dynamo_trtllm.protocol.http_status import RETRY_LATER, STATUS

TEXT: Final[Schema] = {"type": "string"}
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
DONE: Final = "[DONE]"
ANY_ERROR: Final = frozenset(STATUS.values())  # a generation may return any error
# Errors of an operation that reads the store of responses. 502, 503 and 504 mean that the store is
# unreachable or contains unreadable data.
LOOKED_UP: Final = frozenset({400, 404, 502, 503, 504})
MEANINGS: Final = {
    200: "success",
    400: "the request is wrong; param names the field",
    401: "the request has no valid API key",
    403: "the API key does not allow this",
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
    # Schema of one event of the stream. None: the operation does not generate. An operation that
    # generates may return any error.
    event: str | None = None
    errors: frozenset[int] = frozenset()
    query: Mapping[str, Schema] = {}
    is_503_answer: bool = False  # the body of a 503 is `answer`, not an error
    error: str = "Error"  # schema of errors
    example: Mapping[str, Any] = {}  # a body, which `/docs` sends with the name of a model


_BODY_HEADERS: Final = {
    "x-request-id": (
        "Up to 128 visible ASCII characters. Returned, and part of the request's log lines."
    ),
}
_GENERATION_HEADERS: Final = {
    **_BODY_HEADERS,
    "x-dynamo-stats": "1: the response contains its workers and timings.",
    "x-slo-ttft-ms": (
        "Limit of the time to first token in milliseconds. Only with `--router-mode slo`."
    ),
    "x-slo-itl-ms": (
        "Limit of the time between two tokens in milliseconds. Only with `--router-mode slo`."
    ),
    "x-session-id": "Up to 256 characters: the conversation, unless the body names one.",
}
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_RESPONSES = "/v1/responses"
_RESPONSE = "/v1/responses/{id}"
_MODEL = "/v1/models/{id}"
_MESSAGES = "/v1/messages"
# Query parameters of an operation that returns a list in pages.
_PAGE: Final[Mapping[str, Schema]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": TEXT,
}
# Query parameters of an operation that cuts its lists at `limit`.
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
_QUESTION: Final = "Why is the sky blue?"
_CONVERSATION: Final = {
    "model": "MODEL",
    "messages": [{"role": "user", "content": _QUESTION}],
}
_INPUT: Final = {"model": "MODEL", "input": _QUESTION}
_NOT_FOUND: Final = frozenset({404})
_KEY_ERRORS: Final = frozenset({401, 403, 429})
# Errors of an operation that tokenizes its body.
_TOKENIZING: Final = frozenset({400, 404, 408, 413, 415, 429, 503, 504})

OPERATIONS: Final = (
    Operation(
        method="post",
        path=_CHAT,
        id="createChatCompletion",
        about=_CREATE_CHAT,
        answer="ChatCompletion",
        body="ChatRequest",
        event="ChatCompletionChunk",
        example=_CONVERSATION | {"max_tokens": 100, "stream": True},
    ),
    Operation(
        method="post",
        path=_TEXT,
        id="createCompletion",
        about=_CREATE_TEXT,
        answer="TextCompletion",
        body="CompletionRequest",
        event="TextCompletion",
        example={"model": "MODEL", "prompt": "The sky is", "max_tokens": 20},
    ),
    Operation(
        method="post",
        path=_RESPONSES,
        id="createResponse",
        about=_CREATE_RESPONSE,
        answer="Response",
        body="ResponseRequest",
        event="ResponseEvent",
        example=_INPUT | {"max_output_tokens": 100},
    ),
    Operation(
        method="post",
        path=f"{_RESPONSES}/input_tokens",
        id="countInputTokens",
        about=_COUNT_INPUT,
        answer="InputTokens",
        body="ResponseRequest",
        errors=_TOKENIZING | LOOKED_UP,
        example=_INPUT,
    ),
    Operation(
        method="get",
        path=_RESPONSE,
        id="retrieveResponse",
        about="Get a stored response.",
        answer="Response",
        errors=LOOKED_UP,
    ),
    Operation(
        method="delete",
        path=_RESPONSE,
        id="deleteResponse",
        about="Delete a stored response.",
        answer="ResponseDeleted",
        errors=LOOKED_UP,
    ),
    Operation(
        method="post",
        path=f"{_RESPONSE}/cancel",
        id="cancelResponse",
        about=_CANCEL,
        answer="Response",
        errors=LOOKED_UP,
    ),
    Operation(
        method="get",
        path=f"{_RESPONSE}/input_items",
        id="listInputItems",
        about=_LIST_ITEMS,
        answer="ResponseItems",
        errors=LOOKED_UP,
        query=_PAGE,
    ),
    Operation(
        method="post",
        path=_MESSAGES,
        id="createMessage",
        about=_CREATE_MESSAGE,
        answer="Message",
        body="MessagesRequest",
        event="MessageEvent",
        error="MessagesError",
        example=_CONVERSATION | {"max_tokens": 100},
    ),
    Operation(
        method="post",
        path=f"{_MESSAGES}/count_tokens",
        id="countMessageTokens",
        about=_COUNT_MESSAGES,
        answer="MessageTokens",
        body="CountTokensRequest",
        errors=_TOKENIZING,
        error="MessagesError",
        example=_CONVERSATION,
    ),
    Operation(
        method="post",
        path="/tokenize",
        id="tokenize",
        about=_TOKENIZE,
        answer="Tokenization",
        body="TokenizeRequest",
        errors=_TOKENIZING,
        example={"model": "MODEL", "prompt": _QUESTION},
    ),
    Operation(
        method="post",
        path="/detokenize",
        id="detokenize",
        about=_DETOKENIZE,
        answer="Detokenization",
        body="DetokenizeRequest",
        errors=_TOKENIZING,
        example={"model": "MODEL", "tokens": [1, 2, 3]},
    ),
    Operation(
        method="get",
        path="/version",
        id="version",
        about="Get the version of this server.",
        answer="Version",
    ),
    Operation(
        method="get",
        path="/v1/models",
        id="listModels",
        about="List the available models.",
        answer="ModelList",
    ),
    Operation(
        method="get",
        path=_MODEL,
        id="retrieveModel",
        about="Get one model. Its id may contain slashes.",
        answer="Model",
        errors=_NOT_FOUND,
    ),
    Operation(
        method="get",
        path=f"{_MODEL}/ready",
        id="modelReady",
        about=_MODEL_READY,
        answer="Ready",
        errors=_NOT_FOUND,
        is_503_answer=True,
    ),
    Operation(
        method="get",
        path="/health",
        id="health",
        about=_HEALTH,
        answer="Health",
        errors=frozenset({400}),
        query=_LISTED,
    ),
    Operation(
        method="get",
        path="/ready",
        id="ready",
        about=_READY,
        answer="FrontendReady",
        is_503_answer=True,
    ),
    Operation(
        method="get",
        path="/live",
        id="live",
        about="Check that this process responds.",
        answer="Live",
    ),
    Operation(
        method="get",
        path="/metrics",
        id="metrics",
        about="Get Prometheus metrics.",
        answer="",
    ),
)


_REQUESTS: Final = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountTokensRequest,
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
        # The empty object: a frontend without API keys needs no authentication.
        "security": [{}, {"bearer": []}],
        "components": {
            "schemas": request_schemas(*_REQUESTS) | response_schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document."""
    return {"$ref": REF.format(model=name)}


def _operation(operation: Operation) -> dict[str, Any]:
    """Return the OpenAPI object of an operation."""
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
            "content": {JSON: {"schema": ref(operation.body), "example": operation.example}},
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
    """Return the OpenAPI objects of all responses of an operation, by status."""
    answer = ref(operation.answer)
    content: dict[str, Any] = {"text/plain": {"schema": TEXT}}
    if operation.answer:
        content = {JSON: {"schema": answer}}
    statuses = operation.errors | {500}
    if operation.path not in PUBLIC_PATHS:
        statuses |= _KEY_ERRORS
    if operation.event is not None:
        content[EVENTS] = {"schema": _event(operation)}
        statuses |= ANY_ERROR
    answers = {200: _answer(200, content)}
    for status in statuses:
        answers[status] = _answer(status, {JSON: {"schema": ref(operation.error)}})
    if operation.is_503_answer:
        answers[503] = _answer(503, {JSON: {"schema": answer}})
    if operation.event is not None:
        for name in ("x-prefill-instance", "x-decode-instance"):
            answers[200]["headers"][name] = {"schema": TEXT}
    return answers


def _event(operation: Operation) -> Schema:
    """Return the schema of one event of a stream, because OpenAPI 3.1 can't describe the stream.

    The last event of chat and text completions is [DONE], which is not JSON.
    """
    kinds = [ref(name) for name in (operation.event, operation.error) if name is not None]
    data: Schema = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": kinds},
    }
    if operation.event not in ("ResponseEvent", "MessageEvent"):
        data = {"anyOf": [data, {"const": DONE}]}
    return {"type": "object", "properties": {"event": TEXT, "data": data}, "required": ["data"]}


def _answer(status: int, content: dict[str, Any]) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-request-id": {"required": True, "schema": TEXT}}
    if status in RETRY_LATER:
        headers["retry-after"] = {
            "required": True,
            "schema": {"type": "string", "pattern": "^[0-9]+$"},
        }
    return {"description": MEANINGS[status], "headers": headers, "content": content}

"""Serve a request that is answered with the tokenizer, without a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import orjson

from dynamo_trtllm.frontend.api.messages import CountTokensRequest
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.tokenization import DetokenizeRequest, TokenizeRequest
from dynamo_trtllm.frontend.requests.admission import RequestAdmission
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.request_body import check_json
from dynamo_trtllm.frontend.requests.serve_request import tokenize
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.support.http_server.exchange import Exchange

R = TypeVar("R", TokenizeRequest, DetokenizeRequest, ResponseRequest, CountTokensRequest)

# A function that reads the stored texts to which a request refers. Its arguments are the body, the
# model, and the name of the API key to which the texts belong. It returns the work that makes the
# response, and how many characters of stored text this work renders. The work may take long, and is
# safe in a thread.
Resolve: TypeAlias = Callable[
    [R, ServedModel, str], Awaitable[tuple[Callable[[], Mapping[str, Any]], int]]
]


@dataclass(frozen=True, slots=True)
class TokenizationApi(Generic[R]):
    """One endpoint that is answered with the tokenizer."""

    endpoint: str  # the value of the metric label `endpoint`
    body: type[R]
    resolve: Resolve[R]


async def serve_tokenization(
    api: TokenizationApi[R],
    state: AppState,
    exchange: Exchange,
    timeline: RequestTimeline,
    admission: RequestAdmission,
) -> None:
    """Serve a request with the tokenizer. Arguments and errors as for `serve_request`."""
    request, response = exchange
    check_json(request)
    received = await admission.read_body(request)
    unknown = state.ignored_fields.collector()
    body = await received.parse(api.body, unknown)
    tenant = timeline.facts.tenant
    served = state.models.get(body.model, tenant)
    prepare, stored_chars = await api.resolve(body, served, timeline.facts.owner)

    def encode() -> bytes:
        return orjson.dumps(prepare())

    data = await tokenize(encode, served, received, state, stored_chars=stored_chars)
    ignored = state.ignored_fields.report(unknown, (), request)
    headers = {"x-dynamo-ignored-fields": ignored} if ignored else {}
    response.send(200, data, headers=headers)

"""Build the app of a frontend.

Serve its endpoints that run no model: models, readiness, metrics, stored responses.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

import orjson

import dynamo_trtllm
from dynamo_trtllm.api.error_bodies import messages_error
from dynamo_trtllm.api.response_schemas import model_object
from dynamo_trtllm.api.responses import LOGPROBS
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.discovery.records import endpoint_of
from dynamo_trtllm.errors import (
    EngineNotReady,
    InvalidRequest,
    ResponseNotFound,
    UnsupportedParameter,
)
from dynamo_trtllm.frontend.fleet.model_registry import ModelRegistry
from dynamo_trtllm.frontend.generation.completions import CHAT, TEXT
from dynamo_trtllm.frontend.generation.messages.message_builder import MessagesAdapter
from dynamo_trtllm.frontend.generation.pipeline import Pipeline
from dynamo_trtllm.frontend.generation.responses.key_value_store import KeyValueStore, MemoryStore
from dynamo_trtllm.frontend.generation.responses.response_builder import (
    ResponseBuilder,
    ResponsesAdapter,
)
from dynamo_trtllm.frontend.generation.responses.response_store import (
    ResponseStore,
    StoredResponse,
    store_limits,
)
from dynamo_trtllm.frontend.http.openapi import document
from dynamo_trtllm.frontend.http.request_context import AppState, RequestContext
from dynamo_trtllm.frontend.http.request_handler import GenerateEndpoint
from dynamo_trtllm.frontend.http.tokenization import tokenization_routes
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.http_server.server import Route, Router
from dynamo_trtllm.http_status import retry_headers
from dynamo_trtllm.messages import Instance
from dynamo_trtllm.observability.metrics import CONTENT_TYPE, FrontendMetrics
from dynamo_trtllm.observability.traces import TraceExporter

PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NO_WORKER = "no worker has registered yet"
LISTED: Final = 100  # most entries of a list in /health, unless the query has another limit
MAX_LISTED: Final = 1_000_000
_MESSAGES: Final = "/v1/messages"


@dataclass(eq=False)
class StatusRoutes:
    """The status endpoints, one method per path.

    Args:
        not_ready_reason: returns the reason for which `/ready` answers 503, or None.
    """

    _models: ModelRegistry
    _metrics: FrontendMetrics
    _not_ready_reason: Callable[[], str | None]
    # Models have no creation time: the frontend's start is used.
    _created: int = field(default_factory=lambda: int(time.time()), init=False)

    async def models(self, request: HttpRequest, response: HttpResponse) -> None:
        cards = [self._models.get(name).card for name in self._models.names()]
        data = [model_object(card, self._created) for card in cards]
        response.send_json(200, {"object": "list", "data": data})

    async def model(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer with one model, or with all if the name is empty (`/v1/models/`)."""
        name = request.path_params["name"]
        if not name:
            await self.models(request, response)
        else:
            response.send_json(200, model_object(self._models.get(name).card, self._created))

    async def ready(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 when the model can be served now, otherwise 503 with the reason.

        The answer for an unknown model is 404.
        """
        name = request.path_params["name"]
        try:
            self._models.get(name)
            reason = self._models.not_ready_reason(name)
        except EngineNotReady as error:
            reason = error.message
        if reason:
            body = {"model": name, "status": "not_ready", "message": reason}
            response.send_json(503, body, retry_headers(503))
        else:
            response.send_json(200, {"model": name, "status": "ready"})

    async def health(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 always, because this process responds. `status` is that of the deployment.

        Raises:
            InvalidRequest: `limit`, the most entries of a list, is out of range.
        """
        limit = _limit(request, LISTED, MAX_LISTED)
        instances = self._models.instances()
        shown = sorted(instances[:limit], key=lambda instance: (instance.component, instance.id))
        endpoints = {
            (instance.namespace, instance.component, instance.endpoint): instance
            for instance in instances
        }
        num_by_role = Counter(instance.role for instance in instances)
        names = self._models.names()
        found = [self._models.not_ready_reason(name) for name in names]
        reasons = [reason for reason in found if reason]
        if not names:
            reasons = [NO_WORKER]
        body: dict[str, Any] = {
            "status": "not_ready" if reasons else "healthy",
            "endpoints": sorted(str(endpoint_of(instance)) for instance in endpoints.values()),
            "num_instances": {str(role): count for role, count in num_by_role.items()},
            "instances": [_instance(instance) for instance in shown],
            **self._models.readiness(limit),
        }
        if reasons:
            body["message"] = "; ".join(reasons)
        response.send_json(200, body)

    async def frontend_ready(self, _: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 when this frontend takes requests, otherwise 503 with the reason."""
        reason = self._not_ready_reason()
        if reason:
            body = {"status": "not_ready", "reason": reason}
            response.send_json(503, body, retry_headers(503))
        else:
            response.send_json(200, {"status": "ready", "reason": ""})

    async def live(self, _: HttpRequest, response: HttpResponse) -> None:
        response.send_json(200, {"status": "live"})

    async def metrics(self, _: HttpRequest, response: HttpResponse) -> None:
        response.send(200, await self._metrics.render_all(), CONTENT_TYPE)


async def version(_: HttpRequest, response: HttpResponse) -> None:
    response.send_json(200, {"version": dynamo_trtllm.__version__})


async def openapi(_: HttpRequest, response: HttpResponse) -> None:
    response.send(200, await asyncio.to_thread(_openapi))


@cache
def _openapi() -> bytes:
    return orjson.dumps(document())


async def docs(_: HttpRequest, response: HttpResponse) -> None:
    """Answer with a page that shows `/openapi.json`. It loads nothing from other servers."""
    page = files("dynamo_trtllm.frontend").joinpath("docs.html").read_bytes()
    response.send(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": PAGE_MAY})


def _instance(instance: Instance) -> dict[str, Any]:
    return {
        "component": instance.component,
        "endpoint": instance.endpoint,
        "namespace": instance.namespace,
        "instance_id": instance.id,  # a number, as in Dynamo's /health
        "id": f"{instance.id:x}",  # as in logs, headers and `pairs`
        "role": instance.role,
        "model": instance.card.name,
        "engine": instance.engine,
        "transport": {"nats_tcp": instance.subject},
    }


DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 100


@dataclass(eq=False)
class ResponseRoutes:
    """The endpoints of existing responses.

    Responses in progress are known only to their own frontend, stored ones to all frontends that
    share a store.
    """

    _store: ResponseStore
    _running: Mapping[str, tuple[RequestContext, asyncio.Task[None]]]  # see `AppState`

    async def retrieve(self, request: HttpRequest, response: HttpResponse) -> None:
        _check_query(request, "stream", "include", "include[]")
        if _last(request, "stream", "false") != "false":
            raise UnsupportedParameter(
                "stream is not supported for an existing response; leave it out", field="stream"
            )
        stored = await self._stored(request)
        response.send_json(200, stored.response)

    async def input_items(self, request: HttpRequest, response: HttpResponse) -> None:
        _check_query(request, "limit", "order", "after", "include", "include[]")
        stored = await self._stored(request)
        response.send_json(200, _page(stored.items, request))

    async def delete(self, request: HttpRequest, response: HttpResponse) -> None:
        response_id = request.path_params["id"]
        if self._running_builder(request) is not None:
            raise InvalidRequest(f"response {response_id!r} is still in progress; cancel it first")
        await self._store.delete(response_id)
        response.send_json(200, {"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest, response: HttpResponse) -> None:
        """Cancel a response in progress, prefill and decode.

        A response that has ended is returned unchanged.
        """
        builder = self._running_builder(request)
        if builder is None:
            stored = await self._store.get(request.path_params["id"])
            response.send_json(200, stored.response)
            return
        context, task = self._running[builder.id]
        context.is_cancelled = True
        task.cancel()
        cancelled = builder.cancelled()
        packed = builder.pack(cancelled)
        if packed is not None:
            await self._store.put(builder.id, packed, context.client)
        response.send_json(200, cancelled)

    async def _stored(self, request: HttpRequest) -> StoredResponse:
        """Return a stored response, or one in progress that will be stored as it is now."""
        builder = self._running_builder(request)
        if builder is not None and builder.stored:
            return StoredResponse(response=builder.in_progress(), items=builder.input_items())
        return await self._store.get(request.path_params["id"])

    def _running_builder(self, request: HttpRequest) -> ResponseBuilder | None:
        """Return the builder of a response in progress."""
        running = self._running.get(request.path_params["id"])
        if running is None:
            return None
        context, _ = running
        return context.builder if isinstance(context.builder, ResponseBuilder) else None


def _last(request: HttpRequest, name: str, default: str) -> str:
    """Return the last value of a query parameter."""
    return request.query().get(name, [default])[-1]


def _limit(request: HttpRequest, default: int, most: int) -> int:
    """Return the query parameter `limit`. Raise InvalidRequest if it is out of range."""
    limit = _last(request, "limit", str(default))
    is_number = limit.isdecimal() and len(limit) <= len(str(most))
    if not is_number or not 1 <= int(limit) <= most:
        raise InvalidRequest(
            f"limit must be a number from 1 to {most}, not {limit!r}", field="limit"
        )
    return int(limit)


def _check_query(request: HttpRequest, *known: str) -> None:
    """Raise UnsupportedParameter for a query parameter or value that is not supported."""
    query = request.query()
    for name in query:
        if name not in known:
            raise UnsupportedParameter(f"{name} is not supported; leave it out", field=name)
    for name in ("include", "include[]"):
        for value in query.get(name, ()):
            if value != LOGPROBS:  # they are included if the original request asked for them
                raise UnsupportedParameter(
                    f"include of {value!r} is not supported; leave it out", field="include"
                )


def _page(items: Iterable[dict[str, Any]], request: HttpRequest) -> dict[str, Any]:
    """Return the page of items that the query selects. The default order is newest first."""
    order = _last(request, "order", "desc")
    limit = _limit(request, DEFAULT_LIMIT, MAX_LIMIT)
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', not {order!r}", field="order")
    listed = list(items)
    if order == "desc":
        listed.reverse()
    after = request.query().get("after")
    if after:
        places = [index for index, item in enumerate(listed) if item["id"] == after[-1]]
        if not places:
            raise ResponseNotFound(
                f"after is {after[-1]!r}, which is not an input item of this response",
                field="after",
            )
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > len(page),
    }


class FrontendApp(NamedTuple):
    """The app of a frontend: the handler of its requests, and what belongs to it."""

    router: Router
    traces: TraceExporter | None  # sends nothing before its `run`
    close_responses: Callable[[], Awaitable[None]]


def build_app(
    config: FrontendConfig,
    models: ModelRegistry,
    pipeline: Pipeline,
    metrics: FrontendMetrics,
    store: KeyValueStore | None = None,
    not_ready_reason: Callable[[], str | None] = lambda: None,
) -> FrontendApp:
    """Build the app of a frontend. It neither starts nor closes its arguments.

    Args:
        store: storage for `/v1/responses`; None: the memory of this process.
        not_ready_reason: returns the reason for which `/ready` answers 503, or None.
    """
    traces = None
    if config.otlp_endpoint is not None:
        traces = TraceExporter(
            config.otlp_endpoint,
            config.namespace,
            config.trace_sample_ratio,
            on_dropped=metrics.traces_dropped,
        )
    app_state = AppState(config, models, pipeline, metrics, traces)
    _watch(app_state)
    status_routes = StatusRoutes(models, metrics, not_ready_reason)
    limits = store_limits(config)
    response_store = ResponseStore(
        store or MemoryStore(limits),
        shared=config.shares_responses,
        max_bytes=limits.max_value_bytes,
        on_write_failed=lambda code: metrics.child("responses_not_stored_total", code).inc(),
    )
    stored = ResponseRoutes(response_store, app_state.running)
    responses = ResponsesAdapter(response_store)
    routes = [
        Route("POST", "/v1/chat/completions", GenerateEndpoint(CHAT, app_state)),
        Route("POST", "/v1/completions", GenerateEndpoint(TEXT, app_state)),
        Route("POST", "/v1/responses", GenerateEndpoint(responses, app_state)),
        Route("POST", _MESSAGES, GenerateEndpoint(MessagesAdapter(), app_state)),
        Route("GET", "/v1/responses/{id}", stored.retrieve),
        Route("DELETE", "/v1/responses/{id}", stored.delete),
        Route("POST", "/v1/responses/{id}/cancel", stored.cancel),
        Route("GET", "/v1/responses/{id}/input_items", stored.input_items),
        *tokenization_routes(app_state, responses),
        Route("GET", "/version", version),
        Route("GET", "/v1/models", status_routes.models),
        Route("GET", "/v1/models/{name:path}/ready", status_routes.ready),
        Route("GET", "/v1/models/{name:path}", status_routes.model),
        Route("GET", "/health", status_routes.health),
        Route("GET", "/ready", status_routes.frontend_ready),
        Route("GET", "/live", status_routes.live),
        Route("GET", "/metrics", status_routes.metrics),
        Route("GET", "/openapi.json", openapi),
        Route("GET", "/docs", docs),
    ]
    forms = {_MESSAGES: messages_error}
    router = Router(routes, "; see /docs for the API", config.allowed_origins, forms)
    return FrontendApp(router, app_state.traces, response_store.aclose)


def _watch(state: AppState) -> None:
    """Let the metrics read the values of their gauges."""
    metrics = state.metrics
    limiter = state.limiter
    budget = state.body_budget
    placement = state.pipeline.placement
    metrics.watch(
        choices=lambda: limiter.in_use,
        queued=lambda: limiter.queued,
        body_bytes=lambda: budget.in_use,
    )
    metrics.watch(rejected_records=state.models.num_rejected)
    if placement is not None:
        metrics.by_worker["placed_requests"] = placement.loads.requests
        if placement.prefixes is not None:
            metrics.by_worker["known_prefix_blocks"] = placement.prefixes.num_blocks

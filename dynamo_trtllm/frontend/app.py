"""Build the ASGI app: routes, request ids, and OpenAI-style errors for unknown paths and methods."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import CompletionRequest
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.admission import BodyBudget, ConcurrencyLimiter, InFlight
from dynamo_trtllm.frontend.base import ModelCatalog, RequestGenerator
from dynamo_trtllm.frontend.generate_endpoint import GenerateEndpoint
from dynamo_trtllm.frontend.generation.api_adapter import StatelessAdapter
from dynamo_trtllm.frontend.generation.chat import ChatAggregator, ChatSseEncoder
from dynamo_trtllm.frontend.generation.completions import TextAggregator, TextSseEncoder
from dynamo_trtllm.frontend.generation.preprocess import prepare_chat, prepare_text
from dynamo_trtllm.frontend.generation.responses.adapter import ResponsesAdapter
from dynamo_trtllm.frontend.generation.responses.response_store import ResponseStore, store_limits
from dynamo_trtllm.frontend.http import internal
from dynamo_trtllm.frontend.request_handler import AppState
from dynamo_trtllm.frontend.request_ids import RequestIds
from dynamo_trtllm.frontend.response_routes import response_routes
from dynamo_trtllm.frontend.routes import StatusRoutes, docs, error_response, json_response, openapi
from dynamo_trtllm.http_server.errors import to_response
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.request_plane.store import MemoryResponseStore, Store

CHAT = StatelessAdapter(
    endpoint="chat_completions",
    id_prefix="chatcmpl-",
    body=ChatRequest,
    prompt=frozenset({"messages", "tools"}),
    prepare=prepare_chat,
    encoder=ChatSseEncoder,
    aggregator=ChatAggregator,
)
TEXT = StatelessAdapter(
    endpoint="completions",
    id_prefix="cmpl-",
    body=CompletionRequest,
    prompt=frozenset({"prompt"}),
    prepare=prepare_text,
    encoder=TextSseEncoder,
    aggregator=TextAggregator,
)


def build_app(
    config: FrontendConfig,
    models: ModelCatalog,
    pipeline: RequestGenerator,
    metrics: FrontendMetrics,
    store: Store | None = None,
    not_ready_reason: Callable[[], str | None] = lambda: None,
) -> Starlette:
    """Build the ASGI app of a frontend. It neither starts nor closes its arguments.

    Args:
        store: storage for `/v1/responses`; None: the memory of this process.
        not_ready_reason: returns the reason for which `/ready` answers 503, or None.
    """
    limiter = ConcurrencyLimiter(config.max_inflight, config.max_queued)
    body_budget = BodyBudget(config.max_total_body_bytes)
    metrics.watch(choices=lambda: limiter.in_use, queued=lambda: limiter.queued, body_bytes=lambda: body_budget.in_use)
    app_state = AppState(
        config=config,
        models=models,
        pipeline=pipeline,
        metrics=metrics,
        limiter=limiter,
        body_budget=body_budget,
        running=InFlight(),
    )
    status_routes = StatusRoutes(models, metrics, not_ready_reason)
    limits = store_limits(config)
    response_store = ResponseStore(
        store or MemoryResponseStore(limits),
        shared=config.shares_responses,
        max_bytes=limits.max_value_bytes,
        on_write_failed=metrics.response_not_stored,
    )
    responses = ResponsesAdapter(response_store)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", GenerateEndpoint(CHAT, app_state), methods=["POST"]),
            Route("/v1/completions", GenerateEndpoint(TEXT, app_state), methods=["POST"]),
            Route("/v1/responses", GenerateEndpoint(responses, app_state), methods=["POST"]),
            *response_routes(responses, response_store, app_state.running),
            Route("/v1/models", status_routes.models, methods=["GET"]),
            Route("/v1/models/{name:path}/ready", status_routes.ready, methods=["GET"]),
            Route("/v1/models/{name:path}", status_routes.model, methods=["GET"]),
            Route("/health", status_routes.health, methods=["GET"]),
            Route("/ready", status_routes.frontend_ready, methods=["GET"]),
            Route("/live", status_routes.live, methods=["GET"]),
            Route("/metrics", status_routes.metrics, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
            Route("/docs", docs, methods=["GET"]),
        ],
        middleware=[Middleware(RequestIds)],
        exception_handlers={HTTPException: _not_found, Exception: _bug},
    )
    app.router.redirect_slashes = False
    app.state.running = app_state.running
    app.state.close_responses = response_store.aclose
    return app


async def _bug(request: Request, _: Exception) -> Response:
    """Answer an unexpected exception of a status endpoint with 500. Starlette then raises it again, which logs it."""
    response = to_response(internal())
    return json_response(response.body, response.status, {"X-Request-Id": request.state.echoed_id})


async def _not_found(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path, method = request.scope["path"], request.method  # for //x, `url` would treat x as a host
    if exc.status_code == 405:
        return error_response(
            405, f"{method} is not allowed on {path}", code="method_not_allowed", headers=dict(exc.headers or {})
        )
    return error_response(404, f"not found: {method} {path}; see /docs for the API", code="unknown_url")

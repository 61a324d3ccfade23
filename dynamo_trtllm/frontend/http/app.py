"""Build the app of a frontend: its routes, and the id of each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import CompletionRequest
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.fleet.model_registry import ModelRegistry
from dynamo_trtllm.frontend.generation.api_adapter import StatelessAdapter
from dynamo_trtllm.frontend.generation.completions import ChatAggregator, ChatSseEncoder, TextAggregator, TextSseEncoder
from dynamo_trtllm.frontend.generation.pipeline import Pipeline
from dynamo_trtllm.frontend.generation.preprocess import prepare_chat, prepare_text
from dynamo_trtllm.frontend.generation.responses.adapter import ResponsesAdapter
from dynamo_trtllm.frontend.generation.responses.response_store import ResponseStore, store_limits
from dynamo_trtllm.frontend.http.admission import BodyBudget, ConcurrencyLimiter, InFlight
from dynamo_trtllm.frontend.http.request_handler import AppState, GenerateEndpoint
from dynamo_trtllm.frontend.http.routes import StatusRoutes, docs, openapi, response_routes
from dynamo_trtllm.http_server.server import Route, Router
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


class FrontendApp(NamedTuple):
    """The app of a frontend: the handler of its requests, and what belongs to it."""

    router: Router
    running: InFlight
    close_responses: Callable[[], Awaitable[None]]


def build_app(
    config: FrontendConfig,
    models: ModelRegistry,
    pipeline: Pipeline,
    metrics: FrontendMetrics,
    store: Store | None = None,
    not_ready_reason: Callable[[], str | None] = lambda: None,
) -> FrontendApp:
    """Build the app of a frontend. It neither starts nor closes its arguments.

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
    routes = [
        Route("POST", "/v1/chat/completions", GenerateEndpoint(CHAT, app_state)),
        Route("POST", "/v1/completions", GenerateEndpoint(TEXT, app_state)),
        Route("POST", "/v1/responses", GenerateEndpoint(responses, app_state)),
        *response_routes(responses, response_store, app_state.running),
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
    return FrontendApp(Router(routes, "; see /docs for the API"), app_state.running, response_store.aclose)

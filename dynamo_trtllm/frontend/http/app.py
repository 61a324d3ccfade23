"""Build the app of a frontend: its routes, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.access.web_pages import PageGuard
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.api.error_bodies import messages_error
from dynamo_trtllm.frontend.console.activity import RequestActivity
from dynamo_trtllm.frontend.console.feed import ConsoleFeed
from dynamo_trtllm.frontend.console.merged_samples import MergedSamples
from dynamo_trtllm.frontend.console.request_events import RequestEventReader
from dynamo_trtllm.frontend.console.sampler import ProcessSampler
from dynamo_trtllm.frontend.http.console_routes import ConsoleRoutes
from dynamo_trtllm.frontend.http.documentation_routes import docs, openapi
from dynamo_trtllm.frontend.http.hooks import Hooks, ReadBody
from dynamo_trtllm.frontend.http.responses_api_routes import ResponseRoutes
from dynamo_trtllm.frontend.http.status_routes import StatusRoutes, version
from dynamo_trtllm.frontend.http.tokenization import tokenization_routes
from dynamo_trtllm.frontend.messages_api.message_builder import MessagesAdapter
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits
from dynamo_trtllm.frontend.requests.answer import ApiAdapter
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.completions import CHAT, TEXT
from dynamo_trtllm.frontend.requests.preprocess import B
from dynamo_trtllm.frontend.requests.request_body import read_body
from dynamo_trtllm.frontend.requests.serve_request import handle_request, serve_request
from dynamo_trtllm.frontend.requests.traces import TraceExporter
from dynamo_trtllm.frontend.responses_api.key_value_store import KeyValueStore, MemoryStore
from dynamo_trtllm.frontend.responses_api.response_builder import ResponsesAdapter
from dynamo_trtllm.frontend.responses_api.response_store import ResponseStore, store_limits
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.server import Guard, Route, Router

_MESSAGES: Final = "/v1/messages"
_ERROR_FORMS: Final = {_MESSAGES: messages_error}  # forms of errors by the beginning of the path
_NOT_FOUND_HINT: Final = "; see /docs for the API"


class FrontendApp(NamedTuple):
    """The app of a frontend: the handler of its requests, and what belongs to it."""

    router: Router
    access: AccessControl  # reads its file again only in `follow_file`
    limits: AdmissionLimits
    traces: TraceExporter | None  # sends nothing before its `run`
    console: ConsoleFeed | None  # sends only its first events before its `run`
    response_store: ResponseStore


def build_app(
    config: FrontendConfig,
    models: ModelRegistry,
    request_router: RequestRouter,
    metrics: FrontendMetrics,
    store: KeyValueStore | None = None,
    not_ready_reason: Callable[[], str | None] = lambda: None,
    hooks: Hooks | None = None,
    access: AccessControl | None = None,
) -> FrontendApp:
    """Build the app of a frontend. The caller starts and closes the arguments.

    Args:
        store: storage for `/v1/responses`; None: the memory of this process.
        not_ready_reason: returns the reason for which `/ready` answers 503, or None.
        hooks: middleware and routes of the program.
        access: decides which requests are served. Default: that of the settings.

    Raises:
        ConfigError: a route of the program has a path of the frontend, or the file of API keys is
            wrong.
    """
    access = access or AccessControl(config)
    access.count = metrics.count
    access.has_console = config.console
    traces = _trace_exporter(config, metrics)
    app_state = AppState(config, models, request_router, metrics, traces)
    _register_gauges(app_state, access, metrics)
    response_store = _response_store(config, store, metrics)
    response_routes = ResponseRoutes(response_store, app_state.running)
    responses = ResponsesAdapter(response_store)
    routes = [
        _generation_route("/v1/chat/completions", CHAT, app_state),
        _generation_route("/v1/completions", TEXT, app_state),
        _generation_route("/v1/responses", responses, app_state),
        _generation_route(_MESSAGES, MessagesAdapter(), app_state),
        Route("GET", "/v1/responses/{id}", response_routes.retrieve),
        Route("DELETE", "/v1/responses/{id}", response_routes.delete),
        Route("POST", "/v1/responses/{id}/cancel", response_routes.cancel),
        Route("GET", "/v1/responses/{id}/input_items", response_routes.input_items),
        *tokenization_routes(app_state, responses),
        *_status_routes(StatusRoutes(models, metrics, not_ready_reason)),
        Route("GET", "/openapi.json", openapi),
        Route("GET", "/docs", docs),
    ]
    console = _console_feed(app_state, metrics) if config.console else None
    if console is not None:
        events = RequestEventReader(request_router.plane, models, config.namespace)
        routes += ConsoleRoutes(console, events, access.check_again).routes()
    before = hooks.before if hooks else None
    added: list[Route] = []
    if hooks:
        hooks.count_failures(lambda code: metrics.child("hook_failures_total", code).inc())
        added = hooks.route_list(routes, partial(_open_body, app_state))
    guard = _guard(config, access)
    origins = config.allowed_origins
    router = Router(
        routes, _NOT_FOUND_HINT, origins, _ERROR_FORMS, guard=guard, before=before, added=added
    )
    return FrontendApp(router, access, app_state.limits, traces, console, response_store)


def _status_routes(status: StatusRoutes) -> list[Route]:
    """Return the routes of models, readiness, health, metrics and the version."""
    return [
        Route("GET", "/version", version),
        Route("GET", "/v1/models", status.models),
        Route("GET", "/v1/models/{name:path}/ready", status.ready),
        Route("GET", "/v1/models/{name:path}", status.model),
        Route("GET", "/health", status.health),
        Route("GET", "/ready", status.frontend_ready),
        Route("GET", "/live", status.live),
        Route("GET", "/metrics", status.metrics),
    ]


def _console_feed(state: AppState, metrics: FrontendMetrics) -> ConsoleFeed:
    """Return the feed of the console, which follows all requests from now on."""
    activity = RequestActivity()
    activity.subscribe(state.subscribers)
    namespace = state.config.namespace
    return ConsoleFeed(
        ProcessSampler(activity, metrics, state.limits.choice_permits),
        MergedSamples(state.models, namespace, activity.latest),
        state.router.plane,
        namespace,
        metrics.message_unreadable,
    )


def _response_store(
    config: FrontendConfig, store: KeyValueStore | None, metrics: FrontendMetrics
) -> ResponseStore:
    """Return the store of `/v1/responses`."""
    limits = store_limits(config)
    return ResponseStore(
        store or MemoryStore(limits),
        shared=config.shares_responses,
        max_bytes=limits.max_value_bytes,
        on_write_failed=lambda code: metrics.child("responses_not_stored_total", code).inc(),
    )


def _guard(config: FrontendConfig, access: AccessControl) -> Guard:
    """Return the check of requests before their bodies are read."""
    pages = PageGuard(config.host_names, config.allowed_origins)
    return partial(_check_request, access, pages)


def _check_request(
    access: AccessControl, pages: PageGuard, request: HttpRequest, response: HttpResponse
) -> None:
    """Check who sends a request, before its body is read. Raises as `AccessControl.check`."""
    if access.needs_api_key:
        # Web pages of other sites do not know the key, so only the Host header is checked.
        pages.check_host(request)
    else:
        # Nothing else keeps out web pages of other sites: a browser sends its client certificate
        # with the requests of every page.
        pages.check(request)
    access.check(request, response)


def _trace_exporter(config: FrontendConfig, metrics: FrontendMetrics) -> TraceExporter | None:
    """Return the exporter of traces; None if no collector is set."""
    if config.otlp_endpoint is None:
        return None
    return TraceExporter(
        config.otlp_endpoint,
        config.namespace,
        config.trace_sample_ratio,
        on_dropped=metrics.traces_dropped,
    )


def _generation_route(path: str, api: ApiAdapter[B], app_state: AppState) -> Route:
    """Return the route of an API that generates."""
    serve = partial(serve_request, api, app_state)
    return Route("POST", path, partial(handle_request, api.endpoint, serve, app_state))


@contextmanager
def _open_body(state: AppState, request: HttpRequest) -> Iterator[ReadBody]:
    """Let a route of the program read a body, within the limits of all bodies."""
    budget = state.limits.body_budget
    account = budget.body(request.client)
    max_bytes = state.config.max_body_bytes
    try:
        yield partial(
            read_body, request, max_bytes, state.config.receive_timeout_s, budget, account
        )
    finally:
        budget.release(account)


def _register_gauges(state: AppState, access: AccessControl, metrics: FrontendMetrics) -> None:
    """Let the metrics read the values of their gauges."""
    limiter = state.limits.choice_permits
    budget = state.limits.body_budget
    placement = state.router.placement
    metrics.watch(
        choices=lambda: limiter.in_use,
        queued=lambda: limiter.queued,
        body_bytes=lambda: budget.in_use,
    )
    metrics.watch(rejected_records=state.models.num_rejected)
    metrics.shares = state.models.shares
    if access.needs_api_key:  # otherwise, clients are networks, which must not become labels
        metrics.by_key = limiter.loads
    if placement is not None:
        metrics.by_worker["placed_requests"] = placement.loads.requests
        if placement.prefixes is not None:
            metrics.by_worker["known_prefix_blocks"] = placement.prefixes.num_blocks

"""Build the components of a frontend, connect them, run them and open the startup gate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.cluster.connect import connect_plane, open_discovery
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.http.app import FrontendApp, build_app
from dynamo_trtllm.frontend.http.hooks import Hooks
from dynamo_trtllm.frontend.process.routing_setup import create_router, routing_work
from dynamo_trtllm.frontend.requests.usage_reports import UsageReports
from dynamo_trtllm.frontend.responses_api.jetstream import JetStreamStore
from dynamo_trtllm.frontend.responses_api.response_store import store_limits
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.pair_probe import PairProbes
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.observability.recorder import RECORDER, recorder_folder
from dynamo_trtllm.observability.recording_server import answer_queries
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.support.background import BackgroundTasks, wait_for_first
from dynamo_trtllm.support.http_server.exchange import Handler
from dynamo_trtllm.support.tls import ServerCertificate

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.process.control_pipe import ControlPipe

log = logging.getLogger(__name__)

_OTHERS_START = "other processes of this frontend are starting"
_STOP_ANNOUNCED = "this frontend will be stopped; send new requests to another one"
# Longest wait until the parent has sent the metrics of all processes. The parent waits a shorter
# time for each process.
_METRICS_TIMEOUT_S = 5.0
_FAILURE_VISIBLE_S = 1.0  # how long `/ready` reports a failure before the port is closed
# After this time, requests are accepted even if some of the existing models are not loaded, because
# other models may be loaded.
_LOADING_S = 15.0


async def run_app(
    config: FrontendConfig,
    open_gate: Callable[[Handler], None],
    pipe: ControlPipe | None,
    is_stop_announced: Callable[[], bool],
    stop: Callable[[], None],
    hooks: Hooks,
    access: AccessControl,
    certificate: ServerCertificate | None,
) -> None:
    """Run the frontend until cancelled. Call `open_gate` when registered models are loaded.

    Args:
        pipe: leads to the parent, if this process is one of several on the port.
        is_stop_announced: returns True once `/ready` must answer 503.
        stop: called when a background task has failed, and `/ready` has reported it. The server
            then finishes running requests and cancels this function, which raises the failure.
        hooks: middleware and routes of the program.
        access: decides which requests are served.
        certificate: the certificate of the server; None: the server has no TLS.

    Raises:
        ConfigError: a route of the program has a path of the frontend.
        Unreachable: etcd, NATS or its JetStream for the response store cannot be reached.
    """
    async with AsyncExitStack() as stack:
        view = ClusterView()
        breakers = PairBreakers()
        metrics = FrontendMetrics()
        tasks = BackgroundTasks()
        folder = recorder_folder(config.recorder_dir, process_environment())
        RECORDER.start(folder, namespace=config.namespace, kind="frontend")
        stack.callback(RECORDER.stop)
        plane = await _connect_plane(config, tasks, metrics)
        stack.push_async_callback(plane.aclose)
        discovery = open_discovery(config, tasks)
        stack.push_async_callback(discovery.aclose)
        if pipe is not None:
            _share_metrics(pipe, metrics)
        # With probes, a model is ready only once one of its pairs has worked.
        proofs = breakers if config.probe_interval_s > 0 else None
        models = ModelRegistry(view, discovery, plane, config.namespace, proofs)
        stack.push_async_callback(models.aclose)
        router = create_router(config, view, plane, breakers, metrics)
        stack.push_async_callback(router.aclose)
        store = await _connect_store(config)
        if store is not None:
            stack.push_async_callback(store.aclose)
        not_ready = partial(_not_ready_reason, tasks, plane, pipe, is_stop_announced)
        app = build_app(config, models, router, metrics, store, not_ready, hooks, access)
        stack.push_async_callback(app.response_store.aclose)
        work = _background_work(config, models, router, metrics, app, certificate)
        for name, coroutine in work.items():
            stack.push_async_callback(tasks.cancel, tasks.start(coroutine, name))
        await wait_for_first(models.wait_until_loaded(), tasks.until_failed(), timeout_s=_LOADING_S)
        open_gate(app.router)
        if pipe is not None:
            pipe.send_ready()
        await _until_failed(tasks, stop)


def _not_ready_reason(
    tasks: BackgroundTasks,
    plane: RequestPlane,
    pipe: ControlPipe | None,
    is_stop_announced: Callable[[], bool],
) -> str | None:
    """Return the reason for which `/ready` answers 503; None: it answers 200.

    An outage of NATS is no reason. It concerns all frontends, and clients get 503 from each. If no
    frontend was ready, an orchestrator would let clients wait for a connection instead. A rejection
    by NATS is a reason, because other frontends may have the right credentials.
    """
    reason = tasks.reason or plane.rejection()
    if is_stop_announced():
        reason = _STOP_ANNOUNCED
    if reason:
        return reason
    return None if pipe is None or pipe.is_other_ready else _OTHERS_START


async def _connect_plane(
    config: FrontendConfig, tasks: BackgroundTasks, metrics: FrontendMetrics
) -> RequestPlane:
    # An overloaded process reads acknowledgments seconds late. With limits below the stall timeout,
    # it would count workers as unreachable.
    limits = PlaneLimits(
        ack_timeout_s=config.stall_timeout_s, ping_interval_s=config.stall_timeout_s / 3
    )
    return await connect_plane(config, limits, tasks, metrics.message_unreadable)


async def _connect_store(config: FrontendConfig) -> JetStreamStore | None:
    """Return the store of responses; None if each process keeps them in its memory."""
    if not config.shares_responses:
        return None
    return await JetStreamStore.connect(
        config.nats_server, config.namespace, store_limits(config), NatsAccess.of(config)
    )


def _background_work(
    config: FrontendConfig,
    models: ModelRegistry,
    router: RequestRouter,
    metrics: FrontendMetrics,
    app: FrontendApp,
    certificate: ServerCertificate | None,
) -> dict[str, Coroutine[Any, Any, None]]:
    """Return all background work of a frontend, by the names of its tasks, in order of start."""
    work = {"recordings": answer_queries(router.plane, config.namespace)}
    work |= routing_work(config.namespace, router, metrics)
    work["discovery-watch"] = models.watch()
    if config.probe_interval_s > 0:
        probes = PairProbes(
            router,
            metrics.probe_finished,
            interval_s=config.probe_interval_s,
            timeout_s=config.probe_timeout_s,
        )
        work["pair-probes"] = probes.run()
    usage_reports = UsageReports(app.limits, router.health.lacks_pairs, app.access.usage)
    work["frontend-usage"] = usage_reports.run(
        router.plane, config.namespace, metrics.message_unreadable
    )
    if app.traces is not None:
        work["traces"] = app.traces.run()
    if app.console is not None:
        work["console"] = app.console.run()
    if config.api_keys_file is not None:
        work["api-keys"] = app.access.follow_file()
    if certificate is not None:
        certificate.count = metrics.count
        work["tls-certificate"] = certificate.follow_files()
    return work


def _share_metrics(pipe: ControlPipe, metrics: FrontendMetrics) -> None:
    """Let each process of a frontend return the totals of all."""

    async def own_metrics() -> bytes:
        return metrics.render()

    pipe.snapshot = own_metrics
    metrics.gather = partial(pipe.request_snapshot, _METRICS_TIMEOUT_S)


async def _until_failed(tasks: BackgroundTasks, stop: Callable[[], None]) -> None:
    """Wait until a background task fails. Then call `stop`, and raise the failure once cancelled.

    Between the call of `stop` and the cancellation, running requests can finish.
    """
    try:
        await tasks.until_failed()
    except DynamoError as failure:
        log.error("shutting down after running requests: %s", tasks.reason)
        try:
            await asyncio.sleep(_FAILURE_VISIBLE_S)
            stop()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise failure from failure.__cause__

"""Build the components of a frontend, connect them, run them and open the startup gate."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
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
from dynamo_trtllm.frontend.requests.usage_reports import UsageReports
from dynamo_trtllm.frontend.responses_api.jetstream import JetStreamStore
from dynamo_trtllm.frontend.responses_api.response_store import store_limits
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.pair_probe import PairProbes
from dynamo_trtllm.frontend.routing.prefix_feed import PrefixFeed
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement
from dynamo_trtllm.frontend.routing.suspects import Suspects
from dynamo_trtllm.frontend.routing.worker_load import ClusterLoad
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.observability.recorder import RECORDER, recorder_folder
from dynamo_trtllm.observability.recording_server import answer_queries
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS, Clocks
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import LoadReport
from dynamo_trtllm.support.background import BackgroundTasks, wait_for_first
from dynamo_trtllm.support.http_server.exchange import Handler
from dynamo_trtllm.support.tls import ServerCertificate

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.process.control_pipe import ControlPipe

log = logging.getLogger(__name__)

_OTHERS_START = "other processes of this frontend are starting"
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
    stop: Callable[[], None],
    hooks: Hooks,
    access: AccessControl,
    certificate: ServerCertificate | None,
) -> None:
    """Run the frontend until cancelled.

    Calls `open_gate` when the models of registered workers are loaded.

    Args:
        pipe: leads to the parent, if this process is one of several on the port.
        stop: called when a background task has failed, and `/ready` has reported it. The server
            then finishes running requests and cancels this function, which raises the failure.
        hooks: middleware and routes of the program.
        access: decides which requests are served.
        certificate: the certificate of the server; None: the server has no TLS.

    Raises:
        ConfigError: a route of the program has a path of the frontend.
        Unreachable: etcd or NATS cannot be reached, or NATS has no JetStream and the response store
            needs it.
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
        router = router_of(config, view, plane, breakers, metrics)
        stack.push_async_callback(router.aclose)
        store = await _connect_store(config)
        if store is not None:
            stack.push_async_callback(store.aclose)
        not_ready = partial(_not_ready_reason, tasks, plane, pipe)
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
    tasks: BackgroundTasks, plane: RequestPlane, pipe: ControlPipe | None
) -> str | None:
    """Return the reason for which `/ready` answers 503; None: it answers 200.

    An outage of NATS is no reason. It concerns all frontends, and clients get 503 from each. If no
    frontend was ready, an orchestrator would let clients wait for a connection instead. A rejection
    by NATS is a reason, because other frontends may have the right credentials.
    """
    reason = tasks.reason or plane.rejection()
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


async def prune_breakers(view: ClusterView, breakers: PairBreakers) -> None:
    """Drop the breakers of pairs whose instances are gone, until cancelled."""
    changes = view.subscribe()
    while True:
        changed = view.changed
        if any(not change.is_added for change in changes):
            breakers.keep_only(view.ids())
        changes.clear()
        await changed.wait()


def routing_work(
    namespace: str, router: RequestRouter, metrics: FrontendMetrics
) -> dict[str, Coroutine[Any, Any, None]]:
    """Return the background work that updates the data for selecting workers, by task name."""
    view = router.view
    plane = router.plane
    placement = router.placement
    work = {"pairs": prune_breakers(view, router.breakers)}
    if placement is not None:
        clock = router.clocks.monotonic
        work["loads"] = follow_loads(plane, namespace, view, placement.loads, clock)
        if placement.prefixes is not None:
            feed = PrefixFeed(placement.prefixes, view, plane, namespace, metrics)
            work["kv-events"] = feed.run()
    return work


async def follow_loads(
    plane: RequestPlane,
    namespace: str,
    view: ClusterView,
    loads: ClusterLoad,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Store the loads that workers report, and drop the loads of workers that are gone.

    Runs until cancelled.
    """

    def store_report(report: LoadReport) -> None:
        # A report of an unknown instance came before its registration, or after its end.
        if view.instance(report.instance_id) is not None:
            loads.on_report(report, clock())

    changes = view.subscribe()
    unsubscribe = await plane.client.watch_loads(namespace, store_report)
    try:
        while True:
            changed = view.changed
            while changes:
                instance, is_added = changes.popleft()
                if not is_added:
                    loads.remove(instance.id)
            await changed.wait()
    finally:
        await unsubscribe()


# The default of `--early-token-pause-ms`. With this value, nearly all pauses are shorter, and on
# H200 all pauses were below 100 ms. With 50 ms, the first token after a prompt of 2,000 tokens was
# rarely sent early in simulations.
_PAUSE_MS = 75.0
_PAUSE_PART = 0.75  # for requests with a limit between tokens: the default, as a part of that limit


def _options(config: FrontendConfig) -> RouterOptions:
    pause_ms = config.early_token_pause_ms
    if pause_ms is None:
        itl_ms = config.slo_itl_ms
        pause_ms = _PAUSE_MS if itl_ms is None else _PAUSE_PART * itl_ms
    return RouterOptions(
        retries=config.retry_limit,
        migrations=config.migration_limit,
        hold_s=config.hold_for_roles_s,
        selects_at_random=config.router_mode == "random",
        early_token_pause_s=pause_ms / 1000,
        early_token_part=_PAUSE_PART if pause_ms > 0 else 0.0,
        itl_s=None if config.slo_itl_ms is None else config.slo_itl_ms / 1000,
        decode_fallback=config.decode_fallback,
        has_probes=config.probe_interval_s > 0,
    )


def router_of(
    config: FrontendConfig,
    view: ClusterView,
    plane: RequestPlane,
    breakers: PairBreakers,
    metrics: FrontendMetrics,
    clocks: Clocks = SYSTEM_CLOCKS,
    seed: int | None = None,
) -> RequestRouter:
    """Return the router of requests.

    The router counts queries of death and collected KV in `metrics`. `seed` makes its random
    choices of workers repeatable.
    """
    suspects = Suspects(metrics.query_of_death, clock=clocks.monotonic)
    return RequestRouter(
        view,
        plane,
        options=_options(config),
        breakers=breakers,
        placement=placement_of(config, seed),
        on_kv_collected=metrics.kv_collected,
        suspects=suspects,
        clocks=clocks,
        seed=seed,
    )


def placement_of(config: FrontendConfig, seed: int | None = None) -> Placement | None:
    """Return the placement, which selects workers by cost or by predicted times.

    None: the router mode uses neither. `seed` makes random choices repeatable.
    """
    if config.router_mode not in ("least-loaded", "kv", "slo"):
        return None
    prefixes = None
    if config.router_mode != "least-loaded":
        prefixes = ClusterPrefixes(
            reads_events=config.router_kv_events, ttl_s=config.router_ttl_secs
        )
    if config.slo_ttft_ms is not None and config.slo_itl_ms is not None:
        return SloPlacement(
            ttft_s=config.slo_ttft_ms / 1000,
            itl_s=config.slo_itl_ms / 1000,
            prefixes=prefixes,
            rejects=config.slo_policy == "reject",
            overlap_credit=config.router_kv_overlap_score_credit,
            seed=seed,
        )
    return Placement(
        config.router_mode,
        prefixes,
        overlap_credit=config.router_kv_overlap_score_credit,
        temperature=config.router_temperature,
        seed=seed,
    )


# Thresholds of the three GC generations: how many allocations, or collections of the younger
# generation, lead to a collection. A collection of the middle generation stops all streams:
#   up to 500,000 objects took 150 to 200 ms while many choices started,
#   100,000 objects took 50 ms on a busy machine,
#   50,000 objects took 33 ms of CPU time for a body of 40,000 blocks.
# With these thresholds, such a collection has at most 25,000 objects and takes 16 ms. All
# collections together take as long as with larger thresholds.
THRESHOLDS = (5_000, 5, 2_000)


def tune_gc() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    A collection of all objects takes tens of ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)

"""Create the router of a frontend from its settings, and keep what it knows of workers current.

Simulations of a frontend use it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.prefix_feed import PrefixFeed
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement
from dynamo_trtllm.frontend.routing.suspects import Suspects
from dynamo_trtllm.frontend.routing.worker_load import ClusterLoad
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS, Clocks
from dynamo_trtllm.protocol.messages import LoadReport

# The default of `--early-token-pause-ms`. With this value, nearly all pauses are shorter, and on
# H200 all pauses were below 100 ms. With 50 ms, the first token after a prompt of 2,000 tokens was
# rarely sent early in simulations.
_PAUSE_MS = 75.0
_PAUSE_PART = 0.75  # for requests with a limit between tokens: the default, as a part of that limit


def router_options(config: FrontendConfig) -> RouterOptions:
    """Return the options of the router with these settings."""
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


def create_router(
    config: FrontendConfig,
    view: ClusterView,
    plane: RequestPlane,
    breakers: PairBreakers,
    metrics: FrontendMetrics,
    clocks: Clocks = SYSTEM_CLOCKS,
    seed: int | None = None,
) -> RequestRouter:
    """Return the router of a frontend with these settings.

    The router counts queries of death and collected KV in `metrics`. `seed` makes its random
    choices of workers repeatable.
    """
    suspects = Suspects(metrics.query_of_death, clock=clocks.monotonic)
    return RequestRouter(
        view,
        plane,
        options=router_options(config),
        breakers=breakers,
        placement=create_placement(config, seed),
        on_kv_collected=metrics.kv_collected,
        suspects=suspects,
        clocks=clocks,
        seed=seed,
    )


def create_placement(config: FrontendConfig, seed: int | None = None) -> Placement | None:
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

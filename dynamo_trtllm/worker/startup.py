"""Start a worker's engine: run preflight against live peers, and report the progress of loading."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from contextlib import aclosing

from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Discovery, Synced
from dynamo_trtllm.engines.capabilities import ReportsProgress, RunsPreflight
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo, Finding
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Instance, Role
from dynamo_trtllm.worker.health import Health
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming

log = logging.getLogger(__name__)

_PEER_ROLES = {
    Role.PREFILL: (Role.DECODE, Role.ELASTIC),
    Role.DECODE: (Role.PREFILL, Role.ELASTIC),
    Role.ELASTIC: (Role.PREFILL, Role.DECODE, Role.ELASTIC),
}
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "note": logging.INFO}


async def live_peers(
    discovery: Discovery, namespace: str, *, model: str, role: Role
) -> list[Instance]:
    """Return the registered instances of the same model that exchange KV with this role.

    Raises:
        Unreachable: discovery does not answer. Without this error, the worker would load for
            minutes before it fails to register.
    """
    instances: list[Instance] = []
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if isinstance(event, Synced):
                break
            if isinstance(event, Added):
                instances.append(event.instance)
    peer_roles = _PEER_ROLES.get(role, ())
    return [peer for peer in instances if peer.card.name == model and peer.role in peer_roles]


async def preflight(engine: Engine, peers: Sequence[Instance]) -> None:
    """Run the engine's preflight checks, and log each problem.

    Args:
        engine: the engine, not started yet.
        peers: live workers that exchange KV with this one.

    Raises:
        ConfigError: a problem has severity error.
    """
    if not isinstance(engine, RunsPreflight):
        return
    findings = await asyncio.to_thread(engine.preflight, peers)
    for finding in findings:
        log.log(
            _LEVELS[finding.severity],
            "preflight: %s: %s",
            finding.severity,
            format_finding(finding),
        )
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    first = errors[0]
    more = f" (and {len(errors) - 1} more, see the log)" if len(errors) > 1 else ""
    raise ConfigError(f"preflight: {format_finding(first)}{more}", field=first.field)


def format_finding(finding: Finding) -> str:
    """Return a preflight problem in one line."""
    against = f" against {finding.other}" if finding.other else ""
    return (
        f"{finding.field} {finding.value}{against}: {finding.why}; {finding.fix} [{finding.rule}]"
    )


# The numbers in the progress of an engine, which change within a stage of loading.
_NUMBERS = re.compile(r"[\d.]+")


async def start_engine(engine: Engine, health: Health, timing: WorkerTiming = TIMING) -> EngineInfo:
    """Start an engine, with its progress in `health.reason` and in the log.

    Raises the errors of `Engine.start`.
    """
    starting = asyncio.create_task(engine.start(), name="engine-start")
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    logged_s = begun_s
    logged_stage = ""
    try:
        while not starting.done():
            progress = engine.progress() if isinstance(engine, ReportsProgress) else ""
            health.reason = progress
            stage = _NUMBERS.sub("", progress)
            is_due = stage != logged_stage or loop.time() - logged_s >= timing.loading_log_s
            if progress and is_due:
                log.info("loading for %.0f s: %s", loop.time() - begun_s, progress)
                logged_stage = stage
                logged_s = loop.time()
            await asyncio.wait({starting}, timeout=timing.loading_poll_s)
        info = starting.result()
    finally:
        health.reason = ""
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    if not isinstance(info, EngineInfo):
        raise ConfigError(
            f"{type(engine).__qualname__}.start returned {info!r}; it must return an EngineInfo",
            field="engine",
        )
    return info

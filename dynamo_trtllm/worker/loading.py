"""What a worker does around its engine's start: judge its arguments against the live peers, and tell how loading goes.

Decides nothing about requests, and registers nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from contextlib import aclosing

from dynamo_trtllm.discovery.base import Added, Discovery, Synced
from dynamo_trtllm.engines.base import Engine, EngineInfo, Finding, HasPreflight, HasProgress
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Instance, Role
from dynamo_trtllm.worker.health import Health

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5  # engines are asked what they do, they do not tell
_SAY_EVERY_S = 30.0  # so that a long stage is not taken for a hang
_NUMBERS = re.compile(r"[\d.]+")  # they move on within a stage
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "note": logging.INFO}


async def live_peers(discovery: Discovery, namespace: str, *, model: str, role: Role) -> list[Instance]:
    """The registered instances of the same model in the other role. Raises Unreachable, which costs less now than
    after loading."""
    found = []
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if isinstance(event, Synced):
                break
            if isinstance(event, Added):
                found.append(event.instance)
    return [peer for peer in found if peer.card.name == model and peer.role is _OTHER.get(role)]


async def preflight(engine: Engine, peers: Sequence[Instance]) -> None:
    """Logs each finding of an engine that can judge itself. Raises ConfigError when one is an error."""
    if not isinstance(engine, HasPreflight):
        return
    findings = await asyncio.to_thread(engine.preflight, peers)
    for finding in findings:
        _log.log(_LEVELS[finding.severity], "preflight: %s: %s", finding.severity, format_finding(finding))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more, on the log)" if len(errors) > 1 else ""
        raise ConfigError(f"preflight: {format_finding(errors[0])}{more}", field=errors[0].field)


def format_finding(finding: Finding) -> str:
    """A finding in one line."""
    against = f" against {finding.other}" if finding.other else ""
    return f"{finding.field} {finding.value}{against}: {finding.why}; {finding.cure} [{finding.rule}]"


async def start_engine(engine: Engine, health: Health) -> EngineInfo:
    """`engine.start_engine`, with what it is doing in `health` and on the log. Raises as it does."""
    if not isinstance(engine, HasProgress):
        return await engine.start()
    starting = asyncio.create_task(engine.start(), name="engine-start")
    try:
        await _tell(starting, engine, health)
        return starting.result()
    finally:
        health.reason = ""
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


async def _tell(starting: asyncio.Task[EngineInfo], engine: HasProgress, health: Health) -> None:
    """Returns when `starting` is done."""
    loop = asyncio.get_running_loop()
    begun_s = said_s = loop.time()
    said = ""
    while not starting.done():
        health.reason = now = engine.progress()
        stage = _NUMBERS.sub("", now)
        if now and (stage != said or loop.time() - said_s >= _SAY_EVERY_S):
            _log.info("loading for %.0f s: %s", loop.time() - begun_s, now)
            said, said_s = stage, loop.time()
        await asyncio.wait({starting}, timeout=_LOOK_EVERY_S)

"""Wait until a worker's requests and KV transfers have ended, before it stops or sleeps."""

from __future__ import annotations

import asyncio
import logging

from dynamo_trtllm.engines.base import Engine, HasStats
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.request_plane.server import EndpointServer

log = logging.getLogger(__name__)

_LOG_EVERY_S = 3.0
_SOON_S = 0.1  # a shorter drain logs no progress


async def drain(engine: Engine, serving: EndpointServer, timeout_s: float) -> None:
    """Wait until running requests and pending KV transfers have ended, or until `timeout_s` with a warning.

    Args:
        engine: the engine to drain.
        serving: the server of its requests; it rejects new ones from now on.
        timeout_s: longest wait in seconds.
    """
    serving.stop_accepting()
    finishing = asyncio.create_task(_finish(engine, serving), name="worker-drain")
    loop = asyncio.get_running_loop()
    begun_s, pause_s = loop.time(), _SOON_S
    try:
        while not finishing.done():
            left_s = timeout_s - (loop.time() - begun_s)
            if left_s <= 0:
                text = "drain timed out after %g s (%s); raise --drain-timeout-s to wait longer"
                log.warning(text, timeout_s, _left(engine, serving))
                return
            await asyncio.wait({finishing}, timeout=min(pause_s, left_s))
            if not finishing.done():
                spent_s = loop.time() - begun_s
                text = "draining for %.0f s (up to %g s): %s"
                log.info(text, spent_s, timeout_s, _left(engine, serving))
            pause_s = _LOG_EVERY_S
        finishing.result()
        log.info("drained")
    except DynamoError as exc:
        log.warning("drain failed (%s): %s", exc.code, exc.message)
    finally:
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)


async def _finish(engine: Engine, serving: EndpointServer) -> None:
    await serving.finished()  # includes requests that have not reached the engine yet
    await engine.drain()


def _left(engine: Engine, serving: EndpointServer) -> str:
    requests = f"running requests: {serving.running}"
    if not isinstance(engine, HasStats):
        return requests
    return f"{requests}, pending KV transfers: {engine.stats().tickets_held}"

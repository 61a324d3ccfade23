"""How a worker ends its work: what runs is finished, KV is kept until each ticket is released or expired. Bounded.

It says what it waits for. Deregistering comes before, closing after.
"""

from __future__ import annotations

import asyncio
import logging

from dynamo_trtllm.engines.base import Engine, HasStats
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.request_plane.base import ServerHandle

_log = logging.getLogger(__name__)

_SAY_EVERY_S = 3.0
_SOON_S = 0.1  # what is done by then is not worth a line


async def drain(engine: Engine, serving: ServerHandle, timeout_s: float) -> None:
    """Returns after `timeout_s` in any case, with a warning that tells what was left."""
    await serving.stop_accepting()
    finishing = asyncio.create_task(_finish(engine, serving), name="worker-drain")
    loop = asyncio.get_running_loop()
    begun_s, pause_s = loop.time(), _SOON_S
    try:
        while not finishing.done():
            left_s = timeout_s - (loop.time() - begun_s)
            if left_s <= 0:
                left = _left(engine, serving)
                _log.warning("requests or tickets were left after --drain-timeout-s %g: %s", timeout_s, left)
                return
            await asyncio.wait({finishing}, timeout=min(pause_s, left_s))
            if not finishing.done():
                spent_s = loop.time() - begun_s
                _log.info("draining for %.0f s of %g s, waiting for %s", spent_s, timeout_s, _left(engine, serving))
            pause_s = _SAY_EVERY_S
        finishing.result()
        _log.info("drained")
    except DynamoError as exc:
        _log.warning("the engine could not drain (%s): %s", exc.code, exc.message)
    finally:
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)


async def _finish(engine: Engine, serving: ServerHandle) -> None:
    await serving.finished()  # also those that the engine has not seen yet
    await engine.drain()


def _left(engine: Engine, serving: ServerHandle) -> str:
    requests = f"requests: {serving.running}"
    if not isinstance(engine, HasStats):
        return requests
    return f"{requests}, tickets whose KV is kept: {engine.stats().tickets_held}"

"""Kills decode workers during greedy requests and compares the answers with a run without faults
(torch, fp32).
"""

from __future__ import annotations

import asyncio
import signal

from ..load_client import Client
from ..stream import RequestRecord, StreamConnection
from .deployment import Deployment, NotReady, Options
from .fault_run import remaining_resources
from .load import build_load, reference_answers
from .verdict import Expected, Verdict, evaluate

_STREAMS = 20
_OSL = 96
_HUNG_S = 60.0
_RECOVERY_S = 60.0
_MAX_ROUNDS = 40


async def run(wanted: int = 100) -> Verdict:
    """Run rounds of simultaneous requests with one kill each until `wanted` requests were
    migrated.
    """
    deployment = Deployment(Options(engine="torch"))
    verdict = Verdict(fault="migration")
    try:
        deployment.start()
        texts = await reference_answers(deployment, osl=_OSL)
        records: list[RequestRecord] = []
        victims = ["decode-1", "decode-2"]
        for number in range(_MAX_ROUNDS):
            if deployment.total("migrations") >= wanted:
                break
            records += await _round(deployment, victims[number % 2])
            await asyncio.to_thread(deployment.wait_ready, _RECOVERY_S)
        verdict = evaluate("migration", records, Expected(texts=texts, osl=_OSL, hung_s=_HUNG_S))
        verdict.notes.append(
            f"{deployment.total('migrations'):g} migrations in {len(records)} requests"
        )
        verdict.add_leaks(await asyncio.to_thread(remaining_resources, deployment))
    except NotReady as exc:
        verdict.add_leaks([f"the deployment failed: {exc}"])
    finally:
        verdict.add_leaks(deployment.stop())
    return verdict


async def _round(deployment: Deployment, victim: str) -> list[RequestRecord]:
    """Send all requests at once and kill the worker when a request has a third of its answer."""
    midway = asyncio.Event()

    class WatchingConnection(StreamConnection):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._record is not None and self._record.events > _OSL // 3:
                midway.set()

    load = build_load(deployment, osl=_OSL, streams=_STREAMS, timeout_s=_HUNG_S, requests=_STREAMS)
    client = Client(load, connection=WatchingConnection)
    running = asyncio.create_task(client.run(), name="chaos-load")
    try:
        async with asyncio.timeout(_HUNG_S):
            await midway.wait()
        deployment.send(victim, signal.SIGKILL)
        return await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        client.aclose()

"""Greedy requests whose decode worker is killed midway, against an undisturbed run: the torch engine in fp32."""

from __future__ import annotations

import asyncio
import signal

from benchmarks.chaos.course import still_held
from benchmarks.chaos.deployment import Deployment, NotServing, Options
from benchmarks.chaos.judge import Rules, Verdict, judged
from benchmarks.chaos.load import load, undisturbed
from benchmarks.client import Client
from benchmarks.stream import Record, StreamConnection

_STREAMS = 20
_OSL = 96
_HUNG_S = 60.0
_WHOLE_S = 60.0
_MOST_ROUNDS = 40


async def run(wanted: int = 100) -> Verdict:
    """Rounds of simultaneous requests, one kill each, until so many were migrated. Every request is judged."""
    deployment = Deployment(Options(engine="torch"))
    verdict = Verdict(fault="migration")
    try:
        deployment.start()
        texts = await undisturbed(deployment, osl=_OSL)
        records: list[Record] = []
        victims = ["decode-1", "decode-2"]
        for number in range(_MOST_ROUNDS):
            if deployment.total("migrations") >= wanted:
                break
            records += await _round(deployment, victims[number % 2])
            await asyncio.to_thread(deployment.wait_whole, _WHOLE_S)
        verdict = judged("migration", records, Rules(texts=texts, osl=_OSL, hung_s=_HUNG_S))
        verdict.notes.append(f"{deployment.total('migrations'):g} migrations in {len(records)} requests")
        verdict.leak(await asyncio.to_thread(still_held, deployment))
    except NotServing as exc:
        verdict.leak([f"the deployment itself: {exc}"])
    finally:
        verdict.leak(deployment.stop())
    return verdict


async def _round(deployment: Deployment, victim: str) -> list[Record]:
    """All requests at once; the kill comes when one of them is through a third of its answer."""
    midway = asyncio.Event()

    class Watched(StreamConnection):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._record is not None and self._record.events > _OSL // 3:
                midway.set()

    wanted = load(deployment, osl=_OSL, streams=_STREAMS, timeout_s=_HUNG_S, requests=_STREAMS)
    client = Client(wanted, connection=Watched)
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

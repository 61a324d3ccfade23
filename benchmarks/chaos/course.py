"""The course of one fault: load, the fault in its middle, the load's end, then what is still held."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.deployment import STEP_S, Deployment, NotServing, Options
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.judge import Kind, Rules, Verdict, judged
from benchmarks.chaos.load import load
from benchmarks.chaos.scene import Scene
from benchmarks.client import Client
from benchmarks.stream import Record

_WHOLE_S = 60.0
_MARGIN_S = 5.0
_LONGER = 1.4  # a long fault lasts this many stall timeouts of the other side


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How long and how much. Seconds and tokens."""

    seconds: float = 20.0  # 3 parts before the fault, 4 of it, 3 after it
    streams: int = 16
    osl: int = 50
    hung_s: float | None = None

    @property
    def edge_s(self) -> float:
        return 0.3 * self.seconds

    @property
    def outage_s(self) -> float:
        return 0.4 * self.seconds

    def silence_s(self, options: Options, outage_s: float) -> float:
        """The longest that is not called hung: the outage, twice to notice a dead peer, and the wait for a role."""
        return self.hung_s or outage_s + 2 * options.stall_timeout_s + options.hold_s + _MARGIN_S

    def osl_of(self, fault: Fault, options: Options) -> int:
        """Return the tokens per answer; a long fault needs answers that outlast it."""
        if fault.watch_s is None:
            return self.osl
        watch_s = fault.watch_s(options)
        return math.ceil((self.edge_s + _LONGER * watch_s + watch_s) / STEP_S) + self.osl

    def outage_of(self, fault: Fault, options: Options) -> float:
        """How long the fault lasts, seconds."""
        return self.outage_s if fault.watch_s is None else _LONGER * fault.watch_s(options)


async def run(deployment: Deployment, fault: Fault, course: Course, texts: Sequence[str]) -> Verdict:
    """Run the fault, evaluate every request, restore the deployment.

    `texts`: undisturbed answers of the length that the fault needs. Raise NotServing when the deployment can't be
    restored.
    """
    outage_s, osl = course.outage_of(fault, deployment.options), course.osl_of(fault, deployment.options)
    hung_s = course.silence_s(deployment.options, outage_s)
    scene = Scene(deployment=deployment, outage_s=outage_s, osl=osl, hung_s=hung_s)
    ramp_s = min(1.0, 0.8 * course.edge_s)  # else all streams are in the same phase when the fault strikes
    runs = asyncio.Event()
    whole_s = hung_s + osl * STEP_S
    wanted = load(deployment, osl=osl, streams=course.streams, timeout_s=whole_s, ramp_s=ramp_s)

    def note_sent(record: Record) -> None:
        # all streams have sent a request; with long answers none may have ended
        if fault.watch_s and record.index >= course.streams:
            runs.set()

    client = Client(wanted, on_open=note_sent, on_record=lambda _: runs.set())
    migrations = await _migrations(deployment, fault)
    before = _instances(deployment)
    running = asyncio.create_task(client.run(), name="chaos-load")
    try:
        await asyncio.sleep(course.edge_s)
        await runs.wait()  # the load runs, however slow the machine
        await fault.apply(scene)
        await asyncio.sleep(course.edge_s)
        client.stop()
        records = [*await running, *scene.records]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        client.aclose()
    rules = Rules(texts=texts, osl=osl, hung_s=hung_s, frontend_dies=fault.kills_frontend)
    verdict = judged(fault.name, records, rules)
    if fault.is_launcher:
        return _of_launcher(verdict)
    await asyncio.to_thread(deployment.wait_whole, _WHOLE_S)
    if fault.migrates and await _migrations(deployment, fault) <= migrations:
        raise NotServing("no stream was continued on another worker: raise --streams")
    verdict.replace(sorted(name for name, _ in before - _instances(deployment) if name not in fault.victims))
    verdict.leak(await asyncio.to_thread(still_held, deployment))
    deployment.note_processes()
    return verdict


async def _migrations(deployment: Deployment, fault: Fault) -> float:
    """So far; only asked where they are expected."""
    return await asyncio.to_thread(deployment.total, "migrations") if fault.migrates else 0.0


def _instances(deployment: Deployment) -> set[tuple[str, str | None]]:
    return {(name, deployment.instance(name)) for name in deployment.options.workers}


def _of_launcher(verdict: Verdict) -> Verdict:
    """What did not come to its end was cut; what is left is judged when the deployment is closed."""
    right = verdict.counts[Kind.RIGHT]
    return Verdict(
        fault=verdict.fault,
        sent=verdict.sent,
        counts=Counter({Kind.RIGHT: right, Kind.CUT: verdict.sent - right}),
    )


def still_held(deployment: Deployment) -> list[str]:
    """What has not gone within the life of a ticket and a margin."""
    until = time.monotonic() + deployment.options.ticket_ttl_s + _MARGIN_S + deployment.options.stall_timeout_s
    while held := deployment.held():
        if time.monotonic() > until:
            return held
        time.sleep(0.1)
    return []

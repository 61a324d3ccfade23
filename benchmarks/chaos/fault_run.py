"""Runs faults: starts the load, applies the fault, ends the load, and checks that all resources are
released.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_trtllm.protocol.errors import ConfigError

from ..load_client import Client
from ..stream import RequestRecord
from .context import FaultContext
from .deployment import STEP_S, Deployment, NotReady, Options
from .faults import Fault
from .load import build_load, reference_answers
from .verdict import Expected, Outcome, Verdict, evaluate

_RECOVERY_S = 60.0
_MARGIN_S = 5.0
_OUTLAST = 1.4  # a long fault lasts this many stall timeouts of the other side


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Duration and amount of load of one fault."""

    seconds: float = 20.0  # of load: 30 % before the fault, 40 % during it, 30 % after it
    streams: int = 16  # concurrent requests
    osl: int = 50  # tokens per answer
    hung_s: float | None = None  # longest silence; None: derived from the timeouts

    @property
    def margin_s(self) -> float:
        """Return the seconds of load before the fault, and again after it."""
        return 0.3 * self.seconds

    def longest_silence_s(self, options: Options, outage_s: float) -> float:
        """Return the silence in seconds after which a request counts as hung.

        It covers the outage, two stall timeouts, and the wait for a missing role.
        """
        return self.hung_s or outage_s + 2 * options.stall_timeout_s + options.hold_s + _MARGIN_S

    def osl_for(self, fault: Fault, options: Options) -> int:
        """Return the tokens per answer. A long fault needs answers that outlast it."""
        if fault.watch_s is None:
            return self.osl
        watch_s = fault.watch_s(options)
        return math.ceil((self.margin_s + _OUTLAST * watch_s + watch_s) / STEP_S) + self.osl

    def outage_for(self, fault: Fault, options: Options) -> float:
        """Return how long the fault lasts, in seconds."""
        return 0.4 * self.seconds if fault.watch_s is None else _OUTLAST * fault.watch_s(options)


class FaultRunner:
    """Runs faults one by one. Uses one deployment as long as it stays healthy."""

    def __init__(self, options: Options, config: RunConfig) -> None:
        self._options = options
        self._config = config
        self._deployment: Deployment | None = None
        self._leftovers: list[str] = []  # of earlier deployments
        # answers without a fault, by their length in tokens
        self._texts: dict[int, Sequence[str]] = {}

    async def run(self, fault: Fault) -> Verdict:
        """Run one fault and return its verdict."""
        try:
            deployment = await self._deployment_for(fault)
            osl = self._config.osl_for(fault, deployment.options)
            if osl not in self._texts:
                self._texts[osl] = await reference_answers(deployment, osl=osl)
            verdict = await run_fault(deployment, fault, self._config, self._texts[osl])
        except (NotReady, ConfigError) as exc:  # the second: a server did not start in time
            verdict = Verdict(fault=fault.name)
            verdict.add_leaks([f"the deployment failed: {exc}"])
        if fault.is_launcher or verdict.leaked:
            verdict.add_leaks(self.close())
        return verdict

    async def _deployment_for(self, fault: Fault) -> Deployment:
        """Return the running deployment if it suits the fault, or a new one."""
        options = dataclasses.replace(
            self._options,
            engine=fault.engine or self._options.engine,
            is_launcher_victim=fault.is_launcher,
            has_network=fault.has_network,
            is_elastic=fault.is_elastic,
            hold_s=self._options.hold_s if fault.hold_s is None else fault.hold_s,
        )
        if self._deployment is None or fault.is_launcher or self._deployment.options != options:
            self._leftovers = self.close()
            self._deployment = Deployment(options)
            self._deployment.start()
            osl = self._config.osl
            # also tests the new deployment
            self._texts[osl] = await reference_answers(self._deployment, osl=osl)
        return self._deployment

    def close(self) -> list[str]:
        """Stop the deployment. Return the processes and files that it left."""
        deployment = self._deployment
        self._deployment = None
        leftovers = self._leftovers
        self._leftovers = []
        return leftovers if deployment is None else [*leftovers, *deployment.stop()]


async def run_fault(
    deployment: Deployment, fault: Fault, config: RunConfig, texts: Sequence[str]
) -> Verdict:
    """Run the fault, evaluate every request and wait until the deployment has recovered.

    Args:
        deployment: a deployment that is ready.
        fault: what to apply in the middle of the load.
        config: duration and amount of load.
        texts: answers of a run without faults, of the length that the fault needs.

    Raises:
        NotReady: the deployment did not recover, or the fault had no effect.
    """
    outage_s = config.outage_for(fault, deployment.options)
    osl = config.osl_for(fault, deployment.options)
    hung_s = config.longest_silence_s(deployment.options, outage_s)
    context = FaultContext(deployment=deployment, outage_s=outage_s, osl=osl, hung_s=hung_s)
    migrations = await _migrations(deployment, fault)
    before = _instances(deployment)
    records = await _apply_under_load(fault, config, context)
    expected = Expected(texts=texts, osl=osl, hung_s=hung_s, frontend_dies=fault.kills_frontend)
    verdict = evaluate(fault.name, records, expected)
    verdict.notes += context.notes
    if fault.is_launcher:
        return _launcher_verdict(verdict)
    await asyncio.to_thread(deployment.wait_ready, _RECOVERY_S)
    if fault.migrates and await _migrations(deployment, fault) <= migrations:
        raise NotReady("no stream was continued on another worker: raise --streams")
    verdict.add_replaced(
        sorted(name for name, _ in before - _instances(deployment) if name not in fault.victims)
    )
    verdict.add_leaks(await asyncio.to_thread(remaining_resources, deployment))
    deployment.note_processes()
    return verdict


async def _apply_under_load(
    fault: Fault, config: RunConfig, context: FaultContext
) -> list[RequestRecord]:
    """Apply the fault in the middle of the load. Return the records of all requests."""
    # without it all streams are in the same phase when the fault strikes
    ramp_s = min(1.0, 0.8 * config.margin_s)
    is_loaded = asyncio.Event()
    load = build_load(
        context.deployment,
        osl=context.osl,
        streams=config.streams,
        timeout_s=context.hung_s + context.osl * STEP_S,
        ramp_s=ramp_s,
    )

    def on_open(record: RequestRecord) -> None:
        # all streams have sent a request; with long answers none may have ended
        if fault.watch_s and record.index >= config.streams:
            is_loaded.set()

    client = Client(load, on_open=on_open, on_record=lambda _: is_loaded.set())
    running = asyncio.create_task(client.run(), name="chaos-load")
    try:
        await asyncio.sleep(config.margin_s)
        await is_loaded.wait()  # a slow machine may need longer
        await fault.apply(context)
        await asyncio.sleep(config.margin_s)
        client.stop()
        return [*await running, *context.records]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        client.aclose()


async def _migrations(deployment: Deployment, fault: Fault) -> float:
    """Return the number of migrations so far, or 0 for a fault that causes none."""
    return await asyncio.to_thread(deployment.total, "migrations") if fault.migrates else 0.0


def _instances(deployment: Deployment) -> set[tuple[str, str | None]]:
    return {(name, deployment.instance(name)) for name in deployment.options.workers}


def _launcher_verdict(verdict: Verdict) -> Verdict:
    """Count each request that did not complete as cut.

    Leaks are checked when the deployment is closed.
    """
    right = verdict.counts[Outcome.RIGHT]
    return Verdict(
        fault=verdict.fault,
        sent=verdict.sent,
        counts=Counter({Outcome.RIGHT: right, Outcome.CUT: verdict.sent - right}),
    )


def remaining_resources(deployment: Deployment) -> list[str]:
    """Return the resources that requests still hold after the TTL of KV transfer parameters and a
    margin.
    """
    until = (
        time.monotonic()
        + deployment.options.kv_transfer_ttl_s
        + _MARGIN_S
        + deployment.options.stall_timeout_s
    )
    while held := deployment.held():
        if time.monotonic() > until:
            return held
        time.sleep(0.1)
    return []

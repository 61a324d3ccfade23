"""Faults of elastic workers: a planner that is killed, and shares that change all the time."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from dynamo_trtllm.cluster.discovery.discovery_interface import StoredShares
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.discovery.share_changes import change_shares, elastic_workers
from dynamo_trtllm.cluster.discovery.share_records import planner_key
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.observability.metrics import PREFIX
from dynamo_trtllm.planner.process import LEASE_S
from dynamo_trtllm.protocol.shares import Shares

from ..scrape import fetch
from .context import FaultContext
from .deployment import NUM_FRONTENDS, PLANNER, Deployment, NotReady

# Another planner leads when the lease of the one before has ended, and it is a second old.
_LEADS_WITHIN_S = LEASE_S + 5.0
_CHECK_EVERY_S = 0.05
_CHANGE_EVERY_S = 0.25
_AGREE_WITHIN_S = 10.0
_SHARE_LINE = re.compile(rf'{PREFIX}worker_share{{role="(\w+)",worker="(\w+)"}} (\S+)')
# In turn: the same work for all, each of both splits, and unequal shares.
_ROUNDS: Sequence[tuple[Shares, Shares]] = (
    (Shares(1.0, 1.0), Shares(1.0, 1.0)),
    (Shares(1.0, 0.0), Shares(0.0, 1.0)),
    (Shares(0.0, 1.0), Shares(1.0, 0.0)),
    (Shares(0.25, 1.0), Shares(1.0, 0.5)),
)
# Two of three workers get decode calls: with one, its few KV blocks would be full, and the next
# planner would change that.
_SPLIT = _ROUNDS[2]


class _Leader(NamedTuple):
    """The planner that leads, as etcd has it."""

    name: str
    epoch: int


@asynccontextmanager
async def _discovery(deployment: Deployment) -> AsyncIterator[EtcdDiscovery]:
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=deployment.servers["etcd"].address))
    try:
        yield discovery
    finally:
        await discovery.aclose()


async def kill_planner(context: FaultContext) -> None:
    """Kill the planner that leads, and wait until another one does.

    Raise NotReady if the shares change meanwhile, or no other planner leads in time.
    """
    deployment = context.deployment
    async with _discovery(deployment) as discovery:
        before = await _leader(deployment, other_than=None)
        await _set(discovery, deployment, _SPLIT)
        stored = await discovery.read_shares(deployment.namespace)
        deployment.send(PLANNER, signal.SIGKILL)
        after = await _leader(deployment, other_than=before)
        if after.epoch <= before.epoch:
            raise NotReady(f"the epoch {after.epoch} of the next planner is not above that before")
        await asyncio.sleep(context.outage_s)
        now = await discovery.read_shares(deployment.namespace)
        if now != stored:
            raise NotReady(f"the shares have changed: {_shares(stored)}, then {_shares(now)}")


async def change_roles(context: FaultContext) -> None:
    """Change the shares of all workers several times a second.

    Raise NotReady if a change can't be made.
    """
    deployment = context.deployment
    until_s = time.monotonic() + context.outage_s
    num_changes = 0
    longest_s = 0.0
    async with _discovery(deployment) as discovery:
        for shares in itertools.cycle(_ROUNDS):
            wanted = await _set(discovery, deployment, shares)
            longest_s = max(longest_s, await _agree_after_s(deployment, wanted))
            num_changes += 1
            await asyncio.sleep(_CHANGE_EVERY_S)
            if time.monotonic() > until_s:
                break
    context.notes.append(
        f"{num_changes} changes of shares; both frontends had each after at most {longest_s:.2f} s"
    )


async def _agree_after_s(deployment: Deployment, wanted: Mapping[int, Shares]) -> float:
    """Wait until all frontend processes have these shares. Return how long that took.

    Raise NotReady if they have not in time. It includes the time to read their metrics.
    """
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + _AGREE_WITHIN_S:
        page = b""
        # A busy machine may take longer than the timeout.
        with suppress(OSError):
            page = await asyncio.to_thread(fetch, f"{deployment.url}/metrics")
        sums = {
            (int(worker, 16), role): float(value)
            for role, worker, value in _SHARE_LINE.findall(page.decode())
        }
        # The metrics of the processes are summed.
        if all(
            sums.get((worker, role)) == NUM_FRONTENDS * share
            for worker, shares in wanted.items()
            for role, share in (("prefill", shares.prefill), ("decode", shares.decode))
        ):
            return time.monotonic() - begun_s
    raise NotReady(f"the frontends do not have the same shares after {_AGREE_WITHIN_S:g} s")


async def _set(
    discovery: EtcdDiscovery, deployment: Deployment, shares: Sequence[Shares]
) -> Mapping[int, Shares]:
    """Set the shares of the workers, in turn. Return them by instance id."""
    workers = await elastic_workers(discovery, deployment.namespace)
    changes = {worker.id: one for worker, one in zip(workers, itertools.cycle(shares))}
    registered = {worker.id: worker.shares for worker in workers}
    table = await change_shares(
        discovery,
        deployment.namespace,
        changes,
        registered=registered,
        reason="chaos",
        writer="chaos",
    )
    if table is None:
        raise NotReady("the shares could not be set")
    return table.workers


async def _leader(deployment: Deployment, *, other_than: _Leader | None) -> _Leader:
    """Wait for a planner that leads. Raise NotReady if none does in time."""
    store = EtcdStore(ConnectionConfig(etcd_endpoints=deployment.servers["etcd"].address))
    until_s = time.monotonic() + _LEADS_WITHIN_S
    try:
        while time.monotonic() < until_s:
            record = await store.read(planner_key(deployment.namespace))
            if record is not None:
                leader = _Leader(record.record.decode(), record.revision)
                if leader != other_than:
                    return leader
            await asyncio.sleep(_CHECK_EVERY_S)
    finally:
        await store.aclose()
    raise NotReady(f"no planner leads within {_LEADS_WITHIN_S:g} s")


def _shares(stored: StoredShares) -> Mapping[int, Shares]:
    return {} if stored.table is None else stored.table.workers

"""Frontends that follow the shares of elastic workers, with a real etcd."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from benchmarks.chaos.relay import Relay
from dynamo_trtllm.cluster.connect import connect_plane
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.share_changes import change_shares
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.protocol.shares import ALL_WORK, Shares
from dynamo_trtllm.support.background import BackgroundTasks
from tests.kit.instances import elastic_instance
from tests.kit.model_registry import until
from tests.kit.waiting import SOON_S

IDS = (0xA1, 0xB2)
SPLITS = ((Shares(1.0, 0.0), Shares(0.0, 1.0)), (Shares(0.0, 1.0), Shares(1.0, 0.0)))


class FollowingFrontend:
    """What a frontend knows of shares."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    @property
    def shares(self) -> Mapping[int, Shares]:
        return self._models.shares()

    @property
    def problem(self) -> str:
        """What its /health says of discovery."""
        return self._models.readiness(1)["discovery_problem"]


@asynccontextmanager
async def following(address: str, namespace: str) -> AsyncIterator[FollowingFrontend]:
    """Follow the workers that are registered in etcd."""
    # No calls are made.
    own = ConnectionConfig(
        etcd_endpoints=f"memory://{namespace}", nats_server=f"inproc://{namespace}"
    )
    tasks = BackgroundTasks()
    async with AsyncExitStack() as stack:
        plane = await connect_plane(own, PlaneLimits(), tasks, lambda: None)
        stack.push_async_callback(plane.aclose)
        discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=address))
        stack.push_async_callback(discovery.aclose)
        models = ModelRegistry(ClusterView(), discovery, plane, namespace)
        stack.push_async_callback(models.aclose)
        watch = tasks.start(models.watch(), "watch")
        stack.push_async_callback(tasks.cancel, watch)
        await models.synced.wait()
        yield FollowingFrontend(models)


async def until_agreed(shares: Mapping[int, Shares], *frontends: FollowingFrontend) -> None:
    await until(lambda: all(one.shares == shares for one in frontends))


async def test_frontends_agree_on_shares_after_each_change(etcd_server: str) -> None:
    """The one that has lost etcd says so, keeps its shares, and has those of now when it is back."""
    namespace = f"agreement-{secrets.token_hex(4)}"
    relay = await Relay.start(etcd_server.removeprefix("http://"))
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=etcd_server))

    async def change(number: int) -> dict[int, Shares]:
        shares = dict(zip(IDS, SPLITS[number % 2], strict=True))
        present = dict.fromkeys(IDS, ALL_WORK)
        assert await change_shares(discovery, namespace, shares, registered=present)
        return shares

    async with aclosing(discovery), asyncio.timeout(4 * SOON_S):
        for number in IDS:
            await discovery.register(elastic_instance(number, namespace=namespace))
        async with (
            following(etcd_server, namespace) as one,
            following(f"http://{relay.address}", namespace) as other,
        ):
            assert one.shares == other.shares == dict.fromkeys(IDS, ALL_WORK)
            for number in range(10):
                shares = await change(number)
                await until_agreed(shares, one, other)
            assert other.problem == ""
            await relay.cut()
            await until(lambda: bool(other.problem))
            later = await change(0)
            await until_agreed(later, one)
            assert other.shares == shares
            assert "etcd is not reachable" in other.problem
            assert one.problem == ""
            await relay.mend()
            await until_agreed(later, one, other)
            assert other.problem == ""
    await relay.cut()

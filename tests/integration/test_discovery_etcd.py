"""Discovery while etcd is restarted, away, emptied, compacted, frozen."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from benchmarks.chaos.relay import Relay
from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    Event,
    RejectionChanged,
    Removed,
    Synced,
)
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.discovery.records import endpoint_of, instance_key, namespace_prefix
from dynamo_trtllm.cluster.discovery.share_changes import change_shares
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.protocol.messages import Instance, encode
from dynamo_trtllm.protocol.shares import Shares
from tests.kit.etcd_client import EtcdClient
from tests.kit.instance_events import instance_events
from tests.kit.instances import make_instance
from tests.kit.servers import TestServer
from tests.kit.waiting import SOON_S

ONE, TWO, THREE = (make_instance(number) for number in (1, 2, 3))
MakeEtcd = Callable[[], TestServer]


@asynccontextmanager
async def joined(server: TestServer, *, ttl_s: float = 1) -> AsyncIterator[EtcdDiscovery]:
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=server.address), lease_ttl_s=ttl_s)
    try:
        yield discovery
    finally:
        await discovery.aclose()


class Follower:
    """Collects the events of a watch."""

    def __init__(self) -> None:
        self.received: list[Event] = []
        self._news = asyncio.Condition()

    async def run(self, events: AsyncGenerator[Event, None]) -> None:
        async with aclosing(events):
            async for event in events:
                async with self._news:
                    self.received.append(event)
                    self._news.notify_all()

    def last(self, *words: Event) -> Event:
        """Of these."""
        return [event for event in self.received if event in words][-1]

    async def until(self, *wanted: Event, within_s: float = SOON_S) -> None:
        async with asyncio.timeout(within_s), self._news:
            await self._news.wait_for(lambda: all(event in self.received for event in wanted))


@asynccontextmanager
async def following(discovery: EtcdDiscovery) -> AsyncIterator[Follower]:
    follower = Follower()
    task = asyncio.create_task(follower.run(instance_events(discovery, "dynamo")))
    await follower.until(Synced())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


async def etcd_keys(server: TestServer) -> list[tuple[str, int]]:
    """(key, lease) of all there is."""
    reply = await EtcdClient(server.address).get_all()
    return [(kv.key.decode(), kv.lease) for kv in reply.kvs]


async def put_without_lease(server: TestServer, instance: Instance) -> None:
    key = instance_key(endpoint_of(instance), instance.id)
    await EtcdClient(server.address).put(key, encode(instance))


async def revision(server: TestServer) -> int:
    return int((await EtcdClient(server.address).get(b"\0")).header.revision)


async def stop(server: TestServer) -> None:
    await asyncio.to_thread(server.stop)


async def test_proxy_of_the_environment_is_not_used(
    own_etcd: MakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with joined(own_etcd()) as worker:
        await worker.register(ONE)


async def test_watch_survives_etcd_restart_without_false_down(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    async with (
        joined(server, ttl_s=3) as worker,
        joined(server) as frontend,
        following(frontend) as follower,
    ):
        await worker.register(ONE)
        await follower.until(Added(ONE))
        server.restart()
        await worker.register(TWO)
        await follower.until(Added(TWO))
        await asyncio.sleep(3.5)  # another life of the lease
        assert follower.received == [Synced(), Added(ONE), Added(TWO)]
        assert len(await etcd_keys(server)) == 2


async def test_registration_returns_under_same_key_after_long_outage(
    own_etcd: MakeEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_etcd()
    # etcd that is back gives a lease its whole time again; a worker looks every 2 s at worst
    caplog.set_level(logging.INFO)
    async with (
        joined(server, ttl_s=4) as worker,
        joined(server) as frontend,
        following(frontend) as follower,
    ):
        registration = await worker.register(ONE)
        await follower.until(Added(ONE))
        await stop(server)
        await asyncio.sleep(4.3)
        assert follower.received == [Synced(), Added(ONE)]
        server.start()
        async with asyncio.timeout(SOON_S):
            while not re.search(r"registration \S+ is renewed", caplog.text):  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0.02)
        assert [key for key, _ in await etcd_keys(server)] == [instance_key(endpoint_of(ONE), 1)]
        assert Removed(1) not in follower.received
        await registration.aclose()
        await follower.until(Removed(1))
        assert await etcd_keys(server) == []


async def test_registration_returns_when_etcd_lost_its_data(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    async with (
        joined(server, ttl_s=3) as worker,
        joined(server, ttl_s=4) as frontend,
        following(frontend) as follower,
    ):
        await worker.register(ONE)
        gone = await worker.register(TWO)
        await follower.until(Added(ONE), Added(TWO))
        await stop(server)
        await gone.aclose()  # while the store is away: no error
        server.lose_data()
        server.start()
        await worker.register(THREE)
        await follower.until(Removed(2), Added(THREE))
        assert Removed(1) not in follower.received  # it had the time to come back
        assert [key for key, _ in await etcd_keys(server)] == [
            instance_key(endpoint_of(i), i.id) for i in (ONE, THREE)
        ]


async def test_watch_after_data_loss_reports_only_absent_ones_down(own_etcd: MakeEtcd) -> None:
    """Its revision tells nothing, and a worker that is late is not there when the watcher looks
    again.
    """
    server = own_etcd()
    relay = await Relay.start(server.address)
    frontend = EtcdDiscovery(ConnectionConfig(etcd_endpoints=relay.address), lease_ttl_s=3)
    for instance in (ONE, TWO):
        await put_without_lease(server, instance)
    async with joined(server, ttl_s=30) as worker, following(frontend) as follower:
        await relay.cut()
        known = await revision(server)
        await stop(server)
        server.lose_data()
        server.start()
        while await revision(server) <= known:
            await put_without_lease(server, THREE)
        await relay.mend()
        await follower.until(Added(THREE))
        assert follower.received == [Added(ONE), Added(TWO), Synced(), Added(THREE)]
        await worker.register(ONE)
        await follower.until(Removed(2))
        assert follower.received == [Added(ONE), Added(TWO), Synced(), Added(THREE), Removed(2)]
    await frontend.aclose()
    await relay.cut()


async def test_watch_when_compacted_during_outage_then_exact_changes(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    relay = await Relay.start(server.address)
    async with joined(server, ttl_s=30) as worker:
        frontend = EtcdDiscovery(ConnectionConfig(etcd_endpoints=relay.address), lease_ttl_s=1)
        first = await worker.register(ONE)
        await worker.register(TWO)
        async with following(frontend) as follower:
            await relay.cut()
            await first.aclose()
            await worker.register(THREE)
            await EtcdClient(server.address).compact()
            await relay.mend()
            await follower.until(Removed(1), Added(THREE))
            assert follower.received == [
                Added(ONE),
                Added(TWO),
                Synced(),
                Added(THREE),
                Removed(1),
            ]  # who is new does not wait
        await frontend.aclose()
    await relay.cut()


async def test_watch_cancelled_for_compaction_lists_again(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    async with joined(server, ttl_s=30) as worker:
        for _ in range(3):
            await (await worker.register(ONE)).aclose()
        await EtcdClient(server.address).compact()
        store = worker._store
        async with asyncio.timeout(SOON_S), aclosing(store.changes("v1/", 1)) as batches:
            assert [batch async for batch in batches] == [[]]  # it ends, it does not hang


async def test_watch_ends_when_etcd_lost_data_since_the_list(own_etcd: MakeEtcd) -> None:
    """It would tell nothing until etcd is written to past the revision that was listed."""
    server = own_etcd()
    async with joined(server) as discovery:
        store = discovery._store
        known = await revision(server)
        async with asyncio.timeout(SOON_S), aclosing(store.changes("v1/", known + 2)) as batches:
            assert [batch async for batch in batches] == []


async def test_watch_when_closed_while_etcd_is_away_then_ends(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=server.address))
    follower = Follower()
    task = asyncio.create_task(follower.run(instance_events(discovery, "dynamo")))
    await follower.until(Synced())
    await stop(server)
    await asyncio.sleep(0.3)
    await discovery.aclose()
    await asyncio.wait_for(task, SOON_S)


async def test_watch_when_etcd_is_frozen_then_nothing_is_taken_down(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    async with (
        joined(server) as worker,
        joined(server) as frontend,
        following(frontend) as follower,
    ):
        await worker.register(ONE)
        await follower.until(Added(ONE))
        server.pause()
        await asyncio.sleep(2.5)
        assert follower.received == [Synced(), Added(ONE)]
        server.resume()
        await worker.register(TWO)
        await follower.until(Added(TWO))
        # Whatever the thawed etcd did with the old lease, the last word on ONE is that it is there.
        async with asyncio.timeout(2 * SOON_S):
            while (  # noqa: ASYNC110
                len(await etcd_keys(server)) < 2
                or follower.last(Added(ONE), Removed(1)) != Added(ONE)
            ):
                await asyncio.sleep(0.1)


async def test_register_uses_the_live_one_of_two_endpoints(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    endpoints = f"127.0.0.1:1,{server.address.replace('127.0.0.1', 'localhost')}"
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=endpoints))
    async with following(discovery) as follower:
        await discovery.register(ONE)
        await follower.until(Added(ONE))
    await discovery.aclose()


async def test_start_when_address_is_wrong_then_unreachable_names_it() -> None:
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints="127.0.0.1:1"), start_timeout_s=1)
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 .*--etcd-endpoints"):
        await discovery.register(ONE)
    async with aclosing(discovery.watch("dynamo")) as events:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 "):
            await anext(events)
    assert time.monotonic() - began < SOON_S
    await discovery.aclose()


async def test_register_waits_for_etcd_and_logs_it(
    own_etcd: MakeEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a worker that loads for minutes."""
    server = own_etcd()
    discovery = EtcdDiscovery(
        ConnectionConfig(etcd_endpoints=server.address), lease_ttl_s=1, start_timeout_s=0.2
    )
    async with aclosing(discovery.watch("dynamo")) as events:
        assert await anext(events) == Synced()
    await stop(server)
    registering = asyncio.create_task(discovery.register(ONE))
    said = re.compile(
        rf"waiting for etcd for \d s \(up to 120 s\): etcd at {server.address} did not answer"
    )
    async with asyncio.timeout(SOON_S):
        while not said.search(caplog.text):  # noqa: ASYNC110  # a log has no event
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)  # more than the time that it is given where etcd has never answered
    assert not registering.done()
    server.start()
    await asyncio.wait_for(registering, 2 * SOON_S)
    assert len(await etcd_keys(server)) == 1
    await discovery.aclose()


async def test_register_cancelled_after_writing_is_down_on_close(
    own_etcd: MakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a worker that is stopped the moment it is seen."""
    server = own_etcd()
    put = EtcdStore.put

    async def put_and_stay(*what: Any) -> None:
        await put(*what)
        await asyncio.Event().wait()

    monkeypatch.setattr(EtcdStore, "put", put_and_stay)
    async with (
        joined(server, ttl_s=60) as worker,
        joined(server) as frontend,
        following(frontend) as follower,
    ):
        registering = asyncio.create_task(worker.register(ONE))
        await follower.until(Added(ONE))
        registering.cancel()
        await asyncio.wait([registering])
        await worker.aclose()
        await follower.until(Removed(1))
        assert await etcd_keys(server) == []


async def test_registration_with_long_lease_returns_in_seconds(own_etcd: MakeEtcd) -> None:
    """Sooner than watchers take down what is not there again."""
    server = own_etcd()
    async with (
        joined(server, ttl_s=60) as worker,
        joined(server, ttl_s=6) as frontend,
        following(frontend) as follower,
    ):
        await worker.register(ONE)
        await follower.until(Added(ONE))
        await stop(server)
        server.lose_data()
        server.start()
        await worker.register(TWO)
        await follower.until(Added(TWO))
        async with asyncio.timeout(10):
            while len(await etcd_keys(server)) < 2:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.05)
        assert Removed(1) not in follower.received


async def test_registration_changed_by_another_client_is_restored(own_etcd: MakeEtcd) -> None:
    """Within a lease, on its old lease, so that the record still goes when the worker does."""
    server = own_etcd()
    key = instance_key(endpoint_of(ONE), ONE.id)
    async with (
        joined(server) as worker,
        joined(server) as frontend,
        following(frontend) as follower,
    ):
        await worker.register(ONE)
        await follower.until(Added(ONE))
        before = await etcd_keys(server)
        await EtcdClient(server.address).delete(key)
        await follower.until(Removed(1))
        follower.received.clear()
        await follower.until(Added(ONE))
        follower.received.clear()
        await EtcdClient(server.address).put(key, b"\xc1")
        await follower.until(Removed(1), Added(ONE))
        assert await etcd_keys(server) == before


async def test_planner_that_is_silent_for_a_lease_is_replaced(own_etcd: MakeEtcd) -> None:
    """As one that was killed: it does not resign."""
    server = own_etcd()
    async with joined(server) as first, joined(server) as second:
        killed = await first.try_to_lead("n", "first")
        assert killed is not None
        shares = {1: Shares(1.0, 0.0)}
        table = await change_shares(first, "n", shares, registered=shares, epoch=killed.epoch)
        next_one = None
        async with asyncio.timeout(SOON_S):
            while next_one is None:
                await asyncio.sleep(0.1)
                next_one = await second.try_to_lead("n", "second")
        assert next_one.epoch > killed.epoch
        assert (await second.read_shares("n")).table == table
        # If it was only slow, it finds out, and changes nothing once the next one has.
        assert not await killed.renew()
        assert await change_shares(second, "n", shares, registered=shares, epoch=next_one.epoch)
        late = await change_shares(first, "n", shares, registered=shares, epoch=killed.epoch)
        assert late is None


async def test_oldest_unfit_record_is_rejected_by_all_watchers(own_etcd: MakeEtcd) -> None:
    """Its key is the first by name and by age."""
    server = own_etcd()
    unfit = msgspec.structs.replace(ONE, card=msgspec.structs.replace(ONE.card, vocab_size=1000))
    await put_without_lease(server, unfit)
    async with joined(server) as worker, joined(server) as earlier, following(earlier) as follower:
        assert follower.received == [Added(unfit), Synced()]
        await worker.register(TWO)
        await worker.register(THREE)
        await follower.until(Removed(1), Added(TWO), Added(THREE))
        async with joined(server) as later, following(later) as other:
            (rejected,) = (event for event in other.received if isinstance(event, RejectionChanged))
            reason = "card.vocab_size is 1000, and 32 in the card in use,"
            assert str(rejected.reason).startswith(reason)
            await follower.until(rejected)
            assert [event for event in other.received if event != rejected] == [
                Added(TWO),
                Added(THREE),
                Synced(),
            ]


async def test_watch_shows_another_record_under_same_key(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    changed = msgspec.structs.replace(ONE, version="2.0")
    async with (
        joined(server, ttl_s=30) as worker,
        joined(server) as frontend,
        following(frontend) as follower,
    ):
        await worker.register(ONE)
        await follower.until(Added(ONE))
        await worker.register(changed)
        await follower.until(Added(changed))
        assert len(await etcd_keys(server)) == 1


async def test_aclose_is_bounded_when_store_is_away_or_frozen(own_etcd: MakeEtcd) -> None:
    for hurt in ("stop", "pause"):
        server = own_etcd()
        discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=server.address))
        await discovery.register(ONE)
        getattr(server, hurt)()
        began = time.monotonic()
        await discovery.aclose()
        assert time.monotonic() - began < SOON_S


async def test_watch_rejects_keys_that_are_no_utf8(own_etcd: MakeEtcd) -> None:
    server = own_etcd()
    early = b"v1/instances/dynamo/\xff\xfe"
    late = b"v1/instances/dynamo/tensorrt_llm/generate/\xc3"
    rejections = [
        RejectionChanged(
            key, "the key is not of the form v1/instances/NAMESPACE/COMPONENT/ENDPOINT/ID"
        )
        for key in (
            r"v1/instances/dynamo/\udcff\udcfe",
            r"v1/instances/dynamo/tensorrt_llm/generate/\udcc3",
        )
    ]
    client = EtcdClient(server.address)
    async with joined(server) as discovery:
        await client.put(early, encode(ONE))
        async with following(discovery) as follower:
            assert follower.received == [rejections[0], Synced()]
            await client.put(late, encode(ONE))
            await discovery.register(ONE)
            await follower.until(rejections[1], Added(ONE))
            assert set((await discovery._store.leases(namespace_prefix("dynamo"))).values()) > {
                None
            }
            for key in (early, late):
                await client.delete(key)
            await follower.until(
                *(RejectionChanged(rejection.key, None) for rejection in rejections)
            )
            assert Removed(1) not in follower.received

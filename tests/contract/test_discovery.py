"""The contract of discovery, in memory and in etcd."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import pytest

from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    Discovery,
    Event,
    RejectionChanged,
    Removed,
    SharesChanged,
    StoredShares,
    Synced,
)
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore, Lease
from dynamo_trtllm.cluster.discovery.memory import InstanceRecords, MemoryDiscovery
from dynamo_trtllm.cluster.discovery.records import EndpointId, endpoint_of, instance_key, subject
from dynamo_trtllm.cluster.discovery.share_changes import change_shares
from dynamo_trtllm.cluster.discovery.share_records import planner_key, share_key
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import ConfigError, VersionMismatch
from dynamo_trtllm.protocol.messages import WIRE_VERSION, Instance, encode
from dynamo_trtllm.protocol.shares import Shares, ShareTable
from tests.kit.instance_events import instance_events
from tests.kit.instances import make_instance
from tests.kit.waiting import SOON_S

_CHILD = """
import asyncio, sys
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from tests.kit.instance_events import instance_events
from tests.kit.instances import make_instance
async def main():
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=sys.argv[1]), lease_ttl_s=1)
    await discovery.register(make_instance(int(sys.argv[2]), namespace=sys.argv[3]))
    sys.stdout.write("up\\n"); sys.stdout.flush()
    await asyncio.Event().wait()
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One store of instance records.

    `join` adds a participant, `lose` registers an instance whose owner then dies, and `write` puts or
    deletes a record without the checks of discovery.
    """

    namespace: str
    join: Callable[[], Discovery]
    lose: Callable[[Instance], Awaitable[None]]
    write: Callable[[str, bytes | None], Awaitable[None]]


@pytest.fixture(params=["memory", "etcd"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    namespace = f"n{secrets.token_hex(4)}"
    joined: list[Discovery] = []
    store = InstanceRecords()
    address = request.getfixturevalue("etcd_server") if request.param == "etcd" else ""

    def join() -> Discovery:
        etcd = (
            EtcdDiscovery(ConnectionConfig(etcd_endpoints=address), lease_ttl_s=2)
            if address
            else None
        )
        joined.append(etcd or MemoryDiscovery(store))
        return joined[-1]

    async def lose(instance: Instance) -> None:
        if not address:
            await MemoryDiscovery(store).register(instance)
            store.expire(instance.id)
            return
        argv = [sys.executable, "-c", _CHILD, address, str(instance.id), instance.namespace]
        child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert await child.stdout.readline() == b"up\n"
        child.kill()
        await child.wait()

    async def write(key: str, record: bytes | None) -> None:
        if not address:
            store.delete(key) if record is None else store.put(key, record)
            return
        async with aclosing(EtcdStore(ConnectionConfig(etcd_endpoints=address))) as etcd:
            await (
                etcd.delete(key) if record is None else etcd.put(key, record, Lease(id=0, ttl_s=0))
            )

    yield World(namespace=namespace, join=join, lose=lose, write=write)
    for discovery in joined:
        await discovery.aclose()


async def take(
    events: AsyncGenerator[Event, None], count: int, within_s: float = SOON_S
) -> list[Event]:
    async with asyncio.timeout(within_s):
        return [await anext(events) for _ in range(count)]


async def check_quiet(events: AsyncGenerator[Event, None], for_s: float = 0.3) -> None:
    """Nothing more comes. The generator is spent afterwards."""
    with pytest.raises(TimeoutError):
        await take(events, 1, within_s=for_s)


async def test_register_when_watched_then_synced_up_down(world: World) -> None:
    instance = make_instance(1, namespace=world.namespace)
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        assert await take(events, 1) == [Synced()]
        registration = await world.join().register(instance)
        assert await take(events, 1) == [Added(instance)]
        await registration.aclose()
        assert await take(events, 1) == [Removed(1)]
        await check_quiet(events)


async def test_watch_when_instances_are_there_then_up_before_synced(world: World) -> None:
    instances = [make_instance(number, namespace=world.namespace) for number in (1, 2)]
    for instance in instances:
        await world.join().register(instance)
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        received = await take(events, 3)
        assert received[2] == Synced()
        assert [event.instance for event in received[:2] if isinstance(event, Added)] == instances
        await check_quiet(events)


async def test_watch_when_two_watch_then_both_receive_all(world: World) -> None:
    discovery = world.join()
    async with (
        aclosing(instance_events(discovery, world.namespace)) as first,
        aclosing(instance_events(discovery, world.namespace)) as second,
    ):
        assert await take(first, 1) == await take(second, 1) == [Synced()]
        instance = make_instance(1, namespace=world.namespace)
        await discovery.register(instance)
        assert await take(first, 1) == await take(second, 1) == [Added(instance)]


async def test_register_when_200_at_once_then_all_are_received(world: World) -> None:
    discovery = world.join()
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        await take(events, 1)
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(
                    discovery.register(make_instance(number, namespace=world.namespace))
                )
        received = await take(events, 200)
        assert {event.instance.id for event in received if isinstance(event, Added)} == set(
            range(200)
        )
        await discovery.aclose()
        received = await take(events, 200)
        assert {event.instance_id for event in received if isinstance(event, Removed)} == set(
            range(200)
        )


async def test_watch_when_other_namespace_changes_then_quiet(world: World) -> None:
    discovery = world.join()
    async with aclosing(instance_events(discovery, world.namespace)) as events:
        await take(events, 1)
        await discovery.register(make_instance(1, namespace=world.namespace + "x"))
        own = make_instance(2, namespace=world.namespace)
        await discovery.register(own)
        assert await take(events, 1) == [Added(own)]


async def test_register_when_record_changes_then_up_again(world: World) -> None:
    discovery = world.join()
    first = make_instance(1, namespace=world.namespace)
    second = msgspec.structs.replace(first, version="2.0")
    async with aclosing(instance_events(discovery, world.namespace)) as events:
        await take(events, 1)
        await discovery.register(first)
        await discovery.register(second)
        assert await take(events, 2) == [Added(first), Added(second)]


async def test_register_when_owner_is_killed_then_down_after_the_lease(world: World) -> None:
    instance = make_instance(77, namespace=world.namespace)
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        await take(events, 1)
        await world.lose(instance)
        assert await take(events, 2) == [Added(instance), Removed(77)]


async def test_registration_when_kept_longer_than_its_lease_then_stays(world: World) -> None:
    discovery = world.join()
    async with aclosing(instance_events(discovery, world.namespace)) as events:
        await take(events, 1)
        await discovery.register(make_instance(1, namespace=world.namespace))
        await take(events, 1)
        await check_quiet(events, for_s=3.5)


async def test_aclose_when_called_twice_then_down_once(world: World) -> None:
    discovery = world.join()
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        await take(events, 1)
        registration = await discovery.register(make_instance(1, namespace=world.namespace))
        await registration.aclose()
        await registration.aclose()
        await discovery.aclose()
        await discovery.aclose()
        assert isinstance((await take(events, 2))[1], Removed)
        await check_quiet(events)


async def test_watch_when_discovery_is_closed_then_ends(world: World) -> None:
    discovery = world.join()
    synced = asyncio.Event()

    async def follow() -> list[Event]:
        received: list[Event] = []
        async with aclosing(instance_events(discovery, world.namespace)) as events:
            async for event in events:
                received.append(event)
                synced.set()
        return received

    task = asyncio.create_task(follow())
    await synced.wait()
    await asyncio.sleep(0.05)
    await discovery.aclose()
    assert await asyncio.wait_for(task, SOON_S) == [Synced()]


async def test_watch_when_consumer_is_cancelled_then_it_stops(world: World) -> None:
    discovery = world.join()
    synced = asyncio.Event()

    async def follow() -> None:
        async with aclosing(instance_events(discovery, world.namespace)) as events:
            async for _ in events:
                synced.set()

    task = asyncio.create_task(follow())
    await synced.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(task, SOON_S)
    assert task.cancelled()


def key_of(instance: Instance) -> str:
    return instance_key(endpoint_of(instance), instance.id)


async def take_rejected(events: AsyncGenerator[Event, None], key: str) -> str | None:
    """The reason, once the next event says that this key is rejected."""
    (event,) = await take(events, 1)
    assert isinstance(event, RejectionChanged), event
    assert event.key == key
    return event.reason


async def test_watch_rejects_record_under_another_key_until_deleted(world: World) -> None:
    real = make_instance(1, namespace=world.namespace)
    ghost_key = key_of(make_instance(0xAAAA, namespace=world.namespace))
    await world.join().register(real)
    await world.write(ghost_key, encode(real))
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        there = await take(events, 3)
        reason = "id is aaaa in the key and 1 in the record"
        assert there == [RejectionChanged(ghost_key, reason), Added(real), Synced()]
        await world.write(ghost_key, None)
        assert await take_rejected(events, ghost_key) is None
        await check_quiet(events)  # the real one stays up


async def test_watch_rejects_record_of_another_subject(world: World) -> None:
    """Requests would go to the intruder that listens there."""
    real = make_instance(1, namespace=world.namespace)
    intruder = msgspec.structs.replace(
        make_instance(2, namespace=world.namespace), subject=real.subject
    )
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        await take(events, 1)
        await world.write(key_of(intruder), encode(intruder))
        reason = await take_rejected(events, key_of(intruder))
    assert reason is not None
    assert reason.startswith(f"subject is '{real.subject}'; instance 2 must have ")


async def test_watch_when_id_has_two_keys_then_second_waits_for_first(world: World) -> None:
    first = make_instance(1, namespace=world.namespace)
    endpoint = EndpointId(world.namespace, "zzz", "generate")
    second = msgspec.structs.replace(first, component="zzz", subject=subject(endpoint, 1))
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        await take(events, 1)
        registration = await world.join().register(first)
        await world.join().register(second)
        assert await take(events, 1) == [Added(first)]
        reason = await take_rejected(events, key_of(second))
        assert reason == f"instance id 1 is already registered under the key {key_of(first)}"
        await registration.aclose()
        assert await take(events, 3) == [
            Removed(1),
            RejectionChanged(key_of(second), None),
            Added(second),
        ]


async def test_watch_when_a_rejected_record_is_put_right_then_up(world: World) -> None:
    instance = make_instance(1, namespace=world.namespace)
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        await take(events, 1)
        await world.write(key_of(instance), b"garbage")
        assert await take_rejected(events, key_of(instance)) is not None
        await world.write(key_of(instance), encode(instance))
        assert await take(events, 2) == [RejectionChanged(key_of(instance), None), Added(instance)]


async def test_register_rejects_record_that_watchers_would_reject(world: World) -> None:
    instance = msgspec.structs.replace(
        make_instance(1, namespace=world.namespace), subject="another"
    )
    async with aclosing(instance_events(world.join(), world.namespace)) as events:
        await take(events, 1)
        with pytest.raises(ConfigError, match="subject is 'another'"):
            await world.join().register(instance)
        await check_quiet(events)


async def test_shares_are_written_once_and_watched(world: World) -> None:
    watching = world.join()
    writing = world.join()
    async with aclosing(instance_events(watching, world.namespace)) as events:
        assert await take(events, 1) == [Synced()]
        empty = await writing.read_shares(world.namespace)
        assert empty == StoredShares(None)
        table = ShareTable(revision=1, workers={1: Shares(1.0, 0.0)}, wire=WIRE_VERSION)
        assert await writing.write_shares(world.namespace, table, empty.version)
        assert await take(events, 1) == [SharesChanged(table)]
        # Another client, which has read the same version, would undo this change.
        assert not await watching.write_shares(world.namespace, table, empty.version)
        stored = await watching.read_shares(world.namespace)
        assert stored.table == table
        table = msgspec.structs.replace(table, revision=2)
        assert await watching.write_shares(world.namespace, table, stored.version)
        assert await take(events, 1) == [SharesChanged(table)]
        await world.write(share_key(world.namespace), b"shares")
        (rejected,) = await take(events, 1)
        assert isinstance(rejected, RejectionChanged)
        broken = await writing.read_shares(world.namespace)
        assert broken.problem
        assert await writing.write_shares(world.namespace, table, broken.version)
        # They are those that stayed in use.
        assert await take(events, 1) == [RejectionChanged(share_key(world.namespace), None)]
        await check_quiet(events)


async def test_changes_at_the_same_moment_are_all_made(world: World) -> None:
    changes = {number: Shares(1.0, number / 4) for number in range(4)}
    for discovery in (world.join(), world.join()):
        async with asyncio.TaskGroup() as group:
            for number, shares in changes.items():
                group.create_task(
                    change_shares(discovery, world.namespace, {number: shares}, registered=changes)
                )
    stored = await world.join().read_shares(world.namespace)
    assert stored.table is not None
    assert stored.table.revision == 8
    assert stored.table.workers == changes


async def test_replaced_writer_changes_nothing(world: World) -> None:
    discovery = world.join()
    shares = {1: Shares(1.0, 1.0)}
    newer = await change_shares(discovery, world.namespace, shares, registered=shares, epoch=2)
    assert newer is not None
    old = await change_shares(discovery, world.namespace, shares, registered=shares, epoch=1)
    assert old is None
    assert (await discovery.read_shares(world.namespace)).table == newer


async def test_table_of_another_wire_version_is_not_replaced(world: World) -> None:
    discovery = world.join()
    other = encode(ShareTable(revision=4, wire=WIRE_VERSION + 2))
    await world.write(share_key(world.namespace), other)
    shares = {1: Shares(1.0, 0.0)}
    with pytest.raises(VersionMismatch, match="upgrade the side with the lower one"):
        await change_shares(discovery, world.namespace, shares, registered=shares, epoch=9)
    assert (await discovery.read_shares(world.namespace)).is_from_incompatible_release


async def test_one_planner_leads_until_it_ends(world: World) -> None:
    first, second = world.join(), world.join()
    leading = await first.try_to_lead(world.namespace, "first")
    assert leading is not None
    assert await second.try_to_lead(world.namespace, "second") is None
    assert await leading.renew()
    await leading.aclose()
    assert not await leading.renew()
    next_one = await second.try_to_lead(world.namespace, "second")
    assert next_one is not None
    assert next_one.epoch > leading.epoch


async def test_leader_whose_key_is_gone_does_not_lead(world: World) -> None:
    discovery = world.join()
    leading = await discovery.try_to_lead(world.namespace, "first")
    assert leading is not None
    await world.write(planner_key(world.namespace), None)
    assert not await leading.renew()


async def test_watchers_pass_over_the_key_of_the_planner(world: World) -> None:
    watching = world.join()
    async with aclosing(instance_events(watching, world.namespace)) as events:
        assert await take(events, 1) == [Synced()]
        leading = await world.join().try_to_lead(world.namespace, "first")
        assert leading is not None
        await leading.aclose()
        await check_quiet(events)

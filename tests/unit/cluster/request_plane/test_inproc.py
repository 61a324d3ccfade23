"""Clusters within one process: which members see each other, and from which threads."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing

import pytest

from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    CardChosen,
    Removed,
    Synced,
)
from dynamo_trtllm.cluster.discovery.memory import RECORDS, MemoryDiscovery
from dynamo_trtllm.cluster.request_plane.inproc import BUSES, InprocTransport
from dynamo_trtllm.protocol.errors import NoListener
from tests.kit.instances import make_instance
from tests.kit.waiting import SOON_S


async def echo(transport: InprocTransport) -> None:
    def answer(data: bytes, reply: str) -> None:
        transport.publish(reply, data)

    await transport.subscribe("echo", answer)


async def ask(transport: InprocTransport) -> bytes:
    return await transport.request("echo", b"x", timeout_s=SOON_S)


async def test_transports_of_different_addresses_are_separate() -> None:
    worker = InprocTransport(BUSES.at("inproc://a"))
    await echo(worker)
    assert await ask(InprocTransport(BUSES.at("inproc://a"))) == b"x"
    with pytest.raises(NoListener):
        await ask(InprocTransport(BUSES.at("inproc://b")))


async def test_transport_without_users_leaves_nothing() -> None:
    await echo(InprocTransport(BUSES.at("inproc://a")))
    gc.collect()
    with pytest.raises(NoListener):
        await ask(InprocTransport(BUSES.at("inproc://a")))


async def test_publish_reaches_both_subscribers_until_one_closes() -> None:
    bus = BUSES.at("inproc://a")
    receivers = [InprocTransport(bus), InprocTransport(bus)]
    received: list[tuple[int, bytes]] = []
    for number, receiver in enumerate(receivers):

        def take(data: bytes, reply: str, number: int = number) -> None:
            received.append((number, data))

        await receiver.subscribe("load", take)
    sender = InprocTransport(bus)
    sender.publish("load", b"1")
    await asyncio.sleep(0)
    await receivers[0].aclose()
    sender.publish("load", b"2")
    await asyncio.sleep(0)
    assert received == [(0, b"1"), (1, b"1"), (1, b"2")]


async def test_request_is_answered_in_the_thread_of_the_worker() -> None:
    bus = BUSES.at("inproc://threads")
    is_up = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        stopped = asyncio.Event()
        worker = InprocTransport(bus)
        await echo(worker)
        await worker.subscribe("stop", lambda data, reply: stopped.set())
        loop.call_soon_threadsafe(is_up.set)
        await stopped.wait()
        await worker.aclose()

    async with asyncio.timeout(SOON_S):
        serving = asyncio.create_task(asyncio.to_thread(asyncio.run, serve()))
        await is_up.wait()
        caller = InprocTransport(bus)
        assert await ask(caller) == b"x"
        caller.publish("stop", b"")
        await serving
    with pytest.raises(NoListener):
        await ask(caller)


async def test_watch_reports_an_instance_of_another_thread() -> None:
    instance = make_instance(1, namespace="ns")
    records = RECORDS.at("memory://threads")

    async def register() -> None:
        discovery = MemoryDiscovery(records)
        await discovery.register(instance)
        await discovery.aclose()

    async with asyncio.timeout(SOON_S), aclosing(MemoryDiscovery(records).watch("ns")) as events:
        assert await anext(events) == Synced()
        await asyncio.to_thread(asyncio.run, register())
        registered = [await anext(events) for _ in range(3)]
        assert registered == [CardChosen(instance.card), Added(instance), Removed(1)]

"""What every store does: the one in memory and JetStream."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from dynamo_trtllm.cluster.roles import bucket_of
from dynamo_trtllm.frontend.responses_api import jetstream
from dynamo_trtllm.frontend.responses_api.jetstream import JetStreamStore
from dynamo_trtllm.frontend.responses_api.key_value_store import (
    KeyValueStore,
    MemoryStore,
    StoreLimits,
)
from dynamo_trtllm.launch.local_servers import nats_binary
from dynamo_trtllm.protocol.errors import Disconnected, PayloadTooLarge, Unreachable
from dynamo_trtllm.support.subprocesses import spawn
from tests.kit.servers import TestServer
from tests.kit.waiting import SOON_S

MIB = 1 << 20
Opened = Callable[[StoreLimits], Awaitable[KeyValueStore]]


def limits(
    *,
    max_entries: int = 100,
    max_bytes: int = 64 * MIB,
    max_value_bytes: int = 8 * MIB,
    ttl_s: float = 60.0,
) -> StoreLimits:
    return StoreLimits(
        max_entries=max_entries, max_bytes=max_bytes, max_value_bytes=max_value_bytes, ttl_s=ttl_s
    )


async def eventually(
    read: Callable[[], Awaitable[bytes | None]], wanted: bytes | None
) -> bytes | None:
    """What is read once it is `wanted`, or at last."""
    found: bytes | None = b"never read"
    for _ in range(200):
        with contextlib.suppress(Disconnected, Unreachable):
            found = await read()
        if found == wanted:
            break
        await asyncio.sleep(0.05)
    return found


@pytest.fixture(params=["memory", "jetstream"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    """Opens an empty store."""
    stores: list[KeyValueStore] = []

    async def open_store(wanted: StoreLimits) -> KeyValueStore:
        if request.param == "memory":
            stores.append(MemoryStore(wanted))
        else:
            address = request.getfixturevalue("nats_server")
            stores.append(await JetStreamStore.connect(address, f"n{secrets.token_hex(4)}", wanted))
        return stores[-1]

    yield open_store
    for store in stores:
        await store.aclose()
        await store.aclose()


async def test_value_then_read_replaced_and_deleted(opened: Opened) -> None:
    store = await opened(limits())
    assert await store.get("resp_1") is None
    await store.put("resp_1", b"one")
    await store.put("resp_2", b"")
    assert (await store.get("resp_1"), await store.get("resp_2")) == (b"one", b"")
    await store.put("resp_1", b"two")
    assert await store.get("resp_1") == b"two"
    await store.delete("resp_1")
    await store.delete("resp_1")
    await store.delete("resp_3")
    assert (await store.get("resp_1"), await store.get("resp_2")) == (None, b"")


@pytest.mark.parametrize("size", [MIB - 5000, MIB, 2 * MIB, 5 * MIB + 1])
async def test_large_value_then_it_is_whole(opened: Opened, size: int) -> None:
    store = await opened(limits())
    value = secrets.token_bytes(size)
    await store.put("resp_1", value)
    assert await store.get("resp_1") == value
    await store.delete("resp_1")
    assert await store.get("resp_1") is None


async def test_full_store_then_the_oldest_goes(opened: Opened) -> None:
    store = await opened(limits(max_bytes=10 * MIB))
    for number in range(4):
        await store.put(f"resp_{number}", secrets.token_bytes(3 * MIB))
    found = [await store.get(f"resp_{number}") is not None for number in range(4)]
    assert found == [False, True, True, True]


async def test_oversized_value_is_rejected_and_others_stay(opened: Opened) -> None:
    store = await opened(limits(max_value_bytes=MIB))
    await store.put("resp_1", b"small")
    with pytest.raises(PayloadTooLarge, match="can't be stored; the limit is 1048576 bytes"):
        await store.put("resp_2", bytes(MIB + 1))
    assert await store.get("resp_1") == b"small"


async def test_value_when_its_time_is_over_then_gone(opened: Opened) -> None:
    store = await opened(limits(ttl_s=0.2))
    await store.put("resp_1", b"one")
    assert await eventually(lambda: store.get("resp_1"), None) is None


async def test_many_at_once_then_each_has_its_own(opened: Opened) -> None:
    store = await opened(limits())
    values = {f"resp_{number}": secrets.token_bytes(2000) for number in range(40)}
    await asyncio.gather(*(store.put(key, value) for key, value in values.items()))
    found = await asyncio.gather(*(store.get(key) for key in values))
    assert dict(zip(values, found, strict=True)) == values


@pytest.mark.parametrize(
    "full", [limits(max_entries=10), limits(max_bytes=100)], ids=["entries", "bytes"]
)
async def test_memory_filled_by_one_owner_costs_others_nothing(full: StoreLimits) -> None:
    store = MemoryStore(full)
    for number in range(3):
        await store.put(f"quiet_{number}", bytes(10), "quiet")
    for number in range(50):
        await store.put(f"loud_{number}", bytes(10), "loud")
    found = [
        key
        for key in (f"loud_{number}" for number in range(50))
        if await store.get(key) is not None
    ]
    assert found == [f"loud_{number}" for number in range(43, 50)]
    assert [await store.get(f"quiet_{number}") for number in range(3)] == [bytes(10)] * 3


async def test_memory_then_its_bytes_are_counted() -> None:
    now = [0.0]
    store = MemoryStore(limits(max_entries=2, ttl_s=10.0), clock=lambda: now[0])
    await store.put("a", b"123")
    await store.put("a", b"12345")
    assert store.used_bytes == 5
    await store.put("b", b"1")
    await store.put("c", b"1")
    assert (await store.get("a"), store.used_bytes) == (None, 2)
    now[0] = 10.0
    assert (await store.get("b"), store.used_bytes) == (None, 0)


async def test_jetstream_when_two_open_it_then_both_see_the_same(nats_server: str) -> None:
    namespace = f"n.{secrets.token_hex(4)} *"
    first, second = await asyncio.gather(
        *(JetStreamStore.connect(nats_server, namespace, limits()) for _ in range(2))
    )
    await first.put("resp_1", b"one")
    assert await second.get("resp_1") == b"one"
    await second.delete("resp_1")
    assert await first.get("resp_1") is None
    for store in (first, second):
        await store.aclose()


@pytest.mark.parametrize("namespace", ["dynamo", "a.b c", "ü"])
def test_bucket_then_its_name_is_one_of_nats(namespace: str) -> None:
    name = bucket_of(namespace)
    assert name.replace("_", "").replace("-", "").isalnum()
    assert name.isascii()
    assert bucket_of("a-b") != bucket_of("a.b")


async def test_jetstream_values_survive_server_restart(own_nats: Callable[[], TestServer]) -> None:
    server = own_nats()
    store = await JetStreamStore.connect(server.address, "n", limits())
    await store.put("resp_1", b"one")
    server.kill()
    with pytest.raises((Disconnected, Unreachable)):
        await store.get("resp_1")
    with pytest.raises((Disconnected, Unreachable)):
        await store.put("resp_2", b"two")
    server.start()
    assert await eventually(lambda: store.get("resp_1"), b"one") == b"one"
    await store.aclose()


@pytest.fixture
def plain_nats() -> Iterator[str]:
    """URL of a nats-server without JetStream."""
    process = spawn([nats_binary(), "-a", "127.0.0.1", "-p", "-1"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process.stderr as log:
        lines = iter(log.readline, b"")
        port = next(
            match[1]
            for line in lines
            if (match := re.search(rb"connections on 127.0.0.1:(\d+)", line))
        )
        yield f"nats://127.0.0.1:{port.decode()}"
        process.kill()
        process.wait()


async def test_connect_without_jetstream_explains_how_to_start_it(plain_nats: str) -> None:
    with pytest.raises(Unreachable, match="-js"):
        await JetStreamStore.connect(plain_nats, "n", limits())


async def test_connect_when_there_is_no_server_then_unreachable(
    own_nats: Callable[[], TestServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "CONNECT_TIMEOUT_S", 0.3)
    server = own_nats()
    server.kill()
    with pytest.raises(Unreachable, match="--response-store memory"):
        await JetStreamStore.connect(server.address, "n", limits())


async def test_jetstream_calls_and_close_are_bounded_when_frozen(
    own_nats: Callable[[], TestServer],
) -> None:
    server = own_nats()
    store = await JetStreamStore.connect(server.address, "n", limits())
    server.pause()
    begun = time.monotonic()
    with pytest.raises((Disconnected, Unreachable)):
        await store.put("resp_1", secrets.token_bytes(3 * MIB))
    with pytest.raises((Disconnected, Unreachable)):
        await store.get("resp_1")
    await store.aclose()
    assert time.monotonic() - begun < 2 * SOON_S

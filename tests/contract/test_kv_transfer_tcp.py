"""Faults that only the TCP backend can have: unknown clients at its listener, readers that stop
reading.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.tcp import (
    _CHECKED,
    _REPLY,
    _REQUEST,
    DEFAULT_LIMITS,
    TcpBackend,
    TcpLimits,
)
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed, TransferFailed, TransferTimeout
from tests.contract.kv_transfer_source import content, split
from tests.kit.transfer_keys import FIRST_KEY, write_keys
from tests.kit.waiting import SOON_S


@pytest.fixture
async def fetched() -> list[str]:
    return []


@pytest.fixture
def limits() -> TcpLimits:
    return DEFAULT_LIMITS


@pytest.fixture
async def holder(fetched: list[str], limits: TcpLimits) -> AsyncIterator[TcpBackend]:
    backend = TcpBackend("127.0.0.1", limits=limits)
    await backend.start(fetched.append)
    yield backend
    await backend.aclose()


async def ask(offer: bytes, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    facts = msgspec.msgpack.decode(offer)
    reader, writer = await asyncio.open_connection(facts["host"], facts["port"], limit=1024)
    writer.write(request)
    return reader, writer


@pytest.mark.parametrize(
    ("request_head", "transfer_id"),
    [
        (_REQUEST.pack(_CHECKED, bytes(32), 1), b"t"),
        (_REQUEST.pack(_CHECKED, bytes(32), 1), b"u"),
        (_REQUEST.pack(_CHECKED, bytes(32), 257), b""),
    ],
    ids=["wrong token", "unknown transfer", "long id"],
)
# The listener must not wait for more than the head.
@pytest.mark.parametrize("limits", [TcpLimits(request_timeout_s=2 * SOON_S)])
async def test_serve_when_token_is_wrong_then_there_is_no_answer(
    holder: TcpBackend,
    fetched: list[str],
    request_head: bytes,
    transfer_id: bytes,
) -> None:
    source = content("a", 1000)
    offer = await holder.publish("t", split(source, [1000]))
    reader, writer = await ask(offer, request_head + transfer_id)
    async with asyncio.timeout(SOON_S):
        assert await reader.read() == b""
    writer.close()
    assert fetched == []


async def test_read_when_transfer_has_ended_then_the_error_says_so(holder: TcpBackend) -> None:
    offer = await holder.publish("t", split(content("a", 1000), [1000]))
    await holder.unpublish("t")
    to = Destination(split(bytearray(1000), [1000]))
    with pytest.raises(TransferFailed, match="no longer published"):
        await holder.read("t", offer, to, timeout_s=SOON_S)


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def guard(tmp_path: Path) -> TransferGuard:
    return TransferGuard(TransferKeys(write_keys(tmp_path / "keys", FIRST_KEY)))


async def test_read_when_both_workers_have_the_key_then_kv_arrives(
    holder: TcpBackend, fetched: list[str], guard: TransferGuard
) -> None:
    holder.guard = guard
    source = content("a", 1000)
    target = bytearray(1000)
    offer = await holder.publish("t", split(source, [1000]))
    reader = TcpBackend()
    reader.guard = guard
    await reader.read("t", offer, Destination(split(target, [1000])), timeout_s=SOON_S)
    assert target == source


async def test_read_by_a_stranger_who_overheard_the_offer_fails(
    holder: TcpBackend, fetched: list[str], guard: TransferGuard
) -> None:
    holder.guard = guard
    offer = await holder.publish("t", split(content("a", 1000), [1000]))
    to = Destination(split(bytearray(1000), [1000]))
    with pytest.raises(TransferFailed, match="closed the connection"):
        await TcpBackend().read("t", offer, to, timeout_s=SOON_S)
    assert fetched == []


async def test_read_from_a_worker_that_has_ended_names_its_address() -> None:
    holder = TcpBackend()
    await holder.start(lambda _: None)
    offer = await holder.publish("t", split(content("a", 1000), [1000]))
    await holder.aclose()
    to = Destination(split(bytearray(1000), [1000]))
    with pytest.raises(TransferFailed, match=r"can't connect to the prefill worker at 127\.0"):
        await TcpBackend().read("t", offer, to, timeout_s=SOON_S)


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\nHost: holder.example\r\n\r\n", b""], ids=["http", "silence"]
)
async def test_serve_when_a_stranger_calls_then_offers_stay_good(
    holder: TcpBackend, fetched: list[str], noise: bytes
) -> None:
    source = content("a", 1000)
    target = bytearray(1000)
    offer = await holder.publish("t", split(source, [1000]))
    _, writer = await ask(offer, noise)
    await holder.read("t", offer, Destination(split(target, [1000])), timeout_s=SOON_S)
    assert target == source
    writer.close()


async def test_withdraw_ends_connection_of_a_stalled_reader(
    holder: TcpBackend, fetched: list[str]
) -> None:
    source = content("a", 32 << 20)  # more than the sockets' buffers hold
    offer = await holder.publish("t", split(source, [len(source)]))
    token = msgspec.msgpack.decode(offer)["token"]
    reader, writer = await ask(offer, _REQUEST.pack(_CHECKED, token, 1) + b"t")
    async with asyncio.timeout(SOON_S):
        assert await reader.readexactly(_REPLY.size) == _REPLY.pack(_CHECKED, True, len(source))
        await holder.unpublish("t")
        assert holder._published == {}
        assert len(await reader.read(-1)) < len(source)  # the end comes, and early
    writer.close()
    assert fetched == []


async def test_fetch_when_holder_sends_too_little_then_transfer_failed(holder: TcpBackend) -> None:
    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(_REQUEST.size + 1)
        writer.write(_REPLY.pack(_CHECKED, True, 1000) + bytes(400))
        writer.close()
        await writer.wait_closed()

    source = content("a", 1000)
    target = bytearray(1000)
    facts = msgspec.msgpack.decode(await holder.publish("t", split(source, [1000])))
    async with await asyncio.start_server(short, "127.0.0.1", 0) as server:
        offer = msgspec.msgpack.encode({**facts, "port": server.sockets[0].getsockname()[1]})
        with pytest.raises(TransferFailed, match="closed the connection"):
            await holder.read("t", offer, Destination(split(target, [1000])), timeout_s=SOON_S)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (_REPLY.pack(b"HTTP", True, 1000), "does not speak"),
        (_REPLY.pack(_CHECKED, True, 999), "but published 1000"),
    ],
    ids=["magic", "size"],
)
async def test_fetch_with_wrong_reply_writes_nothing(
    holder: TcpBackend, reply: bytes, message: str
) -> None:
    async def wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(_REQUEST.size + 1)
        writer.write(reply + b"x" * 1000)
        writer.close()

    source = content("a", 1000)
    target = bytearray(1000)
    facts = msgspec.msgpack.decode(await holder.publish("t", split(source, [1000])))
    async with await asyncio.start_server(wrong, "127.0.0.1", 0) as server:
        offer = msgspec.msgpack.encode({**facts, "port": server.sockets[0].getsockname()[1]})
        with pytest.raises(TransferFailed, match=message):
            await holder.read("t", offer, Destination(split(target, [1000])), timeout_s=SOON_S)
    assert target == bytes(1000)


async def test_fetch_when_on_a_gpu_then_names_the_device(holder: TcpBackend) -> None:
    with pytest.raises(TransferFailed, match="cuda:0"):
        await holder.publish("t", [MemoryRegion(4096, 10, "cuda:0")])


async def test_fetch_when_time_is_short_then_transfer_timeout(
    holder: TcpBackend, fetched: list[str]
) -> None:
    source = content("a", 1000)
    target = bytearray(1000)
    offer = await holder.publish("t", split(source, [1000]))
    with pytest.raises(TransferTimeout, match="within 0 s"):
        await holder.read("t", offer, Destination(split(target, [1000])), timeout_s=0)


# --- addresses, and strangers that stay -----------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "advertised"),
    [
        (("127.0.0.2", "127.0.0.3"),) * 2,
        (("::1", "127.0.0.3"),) * 2,
        (("0.0.0.0", "::"), ("127.0.0.2", "::1")),
    ],
    ids=["two addresses", "two families", "every interface"],
)
async def test_fetch_uses_the_holders_own_addresses(
    bound: tuple[str, str], advertised: tuple[str, str], fetched: list[str]
) -> None:
    async with AsyncExitStack() as stack:
        one, two = (TcpBackend(*hosts) for hosts in zip(bound, advertised, strict=True))
        for number, (holder, reader) in enumerate([(one, two), (two, one)]):
            await holder.start(fetched.append)
            stack.push_async_callback(holder.aclose)
            source = content("a", 1000)
            target = bytearray(1000)
            offer = await holder.publish("t", split(source, [1000]))
            facts = msgspec.msgpack.decode(offer)
            assert facts["host"] == advertised[number]
            await reader.read("t", offer, Destination(split(target, [1000])), timeout_s=SOON_S)
            assert target == source
            if bound == advertised:  # and from nowhere else
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.4", facts["port"])


async def test_start_at_address_of_another_host_names_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*--kv-transfer-bind-host"):
        await TcpBackend("192.0.2.1").start(lambda _: None)


async def test_check_when_the_listener_is_of_no_use_then_engine_failed(holder: TcpBackend) -> None:
    holder.check()
    assert holder._listener is not None
    holder._listener.shutdown(socket.SHUT_RDWR)
    assert holder._acceptor is not None
    async with asyncio.timeout(SOON_S):
        while holder._acceptor.broken is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(EngineFailed, match="accepts no connections"):
        holder.check()


@pytest.mark.parametrize(
    ("files", "limits"),
    [(16, DEFAULT_LIMITS), (1 << 20, TcpLimits(max_without_request=4))],
)
async def test_serve_closes_oldest_silent_strangers(
    holder: TcpBackend,
    files: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    source = content("a", 1000)
    target = bytearray(1000)
    offer = await holder.publish("t", split(source, [1000]))
    strangers = [await ask(offer, b"DKV1") for _ in range(12)]
    async with asyncio.timeout(SOON_S):
        await holder.read("t", offer, Destination(split(target, [1000])), timeout_s=SOON_S)
        assert target == source
        for reader, _ in strangers[:8]:
            assert await reader.read() == b""
    assert not any(reader.at_eof() for reader, _ in strangers[-3:])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for _, writer in strangers:
        writer.close()


@pytest.mark.parametrize("limits", [TcpLimits(max_connections=2)])
async def test_serve_beyond_connection_limit_fails_at_once(holder: TcpBackend) -> None:
    # more than the sockets' buffers hold
    source = content("a", 32 << 20)
    target = bytearray(32 << 20)
    offer = await holder.publish("t", split(source, [len(source)]))
    token = msgspec.msgpack.decode(offer)["token"]
    readers = [await ask(offer, _REQUEST.pack(_CHECKED, token, 1) + b"t") for _ in range(2)]
    async with asyncio.timeout(SOON_S):
        for reader, _ in readers:
            await reader.readexactly(_REPLY.size)
        with pytest.raises(TransferFailed, match="closed the connection"):
            await holder.read(
                "t", offer, Destination(split(target, [len(source)])), timeout_s=SOON_S
            )
        for _, writer in readers:
            writer.transport.abort()
        while target != source:
            with suppress(TransferFailed):
                await holder.read(
                    "t", offer, Destination(split(target, [len(source)])), timeout_s=SOON_S
                )

"""Fuzz the KV transfer over TCP: what a listener receives, and what a reader gets as reply."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
from collections.abc import Awaitable, Iterator

from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.tcp import _CHECKED, _PLAIN, _REPLY, _REQUEST, TcpBackend, _TcpOffer
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import TransferFailed, TransferTimeout
from dynamo_trtllm.protocol.messages import decode, encode
from tests.fuzz.target import LoggedErrors, Target, cut, event_loop, random_of

_TRANSFER = "t1"
_CONTENT = b"0123456789" * 3
_SIZES = (10, 20)
# Stands for the token of the transfer, which is random.
_TOKEN = b"<TOKEN>"
_PUBLISHED = _REPLY.size + len(_CONTENT)
_TURNS = 200  # of the event loop; the end of a connection takes a few


class _Regions:
    """Two regions of memory, and the memory itself."""

    def __init__(self, content: bytes) -> None:
        self._memory = ctypes.create_string_buffer(content, len(content))
        address = ctypes.addressof(self._memory)
        self.regions = (
            MemoryRegion(address, _SIZES[0], "cpu"),
            MemoryRegion(address + _SIZES[0], _SIZES[1], "cpu"),
        )

    @property
    def content(self) -> bytes:
        return self._memory.raw


class _Peers:
    """A backend that has published a transfer, and one that reads from a scripted peer."""

    def __init__(self) -> None:
        logging.getLogger("dynamo_trtllm.kv_transfer").setLevel(logging.WARNING)
        self.loop = event_loop()
        self.errors = LoggedErrors()
        self.backend = TcpBackend()
        self.fetched: list[str] = []
        self._regions = _Regions(_CONTENT)
        self.reply = b""
        self.answering: asyncio.Task[None] | None = None
        self.run(self._start())

    def run(self, awaitable: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(10):
                await awaitable

        self.loop.run_until_complete(bounded())
        self.errors.check()

    async def _start(self) -> None:
        await self.backend.start(self.fetched.append)
        offer = await self.backend.publish(_TRANSFER, self._regions.regions)
        self.offer = decode(offer, _TcpOffer)
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.scripted_port = server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the scripted reply in parts, and close the connection."""
        self.answering = asyncio.current_task()
        try:
            await reader.readexactly(_REQUEST.size + len(_TRANSFER))
            for part in cut(self.reply, random_of(self.reply)):
                writer.write(part)
                await writer.drain()
            writer.write_eof()
            await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the reader has ended the connection
        finally:
            writer.close()


@functools.cache
def _peers() -> _Peers:
    return _Peers()


# --- requests ---------------------------------------------------------------------------------------


def check_requests(data: bytes) -> None:
    """Send bytes to a listener. Only who has the token gets an answer, and then the whole one."""
    peers = _peers()
    peers.run(_request(peers, data))


async def _request(peers: _Peers, data: bytes) -> None:
    peers.fetched.clear()
    offer = peers.offer
    sent = data.replace(_TOKEN, offer.token)
    reader, writer = await asyncio.open_connection(offer.host, offer.port)
    try:
        for part in cut(sent, random_of(data)):
            writer.write(part)
        writer.write_eof()
        answer = await reader.read()
    except ConnectionError:
        answer = b""  # the listener has closed the connection before it has read everything
    finally:
        writer.close()
    head = sent[: _REQUEST.size]
    transfer_id = _TRANSFER.encode()
    expected = [
        _REQUEST.pack(magic, offer.token, len(transfer_id)) + transfer_id
        for magic in (_PLAIN, _CHECKED)
    ]
    if not any(sent.startswith(request) for request in expected):
        assert answer == b"", f"a stranger got {answer[:50]!r} for {head!r}"
        assert not peers.fetched
        return
    # A connection that is closed with unread bytes is reset, which may discard the answer.
    assert answer[_REPLY.size : _REPLY.size + _SIZES[0]] in (_CONTENT[: _SIZES[0]], b"")
    await _until_idle(peers.backend)
    is_acknowledged = len(sent) > len(expected[0])
    assert peers.fetched == ([_TRANSFER] if is_acknowledged else [])


async def _until_idle(backend: TcpBackend) -> None:
    """Wait until no connection is served."""
    for _ in range(_TURNS):
        if not (backend._published[_TRANSFER].readers or backend._without_request):
            return
        await asyncio.sleep(0)
    raise AssertionError("a connection that its peer has closed is served")


def _requests() -> Iterator[bytes]:
    for magic in (_PLAIN, _CHECKED):
        for transfer_id in (b"t1", b"t2", b"", b"\xff" * 256):
            size = len(transfer_id).to_bytes(2, "big")
            yield magic + _TOKEN + size + transfer_id + b"\x01"
            yield magic + b"x" * 32 + size + transfer_id


# --- replies ----------------------------------------------------------------------------------------


def check_replies(data: bytes) -> None:
    """Read from a peer that sends any bytes. The result is its data, or an error of KV transfers."""
    peers = _peers()
    peers.reply = data
    peers.run(_read(peers, data))
    if peers.answering is not None:
        peers.run(peers.answering)


async def _read(peers: _Peers, data: bytes) -> None:
    backend = TcpBackend()
    offer = _TcpOffer(
        host="127.0.0.1", port=peers.scripted_port, token=b"t" * 32, sizes_bytes=list(_SIZES)
    )
    target = _Regions(bytes(sum(_SIZES)))
    arrived: list[int] = []
    to = Destination(target.regions, arrived.append)
    head = _REPLY.pack(_PLAIN, True, sum(_SIZES))
    is_whole = data.startswith(head) and len(data) >= _PUBLISHED
    try:
        await backend.read(_TRANSFER, encode(offer), to, timeout_s=5.0)
    except TransferFailed:
        assert not is_whole
    except TransferTimeout as exc:
        raise AssertionError("the peer has closed the connection, and the read went on") from exc
    else:
        # Any byte that is not zero means that the transfer is published.
        assert len(data) >= _PUBLISHED
        assert target.content == data[_REPLY.size : _PUBLISHED]
        assert arrived == [0, 1]


def _replies() -> Iterator[bytes]:
    yield _REPLY.pack(_PLAIN, True, len(_CONTENT)) + _CONTENT
    yield _REPLY.pack(_PLAIN, False, 0)
    yield _REPLY.pack(_CHECKED, True, len(_CONTENT)) + _CONTENT + bytes(16)
    yield _REPLY.pack(_PLAIN, True, 1 << 62) + _CONTENT


TARGETS = {
    "kv-requests": Target(
        summary="requests for KV at the TCP listener of a prefill worker",
        check=check_requests,
        files=("kv_transfer/tcp.py", "kv_transfer/guard.py"),
        seeds=_requests,
        words=(_TOKEN, _PLAIN, _CHECKED, b"\x00\x02t1"),
        max_bytes=400,
    ),
    "kv-replies": Target(
        summary="replies of a TCP listener to a decode worker",
        check=check_replies,
        files=("kv_transfer/tcp.py",),
        seeds=_replies,
        words=(_PLAIN, _CHECKED, _CONTENT),
        max_bytes=400,
    ),
}

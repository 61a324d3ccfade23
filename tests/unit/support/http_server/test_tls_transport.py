"""TLS between a transport and its connection, without sockets."""

from __future__ import annotations

import asyncio
import gc
import ssl
import weakref

import pytest

from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.support.http_server.connection import HttpConnection
from dynamo_trtllm.support.http_server.exchange import Handler, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.parsing_turns import ParsingTurns
from dynamo_trtllm.support.http_server.server import HttpServer
from dynamo_trtllm.support.http_server.tls_transport import TlsTransport
from tests.kit.certificates import TlsClient, shared_server_certificate
from tests.kit.memory_http import LIMITS, MemoryTransport

GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


async def answer(request: HttpRequest, response: HttpResponse) -> None:
    response.send(200, request.path.encode())


class Connected:
    """A client and the server's end of its connection."""

    def __init__(self, handler: Handler = answer) -> None:
        self.server = HttpServer(handler, LIMITS, error_form=openai_error, shutdown_s=0.0)
        self.now_s = 0.0
        self.server.parsing_turns = ParsingTurns(lambda: self.now_s)
        certificate = shared_server_certificate()
        self.outcomes: list[str] = []
        certificate.count = lambda metric, outcome: self.outcomes.append(outcome)
        self.tls = TlsTransport(self.server, HttpConnection(self.server), certificate)
        self.raw = MemoryTransport()
        self.raw.set_protocol(self.tls)
        self.client = TlsClient()

    def send(self, data: bytes) -> None:
        size = len(self.server.receive_buffer)
        for start in range(0, len(data), size):
            part = data[start : start + size]
            self.tls.get_buffer(-1)[: len(part)] = part
            self.tls.buffer_updated(len(part))

    def received(self) -> bytes:
        sent = b"".join(self.raw.sent)
        self.raw.sent.clear()
        return sent

    def shake_hands(self) -> None:
        while data := self.client.step(self.received()):
            self.send(data)

    def pass_time(self) -> None:
        """Use up the time for parsing of this iteration."""
        self.server.parsing_turns.run(self._wait)

    def _wait(self) -> None:
        self.now_s += 1.0


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_in_many_records_are_answered() -> None:
    connected = Connected()
    connected.shake_hands()
    request = GET % b"a"
    connected.send(b"".join(connected.client.encrypt(bytes([byte])) for byte in request * 3))
    await turns()
    answers = connected.client.decrypt(connected.received())
    assert answers.count(b"HTTP/1.1 200 ") == 3
    assert connected.outcomes == ["ok"]


async def test_handshake_waits_for_its_turn() -> None:
    connected = Connected()
    connected.pass_time()
    connected.send(connected.client.step())
    assert not connected.raw.sent
    assert not connected.raw.is_reading  # so little is received meanwhile
    await turns()
    assert connected.raw.is_reading
    connected.shake_hands()
    assert connected.outcomes == ["ok"]


async def test_unread_body_pauses_the_socket() -> None:
    go = asyncio.Event()

    async def read_later(request: HttpRequest, response: HttpResponse) -> None:
        await go.wait()
        size = 0
        while part := await request.receive():
            size += len(part)
        response.send(200, b"%d" % size)

    connected = Connected(read_later)
    connected.shake_hands()
    connected.send(connected.client.encrypt(POST % 200_000))
    body = connected.client.encrypt(bytes(200_000))
    at = 0
    while at < len(body):
        if not connected.raw.is_reading:
            go.set()
        await turns()
        assert connected.raw.is_reading or not go.is_set()
        if connected.raw.is_reading:
            connected.send(body[at : at + 10_000])
            at += 10_000
    assert go.is_set()
    await turns()
    assert connected.client.decrypt(connected.received()).endswith(b"200000")


async def test_close_tells_the_client_so() -> None:
    connected = Connected()
    connected.shake_hands()
    connected.send(
        connected.client.encrypt(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    )
    await turns()
    connected.client.incoming.write(connected.received())
    assert connected.client.tls.read(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert connected.client.tls.read(1) == b""  # and not only the end of the socket
    assert connected.raw.is_closing()


async def test_garbage_after_the_handshake_closes() -> None:
    connected = Connected()
    connected.shake_hands()
    connected.send(b"\x17\x03\x03\x00\x20" + bytes(32))
    await turns()
    assert connected.raw.is_closing()
    with pytest.raises(ssl.SSLError, match=r"(?i)bad record mac"):
        connected.client.decrypt(connected.received())


async def test_evicted_handshake_is_closed_and_counted() -> None:
    connected = Connected()
    assert connected.server.evict_idlest()
    await turns()
    assert connected.raw.is_closing()
    assert connected.outcomes == ["disconnected"]


async def test_lost_connection_leaves_no_garbage() -> None:
    connected = Connected()
    connected.shake_hands()
    lost = weakref.ref(connected.tls._connection), weakref.ref(connected.tls._tls)
    gc.disable()
    try:
        connected.raw.abort()
        await turns()
        del connected
        assert [reference() for reference in lost] == [None, None]
    finally:
        gc.enable()

"""Which connections are closed to accept others, and what is still answered then, without
sockets.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.frontend.http.frontend_server import frontend_server
from dynamo_trtllm.support.http_server.connection import HttpConnection
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.parsing_turns import ParsingTurns
from dynamo_trtllm.support.http_server.request_head import MAX_HEADERS, SMALL_HEAD_BYTES
from dynamo_trtllm.support.http_server.server import HttpServer
from dynamo_trtllm.support.network.addresses import network_of
from tests.kit.cases import each_case
from tests.kit.memory_http import LIMITS, MemoryClient, MemoryTransport

GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"
ATTACKER = "192.0.2.1"
OTHER = "192.0.2.2"


class Served:
    """A server and its clients. It answers requests for /held when `go` is set."""

    def __init__(self, **limits: Any) -> None:
        self.go = asyncio.Event()
        self.server = HttpServer(
            self._handle, replace(LIMITS, **limits), error_form=openai_error, shutdown_s=0.0
        )
        self.server.parsing_turns = ParsingTurns(lambda: 0.0)  # a busy machine changes nothing

    async def _handle(self, request: HttpRequest, response: HttpResponse) -> None:
        if request.method == "POST":
            while await request.receive():
                pass
        if request.path == "/held":
            await self.go.wait()
        response.send(200, b"")

    async def client(self, address: str, *sent: bytes) -> MemoryClient:
        """Connect a client, which sends something and gets the responses."""
        client = MemoryClient(self._handle, (address, 1), self.server)
        for data in sent:
            await settle()
            client.send(data)
        await settle()
        return client

    async def end(self) -> None:
        """Check that nothing is counted when all connections have ended."""
        self.go.set()
        for connection in list(self.server.open):
            connection.abort()
        await settle()
        assert (len(self.server.open), len(self.server.idle)) == (0, 0)
        assert self.server.large_heads._in_use == 0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def statuses(client: MemoryClient) -> list[int]:
    return [int(part[:3]) for part in client.received.split(b"HTTP/1.1 ")[1:]]


def is_closed(client: MemoryClient) -> bool:
    return client.transport.is_closing()


@each_case(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("a:socket", "a:socket"),
    ],
)
def test_network_then_an_ipv4_address_or_64_bits_of_an_ipv6_one(address: str, network: str) -> None:
    assert network_of(address) == network


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET % b"a"], ids=["silent", "head", "idle"])
async def test_connection_over_limit_closes_idlest_of_busiest_client(sent: bytes) -> None:
    served = Served(max_connections=3, reserved_connections=2)
    other = await served.client(OTHER, GET % b"a")
    attackers = [await served.client(ATTACKER, sent) for _ in range(4)]
    attackers.append(await served.client(ATTACKER, sent))
    assert [is_closed(client) for client in attackers] == [True, False, False, False, False]
    newcomer = await served.client("192.0.2.3", GET % b"a")
    assert statuses(newcomer) == [200]
    assert [is_closed(client) for client in attackers] == [True, True, False, False, False]
    other.send(GET % b"b")
    await settle()
    assert statuses(other) == [200, 200]
    assert len(served.server.open) == 5
    await served.end()


async def test_connection_over_limit_of_one_address_closes_idlest() -> None:
    served = Served(max_connections=2, reserved_connections=1)
    clients = [await served.client(OTHER, GET % b"a") for _ in range(3)]
    clients[0].send(GET % b"b")
    await settle()
    clients += [await served.client(OTHER, GET % b"a") for _ in range(2)]
    assert [is_closed(client) for client in clients] == [False, True, True, False, False]
    await served.end()


@each_case(
    ("sent", "answered"),
    [
        ([], []),
        ([b"GET / HT"], [429]),
        ([GET % b"a"], [200]),
        ([GET % b"a" + b"GET / HT"], [200, 429]),
        ([HEAD + b"Content-Length: 100\r\n\r\n{"], [429]),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"], [429]),
        ([HEAD + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"], [100, 429]),
    ],
)
async def test_connection_closed_while_receiving_gets_429(
    sent: list[bytes], answered: list[int]
) -> None:
    served = Served(max_connections=1, reserved_connections=1)
    client = await served.client(ATTACKER, *sent)
    await served.client(ATTACKER)
    assert not is_closed(client)
    newcomer = await served.client(OTHER, GET % b"a")
    assert is_closed(client)
    assert statuses(client) == answered
    assert statuses(newcomer) == [200]
    await served.end()


async def test_requests_on_all_connections_allow_only_health() -> None:
    served = Served(max_connections=2, reserved_connections=1)
    running = [await served.client(ATTACKER, GET % b"held") for _ in range(2)]
    for path in (b"live", b"ready", b"health"):
        probe = await served.client(OTHER, GET % path, (GET % path).replace(b"GET", b"HEAD"))
        assert statuses(probe) == [200, 200]
    for request in (GET % b"a", GET % b"live/a", (GET % b"live").replace(b"GET", b"POST")):
        rejected = await served.client(OTHER, request)
        assert statuses(rejected) == [429]
        assert b'"code":"overloaded"' in rejected.received
        assert is_closed(rejected)
    running[0].send(GET % b"next")  # a request on a connection that runs one needs no other
    served.go.set()
    await settle()
    assert [statuses(client) for client in running] == [[200, 200], [200]]
    assert statuses(await served.client(OTHER, GET % b"a")) == [200]
    await served.end()


async def test_bodies_ending_together_all_run() -> None:
    served = Served(max_connections=1, reserved_connections=3)
    body = b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"
    clients = [await served.client(ATTACKER, body) for _ in range(3)]
    for client in clients:
        client.send(b"{")
    await settle()
    assert (len(served.server.open), len(served.server.idle)) == (3, 2)
    served.go.set()
    await settle()
    assert [statuses(client) for client in clients] == [[200], [200], [200]]
    await served.end()


async def test_relief_without_files_closes_idle_connections() -> None:
    served = Served(max_connections=10, reserved_connections=1)
    running = await served.client(ATTACKER, GET % b"held")
    idle = await served.client(OTHER)
    assert served.server._relieve()
    assert (is_closed(running), is_closed(idle)) == (False, True)
    assert not served.server._relieve()
    await served.end()


async def test_relief_waits_until_accepted_connections_are_open() -> None:
    served = Served(max_connections=10, reserved_connections=1)
    idle = await served.client(OTHER)
    client, accepted = socket.socketpair()
    accepted.setblocking(False)
    connecting = asyncio.create_task(served.server._connect(accepted))
    await asyncio.sleep(0)
    assert served.server._relieve()
    assert not is_closed(idle)
    await connecting
    assert served.server._relieve()
    assert is_closed(idle)
    client.close()
    await served.end()


@pytest.mark.parametrize(
    ("files", "running", "reserved"),
    [(8704, 8192, 256), (1024, 576, 192), (256, 96, 32), (64, 24, 8)],
)
async def test_server_with_few_files_has_fewer_connections(
    files: int, running: int, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: None)
    limits = frontend_server(Served()._handle, FrontendConfig()).limits
    assert (limits.max_connections, limits.reserved_connections) == (running, reserved)


# --- heads ----------------------------------------------------------------------------------------

CLIENTS = 20
HEAD_BYTES = 60_000
SMALL_HEADERS = b"a:b\r\n" * 9000
LARGE_HEADERS = (b"name: " + b"v" * 650 + b"\r\n") * 90


async def memory_of(head: bytes) -> float:
    """Return how many bytes of memory a client takes that sends a head, or the beginning of one."""
    served = Served(max_connections=CLIENTS, reserved_connections=1, max_header_bytes=64 << 10)
    connections = [HttpConnection(served.server) for _ in range(CLIENTS)]
    for number, connection in enumerate(connections):
        MemoryTransport((f"192.0.2.{number}", 1)).set_protocol(connection)
    tracemalloc.start()
    try:
        for connection in connections:
            for begin in range(0, len(head), 5000):
                connection.receive(bytes(head[begin : begin + 5000]))
        await settle()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    await served.end()
    return taken / CLIENTS


@each_case(
    "head",
    [
        HEAD + SMALL_HEADERS,
        HEAD + LARGE_HEADERS,
        HEAD + b"X-Long: " + b"v" * HEAD_BYTES,
        b"GET /" + b"p" * HEAD_BYTES,
        b"POST /"
        + b"p" * HEAD_BYTES
        + b"%F0%9F%98%80 HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
        HEAD + SMALL_HEADERS + b"Content-Length: 9\r\n\r\n",
        HEAD + LARGE_HEADERS + b"Content-Length: 9\r\n\r\n",
        HEAD + b"Content-Length: 9\r\n\r\n123456789" + HEAD + LARGE_HEADERS,
    ],
)
async def test_head_then_it_takes_at_most_four_times_its_size(head: bytes) -> None:
    assert await memory_of(head) < 4 * len(head)


@pytest.mark.parametrize("header", [b"a:b\r\n", b"Expect:b\r\n", b"Connection:b\r\n"])
async def test_head_of_many_short_headers_takes_little_memory(header: bytes) -> None:
    short = header * (MAX_HEADERS - 1)
    long = b"a:" + b"b" * (len(short) - 4) + b"\r\n"
    assert await memory_of(HEAD + short) < await memory_of(HEAD + long) + 4 * len(short)


async def test_head_of_ended_request_is_released() -> None:
    served = Served()
    client = await served.client(OTHER, HEAD + LARGE_HEADERS + b"Content-Length: 1\r\n\r\n")
    assert client.connection in served.server.large_heads
    client.send(b"1")
    await settle()
    assert statuses(client) == [200]
    assert client.connection not in served.server.large_heads
    assert (client.connection._current, client.connection._newest) == (None, None)
    await served.end()


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (HEAD + b"a:b\r\n" * MAX_HEADERS + b"\r\n", b"more than 100 headers"),
        (
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a:b\r\n" * MAX_HEADERS,
            b"more than 100 headers",
        ),
        (b"GET /" + b"a" * 9000, b"longer than 8192 bytes"),
        (b"GET /?a=" + b"a" * 9000 + b" HTTP/1.1\r\n", b"longer than 8192 bytes"),
    ],
    ids=["headers", "trailers", "path", "query"],
)
async def test_head_over_limit_is_431_with_the_limit(head: bytes, said: bytes) -> None:
    served = Served(max_header_bytes=64 << 10)
    client = await served.client(OTHER, head)
    assert statuses(client)[-1] == 431
    assert said in client.received
    assert is_closed(client)
    await served.end()


async def test_head_behind_another_request_has_the_same_limit() -> None:
    served = Served(max_header_bytes=64 << 10)
    client = await served.client(OTHER, GET % b"a" + HEAD + b"X-Long: " + b"a" * 90_000)
    assert statuses(client) == [200]  # it was received before the head that is too large
    assert is_closed(client)
    await served.end()


async def test_large_heads_over_limit_close_the_oldest() -> None:
    served = Served(max_connections=20, reserved_connections=1, max_large_head_bytes=25_000)
    small = await served.client(
        ATTACKER, b"GET / HTTP/1.1\r\nX-Small: " + b"a" * (SMALL_HEAD_BYTES - 100)
    )
    large = HEAD + b"X-Large: " + b"a" * 7900
    first, second = [await served.client(ATTACKER, large) for _ in range(2)]
    first.send(b"a" * 50)  # a byte now and then does not make it newer
    newcomer = await served.client(OTHER, large, b"\r\nContent-Length: 1\r\n\r\n1" + GET % b"a")
    assert statuses(newcomer) == [200, 200]
    assert not is_closed(first)
    body_withheld = await served.client(ATTACKER, large + b"\r\nContent-Length: 1\r\n\r\n")
    last = await served.client(OTHER, large)
    assert [is_closed(client) for client in (small, first, second, body_withheld, last)] == [
        *(False, True, False, False, False)
    ]
    assert statuses(first) == [429]
    await served.end()


async def test_large_heads_of_running_requests_stay_open() -> None:
    served = Served(max_connections=20, reserved_connections=1, max_large_head_bytes=15_000)
    large = b"GET /held HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * 7900 + b"\r\n\r\n"
    running = await served.client(OTHER, large)
    rejected = [await served.client(OTHER, large), await served.client(OTHER, large[:-4])]
    for client in rejected:
        assert statuses(client) == [429]
        assert (
            b"of more than 4096 bytes together reach their limit of 15000 bytes" in client.received
        )
    assert statuses(await served.client(OTHER, GET % b"a")) == [200]
    served.go.set()
    await settle()
    assert statuses(running) == [200]
    assert statuses(await served.client(OTHER, large)) == [200]
    await served.end()

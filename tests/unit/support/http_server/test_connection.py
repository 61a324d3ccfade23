"""What one connection does with the bytes of its client, without sockets."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.support.http_server import connection
from dynamo_trtllm.support.http_server.connection import HttpConnection
from dynamo_trtllm.support.http_server.exchange import (
    FlushBatch,
    HttpRequest,
    HttpResponse,
    ReadTimer,
)
from dynamo_trtllm.support.http_server.server import HttpServer, Route, Router
from tests.kit.cases import each_case
from tests.kit.memory_http import LIMITS, MemoryClient, MemoryTransport
from tests.kit.waiting import SOON_S

GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


async def echo(request: HttpRequest, response: HttpResponse) -> None:
    """Answer with the path and the body."""
    parts = [part async for part in iter_body(request)]
    response.send(200, request.path.encode() + b":" + b"".join(parts))


async def iter_body(request: HttpRequest):  # type: ignore[no-untyped-def]
    while part := await request.receive():
        yield part


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def bodies(client: MemoryClient) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in client.received.split(b"HTTP/1.1 ")[1:]]


class Held:
    """A handler that answers when `go` is set, and records which requests have begun."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.cancels = False

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        self.begun.append(request.path)
        if self.cancels:
            response.cancel_on_disconnect()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.path)
            raise
        response.send(200, request.path.encode())


async def test_requests_in_one_packet_are_answered_in_order() -> None:
    held = Held()
    client = MemoryClient(held)
    client.send(GET % b"a" + GET % b"b" + GET % b"c")
    await turns()
    assert held.begun == ["/a"]
    held.go.set()
    await turns()
    assert bodies(client) == [b"/a", b"/b", b"/c"]


async def test_waiting_requests_pause_receiving() -> None:
    held = Held()
    client = MemoryClient(held)
    for count in range(9):
        assert client.transport.is_reading, count
        client.send(GET % b"%d" % count)
    assert not client.transport.is_reading
    held.go.set()
    await turns()
    assert client.transport.is_reading
    assert len(bodies(client)) == 9


async def test_packet_of_thousands_parses_few_before_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[HttpRequest] = []

    class CountedRequest(HttpRequest):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            parsed.append(self)

    monkeypatch.setattr(connection, "HttpRequest", CountedRequest)
    held = Held()
    client = MemoryClient(held)
    client.send(GET % b"a" * 3_000)
    await turns()
    assert len(parsed) < 200
    assert not client.transport.is_reading
    held.go.set()
    async with asyncio.timeout(60):
        while len(parsed) < 3_000 or not client.transport.is_reading:
            await turns()
    await turns()
    assert len(bodies(client)) == 3_000


async def test_head_after_answered_requests_is_received() -> None:
    go = asyncio.Event()

    async def answer_first(request: HttpRequest, response: HttpResponse) -> None:
        response.cancel_on_disconnect()
        await (go if request.path == "/first" else asyncio.Event()).wait()
        response.send(200, b"")

    client = MemoryClient(answer_first)
    client.send(GET % b"first" + GET % b"w" * 8 + b"GET /next HTTP/1.1\r\nX-Long: " + b"a" * 5000)
    await turns()
    assert not client.transport.is_reading
    go.set()
    await turns()
    assert client.transport.is_reading
    client.leave()
    await turns()


async def test_client_leaving_cancels_its_handler_if_wanted() -> None:
    for cancels in (False, True):
        held = Held()
        held.cancels = cancels
        client = MemoryClient(held)
        client.send(GET % b"a" + GET % b"b")
        await turns()
        client.leave()
        await turns()
        assert held.cancelled == (["/a"] if cancels else [])
        held.go.set()
        await turns()
        assert (held.begun, client.received, client.server.tasks) == (["/a"], b"", set())


async def test_client_leaving_after_the_answer_cancels_nothing() -> None:
    go = asyncio.Event()
    ended: list[str] = []

    async def answer_first(request: HttpRequest, response: HttpResponse) -> None:
        response.cancel_on_disconnect()
        response.send(200, b"")
        await go.wait()
        ended.append(request.path)

    client = MemoryClient(answer_first)
    client.send(POST % 4)  # whose body is still to come
    await turns()
    client.leave()
    await turns()
    go.set()
    await turns()
    assert ended == ["/x"]


async def test_client_lost_twice_lets_its_handler_end() -> None:
    ended: list[str] = []
    go = asyncio.Event()

    async def end_slowly(request: HttpRequest, response: HttpResponse) -> None:
        response.cancel_on_disconnect()
        try:
            await request.receive()
        finally:
            await go.wait()
            ended.append(request.path)

    client = MemoryClient(end_slowly)
    # The body is invalid, so the request is lost, and then the connection.
    client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    await turns()
    client.send(b"x")
    await turns()
    client.leave()
    await turns()
    go.set()
    await turns()
    assert ended == ["/a"]


async def test_client_leaving_before_handler_ends_it_at_once() -> None:
    held = Held()
    held.cancels = True
    client = MemoryClient(held)
    client.send(GET % b"a")
    client.connection.connection_lost(None)
    await turns()
    assert (held.begun, client.server.tasks) == (["/a"], set())


async def test_unread_body_receives_no_more_than_a_buffer() -> None:
    go = asyncio.Event()

    async def late(request: HttpRequest, response: HttpResponse) -> None:
        await go.wait()
        await echo(request, response)

    client = MemoryClient(late)
    client.send(POST % 150_000)
    client.send(b"x" * 50_000)
    assert client.transport.is_reading
    client.send(b"x" * 50_000)
    assert not client.transport.is_reading
    go.set()
    await turns()
    assert client.transport.is_reading
    client.send(b"x" * 50_000)
    await turns()
    assert bodies(client) == [b"/x:" + b"x" * 150_000]


async def test_expectation_gets_100_once_when_body_is_read() -> None:
    client = MemoryClient(echo)
    client.send(POST.replace(b"Host", b"Expect: 100-continue\r\nHost") % 4)
    await turns()
    assert client.received == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"ab")
    await turns()
    client.send(b"cd")
    await turns()
    assert client.received.count(b"100 Continue") == 1
    assert client.received.endswith(b"\r\n\r\n/x:abcd")


async def test_expectation_when_the_client_is_of_http_1_0_then_no_100() -> None:
    client = MemoryClient(echo)
    client.send(
        (POST % 4).replace(b"Host", b"Expect: 100-continue\r\nHost").replace(b"/1.1", b"/1.0")
    )
    await turns()
    assert client.received == b""
    client.send(b"abcd")
    await turns()
    assert client.received.startswith(b"HTTP/1.1 200 ")


async def test_expectation_when_the_handler_refuses_first_then_no_100() -> None:
    async def refuse(request: HttpRequest, response: HttpResponse) -> None:
        raise InvalidRequest("no")

    client = MemoryClient(Router([Route("POST", "/x", refuse)]))
    client.send(POST.replace(b"Host", b"Expect: 100-continue\r\nHost") % 4)
    await turns()
    assert client.received.startswith(b"HTTP/1.1 400 ")


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings:"
    b" AAEAAEAAAAIAAAAB\r\nHost"
)
CHUNKED = POST.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    "request_", [GET % b"x", CHUNKED.replace(b"Transfer-Encoding: chunked", b"X-Some: 1")]
)
async def test_upgrade_without_body_stays_http_1_1(request_: bytes) -> None:
    client = MemoryClient(echo)
    client.send(request_.replace(b"Host", UPGRADE) + GET % b"next")
    await turns()
    assert client.received.startswith(b"HTTP/1.1 200 ")
    assert client.received.count(b"HTTP/1.1") == 1
    assert client.transport.is_closing()


@each_case("size", [1, 3, 1000])
@each_case("request_", [POST % 2 + b"ab", CHUNKED + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"])
async def test_upgrade_with_body_is_a_usual_request(request_: bytes, size: int) -> None:
    client = MemoryClient(echo)
    data = request_.replace(b"Host", UPGRADE) * 2 + GET % b"next"
    for first in range(0, len(data), size):
        client.send(data[first : first + size])
    await turns()
    assert bodies(client) == [b"/x:ab", b"/x:ab", b"/next:"]
    assert not client.transport.is_closing()


@each_case(
    "request_",
    [
        POST.replace(b"Host", UPGRADE.replace(b"h2c", b"h2c, WebSocket")) % 2,
        POST.replace(b"Host", UPGRADE).replace(b"%d", b"2\r\nContent-Length: 3"),
        POST.replace(b"Host", UPGRADE).replace(b"%d", b"2\r\nTransfer-Encoding: chunked"),
        CHUNKED.replace(b"Host", UPGRADE).replace(b"chunked", b"gzip"),
        CHUNKED.replace(b"Host", UPGRADE).replace(b"chunked", b"chunked, gzip"),
        POST.replace(b"Host", UPGRADE).replace(b"%d", b"\r\n 2"),
        POST.replace(b"Host", UPGRADE).replace(b"%d", b"2\r\nX-Some: a\rContent-Length: 0"),
        (POST % 2).replace(b"Host", UPGRADE).replace(b"POST /x", b"CONNECT x:1"),
    ],
)
async def test_upgrade_with_unclear_body_end_is_400(request_: bytes) -> None:
    client = MemoryClient(echo)
    client.send(request_ + b"ab" + GET % b"next")
    await turns()
    assert client.received.startswith(b"HTTP/1.1 400 ")
    assert client.received.count(b"HTTP/1.1 ") == 1
    assert client.transport.is_closing()


async def test_trailer_then_it_is_not_a_header() -> None:
    seen: list[str | None] = []

    async def look(request: HttpRequest, response: HttpResponse) -> None:
        async for _ in iter_body(request):
            pass
        seen.append(request.header(b"x-request-id"))
        response.send(200, b"")

    client = MemoryClient(look)
    client.send(
        POST.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
        + b"1\r\na\r\n0\r\nX-Request-Id: b\r\n\r\n"
    )
    await turns()
    assert seen == [None]


async def test_header_that_is_never_read_is_not_stored() -> None:
    kept: list[list[tuple[bytes, bytes]]] = []

    async def look(request: HttpRequest, response: HttpResponse) -> None:
        kept.append(request.headers.pairs())
        response.send(200, b"")
        with pytest.raises(AssertionError, match="x-other"):
            request.header(b"x-other")

    client = MemoryClient(look)
    client.send((GET % b"a").replace(b"Host", b"X-Other: 1\r\nX-Request-ID: 2\r\nHost"))
    await turns()
    assert [name for name, _ in kept[0]] == [b"x-request-id", b"host"]


async def test_connection_close_ends_further_requests() -> None:
    client = MemoryClient(echo)
    client.send((GET % b"a").replace(b"Host", b"Connection: close\r\nHost") + GET % b"b")
    await turns()
    assert b"\r\nConnection: close\r\n" in client.received
    assert bodies(client) == [b"/a:"]
    assert client.transport.is_closing()


async def test_handler_without_answer_gives_500_and_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: HttpRequest, response: HttpResponse) -> None:
        if request.path == "/bug":
            raise RuntimeError("a bug")

    for path in (b"bug", b"nothing"):
        client = MemoryClient(fail)
        client.send(GET % path)
        await turns()
        assert client.received.startswith(b"HTTP/1.1 500 ")
        assert b'"code":"internal"' in client.received
        assert client.transport.is_closing()
    assert "GET /bug failed" in caplog.text
    assert "GET /nothing failed" in caplog.text


async def test_handler_failing_in_a_stream_leaves_it_unended() -> None:
    async def fail(request: HttpRequest, response: HttpResponse) -> None:
        response.start_events({})
        await response.send_events(b"data: x\n\n")
        raise RuntimeError("a bug")

    client = MemoryClient(fail)
    client.send(GET % b"a")
    await turns()
    assert client.received.endswith(b"data: x\n\n\r\n")
    assert client.transport.is_closing()


async def test_unread_response_delays_the_next_request() -> None:
    client = MemoryClient(echo)
    client.connection.pause_writing()
    client.send(GET % b"a" + GET % b"b")
    await turns()
    assert bodies(client) == []
    client.connection.resume_writing()
    await turns()
    assert bodies(client) == [b"/a:", b"/b:"]


@pytest.mark.parametrize("wrong", [b"nonsense\r\n\r\n", POST.replace(b"%d", b"1 1"), b"GET / HT"])
async def test_wrong_request_after_others_closes_at_last(wrong: bytes) -> None:
    held = Held()
    client = MemoryClient(held)
    client.send(GET % b"a" + GET % b"b" + wrong)
    await turns()
    if wrong == b"GET / HT":
        client.connection._cut()
    assert not client.transport.is_closing()
    held.go.set()
    await turns()
    assert bodies(client) == [b"/a", b"/b"]
    assert client.transport.is_closing()


async def test_wrong_body_after_a_request_closes_at_last() -> None:
    held = Held()
    client = MemoryClient(held)
    client.send(
        GET % b"a"
        + POST.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
        + b"no size\r\n"
    )
    held.go.set()
    await turns()
    assert bodies(client) == [b"/a"]
    assert client.transport.is_closing()


async def test_body_time_begins_when_it_is_read() -> None:
    held = Held()
    client = MemoryClient(held)
    client.send(GET % b"a" + POST % 2)
    before = client.connection._timer
    await asyncio.sleep(0.01)
    held.go.set()
    await turns()
    after = client.connection._timer
    assert before is not None
    assert after is not None
    assert after.when() >= before.when() + 0.01


async def test_answer_limit_passed_still_watches_a_slow_reader() -> None:
    transport = MemoryTransport()
    transport.set_protocol(asyncio.Protocol())
    response = HttpResponse(
        transport, FlushBatch(), lambda: None, error_form=openai_error, stall_s=0.01
    )
    response.send(200, b"")
    timer = ReadTimer(transport, stall_s=0.01)
    timer.limit_answer(0, response)
    await asyncio.sleep(0.01)
    assert not transport.is_closing()
    transport.unread_bytes = 1
    timer.watch()
    await asyncio.sleep(0.05)
    assert transport.is_closing()


@pytest.mark.parametrize("sent", [GET % b"a" * 12, POST % 200_000 + b"x" * 150_000])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_client_leaving_while_paused_cancels_its_handler(
    new_loop: Callable[[], asyncio.AbstractEventLoop], sent: bytes
) -> None:
    async def leave() -> None:
        held = Held()
        held.cancels = True
        server = HttpServer(held, LIMITS, error_form=openai_error, shutdown_s=0.0)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: HttpConnection(server), theirs)
        sending = asyncio.create_task(loop.sock_sendall(ours, sent))
        while transport.is_reading():  # noqa: ASYNC110  # a transport has no event
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        ours.close()
        await server.until_ended()
        server.hangups.close()
        assert held.cancelled == held.begun != []

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(leave(), SOON_S))


# The parser reports a header when the next one begins, so the last one of these is not read.
PAGE = b"X-Request-Id: mine\r\nOrigin: https://a.example\r\nAccept: */*\r\nUser-Agent: x\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"


@each_case(
    ("sent", "status"),
    [
        (b"GET /x HTTP/1.1\r\n" + PAGE + b"\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + PAGE + b"wrong\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + PAGE + b"X-Long: " + b"x" * LIMITS.max_header_bytes, 431),
        (CHUNKED + PAGE + b"\r\nno size\r\n", 400),
        (GET.replace(b"\r\n\r\n", b"\r\n") % b"x" + PAGE, 408),
    ],
)
async def test_error_before_routing_has_request_id_and_cors(sent: bytes, status: int) -> None:
    held = Held()
    server = HttpServer(
        held, LIMITS, error_form=openai_error, shutdown_s=0.0, origins={"https://a.example"}
    )
    client = MemoryClient(held, server=server)
    client.send(sent)
    await turns()
    if status == 408:
        client.connection._cut()
    await turns()
    head = client.received.partition(b"\r\n\r\n")[0]
    assert int(head.split()[1]) == status
    assert b"\r\nX-Request-Id: mine" in head
    assert b"\r\nAccess-Control-Allow-Origin: https://a.example" in head
    assert b"\r\nVary: Origin" in head


async def test_error_in_the_request_line_has_a_new_request_id() -> None:
    client = MemoryClient(echo)
    client.send(b"nonsense\r\n\r\n")
    await turns()
    assert re.search(rb"\r\nX-Request-Id: [0-9a-f]{32}\r\n", client.received)


async def test_error_in_a_body_keeps_the_id_that_the_handler_has_set() -> None:
    held = Held()
    client = MemoryClient(Router([Route("POST", "/x", held)], error_forms={"/x": openai_error}))
    client.send(CHUNKED + b"\r\n")
    await turns()
    assert client.connection._current is not None
    request_id = client.connection._current.response.request_id
    client.send(b"no size\r\n")
    await turns()
    assert held.begun == ["/x"]
    head = client.received.partition(b"\r\n\r\n")[0].decode()
    assert f"\r\nX-Request-Id: {request_id}\r\n" in head
    assert f"\r\nRequest-Id: {request_id}" in head

"""When the bytes of a response leave: together where they can, in order, and not to a client that
does not read.
"""

from __future__ import annotations

import asyncio

import httpx
import orjson
import pytest

from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.protocol.errors import InternalError, InvalidRequest
from dynamo_trtllm.support.http_server.exchange import ClientDisconnected, FlushBatch, HttpResponse
from tests.kit.memory_http import MemoryTransport


class Sent(HttpResponse):
    def __init__(self, batch: FlushBatch | None = None, **form: bool) -> None:
        self.transport = MemoryTransport()
        self.num_ends = 0
        batch = batch or FlushBatch()
        super().__init__(
            self.transport, batch, self._count, error_form=openai_error, stall_s=60.0, **form
        )

    def _count(self) -> None:
        self.num_ends += 1

    def started_events(self) -> Sent:
        """Drop the head."""
        self.start_events({})
        self.flush()
        self.transport.sent.clear()
        return self


async def test_head_leaves_with_the_events_of_its_turn() -> None:
    response = Sent()
    response.start_events({"X-Some": "value"})
    await response.send_events(b"data: x\n\n")
    await response.send_events(b"y")
    assert response.transport.sent == []
    await asyncio.sleep(0)
    head, _, events = response.transport.sent[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"X-Some: value" in head
    assert b"X-Accel-Buffering: no" in head  # nginx passes events on at once
    assert events == b"9\r\ndata: x\n\n\r\n1\r\ny\r\n"
    await response.send_events(b"z")
    await asyncio.sleep(0)
    assert response.transport.sent[1:] == [b"1\r\nz\r\n"]


async def test_send_events_of_a_large_turn_leaves_early() -> None:
    response = Sent().started_events()
    for _ in range(4):
        await response.send_events(b"y" * 10_000)
    assert [len(data) > 30_000 for data in response.transport.sent] == [True]


async def test_head_without_events_leaves_alone() -> None:
    response = Sent()
    response.start_events({})
    await asyncio.sleep(0)
    assert len(response.transport.sent) == 1
    assert response.transport.sent[0].endswith(b"\r\n\r\n")


async def test_whole_response_then_head_and_body_leave_at_once() -> None:
    response = Sent()
    response.send_json(200, {"a": 1})
    assert len(response.transport.sent) == 1
    assert response.transport.sent[0].endswith(b"Content-Length: 7\r\n\r\n" + b'{"a":1}')
    assert (response.num_ends, response.ended) == (1, True)


async def test_head_method_gets_length_without_body() -> None:
    response = Sent(is_head=True)
    response.send_json(200, {"a": 1})
    assert response.transport.sent[0].endswith(b"Content-Length: 7\r\n\r\n")


async def test_write_of_several_events_sends_each_response_once() -> None:
    batch = FlushBatch()
    one = Sent(batch).started_events()
    two = Sent(batch).started_events()
    await asyncio.sleep(0)
    for response in (one, two, one):
        response.write(b"data: x\n\n")
    assert one.transport.sent == []
    await asyncio.sleep(0)
    assert one.transport.sent == [b"9\r\ndata: x\n\n\r\n" * 2]
    assert two.transport.sent == [b"9\r\ndata: x\n\n\r\n"]
    one.write(b"y")
    await asyncio.sleep(0)
    assert one.transport.sent[1:] == [b"1\r\ny\r\n"]


async def test_write_of_last_events_follows_once() -> None:
    response = Sent().started_events()
    response.write(b"y")
    await response.send_events(b"z", last=True)
    await asyncio.sleep(0)
    assert response.transport.sent == [b"1\r\ny\r\n1\r\nz\r\n0\r\n\r\n"]
    assert (response.num_ends, response.is_writable) == (1, False)


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029", "\x0b", "é", "…"])
async def test_event_is_one_line_for_clients_that_read_with_httpx(character: str) -> None:
    """Their lines also end at the line ends of Unicode."""
    text = f"before{character}after"
    response = Sent(is_chunked=False, keeps_alive=False).started_events()
    response.write(b"data: " + orjson.dumps({"text": text}) + b"\n\n")
    await response.send_events(b"data: [DONE]\n\n", last=True)
    read = httpx.Response(200, content=b"".join(response.transport.sent))
    event, *rest = read.iter_lines()
    assert orjson.loads(event.removeprefix("data: ")) == {"text": text}
    assert rest == ["", "data: [DONE]", ""]


async def test_stream_of_http_1_0_then_its_events_have_no_frames() -> None:
    response = Sent(is_chunked=False, keeps_alive=False)
    response.start_events({})
    response.write(b"y")
    await response.send_events(b"z", last=True)
    head, events = b"".join(response.transport.sent).split(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"Connection: close" in head
    assert events == b"yz"


async def test_write_to_closing_connection_spares_others() -> None:
    batch = FlushBatch()
    gone, closing, there = (Sent(batch).started_events() for _ in range(3))
    for response in (gone, closing, there):
        response.write(b"y")
    gone.lose()
    closing.transport.set_protocol(asyncio.Protocol())
    closing.transport.close()
    await asyncio.sleep(0)
    assert [len(answer.transport.sent) for answer in (gone, closing, there)] == [0, 0, 1]


async def test_is_writable_is_false_for_unread_or_gone_clients() -> None:
    response = Sent()
    assert not response.is_writable
    response.started_events()
    assert response.is_writable
    response.pause()
    assert not response.is_writable
    response.resume()
    assert response.is_writable
    response.lose()
    assert not response.is_writable


async def test_send_events_waits_for_a_slow_reader() -> None:
    response = Sent().started_events()
    response.pause()
    sending = asyncio.create_task(response.send_events(b"y"))
    await asyncio.sleep(0.01)
    assert response.transport.sent == []
    response.resume()
    await sending
    await asyncio.sleep(0)
    assert response.transport.sent == [b"1\r\ny\r\n"]


async def test_cancel_on_disconnect_raises_for_a_gone_client() -> None:
    response = Sent()
    response.lose()
    with pytest.raises(ClientDisconnected):
        response.cancel_on_disconnect()


async def test_header_with_line_break_is_not_sent() -> None:
    for line_break in ("\r\n", "\n", "\r"):
        response = Sent()
        with pytest.raises(ValueError, match="line break"):
            response.send_json(200, {}, {"X-Some": f"a{line_break}Set-Cookie: b"})
        await asyncio.sleep(0)
        assert response.transport.sent == []
        response.fail(InternalError("a fault"))
        assert response.status == 500
        assert response.transport.sent[0].startswith(b"HTTP/1.1 500 ")


async def test_response_when_it_has_ended_then_nothing_more_is_sent() -> None:
    response = Sent().started_events()
    await response.send_events(b"z", last=True)
    await response.send_events(b"late", last=True)
    response.write(b"late")
    await response.send_events(b"late")
    response.fail(InvalidRequest("late"))
    await asyncio.sleep(0)
    assert (response.transport.sent, response.num_ends) == ([b"1\r\nz\r\n0\r\n\r\n"], 1)


async def test_fail_during_a_stream_sends_no_last_chunk() -> None:
    response = Sent().started_events()
    response.write(b"y")
    response.fail(InvalidRequest("late"))
    assert b"".join(response.transport.sent) == b"1\r\ny\r\n"
    assert (response.num_ends, response.ended, response.is_writable, response.keeps_alive) == (
        1,
        True,
        False,
        False,
    )

"""A request and its response, as handlers see them.

Both belong to one connection. Only the connection owns the socket.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qs

import orjson

from dynamo_trtllm.protocol.errors import DynamoError, RequestTimeout
from dynamo_trtllm.protocol.http_status import RETRY_AFTER_S, ErrorForm, to_response
from dynamo_trtllm.support.http_server.request_head import Headers

# Events wait for the end of the turn. If more than this many bytes wait, they are written at once.
_FLUSH_BYTES = 32 << 10
JSON = "application/json"
_SIZE_LINES = [b"%x\r\n" % size for size in range(1024)]  # the size lines of small chunks
# Line ends of Unicode that the event stream format does not have, in UTF-8 and as JSON escapes.
# Some clients split an event there, such as all that read lines with httpx (httpx 0.28,
# LineDecoder).
_OTHER_LINE_ENDS = {
    "\N{NEXT LINE}".encode(): rb"\u0085",
    "\N{LINE SEPARATOR}".encode(): rb"\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): rb"\u2029",
}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


def _without_other_line_ends(events: bytes) -> bytes:
    """Return the events with escapes in place of line ends that only some clients split at."""
    # Most text has no such bytes, and this takes less time than the loop.
    if b"\xe2\x80" not in events and b"\xc2\x85" not in events:
        return events
    for line_end, escape in _OTHER_LINE_ENDS.items():
        if line_end in events:
            events = events.replace(line_end, escape)
    return events


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


class HttpRequest:
    """A request. Its body may still be arriving."""

    path_params: Mapping[str, str] = {}
    id = ""  # the client's id for this request, set by the handler
    is_lost = False  # the client has disconnected
    is_complete = False  # the whole body has arrived
    expects_continue = False  # the client sends the body after a response with status 100
    unread_bytes = 0  # number of bytes that have arrived and that the handler has not read
    is_probe = False  # the request asks for the health of this process
    sender: object = None  # who has sent the request, if the guard of the server has found out
    has_client_certificate = False  # a CA that the server trusts has signed the certificate
    large_head_bytes = 0  # size of a large head. 0: the head is small, and is not counted

    def __init__(
        self, method: str, path: str, query: str, headers: Headers, client: str, on_read: _Notify
    ) -> None:
        """Create a request of which no body has arrived.

        Args:
            method: the method in upper case.
            path: the decoded path, without the query.
            query: the query, which is not decoded.
            headers: the headers.
            client: the IP address of the client.
            on_read: called before `receive` waits, and after `receive` has taken a part of the
                body.
        """
        self.method = method
        self.path = path
        self.headers = headers
        self.client = client
        self.arrived_s = time.monotonic()
        self._query = query
        self._on_read = on_read
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> str | None:
        """Return the first value of a header. `name` is in lower case."""
        return self.headers.first(name)

    def query(self) -> dict[str, list[str]]:
        """Return the values of each query parameter."""
        return parse_qs(self._query, keep_blank_values=True)

    async def receive(self) -> bytes:
        """Return the next part of the body, or b"" at its end. Raises ClientDisconnected."""
        while not self._parts:
            if self.is_lost:
                raise ClientDisconnected
            if self.is_complete:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            self._on_read()
            await self._waiter
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.unread_bytes = 0
        self._on_read()
        return part

    # --- called by the connection -----------------------------------------------------------------

    def feed(self, part: bytes) -> None:
        self._parts.append(part)
        self.unread_bytes += len(part)
        self._wake()

    def complete(self) -> None:
        self.is_complete = True
        self._wake()

    def lose(self) -> None:
        self.is_lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class FlushBatch:
    """The responses that were written to in this turn of the event loop.

    Each response is flushed once, at the end of the turn. A message of a worker contains tokens of
    many responses, and if tokens arrive fast, several tokens of each response.
    """

    def __init__(self) -> None:
        self._written: list[HttpResponse] = []

    def add(self, response: HttpResponse) -> None:
        if not self._written:
            asyncio.get_running_loop().call_soon(self._flush)
        self._written.append(response)

    def _flush(self) -> None:
        written = self._written
        self._written = []
        for response in written:
            response.flush()


class HttpResponse:
    """The response to one request: a whole body, or a stream of events.

    Data that is sent after the client has disconnected is dropped.
    """

    started = False
    ended = False
    status = 0  # the HTTP status; 0: it was not sent yet
    is_writable = False  # events were started, and the client is connected and keeps up
    deadline = 0.0  # a time in seconds since the epoch, until which the client may read slowly
    # True: if the client disconnects before the response has ended, the handler is cancelled.
    cancels_handler = False
    # Called when the server shuts down while this response is being sent. A response that would go
    # on without end must then end.
    on_drain: Callable[[], None] | None = None
    _is_lost = False
    _is_paused = False
    _resumed: asyncio.Future[None] | None = None

    def __init__(
        self,
        transport: asyncio.Transport,
        batch: FlushBatch,
        on_end: _Notify,
        *,
        error_form: ErrorForm,
        stall_s: float,
        is_head: bool = False,
        is_chunked: bool = True,
        keeps_alive: bool = True,
    ) -> None:
        """Create a response.

        Args:
            transport: the connection.
            batch: flushes the response at the end of the event loop's turn.
            on_end: called after the last byte was written.
            error_form: the form of errors, unless a handler sets another form.
            stall_s: shortest time in seconds after which a slow client is disconnected.
            is_head: the request's method is HEAD, so the body is left out.
            is_chunked: the client accepts chunks. Otherwise the end of the connection ends a
                stream.
            keeps_alive: the connection stays open for another request.
        """
        self._transport = transport
        self._batch = batch
        self._on_end = on_end
        self._stall_s = stall_s
        self._is_head = is_head
        self._is_chunked = is_chunked
        self.keeps_alive = keeps_alive
        self.headers: dict[str, str] = {}  # headers beside those that the handler sends
        self.error_form = error_form
        self.request_id = ""  # the id of the request, which errors contain
        self._unsent: list[bytes] = []
        self._unsent_event_bytes = 0  # number of bytes in `_unsent` that `send_events` has added

    def cancel_on_disconnect(self) -> None:
        """Cancel the handler if the client disconnects before the response has ended.

        Raises:
            ClientDisconnected: the client has disconnected already.
        """
        if self._is_lost:
            raise ClientDisconnected
        self.cancels_handler = True

    def continue_on_disconnect(self) -> None:
        """Undo `cancel_on_disconnect`."""
        self.cancels_handler = False

    def send(
        self,
        status: int,
        body: bytes,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole response."""
        body_headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
        self._start(status, body_headers, headers)
        self._end(b"" if self._is_head else body)

    def send_json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self.send(status, orjson.dumps(value), headers=headers)

    def send_error(self, error: DynamoError, retry_after_s: int = RETRY_AFTER_S) -> None:
        """Send an error response, unless a response was started."""
        if not self.started:
            if isinstance(error, RequestTimeout):
                self.keeps_alive = False  # the rest of the request may still arrive
            response = to_response(
                error,
                self.error_form,
                request_id=self.request_id,
                retry_after_s=retry_after_s,
            )
            self.send_json(response.status, response.body, response.headers)

    def start_events(self, headers: Mapping[str, str]) -> None:
        """Send the headers of a stream.

        If the first event follows in this turn of the event loop, both are sent together.
        """
        stream_headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would collect events until its buffer is full
        }
        if self._is_chunked:
            stream_headers["Transfer-Encoding"] = "chunked"
        self._start(200, stream_headers, headers)
        self.is_writable = not (self._is_paused or self._is_lost)

    def write(self, events: bytes) -> None:
        """Send events at the end of the event loop's turn. `events` must not be empty.

        Called while `is_writable`, or right after `start_events`. The data of events is JSON.
        """
        if self.ended:  # the client would take the events for a part of the next response
            return
        if not events.isascii():
            events = _without_other_line_ends(events)
        unsent = self._unsent
        if not unsent:
            self._batch.add(self)
        if self._is_chunked:
            size = len(events)
            size_line = _SIZE_LINES[size] if size < 1024 else b"%x\r\n" % size
            unsent += (size_line, events, b"\r\n")
        else:
            unsent.append(events)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send events as `write` does, but the last ones at once.

        While the client reads slowly, this waits. After a time limit, the client is disconnected.
        """
        if self._is_paused:
            await self._until_resumed()
        if events:
            self.write(events)
        if last:
            self._end(b"0\r\n\r\n" if self._is_chunked else b"")
            return
        self._unsent_event_bytes += len(events)
        # Only the transport notices that a client reads slowly, and then calls `pause`. Therefore
        # the data is passed to the transport before much of it is collected here.
        if self._unsent_event_bytes >= _FLUSH_BYTES:
            self.flush()

    def fail(self, error: DynamoError) -> None:
        """End a response that its handler has not ended: send an error, or close the connection."""
        self.keeps_alive = False
        if self.started:
            self._end(b"")
        else:
            self.send_error(error)

    # --- called by the connection and the batch ---------------------------------------------------

    def take_over(self, other: HttpResponse) -> None:
        """Use the id, the headers and the form of errors of a response that this one replaces."""
        self.request_id = other.request_id
        self.headers = dict(other.headers)
        self.error_form = other.error_form

    def flush(self) -> None:
        """Write the data that waits to the socket."""
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_event_bytes = 0
            if not (self._is_lost or self._transport.is_closing()):
                self._transport.write(data)

    def pause(self) -> None:
        self._is_paused = True
        self.is_writable = False

    def resume(self) -> None:
        self._is_paused = False
        self.is_writable = self.started and not (self.ended or self._is_lost)
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)

    def lose(self) -> None:
        """Drop the rest of the response."""
        self._is_lost = True
        self.resume()

    # ----------------------------------------------------------------------------------------------

    def _start(
        self,
        status: int,
        body_headers: Mapping[str, str],
        handler_headers: Mapping[str, str] | None,
    ) -> None:
        """Send the head at the end of the turn. Headers of the handler override others."""
        assert not self.started
        headers = {"Date": _date(int(time.time())), **body_headers, **self.headers}
        if handler_headers is not None:
            headers.update(handler_headers)
        if not self.keeps_alive:
            headers["Connection"] = "close"
        lines = [_STATUS_LINES[status]]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines) + "\r\n\r\n"
        # Each line ends with one line break, and an empty line follows. A value with a line break
        # would add a header. Some proxies and clients take a carriage return alone as a line break.
        num_breaks = len(lines) + 1
        if head.count("\n") != num_breaks or head.count("\r") != num_breaks:
            raise ValueError("a value of a response header contains a line break")
        self._unsent.append(head.encode("latin-1"))
        # This is set last. So after an error above, `fail` can still send another response.
        self.started = True
        self.status = status
        self._batch.add(self)

    def _end(self, data: bytes) -> None:
        if self.ended:
            return
        self._unsent.append(data)
        self.flush()
        self.ended = True
        self.is_writable = False
        self._on_end()

    async def _until_resumed(self) -> None:
        """Wait until the client has read enough, or has disconnected.

        If this takes longer than `stall_s`, and the deadline has passed, the connection is closed,
        even if the client reads a little.
        """
        loop = asyncio.get_running_loop()
        longest_s = max(self._stall_s, self.deadline - time.time())
        stalled = loop.call_later(longest_s, self._transport.abort)
        self._resumed = loop.create_future()
        try:
            await self._resumed
        finally:
            stalled.cancel()


class Exchange(NamedTuple):
    """A request and its response."""

    request: HttpRequest
    response: HttpResponse


Handler: TypeAlias = Callable[[HttpRequest, HttpResponse], Awaitable[None]]
_Notify: TypeAlias = Callable[[], None]


@functools.lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


class ReadTimer:
    """Closes a connection whose client does not read.

    At most one limit applies at a time. While it applies, `watch` sets no other limit.
    """

    def __init__(self, transport: asyncio.Transport, stall_s: float) -> None:
        self._transport = transport
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def limit_answer(self, seconds: float, response: HttpResponse) -> None:
        """Close the connection after this time, unless the client has read the response by then.

        This must be called while no other limit applies.
        """
        assert self._timer is None
        self._timer = self._loop.call_later(seconds, self._cut_answer, response)

    def watch(self) -> None:
        """Close the connection once the client has read nothing for a while."""
        if self._timer is None:
            unread_bytes = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._stall_s, self._cut_reader, unread_bytes)

    def stop(self) -> None:
        """Remove the limit, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut_answer(self, response: HttpResponse) -> None:
        self._timer = None
        if not response.ended or self._transport.get_write_buffer_size():
            self._transport.abort()

    def _cut_reader(self, unread_bytes: int) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() >= unread_bytes:
            self._transport.abort()
        else:
            self.watch()

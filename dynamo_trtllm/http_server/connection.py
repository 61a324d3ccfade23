"""One HTTP/1.1 connection: its socket, its requests, and their limits in size and time.

Bodies are also limited where they are read (`frontend/http/admission.read_body`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httptools

from dynamo_trtllm import errors
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.http_server import request_head
from dynamo_trtllm.http_server.exchange import ClientDisconnected, Exchange, HttpRequest, HttpResponse, ReadTimer

if TYPE_CHECKING:
    from dynamo_trtllm.http_server.server import HttpServer

log = logging.getLogger(__name__)

_GRACE_S = 5.0  # time to send the error for a body that arrived too slowly, before the connection is closed
_DRAIN_S = 1.0  # time for a request that was sent before its client could know that the server shuts down
_LINGER_S = 1.0  # time for a rejected client to read the error: closing while it still sends would discard the error
_UNREAD_BYTES = 64 << 10  # of a body: beyond, nothing is received until the handler has read it
_WAITING = 8  # requests that wait behind another one: beyond, nothing is received, not even a disconnect
_BUG = "an internal error occurred; see the server's log for this request id"
_order = count(1)


class HttpConnection(asyncio.Protocol):
    """One connection. It runs one handler at a time; requests that the client sends before its response wait."""

    _transport: asyncio.Transport
    _client = ""
    _in_head = True  # True before and during a request's head
    _received_bytes = 0  # of an incomplete head
    _parsed_bytes = 0
    _body_bytes = 0  # received
    _ignores_data = False
    _is_lingering = False  # nothing more is sent
    _is_idle = False  # `_timer` is that of an idle connection
    _is_paused = False  # the client does not read what was written
    _is_reading = True
    _timer: asyncio.TimerHandle | None = None  # for the client's sending
    _read_timer: ReadTimer

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self.last_activity = next(_order)  # rank by the time of its opening, or of its newest complete request head
        self._parser = httptools.HttpRequestParser(self)
        # A client may send more after a request with `Connection: close`. It is not answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._current: Exchange | None = None  # whose handler runs, or was the last to run
        self._newest: Exchange | None = None  # received
        self._waiting: deque[Exchange] = deque()
        self._plain_head: bytes | None = None  # replaces a head that asks for an upgrade

    # --- called by the event loop ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._read_timer = ReadTimer(transport)
        peer = transport.get_extra_info("peername")
        self._client = peer[0] if peer else ""
        server, limits = self._server, self._limits
        if len(server.open) >= limits.max_connections:
            if not limits.closes_least_recent:
                text = f"the server has {limits.max_connections} open connections, its limit; try again later"
                self._reject(errors.Overloaded(text))
                return
            server.close_least_recent()
        server.open.add(self)
        self._arm(limits.receive_timeout_s, self._cut)
        if server.is_draining:
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._read_timer.stop()
        for request, response in [*([self._current] if self._current else []), *self._waiting]:
            request.lose()
            response.lose()
        self._current = self._newest = None
        self._waiting.clear()
        del self._parser  # it refers to this object
        self._server.open.discard(self)
        self._server.changed.set()

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._current is not None:
            self._current.response.pause()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._current is not None:
            self._current.response.resume()
        self._begin_next()

    def data_received(self, data: bytes) -> None:
        if self._ignores_data:
            return
        if self._in_head:
            self._received_bytes += len(data)
        else:
            self._body_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as exc:
            cause = exc.__context__  # an error that a method below raised
            self._reject(
                cause if isinstance(cause, DynamoError) else errors.InvalidRequest("the request is not valid HTTP/1.1")
            )
        if self._ignores_data:
            return
        limits = self._limits
        if self._body_bytes > limits.max_body_bytes + limits.max_header_bytes:
            text = f"the request body is larger than the limit of {limits.max_body_bytes} bytes, including chunk "
            self._reject(errors.PayloadTooLarge(text + "sizes, extensions and trailers"))
        elif self._in_head and self._received_bytes > limits.max_header_bytes:
            self._reject(request_head.head_too_large(limits.max_header_bytes))

    def _parse(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                self._parser.feed_data(view)
                return
            except httptools.HttpParserUpgrade as exc:
                if self._plain_head is None:
                    self._ignores_data = True  # it may be of another protocol, which is not offered
                    return
                view = view[exc.args[0] :]
            head, self._plain_head, self._parsed_bytes = self._plain_head, None, 0
            self._parser.feed_data(head)

    # --- called by the parser, within `data_received` ----------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._received_bytes = self._received_bytes or 1  # 0 if the end of another request was in the same packet
        if self._timer is None or self._is_idle:
            self._arm(self._limits.receive_timeout_s, self._cut)

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:  # otherwise it is a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        version, url = self._parser.get_http_version(), httptools.parse_url(self._url)
        request_head.check_head(version, self._headers)
        if self._server.is_draining:
            raise errors.Draining("the server is shutting down; retry")
        if self._parser.should_upgrade():
            self._plain_head = request_head.without_upgrade(
                self._parser.get_method(), self._url, version, self._headers
            )
            if self._plain_head is not None:
                return
        self._in_head, self._received_bytes, self._parsed_bytes, self._body_bytes = False, 0, 0, 0
        self.last_activity = next(_order)
        method, path = self._parser.get_method().decode("ascii"), (url.path or b"/").decode("ascii")
        query = (url.query or b"").decode("latin-1")
        request = HttpRequest(
            method, unquote(path) if "%" in path else path, query, self._headers, self._client, self._on_read
        )
        request.expects_continue = version == "1.1" and any(
            n == b"expect" and v.lower() == b"100-continue" for n, v in self._headers
        )
        response = HttpResponse(
            self._transport,
            self._server.batch,
            self._on_end,
            is_head=method == "HEAD",
            is_chunked=version == "1.1",
            keeps_alive=version == "1.1" and self._parser.should_keep_alive() and not self._parser.should_upgrade(),
        )
        self._newest = Exchange(request, response)
        self._waiting.append(self._newest)
        self._begin_next()
        if self._waiting:
            self._arm_body()
        self._update_reading()

    def on_body(self, part: bytes) -> None:
        if self._newest is not None and not self._newest.response.ended:
            self._newest.request.feed(part)
            self._update_reading()

    def on_message_complete(self) -> None:
        if self._plain_head is not None:
            return
        self._in_head = True
        self._disarm()
        if self._newest is not None:
            self._newest.request.complete()
            if self._newest.response.ended:
                self._arm_idle()

    def _count(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self._limits.max_header_bytes:
            raise request_head.head_too_large(self._limits.max_header_bytes)

    # --- requests ----------------------------------------------------------------------------------------

    def _begin_next(self) -> None:
        """Run the handler of the next request, once the response before it was sent, and read but for a buffer."""
        if self._current is not None and not self._current.response.ended:
            return
        if not self._waiting or self._transport.is_closing():
            return
        if self._is_paused:
            self._read_timer.watch()
            return
        self._current = self._waiting.popleft()
        if not self._current.request.is_complete:  # it could not arrive while others were before it
            self._arm_body()
        self._read_timer.stop()
        if self._limits.answer_timeout_s is not None:
            self._read_timer.limit_answer(self._limits.answer_timeout_s, self._current.response)
        task = self._loop.create_task(self._serve(*self._current))
        self._server.tasks.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        self._server.changed.set()

    async def _serve(self, request: HttpRequest, response: HttpResponse) -> None:
        """Run the handler, and end the response if the handler did not."""
        failure: DynamoError | None = None  # None: a bug
        try:
            await self._server.handler(request, response)
            if not (response.ended or request.is_lost):
                raise RuntimeError("the handler has not ended the response")
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            failure = errors.Draining("the server shut down before the request was complete; retry")
            raise
        except Exception:  # any bug of a handler: logged here, answered as `internal`
            log.exception("%s %s failed", request.method, request.path)
        finally:
            if not (response.ended or request.is_lost):
                response.fail(failure or errors.InternalError(_BUG))

    def _on_read(self) -> None:
        """Receive the body of the current request. Called when its handler reads."""
        if self._current is None:
            return
        request, response = self._current
        if request.expects_continue and not (request.is_complete or request.unread_bytes or response.started):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.expects_continue = False
        self._update_reading()

    def _on_end(self) -> None:
        """Close the connection after a response, or go on with the next request."""
        if self._current is None or self._transport.is_closing():
            return
        if not self._current.response.keeps_alive:
            self._close()
        elif self._waiting:
            self._begin_next()
        elif self._server.is_draining:
            self.drain()
        elif self._in_head:
            self._arm_idle()
        self._update_reading()

    def _update_reading(self) -> None:
        """Receive data unless too many requests wait, or a body is not read by its handler."""
        newest = self._newest
        is_full = newest is not None and newest.request.unread_bytes > _UNREAD_BYTES and not newest.response.ended
        reads = len(self._waiting) < _WAITING and not is_full
        if reads != self._is_reading and not self._transport.is_closing():
            self._is_reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # --- time ----------------------------------------------------------------------------------------------

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, action)

    def _arm_body(self) -> None:
        self._arm(self._limits.receive_timeout_s + _GRACE_S, self._cut)

    def _arm_idle(self) -> None:
        if self._timer is None:  # otherwise the next request has begun
            self._arm(self._limits.keep_alive_timeout_s, self._close)
            self._is_idle = True

    def _disarm(self) -> None:
        self._is_idle = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        """End a connection whose request has not arrived in time."""
        self._timer = None
        seconds = self._limits.receive_timeout_s
        if not self._is_reading and self._waiting:
            self._arm(seconds, self._cut)  # it could not arrive
        elif self._in_head and self._received_bytes:
            self._reject(errors.RequestTimeout(f"the request line and headers did not arrive within {seconds:g} s"))
        else:
            self._close()

    # --- the end -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close the connection. Data that the client has not read is lost."""
        self._transport.abort()

    def drain(self) -> None:
        """Close the connection after the responses to the requests that were received.

        Of a response that has begun, the client does not know that it is the last one. It may send another request,
        which gets 503 `draining`.
        """
        newest = self._newest
        if newest is not None and not newest.response.ended:
            newest.response.keeps_alive = newest.response.keeps_alive and newest.response.started
        elif self._in_head:
            self._arm(_DRAIN_S, self._close)
            self._is_idle = True
        else:
            self._close()

    def _close(self) -> None:
        """Close the connection when the client has read all data. It may still send a body that is not read."""
        if self._is_lingering:
            return
        self._disarm()
        current, newest = self._current, self._newest
        if current and newest and current.response.ended and not newest.request.is_complete:
            self._waiting.clear()
            self._ignores_data = True
            self._linger()
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._read_timer.watch()

    def _reject(self, error: DynamoError) -> None:
        """Receive no more, and send an error unless a response is before it. Then the connection ends after that."""
        self._ignores_data = True
        self._disarm()
        newest = self._newest
        if newest is not None and not self._in_head:  # the error is in its body
            if newest.response.ended:
                self._linger()
                return
            if self._waiting:
                self._waiting.pop()
                newest = self._newest = self._waiting[-1] if self._waiting else self._current
            elif newest.response.started:
                self._close()
                return
            else:
                newest.request.lose()
                newest.response.lose()
                newest = None
        if newest is not None and not newest.response.ended:
            newest.response.keeps_alive = False
        else:
            HttpResponse(self._transport, self._server.batch, self._linger, keeps_alive=False).send_error(error)

    def _linger(self) -> None:
        """Close the connection after the client has had time to read what was sent."""
        self._is_lingering = True
        self._transport.write_eof()
        self._end_linger()

    def _end_linger(self) -> None:
        if self._transport.get_write_buffer_size():
            self._read_timer.watch()
            self._arm(_LINGER_S, self._end_linger)
        else:
            self._arm(_LINGER_S, self.abort)

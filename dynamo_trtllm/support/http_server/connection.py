"""One HTTP/1.1 connection: its socket, its requests, and their limits in size and time.

Bodies are also limited where they are read (`frontend/requests/request_body.read_body`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from urllib.parse import unquote

from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.support.http_server.answer_headers import set_answer_headers
from dynamo_trtllm.support.http_server.connection_group import ConnectionGroup
from dynamo_trtllm.support.http_server.exchange import (
    ClientDisconnected,
    Exchange,
    HttpRequest,
    HttpResponse,
    ReadTimer,
)
from dynamo_trtllm.support.http_server.request_head import SMALL_HEAD_BYTES
from dynamo_trtllm.support.http_server.request_parser import RequestHead, RequestParser
from dynamo_trtllm.support.network.addresses import network_of

log = logging.getLogger(__name__)

# Above one of these limits, the connection receives nothing.
_MAX_UNREAD_BYTES = 64 << 10  # most bytes of a body that its handler has not read yet
_MAX_WAITING = 8  # most requests that wait behind another one
# Most bytes that are parsed at once. The parser does not report where in such a part a head begins,
# so the size of a head is only known to this precision. The parser does not stop at the end of a
# request either, so a few more requests than `_MAX_WAITING` may wait.
_PART_BYTES = 2 << 10
_PROBE_PATHS = frozenset({"/live", "/ready", "/health"})  # answered at any load
_BUG = "an internal error occurred; see the server's log for this request id"


def _do_nothing() -> None: ...


class HttpConnection(asyncio.BufferedProtocol):
    """One connection. It runs one handler at a time, and further requests wait."""

    _transport: asyncio.Transport
    _file = -1  # the descriptor of the socket; -1: there is none
    _client = ""  # the address of the client
    network = ""  # the network of the client, see `network_of`
    has_client_certificate = False  # a CA that the server trusts has signed it; TLS sets this
    _ignores_data = False  # what the client still sends is discarded
    # The response was sent. The connection stays open so that the client can read it.
    _is_lingering = False
    _awaits_request = False  # `_timer` limits the time until the next request begins
    _is_paused = False  # the client does not read what was written
    _is_reading = True
    _unparsed = memoryview(b"")  # the bytes that are parsed later: in a turn, or when fewer wait
    _awaits_turn = False  # the connection waits in `ParsingTurns`, and receives nothing until then
    _timer: asyncio.TimerHandle | None = None  # limits the time until the client has sent something
    _read_timer: ReadTimer  # closes the connection if the client does not read what was written

    def __init__(self, server: ConnectionGroup) -> None:
        self._server = server
        self._limits = server.limits
        self._timing = server.limits.timing
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(server.limits, self)
        self._current: Exchange | None = None  # its handler is running, or was the last to run
        self._handler: asyncio.Task[None] | None = None  # the handler of `_current`
        self._newest: Exchange | None = None  # the exchange whose head was received last
        self._waiting: deque[Exchange] = deque()  # the exchanges whose handlers have not begun

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and runs no request. Then it may be closed for another."""
        return self in self._server.idle

    @property
    def begins_request(self) -> bool:
        """True if nothing of the next request was parsed yet."""
        return self._parser.awaits_head and not self._parser.received_bytes

    # --- called by the event loop -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._read_timer = ReadTimer(transport, self._timing.stall_s)
        sock = transport.get_extra_info("socket")
        self._file = -1 if sock is None else sock.fileno()
        peer = transport.get_extra_info("peername")
        self._client = peer[0] if peer else ""
        self.network = network_of(self._client)
        self._server.admit(self)
        self._arm(self._limits.receive_timeout_s, self._cut)
        if self._server.is_draining:
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests, and free what they hold."""
        self._disarm()
        self._read_timer.stop()
        self._server.hangups.discard(self._file)
        for exchange in self._exchanges():
            self._lose(exchange)
        self._current = None
        self._newest = None
        self._handler = None
        self._waiting.clear()
        self._unparsed = memoryview(b"")
        self._parser.close()
        self._server.remove(self)

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._current is not None:
            self._current.response.pause()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._current is not None:
            self._current.response.resume()
        if self._waiting:  # `_begin_next` has waited for this
            self._await_turn(has_rest=True)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes. All connections share it: it is copied at once."""
        return self._server.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.receive(bytes(self._server.receive_buffer[:nbytes]))

    def receive(self, data: bytes) -> None:
        """Parse what the client has sent, now or in later turns."""
        if self._unparsed:
            data = b"".join((self._unparsed, data))
        self._unparsed = memoryview(data)
        turns = self._server.parsing_turns
        while self._may_parse and not (turns.is_time_over or self._awaits_turn):
            turns.run(self._parse_part)
        if self._may_parse:
            self._await_turn(has_rest=False)
        elif self._ignores_data:
            # Receive nothing before the next turn. So a client whose bytes are discarded takes no
            # time from others.
            self._await_turn(has_rest=True)
        self._update_reading()

    @property
    def _may_parse(self) -> bool:
        """True if there are unparsed bytes, and another request may wait."""
        return bool(self._unparsed) and len(self._waiting) < _MAX_WAITING

    def _parse_part(self) -> None:
        """Parse a part of what was received."""
        part = self._unparsed[:_PART_BYTES]
        self._unparsed = self._unparsed[_PART_BYTES:]
        if not self._ignores_data:
            self._feed_parser(part)
        if self._ignores_data:  # set before, or by `_feed_parser`
            self._unparsed = memoryview(b"")

    def _await_turn(self, *, has_rest: bool) -> None:
        """Wait for a turn. `has_rest`: see `ParsingTurns.wait`."""
        if not self._awaits_turn:
            self._awaits_turn = True
            begins_request = self.begins_request and not has_rest
            self._server.parsing_turns.wait(self, has_rest=has_rest, begins_request=begins_request)

    def take_turn(self) -> None:
        """Begin the next request that waits, and parse a part of what was received.

        Called by `ParsingTurns`.
        """
        self._awaits_turn = False
        self._begin_next()
        if self._may_parse:
            self._parse_part()
        if self._may_parse:
            self._await_turn(has_rest=True)
        self._update_reading()

    def _feed_parser(self, part: memoryview) -> None:
        """Parse a part of what the client sends, and check the limits of heads and bodies."""
        parser = self._parser
        try:
            is_http = parser.feed(part)
            if not is_http:
                # The client wants another protocol, which is not offered. Ignore the rest.
                self._ignores_data = True
            if self._ignores_data:
                return
            parser.check_size()
            if parser.awaits_head and parser.received_bytes > SMALL_HEAD_BYTES:
                self._count_large_heads(parser.received_bytes)
        except DynamoError as error:
            self._reject(error)

    # --- called by the parser, within `feed` ------------------------------------------------------

    def on_begin(self) -> None:
        # The timer of an idle connection is replaced. The timer of the first request was started
        # with the connection, and goes on.
        if self._timer is None or self._awaits_request:
            self._arm(self._limits.receive_timeout_s, self._cut)

    def check_accepting(self) -> None:
        if self._server.is_draining:
            raise errors.Draining("the server is shutting down; retry")

    def on_head(self, head: RequestHead) -> None:
        """Run the request of a head, or let it wait for the requests before it."""
        request = self._new_request(head)
        if self.is_idle:
            if not request.is_probe:
                self._server.check_capacity()
            # The connection counts as idle until the body has arrived. Now it becomes the last of
            # the idle ones, so others are evicted first.
            self._server.mark_idle(self)
        # A head may have been counted as large while it arrived. Now its exact size is known.
        if request.large_head_bytes or self in self._server.large_heads:
            self._count_large_heads(request.large_head_bytes)
        response = HttpResponse(
            self._transport,
            self._server.batch,
            self._on_end,
            error_form=self._server.error_form,
            stall_s=self._timing.stall_s,
            is_head=request.method == "HEAD",
            is_chunked=head.version == "1.1",
            keeps_alive=head.keeps_alive,
        )
        self._newest = Exchange(request, response)
        self._waiting.append(self._newest)
        self._begin_next()
        # If the request runs, `_begin_next` has limited the time of its body.
        if self._waiting:
            self._arm_body()
        self._update_reading()

    def _new_request(self, head: RequestHead) -> HttpRequest:
        """Return the request whose head was parsed."""
        method = head.method.decode("ascii")
        path = head.raw_path.decode("ascii")
        if "%" in path:
            path = unquote(path)
        query = head.raw_query.decode("latin-1")
        request = HttpRequest(method, path, query, head.headers, self._client, self._on_read)
        request.is_probe = path in _PROBE_PATHS and method in ("GET", "HEAD")
        request.has_client_certificate = self.has_client_certificate
        if head.num_bytes > SMALL_HEAD_BYTES:
            request.large_head_bytes = head.num_bytes
        expectation = head.headers.first(b"expect") or ""
        request.expects_continue = head.version == "1.1" and expectation.lower() == "100-continue"
        return request

    def on_body(self, part: bytes) -> None:
        if self._newest is not None and not self._newest.response.ended:
            self._newest.request.feed(part)
            self._update_reading()

    def on_complete(self) -> None:
        self._disarm()
        if self._newest is not None:
            self._newest.request.complete()
            if self._newest.response.ended:
                self._forget_request()
                self._arm_idle()
            elif self._newest is self._current:
                self._keep_open()

    def _count_large_heads(self, head_bytes: int) -> None:
        """Count the large heads of this connection: of requests that wait or run, and of a new one.

        Args:
            head_bytes: number of bytes of the new head that have arrived. 0: the head is not large.

        Raises:
            Overloaded: the large heads of all connections together exceed their limit.
        """
        num_bytes = head_bytes + sum(request.large_head_bytes for request, _ in self._exchanges())
        if not num_bytes:
            self._server.large_heads.release(self)
        elif not self._server.large_heads.hold(self, num_bytes):
            max_bytes = self._limits.max_large_head_bytes
            raise errors.Overloaded(
                f"all request heads of more than {SMALL_HEAD_BYTES} bytes together reach their"
                f" limit of {max_bytes} bytes; send fewer or try again later"
            )

    # --- requests ---------------------------------------------------------------------------------

    def _exchanges(self) -> list[Exchange]:
        """Return the current exchange, if there is one, and those that wait."""
        if self._current is None:
            return list(self._waiting)
        return [self._current, *self._waiting]

    def _begin_next(self) -> None:
        """Run the next handler, if the response before was sent and the client reads it."""
        if self._current is not None and not self._current.response.ended:
            return
        if not self._waiting or self._transport.is_closing():
            return
        if self._is_paused:
            self._read_timer.watch()
            return
        self._current = self._waiting.popleft()
        if self._current.request.is_complete:
            self._keep_open()
        else:  # the body could not arrive while other requests were before this one
            self._arm_body()
        self._read_timer.stop()
        self._server.parsing_turns.count_handler()
        if self._limits.answer_timeout_s is not None:
            self._read_timer.limit_answer(self._limits.answer_timeout_s, self._current.response)
        self._handler = self._loop.create_task(self._serve(*self._current))
        self._server.tasks.add(self._handler)
        self._handler.add_done_callback(self._served)

    def _keep_open(self) -> None:
        """Do not close the connection for another one while its complete request runs."""
        if self._current is not None and not self._current.request.is_probe:
            self._server.mark_running(self)

    def _forget_request(self) -> None:
        """Free the current request, which has ended, unless its body still arrives."""
        ended = self._current
        if ended is None or not ended.request.is_complete:
            return
        self._current = None
        if self._newest is ended:
            self._newest = None
        if ended.request.large_head_bytes:
            self._server.large_heads.reduce(self, ended.request.large_head_bytes)

    def _lose(self, exchange: Exchange) -> None:
        """End a request whose client gets no response. Cancel its handler if `cancels_handler`."""
        request, response = exchange
        request.lose()
        response.lose()
        if exchange is not self._current or self._handler is None or response.ended:
            return
        if response.cancels_handler:
            response.cancels_handler = False  # a second call must not cancel the end of the handler
            self._handler.cancel()

    def _served(self, task: asyncio.Task[None]) -> None:
        if task is self._handler:
            self._handler = None
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
        except Exception:  # a bug of the handler, which is logged and answered as `internal`
            log.exception("%s %s failed", request.method, request.path)
        finally:
            if not (response.ended or request.is_lost):
                response.fail(failure or errors.InternalError(_BUG))

    def _on_read(self) -> None:
        """Receive the body of the current request. Called when its handler reads."""
        if self._current is None:
            return
        request, response = self._current
        # A client that has begun to send the body, or gets a response, does not wait any more.
        has_body = request.is_complete or request.unread_bytes > 0
        if request.expects_continue and not has_body and not response.started:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.expects_continue = False
        self._update_reading()

    def _on_end(self) -> None:
        """Close the connection after a response, or go on with the next request."""
        if self._current is None or self._transport.is_closing():
            return
        keeps_alive = self._current.response.keeps_alive
        self._server.mark_idle(self)
        self._forget_request()
        if not keeps_alive:
            self._close()
        elif self._waiting:
            self._await_turn(has_rest=True)
        elif self._server.is_draining:
            self.drain()
        elif self._parser.awaits_head:
            self._arm_idle()
        self._update_reading()

    def _update_reading(self) -> None:
        """Receive data, unless this connection waits for its turn or has received enough.

        It has enough if too many requests wait, or if a handler does not read its body.
        """
        newest = self._newest
        is_full = len(self._waiting) >= _MAX_WAITING
        if newest is not None and not newest.response.ended:
            is_full = is_full or newest.request.unread_bytes > _MAX_UNREAD_BYTES
        reads = not is_full and not self._awaits_turn
        if reads == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = reads
        if reads:
            self._server.hangups.discard(self._file)
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
            if self._file >= 0:
                self._server.hangups.add(self._file, self.hang_up)

    # --- time -------------------------------------------------------------------------------------

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, action)

    def _arm_body(self) -> None:
        self._arm(self._limits.receive_timeout_s + self._timing.grace_s, self._cut)

    def _arm_idle(self) -> None:
        if self._timer is None:  # otherwise the next request has begun
            self._arm(self._limits.keep_alive_timeout_s, self._close)
            self._awaits_request = True

    def _disarm(self) -> None:
        self._awaits_request = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        """End a connection whose request has not arrived in time."""
        self._timer = None
        seconds = self._limits.receive_timeout_s
        if not self._is_reading and self._waiting:
            self._arm(seconds, self._cut)  # the server did not read, so nothing could arrive
        elif self._parser.awaits_head and self._parser.received_bytes:
            self._reject(
                errors.RequestTimeout(
                    f"the request line and headers did not arrive within {seconds:g} s"
                )
            )
        else:
            self._close()

    # --- the end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close the connection. Data that the client has not read is lost."""
        self._transport.abort()

    def hang_up(self) -> None:
        """Close the connection, because its client sends no more.

        The event loop notices this for connections that read. This is called for the others.
        """
        if self._is_lingering:
            return  # the client may still read the response, which a close would discard
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._read_timer.watch()

    def evict(self) -> None:
        """Close this idle connection at once, so that others can be accepted.

        A partly received request gets 429.
        """
        self._server.remove(self)
        self._disarm()
        self._ignores_data = True
        if self._is_lingering or self._transport.get_write_buffer_size():
            self._transport.abort()  # `close` would wait until the client has read all data
            return
        newest = self._newest
        receives_head = self._parser.awaits_head and self._parser.received_bytes > 0
        receives_body = newest is not None and not (
            newest.request.is_complete or newest.response.started
        )
        if receives_head or receives_body:
            error = errors.Overloaded(
                "this connection was closed for other clients before the request was received; try"
                " again later"
            )
            self._send_error(error, _do_nothing, newest if receives_body else None)
            self._read_timer.watch()
        self._transport.close()

    def drain(self) -> None:
        """Close the connection after the responses to the requests that were received.

        If a response has begun, its client does not know that this response is the last one. The
        client's next request gets 503 `draining`.
        """
        newest = self._newest
        if newest is not None and not newest.response.ended:
            if not newest.response.started:
                newest.response.keeps_alive = False
            elif newest.response.on_drain is not None:
                newest.response.on_drain()
        elif self._parser.awaits_head:
            self._arm(self._timing.drain_s, self._close)
            self._awaits_request = True
        else:  # the rest of a request that was answered still arrives
            self._close()

    def _close(self) -> None:
        """Close the connection when the client has read all data.

        The client may still send a body that is not read.
        """
        if self._is_lingering:
            return
        self._disarm()
        current = self._current
        newest = self._newest
        # The client may still send a body, of the answered request or of a later one. Then a close
        # could reset the connection before the client has read the answer.
        if current and newest and current.response.ended and not newest.request.is_complete:
            self._waiting.clear()
            self._ignores_data = True
            self._linger()
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._read_timer.watch()

    def _reject(self, error: DynamoError) -> None:
        """Receive no more, and end the connection.

        If a response is being sent, the connection ends after it, otherwise with `error`.
        """
        self._ignores_data = True
        self._disarm()
        replaced: Exchange | None = None
        newest = self._newest
        # If the error is in a head, `newest` is the request before it.
        if newest is not None and not self._parser.awaits_head:
            if newest.response.ended:
                # The error is in the rest of a body whose request was answered already.
                self._linger()
                return
            if self._waiting:
                # The handler of the newest request has not begun. Those before are still answered.
                self._waiting.pop()
                newest = self._waiting[-1] if self._waiting else self._current
                self._newest = newest
            elif newest.response.started:
                self._close()
                return
            else:
                # The error is sent in place of the handler's response.
                self._lose(newest)
                replaced = newest
                newest = None
        if newest is not None and not newest.response.ended:
            newest.response.keeps_alive = False
        else:
            self._send_error(error, self._linger, replaced)

    def _send_error(
        self, error: DynamoError, on_end: Callable[[], None], replaced: Exchange | None
    ) -> None:
        """Send an error in place of another response, or for a head that is incomplete or wrong."""
        response = HttpResponse(
            self._transport,
            self._server.batch,
            on_end,
            error_form=self._server.error_form,
            stall_s=self._timing.stall_s,
            keeps_alive=False,
        )
        set_answer_headers(response, replaced, self._parser.headers, self._server.origins)
        response.send_error(error)

    def _linger(self) -> None:
        """Close the connection after the client has had time to read what was sent."""
        self._is_lingering = True
        self._transport.write_eof()
        self._limit_linger()

    def _limit_linger(self) -> None:
        """Close the connection some time after everything was sent."""
        if self._transport.get_write_buffer_size():
            self._read_timer.watch()
            self._arm(self._timing.linger_s, self._limit_linger)
        else:
            self._arm(self._timing.linger_s, self.abort)

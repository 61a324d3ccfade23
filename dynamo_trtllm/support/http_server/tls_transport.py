"""The TLS of one connection: a transport between `HttpConnection` and the socket."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from typing import Any, Final, cast

from dynamo_trtllm.support.http_server.connection import HttpConnection
from dynamo_trtllm.support.http_server.connection_group import ConnectionGroup
from dynamo_trtllm.support.tls import ServerCertificate

log = logging.getLogger(__name__)

_READ_BYTES: Final = 16 << 10  # most bytes of a record of TLS
_HANDSHAKE_RECORD: Final = 0x16  # the first byte of every connection with TLS
# Most bytes that TLS itself may send after the handshake. A client may ask for a key update (RFC
# 8446, 4.6.3), and each time gets an answer of 27 bytes. Normal clients ask once in gigabytes.
_MAX_REPLY_BYTES: Final = 4 << 10
_TEXT: Final = b"this port needs TLS; use https:// instead of http://\n"
_NOT_TLS: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """The TLS between a socket and its `HttpConnection`.

    The connection exists before the handshake. So the handshake is part of the time that a request
    may take to arrive, and during the handshake the connection counts as idle for the limits.

    The TLS of the event loop is not used, because it hides what the limits of the HTTP server need:

    * A connection begins only after the handshake.
    * The size of unsent data does not include the data that waits for the socket. So a client that
      reads nothing is not noticed.
    * Data that a client sends after an early answer can't be discarded, so the client may lose the
      answer.
    * A paused connection receives up to 256 KiB more.

    Encryption takes turns with the parsing of other connections (`ParsingTurns`). A handshake takes
    up to 1 ms of CPU time.
    """

    _raw: asyncio.Transport
    network = ""  # the network of the client
    _has_begun = False  # something was received
    _is_established = False  # the handshake is complete
    _is_shut = False  # the server sends nothing more
    _discards = False  # what the client still sends is discarded
    _is_hung_up = False  # the client sends nothing more
    _is_paused = False  # the `HttpConnection` wants to receive nothing
    _awaits_turn = False  # this waits in `ParsingTurns`, and receives nothing until then
    _is_reading = True
    _num_reply_bytes = 0  # number of bytes that TLS itself has sent after the handshake
    _decrypted = b""  # the decrypted data that the `HttpConnection` has not received yet
    _timer: asyncio.TimerHandle | None = None  # limits the time of the handshake

    def __init__(
        self, group: ConnectionGroup, connection: HttpConnection, certificate: ServerCertificate
    ) -> None:
        """Create the transport.

        Args:
            group: the group of the connection.
            connection: receives the decrypted data.
            certificate: the certificate of the server.
        """
        super().__init__()
        self._group = group
        self._connection = connection
        self._certificate = certificate
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = certificate.context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    # --- called by the event loop -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop is not a subclass of asyncio.Transport.
        self._raw = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(
            self._group.limits.timing.handshake_s, self._cut_handshake
        )
        self._connection.connection_made(self)
        self.network = self._connection.network

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._end_handshake("disconnected")
        self._connection.connection_lost(exc)
        # This transport and its connection refer to each other. If they still did, both would stay
        # in memory with the large state of TLS until the next garbage collection.
        self._is_shut = True
        self._discards = True
        del self._connection, self._tls

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes are received, see `HttpConnection.get_buffer`."""
        return self._group.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Receive bytes that are in the buffer, now or in a later turn."""
        if self._discards:
            return
        received = self._group.receive_buffer[:nbytes]
        if not self._has_begun:
            self._has_begun = True
            if received[0] != _HANDSHAKE_RECORD:
                self._reject_plain()
                return
        self._incoming.write(received)
        turns = self._group.parsing_turns
        if turns.is_time_over:
            self._awaits_turn = True
            turns.wait(self, has_rest=False, begins_request=self._connection.begins_request)
            self._update_reading()
        else:
            turns.run(self._decrypt)
            self._deliver()

    # --- called by `ParsingTurns` -----------------------------------------------------------------

    def take_turn(self) -> None:
        """Decrypt what was received."""
        self._awaits_turn = False
        if not self._raw.is_closing():
            self._decrypt()
            self._deliver()
            self._update_reading()

    # --- called by the connection -----------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)

    def write(self, data: bytes) -> None:  # type: ignore[override]
        # Before the end of the handshake, nothing can be encrypted. A connection writes at that
        # time only if it is being closed. Its message is dropped.
        if self._is_shut or not self._is_established:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError as exc:
            self._fail(exc)
            return
        self._flush()

    def write_eof(self) -> None:
        """Send nothing more, and discard what the client still sends.

        The client is not informed of this before the connection is closed. Otherwise most clients
        would end the whole connection, as TLS 1.2 requires. Then a client that still sends would
        lose the answer.
        """
        self._discards = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        """Close the connection when the client has read all data."""
        if not self._raw.is_closing():
            self._shut()
            self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._update_reading()

    # ----------------------------------------------------------------------------------------------

    def _decrypt(self) -> None:
        """Continue the handshake, and decrypt what was received into `_decrypted`.

        A receive buffer can hold hundreds of small records. The connection receives all of them
        together, as it would without TLS.
        """
        parts: list[bytes] = []
        try:
            if not self._is_established:
                self._shake_hands()
            while self._incoming.pending or self._tls.pending():
                part = self._tls.read(_READ_BYTES)
                if not part:
                    self._is_hung_up = True
                    break
                parts.append(part)
        except ssl.SSLWantReadError:
            pass  # the rest of a record is on its way
        except ssl.SSLZeroReturnError:
            self._is_hung_up = True
        except ssl.SSLError as exc:
            self._fail(exc)
            return
        self._decrypted = b"".join(parts)
        if self._is_established:
            self._num_reply_bytes += self._outgoing.pending
        self._flush()
        if self._num_reply_bytes > _MAX_REPLY_BYTES:
            log.debug("client %s asked for new keys too often", self.network)
            self._raw.abort()

    def _deliver(self) -> None:
        """Let the connection receive the decrypted data."""
        data = self._decrypted
        if self._raw.is_closing():
            return
        if data:
            self._decrypted = b""
            self._connection.receive(data)
        if self._is_hung_up:
            self._connection.hang_up()

    def _flush(self) -> None:
        """Send the encrypted data."""
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def _shut(self) -> None:
        """Tell the client that nothing more is sent."""
        if self._is_shut:
            return
        self._is_shut = True
        if self._is_established:
            # `unwrap` raises an error if the client has not ended its side yet. The server does not
            # wait for that.
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()

    def _update_reading(self) -> None:
        reads = not (self._is_paused or self._awaits_turn)
        if reads == self._is_reading or self._raw.is_closing():
            return
        self._is_reading = reads
        if reads:
            self._raw.resume_reading()
        else:
            self._raw.pause_reading()

    # --- the handshake ----------------------------------------------------------------------------

    def _shake_hands(self) -> None:
        """Continue the handshake. Raises ssl.SSLError."""
        self._tls.do_handshake()
        self._is_established = True
        self._connection.has_client_certificate = bool(self._tls.getpeercert())
        self._end_handshake("ok")
        # The last bytes of the handshake are sent here, so that they do not count as a reply.
        self._flush()

    def _end_handshake(self, outcome: str) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self._certificate.count("tls_handshakes_total", outcome)

    def _cut_handshake(self) -> None:
        """End a connection whose handshake takes too long."""
        self._end_handshake("timeout")
        self._raw.abort()

    def _reject_plain(self) -> None:
        """End a connection that does not begin with TLS. Most such connections are HTTP."""
        log.debug("client %s does not use TLS", self.network)
        self._end_handshake("not_tls")
        self._is_shut = True
        self._discards = True
        self._raw.write(_NOT_TLS)
        self._raw.close()

    def _fail(self, exc: ssl.SSLError) -> None:
        """End a connection after an error, and send the alert of TLS to the client."""
        log.debug("TLS with client %s failed: %s", self.network, exc)
        if not self._is_established:
            is_certificate = isinstance(exc, ssl.SSLCertVerificationError)
            self._end_handshake("client_certificate" if is_certificate else "failed")
        self._flush()
        self._is_shut = True
        self._discards = True
        self._raw.close()

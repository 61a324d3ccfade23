"""Define the limits of the connections of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTiming:
    """How long a server waits for its clients, in seconds. Only tests change these times."""

    # The shortest time after which the connection of a client that reads slowly is closed.
    stall_s: float = 30.0
    # The time to send the error for a body that has arrived too slowly, before the connection is
    # closed.
    grace_s: float = 5.0
    # After the shutdown has begun, the wait for a request that a client has sent before it could
    # know this.
    drain_s: float = 1.0
    # The longest time for the handshake of TLS.
    handshake_s: float = 10.0
    # The time in which a rejected client can read the error. If the connection were closed while
    # the client sends, the client would lose the error.
    linger_s: float = 1.0


TIMING = ConnectionTiming()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one server.

    At most `max_connections` connections run requests. Further requests get 429, unless they ask
    for the health of the process. `reserved_connections` more connections may be open, so there are
    always idle connections. A further connection replaces an idle one.
    """

    max_connections: int
    reserved_connections: int
    max_header_bytes: int  # limit of the request line and the headers together
    # The longest time in which the head of a request may arrive, and then its body.
    receive_timeout_s: float
    keep_alive_timeout_s: float  # an idle connection is closed after this time
    # The longest time until the client has read a response. None: there is no such limit.
    answer_timeout_s: float | None = None
    # Limit of a body. Chunk sizes, extensions and trailers may take `max_header_bytes` in addition.
    max_body_bytes: int = 0
    max_large_head_bytes: int = 32 << 20  # limit of all large request heads together
    keeps_all_headers: bool = False  # store headers that this server does not read, too
    timing: ConnectionTiming = TIMING

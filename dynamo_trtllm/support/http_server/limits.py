"""Define the limits of the connections of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTiming:
    """Waits of a server for its clients, in seconds. Users can't change them; tests do."""

    # Least time for a client that reads slowly, before its connection is closed.
    stall_s: float = 30.0
    # To send the error for a body that arrived too slowly, before the connection is closed.
    grace_s: float = 5.0
    # For a request that was sent before its client could know that the server shuts down.
    drain_s: float = 1.0
    # For the handshake of TLS.
    handshake_s: float = 10.0
    # For a rejected client to read the error: a close while it sends would discard the error.
    linger_s: float = 1.0


TIMING = ConnectionTiming()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one server.

    At most `max_connections` run requests; further requests get 429, unless they ask for the health
    of the process. `reserved_connections` more may be open, so there are always idle ones. A
    further connection replaces one of these.
    """

    max_connections: int
    reserved_connections: int
    max_header_bytes: int  # request line and headers
    # for the head from its first byte (or the connection) on, then for the body
    receive_timeout_s: float
    keep_alive_timeout_s: float  # of an idle connection
    # until the client has read a response; None: no limit here
    answer_timeout_s: float | None = None
    # includes chunk sizes, extensions and trailers beyond `max_header_bytes`
    max_body_bytes: int = 0
    max_large_head_bytes: int = 32 << 20  # of all request heads together that are large
    keeps_all_headers: bool = False  # also those that this server does not read
    timing: ConnectionTiming = TIMING

"""The head of a request: its headers, their limits, and heads that ask for an upgrade."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from dynamo_trtllm.protocol.errors import HeadTooLarge, InvalidRequest

MAX_HEADERS = 100  # most headers and trailers of a request
SMALL_HEAD_BYTES = 4 << 10  # a larger head counts in `LargeHeads`
# Most bytes of path and query together. A decoded path takes up to four times as much memory.
_MAX_TARGET_BYTES = 8 << 10
READ_HEADERS = frozenset(
    {
        b"access-control-request-headers",
        b"access-control-request-method",
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"traceparent",
        b"transfer-encoding",
        b"upgrade",
        b"user-agent",
        b"x-api-key",
        b"x-dynamo-stats",
        b"x-request-id",
        b"x-session-id",
        b"x-slo-itl-ms",
        b"x-slo-ttft-ms",
    }
)
_LINE_FEED = ord("\n")  # bytes are searched for a number twenty times as fast as for bytes
# The values of these headers are lists, so a repeated header continues the list (RFC 9110, 5.3).
_LISTS = frozenset(
    {
        b"access-control-request-headers",
        b"connection",
        b"content-encoding",
        b"transfer-encoding",
        b"upgrade",
    }
)
# These headers only say whose request it is. A proxy may add its own after that of the client, so
# the first one counts, and none is refused.
_LABELS = frozenset({b"traceparent", b"user-agent", b"x-request-id", b"x-session-id"})
# Two different values of one of these headers are an error.
_SINGLE = READ_HEADERS - _LISTS - _LABELS


class Headers:
    """The headers of a request that this server reads, see `READ_HEADERS`.

    Other headers are stored only if hooks of a program may read them. Otherwise a client could use
    much memory: a short header takes up to twenty times as many bytes as were sent.
    """

    __slots__ = ("_ambiguous", "_num_more_hosts", "_values")

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}  # the values by lower-case name
        self._ambiguous: bytes | None = None  # the first name with two different values
        self._num_more_hosts = 0  # number of Host headers after the first one

    def add(self, name: bytes, value: bytes) -> None:
        """Add a header. If it is repeated, the first value counts, unless it is a list.

        Args:
            name: the name in lower case.
            value: the value.

        Raises:
            InvalidRequest: the value contains a line break.
        """
        if _LINE_FEED in value:
            raise InvalidRequest("the value of a header contains a line break")
        if name not in self._values:
            self._values[name] = value
        elif name in _LISTS:
            self._values[name] += b", " + value
        elif name == b"host":
            self._num_more_hosts += 1
        elif self._ambiguous is None and name in _SINGLE and self._values[name] != value:
            self._ambiguous = name

    def check_repeated(self) -> None:
        """Check that no header which has one value was sent with several.

        A proxy and this server might each use another of them. Headers that only hooks read are not
        checked: they may be lists. Nor are those that only label a request.

        Raises:
            InvalidRequest: a header has two different values. The error does not quote them,
                because they may be secrets.
        """
        if self._ambiguous is not None:
            name = self._ambiguous.decode()
            raise InvalidRequest(
                f"the header {name} was sent with two different values; send it once", field=name
            )

    @property
    def num_hosts(self) -> int:
        """The number of Host headers."""
        if b"host" not in self._values:
            return 0
        return 1 + self._num_more_hosts

    def first(self, name: bytes) -> str | None:
        """Return the first value of a header. `name` is one of READ_HEADERS."""
        assert name in READ_HEADERS, name
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")

    def pairs(self) -> list[tuple[bytes, bytes]]:
        """Return the names, in lower case, and the values."""
        return list(self._values.items())


class HeadHolder(Hashable, Protocol):
    """A connection that has received request heads."""

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and runs no request."""

    def evict(self) -> None:
        """Close the idle connection at once. A partly received request gets 429."""


class LargeHeads:
    """Limit the memory of all large request heads of a server.

    A head counts from its arrival until its request has ended. Heads of up to `SMALL_HEAD_BYTES`
    are not counted, so they are accepted even when large heads have used up the memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_use = 0
        # The number of bytes by connection, the oldest entry first.
        self._held: dict[HeadHolder, int] = {}

    def hold(self, connection: HeadHolder, num_bytes: int) -> bool:
        """Set the bytes of all large heads of a connection.

        If all connections together have too many bytes, other connections that run no request are
        closed, the oldest entry first. If that is not enough, nothing is counted for this
        connection, and the result is False.
        """
        self._in_use += num_bytes - self._held.get(connection, 0)
        self._held[connection] = num_bytes
        while self._in_use > self._max_bytes:
            victim = self._oldest_idle(connection)
            if victim is None:
                self.release(connection)
                return False
            victim.evict()
        return True

    def _oldest_idle(self, other_than: HeadHolder) -> HeadHolder | None:
        """Return the connection with the oldest entry that runs no request, if there is one."""
        for holder in self._held:
            if holder is not other_than and holder.is_idle:
                return holder
        return None

    def __contains__(self, connection: HeadHolder) -> bool:
        return connection in self._held

    def reduce(self, connection: HeadHolder, num_bytes: int) -> None:
        """Subtract the bytes of a request of the connection that has ended."""
        left = self._held.get(connection, 0) - num_bytes
        if left > 0:
            self._held[connection] = left
            self._in_use -= num_bytes
        else:
            self.release(connection)

    def release(self, connection: HeadHolder) -> None:
        """Remove a connection with all its bytes. Idempotent."""
        self._in_use -= self._held.pop(connection, 0)


def check_target(target: bytes) -> None:
    """Check the length of path and query together. Raises HeadTooLarge."""
    if len(target) > _MAX_TARGET_BYTES:
        raise HeadTooLarge(
            f"path and query are longer than {_MAX_TARGET_BYTES} bytes, their limit; send shorter"
            " ones"
        )


def too_many_headers() -> HeadTooLarge:
    """Return the error of a request with more than MAX_HEADERS headers and trailers."""
    return HeadTooLarge(
        f"the request has more than {MAX_HEADERS} headers and trailers, their limit; send fewer"
    )


def check_head(version: str, headers: Headers) -> None:
    """Check a head that was received.

    Raises:
        InvalidRequest: the HTTP version is not supported, or the Host header is missing or
            repeated.
    """
    if version not in ("1.0", "1.1"):
        raise InvalidRequest(f"HTTP/{version} is not supported; send HTTP/1.1 requests")
    hosts = headers.num_hosts
    if hosts > 1 or (version == "1.1" and not hosts):
        raise InvalidRequest(
            f"the request has {hosts} Host headers; HTTP/1.1 requests must have one"
        )


def head_too_large(max_bytes: int) -> HeadTooLarge:
    """Return the error of a head that is larger than the limit."""
    return HeadTooLarge(
        f"the request line and headers are larger than the limit of {max_bytes} bytes; send fewer"
    )


def without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes | None:
    """Return the head of a request without the header Upgrade. None: the request has no body.

    A server that offers no upgrade should serve such a request as usual. But the parser reads no
    body after the header Upgrade, so the head is parsed again without it. The other headers stay
    as they are, because they say where the body ends.

    Raises:
        InvalidRequest: the request asks for a tunnel or for WebSocket, or a header has two values.
    """
    headers.check_repeated()  # the second head would have only one of them
    if headers.first(b"content-length") is None and headers.first(b"transfer-encoding") is None:
        return None
    upgrade = headers.first(b"upgrade") or ""
    if method == b"CONNECT" or "websocket" in upgrade.lower():
        raise InvalidRequest(
            "a request with a body cannot ask for a tunnel or WebSocket; leave out the header"
            " Upgrade"
        )
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers.pairs() if name != b"upgrade"]
    lines.append(b"\r\n")
    return b"\r\n".join(lines)

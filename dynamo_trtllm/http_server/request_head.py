"""The head of a request: its headers, their limits, and what replaces a head that asks for an upgrade."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dynamo_trtllm.errors import HeadTooLarge, InvalidRequest

if TYPE_CHECKING:
    from dynamo_trtllm.http_server.connection import HttpConnection

MAX_HEADERS = 100  # of a request, together with its trailers
SMALL_HEAD_BYTES = 4 << 10  # of a usual head; a larger one counts in `LargeHeads`
_MAX_TARGET_BYTES = 8 << 10  # path and query; decoded, a path takes up to four times as much


class Headers:
    """The headers of a request.

    One string has them all: as a list of pairs, short headers would take twenty times as much
    memory as their client sent.
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = bytearray(b"\n")  # each header is `name:value` and a line break

    def add(self, name: bytes, value: bytes) -> None:
        """Add a header. It must not contain a line break, see `check_head`."""
        lines = self._lines
        lines += name.lower()  # four small additions take a third of the time of one formatted line
        lines += b":"
        lines += value
        lines += b"\n"

    @property
    def num_lines(self) -> int:
        """The number of lines, which is that of the headers unless one contains a line break."""
        return self._lines.count(b"\n") - 1

    def first(self, name: bytes) -> str | None:
        """Return the first value of a header. `name` is in lower case."""
        found = self._lines.find(b"\n%b:" % name)
        if found < 0:
            return None
        begin = found + len(name) + 2
        return self._lines[begin : self._lines.index(b"\n", begin)].decode("latin-1")

    def count(self, name: bytes) -> int:
        """Return how many headers have this name, in lower case."""
        return self._lines.count(b"\n%b:" % name)

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the name, in lower case, and the value of each header."""
        for line in bytes(self._lines).split(b"\n")[1:-1]:
            name, _, value = line.partition(b":")
            yield name, value


class LargeHeads:
    """Limit the memory of all large request heads of a server, from their arrival until their requests end.

    Heads of up to `SMALL_HEAD_BYTES` are not counted, so that large ones can't use up their memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_use = 0
        self._held: dict[HttpConnection, int] = {}  # bytes by connection, the oldest entry first

    def hold(self, connection: HttpConnection, num_bytes: int) -> bool:
        """Set the bytes of all large heads of a connection.

        If all connections together have too many, close others that run no request, the oldest entry first. If that is
        not enough, count nothing for this connection and return False.
        """
        self._in_use += num_bytes - self._held.get(connection, 0)
        self._held[connection] = num_bytes
        while self._in_use > self._max_bytes:
            others = (holder for holder in self._held if holder is not connection and holder.is_idle)
            victim = next(others, None)
            if victim is None:
                self.release(connection)
                return False
            victim.evict()
        return True

    def __contains__(self, connection: HttpConnection) -> bool:
        return connection in self._held

    def reduce(self, connection: HttpConnection, num_bytes: int) -> None:
        """Subtract the bytes of a request of the connection that has ended."""
        left = self._held.get(connection, 0) - num_bytes
        if left > 0:
            self._held[connection] = left
            self._in_use -= num_bytes
        else:
            self.release(connection)

    def release(self, connection: HttpConnection) -> None:
        """Remove a connection with all its bytes. A second call does nothing."""
        self._in_use -= self._held.pop(connection, 0)


def check_target(target: bytes) -> None:
    """Check the length of path and query together. Raises HeadTooLarge."""
    if len(target) > _MAX_TARGET_BYTES:
        raise HeadTooLarge(f"path and query are longer than {_MAX_TARGET_BYTES} bytes, their limit; send shorter ones")


def too_many_headers() -> HeadTooLarge:
    """Return the error of a request with more than MAX_HEADERS headers and trailers."""
    return HeadTooLarge(f"the request has more than {MAX_HEADERS} headers and trailers, their limit; send fewer")


def check_head(version: str, headers: Headers, num_headers: int) -> None:
    """Check a head that was received.

    Raises:
        InvalidRequest: the HTTP version is not supported, the Host header is missing or repeated, or a header contains
            a line break.
    """
    if version not in ("1.0", "1.1"):
        raise InvalidRequest(f"HTTP/{version} is not supported; send HTTP/1.1 requests")
    if headers.num_lines != num_headers:
        raise InvalidRequest("the value of a header contains a line break")
    hosts = headers.count(b"host")
    if hosts > 1 or (version == "1.1" and not hosts):
        raise InvalidRequest(f"the request has {hosts} Host headers; HTTP/1.1 requests must have one")


def head_too_large(max_bytes: int) -> HeadTooLarge:
    """Return the error of a head that is larger than the limit."""
    return HeadTooLarge(f"the request line and headers are larger than the limit of {max_bytes} bytes; send fewer")


def without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes | None:
    """Return the head without the header Upgrade, for a request that asks for an upgrade; None if it has no body.

    The parser takes no body after such a header, although the request is a usual one to a server that offers no
    upgrade. Everything else is unchanged, so that the end of the body is where the client's headers say.

    Raises:
        InvalidRequest: it asks for a tunnel or for WebSocket.
    """
    if not (headers.count(b"content-length") or headers.count(b"transfer-encoding")):
        return None
    pairs = list(headers.pairs())
    if method == b"CONNECT" or any(name == b"upgrade" and b"websocket" in value.lower() for name, value in pairs):
        raise InvalidRequest("a request with a body cannot ask for a tunnel or WebSocket; leave out the header Upgrade")
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in pairs if name != b"upgrade"]
    return b"\r\n".join([*lines, b"\r\n"])

"""The head of a request: its checks, and what replaces one that asks for an upgrade."""

from __future__ import annotations

from dynamo_trtllm.errors import HeadTooLarge, InvalidRequest

_OF_BODIES = frozenset({b"content-length", b"transfer-encoding"})
Headers = list[tuple[bytes, bytes]]  # names are in lower case


def check_head(version: str, headers: Headers) -> None:
    """Check the HTTP version and the Host header. Raises InvalidRequest."""
    if version not in ("1.0", "1.1"):
        raise InvalidRequest(f"HTTP/{version} is not supported; send HTTP/1.1 requests")
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (version == "1.1" and not hosts):
        raise InvalidRequest(f"the request has {hosts} Host headers; HTTP/1.1 requests must have one")


def head_too_large(max_bytes: int) -> HeadTooLarge:
    return HeadTooLarge(f"the request line and headers are larger than the limit of {max_bytes} bytes; send fewer")


def without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes | None:
    """Return the head without the header Upgrade, for a request that asks for an upgrade; None if it has no body.

    The parser takes no body after such a header, although the request is a usual one to a server that offers no
    upgrade. Everything else is unchanged, so that the end of the body is where the client's headers say.

    Raises:
        InvalidRequest: it asks for a tunnel or for WebSocket, or a value has a line break.
    """
    if not any(name in _OF_BODIES for name, _ in headers):
        return None
    if method == b"CONNECT" or any(name == b"upgrade" and b"websocket" in value.lower() for name, value in headers):
        raise InvalidRequest("a request with a body cannot ask for a tunnel or WebSocket; leave out the header Upgrade")
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % each for each in headers if each[0] != b"upgrade"]
    if any(b"\r" in line or b"\n" in line for line in lines):
        raise InvalidRequest("the value of a header contains a line break")
    return b"\r\n".join([*lines, b"\r\n"])

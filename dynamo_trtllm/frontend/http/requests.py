"""Check and read the bodies of requests. Knows no OpenAI object."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dynamo_trtllm.errors import PayloadTooLarge, RequestTimeout, UnsupportedMedia
from dynamo_trtllm.http_server.exchange import HttpRequest


def check_json(request: HttpRequest) -> None:
    """Raise UnsupportedMedia if a header declares that the body is compressed or not JSON."""
    given = request.header(b"content-type")
    kind = (given or "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMedia(f"Content-Type {kind!r} is not supported; send application/json")
    encoding = (request.header(b"content-encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMedia(f"Content-Encoding {encoding!r} is not supported; send the body uncompressed")


async def read_body(
    request: HttpRequest, max_bytes: int, within_s: float, reserve: Callable[[int], Awaitable[None]]
) -> bytes:
    """Return the body.

    Args:
        max_bytes: limit of the body's size.
        within_s: seconds until the whole body must have arrived.
        reserve: awaited with the size of each chunk; may raise to reject the body.

    Raises:
        PayloadTooLarge: the body is too large; raised as soon as this is known.
        RequestTimeout: the client did not send it in time.
        ClientDisconnected: the client disconnected before the end.
    """
    declared = request.header(b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(within_s):
            return await _receive_body(request, max_bytes, reserve)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {within_s:g} s; send it faster") from None


async def _receive_body(request: HttpRequest, max_bytes: int, reserve: Callable[[int], Awaitable[None]]) -> bytes:
    parts, size = [], 0
    while part := await request.receive():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        await reserve(len(part))
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than the limit of {max_bytes} bytes; send a shorter one")

"""Give each request an id, and check and read its body. Knows no OpenAI object."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable

from dynamo_trtllm.errors import PayloadTooLarge, RequestTimeout, UnsupportedMedia
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.observability import logging as observe_logging

ECHOED_ID = re.compile(r"[\x21-\x7e]{1,128}")
ENGINE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # safe in logs, keys and subjects


def set_request_id(request: HttpRequest, response: HttpResponse) -> None:
    """Take the id of a request from `X-Request-Id`, or generate one. Add it to the response and the log lines."""
    given = request.header(b"x-request-id") or ""
    request_id = given if ECHOED_ID.fullmatch(given) else secrets.token_hex(16)
    # It is never reset: the server logs exceptions in this task, which serves no other request.
    observe_logging.request_id.set(request_id)
    request.id = request_id if ENGINE_ID.fullmatch(request_id) else ""
    response.headers["X-Request-Id"] = request_id


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

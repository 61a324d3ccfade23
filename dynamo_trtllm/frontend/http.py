"""Read bodies, send one response and detect a client's disconnect over raw ASGI. Knows no OpenAI object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from dynamo_trtllm.errors import DynamoError, InternalError, PayloadTooLarge, RequestTimeout, UnsupportedMedia
from dynamo_trtllm.http_server.body_writer import BodyWriter
from dynamo_trtllm.http_server.errors import to_response

STALL_S = 30.0  # after the deadline, the connection of a client that reads nothing for this long is closed


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first value of a request header. `name` is in lower case."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def check_json(scope: Scope) -> None:
    """Raise UnsupportedMedia if a header declares that the body is compressed or not JSON."""
    given = header(scope, b"content-type")
    kind = (given or "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMedia(f"Content-Type {kind!r} is not supported; send application/json")
    encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMedia(f"Content-Encoding {encoding!r} is not supported; send the body uncompressed")


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, within_s: float, reserve: Callable[[int], Awaitable[None]]
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
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(within_s):
            return await _receive_body(receive, max_bytes, reserve)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {within_s:g} s; send it faster") from None


async def _receive_body(receive: Receive, max_bytes: int, reserve: Callable[[int], Awaitable[None]]) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        await reserve(len(part))
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than the limit of {max_bytes} bytes; send a shorter one")


async def run_until_disconnect(
    work: Coroutine[Any, Any, None], receive: Receive, is_answered: Callable[[], bool]
) -> None:
    """Run `work`. If the client disconnects first, cancel it once, wait for its end and raise ClientDisconnected.

    ASGI servers also report a disconnect after a complete response; then `work` is allowed to finish.
    """
    tasks = (asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not (tasks[0].done() or is_answered()):
            raise ClientDisconnected
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # An error refers to this frame and the task to the error. Such a cycle would keep the body in memory.
        del tasks, task


async def _wait_for_disconnect(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class ClientResponse:
    """The response to one request: a JSON body or a stream of events.

    Sending waits while the client reads slowly. With a `writer`, all methods close the connection and raise
    ClientDisconnected if the client reads nothing for too long: otherwise it could keep the response in memory forever.
    """

    def __init__(self, send: Send, writer: BodyWriter | None = None) -> None:
        """`writer` sends body chunks without awaiting. None if the HTTP server does not provide one."""
        self._send = send
        self.writer = writer
        self.started = False
        self.status = 0  # HTTP status, once it was sent
        self.ended = False
        self.deadline = 0.0  # seconds since the epoch; until then a client may read slowly

    async def send_json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        body = orjson.dumps(value)
        await self._start(status, {"Content-Type": "application/json", "Content-Length": str(len(body))}, headers)
        await self._send_message({"type": "http.response.body", "body": body})
        self.ended = True

    async def start_events(self, headers: Mapping[str, str]) -> None:
        await self._start(
            200, {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}, headers
        )

    async def send_events(self, data: bytes, *, last: bool = False) -> None:
        """Send events. Waits while the client reads slowly; other streams are not delayed."""
        if self.writer is not None:
            self.writer.flush()
        await self._send_message({"type": "http.response.body", "body": data, "more_body": not last})
        self.ended = last

    async def send_error(self, error: DynamoError, retry_after_s: int) -> None:
        """Send an error response, unless a response was started."""
        if not self.started:
            response = to_response(error, retry_after_s)
            await self.send_json(response.status, response.body, response.headers)

    async def _start(self, status: int, first: Mapping[str, str], more: Mapping[str, str] | None) -> None:
        self.started, self.status = True, status
        pairs = [*first.items(), *(more or {}).items()]
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send_message({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_message(self, message: Message) -> None:
        writer = self.writer
        if writer is None or writer.is_ready():
            await self._send(message)
            return
        try:
            async with asyncio.timeout(max(STALL_S, self.deadline - time.time())):
                await self._send(message)
        except TimeoutError:
            writer.abort()
            raise ClientDisconnected from None


def internal() -> InternalError:
    """Return the error for an unexpected exception."""
    return InternalError("an internal error occurred; see the server's log for this request id")

"""Raw ASGI in small pieces: reading a body, answering once, noticing that the client left. Knows no OpenAI object."""

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

STALL_S = 30.0  # past its deadline, an answer is cut of which nothing was taken for so long


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a request header; `name` in lower case."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def check_json(scope: Scope) -> None:
    """Raises UnsupportedMedia for a body that says it is something else. No word of it: taken as JSON, not packed."""
    given = header(scope, b"content-type")
    kind = (given or "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMedia(f"the body is of type {kind!r}; send Content-Type: application/json")
    encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMedia(f"the body is packed by {encoding!r}; send it as it is, without Content-Encoding")


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, within_s: float, reserve: Callable[[int], Awaitable[None]]
) -> bytes:
    """Return the body. `reserve` is awaited with the size of each piece, and may raise to reject it.

    Raises:
        PayloadTooLarge: the body is too large; raised as soon as this is known.
        RequestTimeout: the client did not send it in time.
        ClientDisconnected: the client left before the end.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(within_s):
            return await _receive_body(receive, max_bytes, reserve)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not come in {within_s:g} s") from None


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
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes, the most this server takes")


async def run_until_disconnect(
    work: Coroutine[Any, Any, None], receive: Receive, is_answered: Callable[[], bool]
) -> None:
    """Runs `work`. When the client leaves first, cancels it once, waits for its end and raises ClientDisconnected.

    A server tells the same of a client that has its whole answer; what `work` does after that is waited for.
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
        # An error refers to this frame, and the task to the error: as a cycle they would keep the request's body.
        del tasks, task


async def _wait_for_disconnect(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class ClientResponse:
    """The one answer of an exchange: whole JSON, or a stream of events.

    Sending waits while the client reads slowly. On our own server all methods cut the connection and raise
    ClientDisconnected when it takes nothing for too long: otherwise it could keep the answer in memory at will.
    """

    def __init__(self, send: Send, writer: BodyWriter | None = None) -> None:
        """`writer`: sends a piece without awaiting, where the server has such a way."""
        self._send = send
        self.writer = writer
        self.started = False
        self.status = 0  # of HTTP, once it was sent
        self.ended = False
        self.deadline = 0.0  # seconds since the epoch; until then the client may take its time

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
        """Waits while the client reads slowly: this stream only."""
        if self.writer is not None:
            self.writer.flush()
        await self._send_message({"type": "http.response.body", "body": data, "more_body": not last})
        self.ended = last

    async def send_error(self, error: DynamoError, retry_after_s: int) -> None:
        """A proper status, while there is none yet."""
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
    return InternalError("an internal error occurred; the server's log has the details under this request's id")

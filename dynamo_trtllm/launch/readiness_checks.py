"""Check over the network that a process is ready: with HTTP, or with PING for NATS.

The module uses httptools, which is a dependency already, while an asyncio HTTP client is not. The standard library's
client would block a thread that a stopping launcher has to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import TypeVar

import httptools
import msgspec

_ONE_ANSWER_S = 5.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_PAUSE_FRACTION = 0.1  # of the time waited so far
_LONGEST_ANSWER_BYTES = 1 << 16
_READ_BYTES = 1 << 14
_CONNECT_TO = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # for a server that listens on every interface

T = TypeVar("T")


class NotYet(Exception):
    """The process is not ready. The message gives the reason."""


class ReadyAnswer(msgspec.Struct, frozen=True):
    """Response body of GET /ready, of workers and frontends."""

    status: str
    reason: str = ""
    instance_id: str = ""  # hexadecimal; empty for a frontend


async def until(ask: Callable[[], Awaitable[T]], within_s: float, on_wait: Callable[[str], None] = lambda _: None) -> T:
    """Call `ask` repeatedly until it returns.

    The pause between calls is a tenth of the time waited, at least 0.05 s and at most 1 s.

    Args:
        ask: A check; it raises NotYet or OSError if the process is not ready.
        within_s: Maximum time in seconds.
        on_wait: Called with the reason after each attempt; empty if there was no connection.

    Returns:
        The value of `ask`.

    Raises:
        NotYet: The time is over. The message is that of the last attempt.
    """
    now = asyncio.get_running_loop().time
    began, why = now(), ""
    while True:
        limit_s = min(_ONE_ANSWER_S, began + within_s - now())
        try:
            async with asyncio.timeout(limit_s):
                return await ask()
        except TimeoutError:
            if limit_s == _ONE_ANSWER_S or not why:  # else the total limit cut this attempt short
                why = "no response"
        except (NotYet, OSError) as exc:
            why = str(exc)
            on_wait(why if isinstance(exc, NotYet) else "")
        spent_s = now() - began
        if spent_s >= within_s:
            raise NotYet(why)
        pause_s = min(max(_PAUSE_FRACTION * spent_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        await asyncio.sleep(min(pause_s, within_s - spent_s))


async def ready(host: str, port: int) -> ReadyAnswer:
    """Check that a worker or a frontend is ready.

    Raises:
        NotYet: It reports that it is not ready. The message is its reason.
        OSError: There is no connection.
    """
    status, answer = await _get(host, port, "/ready", ReadyAnswer)
    if status != 200:
        raise NotYet(f"{answer.status}: {answer.reason}" if answer.reason else answer.status)
    return answer


async def check_etcd(host: str, port: int) -> None:
    """Check that an etcd server is healthy, on its client port. Raise as `ready` does."""
    status, answer = await _get(host, port, "/health", _EtcdHealth)
    if status != 200 or answer.health != "true":
        raise NotYet(f"etcd is not healthy: {answer.reason}" if answer.reason else "etcd is not healthy")


async def check_nats(host: str, port: int) -> None:
    """Check that a NATS server answers PING. Raise as `ready` does."""
    async with _connection(host, port) as (reader, writer):
        greeting = await reader.readline()
        if not greeting.startswith(b"INFO "):
            raise NotYet(f"the server is not NATS: it sent {greeting!r} instead of INFO")
        writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        answer = await reader.readline()
        if answer != b"PONG\r\n":
            raise NotYet(f"NATS answered {answer!r} to PING")


async def is_taken(host: str, port: int) -> bool:
    """Return True if a process accepts connections at this address."""
    try:
        async with asyncio.timeout(_ONE_ANSWER_S), _connection(host, port):
            return True
    except OSError:
        return False


class _EtcdHealth(msgspec.Struct, frozen=True):
    health: str
    reason: str = ""


async def _get(host: str, port: int, path: str, form: type[T]) -> tuple[int, T]:
    """Return the status and the decoded JSON body. Raise NotYet for other responses, OSError for no response."""
    status, body = await request(host, port, "GET", path)
    try:
        return status, msgspec.json.decode(body, type=form)
    except msgspec.DecodeError as exc:
        raise NotYet(f"the response to GET {path} at port {port} can't be parsed: {exc}") from exc


async def request(
    host: str,
    port: int,
    method: str,
    path: str,
    content: bytes = b"",
    headers: Mapping[str, str] = {},
    *,
    max_bytes: int = _LONGEST_ANSWER_BYTES,
) -> tuple[int, bytes]:
    """Return the status and the body of an HTTP response. Raise OSError if there is none, or it is too long."""
    lines = {"Host": "localhost", "Connection": "close", "Content-Length": len(content), **headers}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    body: list[bytes] = []
    is_complete = asyncio.Event()
    parser = httptools.HttpResponseParser(SimpleNamespace(on_body=body.append, on_message_complete=is_complete.set))
    read_bytes = 0
    try:
        async with _connection(host, port) as (reader, writer):
            writer.write(head.encode() + b"\r\n" + content)
            while not is_complete.is_set():
                data = await reader.read(_READ_BYTES)
                read_bytes += len(data)
                if not data or read_bytes > max_bytes:
                    raise ConnectionError(f"the response to {method} {path} is incomplete or too long")
                parser.feed_data(data)
        return parser.get_status_code(), b"".join(body)
    except httptools.HttpParserError as exc:
        raise ConnectionError(f"the response to {method} {path} at port {port} can't be parsed: {exc}") from exc


@asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(_CONNECT_TO.get(host, host), port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()

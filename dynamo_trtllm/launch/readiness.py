"""Check over the network that a worker, a frontend, etcd or NATS is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.network.addresses import connect_host, http_url
from dynamo_trtllm.support.tls import own_server_context

ONE_ANSWER_S = 5.0  # longest time of one check
# The pause between two checks, as a fraction of the time waited so far, and its limits.
_PAUSE_FRACTION = 0.1
_SHORTEST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0

T = TypeVar("T")


class NotYet(Exception):
    """The process is not ready. The message gives the reason."""


class ReadyAnswer(msgspec.Struct, frozen=True):
    """Response body of GET /ready, of workers and frontends."""

    status: str
    reason: str = ""
    instance_id: str = ""  # hexadecimal; empty for a frontend


async def poll(
    ask: Callable[[], Awaitable[T]],
    within_s: float,
    on_wait: Callable[[str], None] | None = None,
    one_answer_s: float = ONE_ANSWER_S,
) -> T:
    """Call `ask` repeatedly until it returns.

    The pause between calls is a tenth of the time waited, at least 0.05 s and at most 1 s.

    Args:
        ask: a check; it raises NotYet or OSError if the process is not ready.
        within_s: maximum time in seconds.
        on_wait: called after each attempt that got an answer, or no connection. It gets the reason,
            or "" without a connection.
        one_answer_s: limit of one call.

    Returns:
        The value of `ask`.

    Raises:
        NotYet: the time is over. The message is that of the last attempt.
    """
    now = asyncio.get_running_loop().time
    began_s = now()
    why = ""
    while True:
        limit_s = min(one_answer_s, began_s + within_s - now())
        try:
            async with asyncio.timeout(limit_s):
                return await ask()
        except TimeoutError:
            # If the total limit has ended this attempt early, the reason of the attempt before says
            # more.
            if limit_s == one_answer_s or not why:
                why = "no response"
        except (NotYet, OSError) as exc:
            why = str(exc)
            if on_wait is not None:
                on_wait(why if isinstance(exc, NotYet) else "")
        spent_s = now() - began_s
        if spent_s >= within_s:
            raise NotYet(why)
        pause_s = min(max(_PAUSE_FRACTION * spent_s, _SHORTEST_PAUSE_S), _MAX_PAUSE_S)
        await asyncio.sleep(min(pause_s, within_s - spent_s))


async def check_ready(host: str, port: int, certificate: Path | None = None) -> ReadyAnswer:
    """Check that a worker or a frontend is ready.

    Args:
        host: address that it listens on.
        port: its HTTP port.
        certificate: file with the certificate of the process. None: its port has no TLS.

    Raises:
        NotYet: the process reports that it is not ready. The message is its reason.
        OSError: there is no connection.
    """
    status, answer = await _get(host, port, "/ready", ReadyAnswer, certificate)
    if status != 200:
        raise NotYet(f"{answer.status}: {answer.reason}" if answer.reason else answer.status)
    return answer


async def check_etcd(host: str, port: int) -> None:
    """Check that an etcd server is healthy, on its client port. Raise as `check_ready` does."""
    status, answer = await _get(host, port, "/health", _EtcdHealth)
    if status != 200 or answer.health != "true":
        reason = f": {answer.reason}" if answer.reason else ""
        raise NotYet(f"etcd is not healthy{reason}")


async def check_nats(host: str, port: int) -> None:
    """Check that a NATS server answers PING, or requires a user. Raise as `check_ready` does."""
    async with _connection(host, port) as (reader, writer):
        greeting = await reader.readline()
        if not greeting.startswith(b"INFO "):
            raise NotYet(f"the server is not NATS: it sent {greeting!r} instead of INFO")
        writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        answer = await reader.readline()
        if answer not in (b"PONG\r\n", b"-ERR 'Authorization Violation'\r\n"):
            raise NotYet(f"NATS answered {answer!r} to PING")


async def is_taken(host: str, port: int) -> bool:
    """Return True if a process accepts connections at this address."""
    try:
        async with asyncio.timeout(ONE_ANSWER_S), _connection(host, port):
            return True
    except OSError:
        return False


class _EtcdHealth(msgspec.Struct, frozen=True):
    health: str
    reason: str = ""


async def _get(
    host: str, port: int, path: str, form: type[T], certificate: Path | None = None
) -> tuple[int, T]:
    """Return the status and the decoded JSON body.

    Raise NotYet for other responses, OSError for no response.
    """
    url = http_url(host, port, path, uses_tls=certificate is not None)
    tls = None if certificate is None else own_server_context(certificate)
    status, body = await http_client.request(url, "GET", tls=tls)
    try:
        return status, msgspec.json.decode(body, type=form)
    except msgspec.DecodeError as exc:
        raise NotYet(f"the response to GET {path} at port {port} can't be parsed: {exc}") from exc


@asynccontextmanager
async def _connection(
    host: str, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(connect_host(host), port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()

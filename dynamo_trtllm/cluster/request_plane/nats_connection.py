"""Connect and close clients of nats-py, within limits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.transport import TcpTransport

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2
_CANCEL_AGAIN_S = 0.1
_CONNECT_OPTIONS: Final[dict[str, Any]] = {
    "reconnect_time_wait": 0.1,
    "max_reconnect_attempts": -1,
    "ping_interval": 2,
    "max_outstanding_pings": 2,
    "pending_size": 1 << 40,
}


async def connect_client(client: Client, url: str, timeout_s: float, **callbacks: Any) -> None:
    """Connect a client. If this fails or is cancelled, close all that the client opened.

    Without a limit, the client retries for ever. It connects in a task of its own, so that
    `_end_task` can end it. Its `close` does not help: a client that is cancelled while it closes a
    failed connection assumes that it is closed, and leaves the connection open.

    Raises:
        TimeoutError: the client did not connect in time.
    """
    connecting = asyncio.get_running_loop().create_task(
        client.connect(url, **callbacks, **_CONNECT_OPTIONS)
    )
    try:
        await asyncio.wait({connecting}, timeout=timeout_s)
        if not connecting.done():
            raise TimeoutError
        connecting.result()
    except BaseException:
        # A second cancel does not interrupt this.
        await asyncio.shield(_abort_connecting(client, connecting))
        raise


async def _abort_connecting(client: Client, connecting: asyncio.Task[None]) -> None:
    await _end_task(connecting)
    abort_client(client)


async def _end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task of the client until it ends.

    `wait_for` of Python 3.11, which the client uses, drops a cancel that arrives together with a
    result or an error, and the client then goes on to retry; so the cancel is repeated.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    # This marks its error as retrieved, so asyncio does not log it.
    await asyncio.gather(task, return_exceptions=True)


def abort_client(client: Client) -> None:
    """Close the client and its connection without awaiting: a cancel can't interrupt this."""
    tasks = [
        client._reading_task,
        client._ping_interval_task,
        client._flusher_task,
        client._reconnection_task,
    ]
    tasks += [subscription._wait_for_msgs_task for subscription in client._subs.values()]
    for task in tasks:
        if task is not None:
            task.cancel()
    transport = client._transport
    if isinstance(transport, TcpTransport) and transport._io_writer is not None:
        transport._io_writer.transport.abort()
    client._status = Client.CLOSED


async def close_client(client: Client) -> None:
    """Close the client and its connection.

    It takes a few seconds if the server is frozen. Idempotent.
    """
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            if client._reconnection_task is not None:
                await _end_task(client._reconnection_task)  # the client cancels it only once
            await client.close()
    except (OSError, TimeoutError) as exc:
        # nats-py 2.16 first writes pending data, even to a lost or frozen connection, and stops
        # there halfway.
        log.warning("connection to NATS closed, messages may be unsent: %r", exc)
        abort_client(client)

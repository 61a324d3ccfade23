"""The request plane over NATS. The only file that knows nats-py; its errors stop here.

Traps it keeps away (nats-py 2.16): an oversized message closes the client for good, a frozen server is noticed by
pings only, a slow consumer loses messages silently, a `flush` that is cancelled or times out kills the read loop when
its answer comes: it is never called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.errors import Disconnected, DynamoError, StreamIncomplete, Unreachable
from dynamo_trtllm.request_plane.client import PlaneLimits, TransportPlane
from dynamo_trtllm.request_plane.transport import OnDisconnect, Receive
from dynamo_trtllm.sanitize import mask_address

logger = logging.getLogger(__name__)

_PENDING_MESSAGES = 1 << 20  # of one subscription, while our loop is busy
_PENDING_BYTES = 512 << 20
_OUTGOING_MESSAGES = 1 << 16  # not yet taken by the client
_FLUSH_TIMEOUT_S = 2
_LONGEST_SUBJECT = 1024  # a server ends the connection of a client whose line has more than 4096 bytes


@asynccontextmanager
async def connect_or_abort(client: Client, timeout_s: float) -> AsyncIterator[None]:
    """Around the connecting of a client: it is connected, or it is gone with all that it had opened.

    The client itself would try for ever. Its own `close` is no use here: a client that was cut off while it closed a
    connection that had failed takes itself for closed, and leaves that connection open.
    """
    caller = asyncio.current_task()
    assert caller is not None
    cancels = caller.cancelling()
    try:
        async with asyncio.timeout(timeout_s):
            yield
        if caller.cancelling() > cancels:  # the `wait_for` in there, up to Python 3.11, drops a cancel beside a result
            raise asyncio.CancelledError
    except BaseException:
        _force_close(client)
        raise


def _force_close(client: Client) -> None:
    """Does not wait: nothing that comes between may keep it from its end."""
    for task in (client._reading_task, client._ping_interval_task, client._flusher_task, client._reconnection_task):
        if task is not None:
            task.cancel()
    _abort(client)
    client._status = Client.CLOSED


def _abort(client: Client) -> None:
    transport = client._transport
    if isinstance(transport, TcpTransport) and transport._io_writer is not None:
        transport._io_writer.transport.abort()


async def close_client(client: Client) -> None:
    """Idempotent; takes a few seconds where the server is frozen, and leaves nothing open."""
    if not await _close(client):
        # nats-py 2.16 first writes what is pending, to a lost or frozen connection too, and stops there halfway.
        client._pending_data_size = 0
        client._status = Client.DISCONNECTED
        _abort(client)
        await _close(client)


async def _close(client: Client) -> bool:
    try:
        async with asyncio.timeout(_FLUSH_TIMEOUT_S):
            await _end_reconnecting(client)
            await client.close()
    except (OSError, TimeoutError) as exc:
        logger.debug("closing the connection to NATS: %r", exc)
        return False
    return True


async def _end_reconnecting(client: Client) -> None:
    """The client cancels it once, and its `wait_for` may drop that (see `ask`): it would connect for ever."""
    task = client._reconnection_task
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)


class NatsTransport:
    """One connection that reconnects for ever. Usable after `connect`."""

    def __init__(self, url: str, tasks: BackgroundTasks | None = None) -> None:
        self._tasks = tasks or BackgroundTasks()
        self._url = url
        self._address = mask_address(url)
        self._client = Client()
        self._ended = asyncio.Event()  # for good, and not by us
        self._up = asyncio.Event()  # there is a connection, as far as the client knows
        self._on_disconnect: list[OnDisconnect] = []
        self._outgoing: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_OUTGOING_MESSAGES)
        self._writer: asyncio.Task[None] | None = None
        self._writing = True
        self._is_waiting_logged = False
        self._closing = False

    async def connect(self, timeout_s: float) -> None:
        """Raises Unreachable when no server answers at the address in time."""
        try:
            async with connect_or_abort(self._client, timeout_s):
                await self._client.connect(
                    self._url,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # declared int, used as a float
                    max_reconnect_attempts=-1,
                    ping_interval=2,
                    max_outstanding_pings=2,
                    flush_timeout=_FLUSH_TIMEOUT_S,  # else a publish to a frozen server waits, deaf to cancels
                )
        except (nats_errors.Error, OSError, TimeoutError) as exc:
            self._closing = True
            raise Unreachable(f"no NATS server at {self._address}; start one, or check --nats-server") from exc
        except asyncio.CancelledError:
            self._closing = True
            raise
        self._up.set()
        self._writer = self._tasks.start(self._write(), "plane-nats-writer")

    @property
    def max_message_bytes(self) -> int:
        return self._client.max_payload  # headers would count too: none are ever sent

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def on_disconnect(self, callback: OnDisconnect) -> None:
        self._on_disconnect.append(callback)

    def unavailable_reason(self) -> str | None:
        return None if self._up.is_set() else f"there is no connection to NATS at {self._address}; is it running?"

    async def subscribe(self, subject: str, receive: Receive) -> NatsSubscription:
        async def take(message: Msg) -> None:
            receive(message.data, message.reply)

        try:
            subscription = await self._client.subscribe(
                subject, cb=take, pending_msgs_limit=_PENDING_MESSAGES, pending_bytes_limit=_PENDING_BYTES
            )
        except (nats_errors.Error, OSError) as exc:
            raise Disconnected(f"can't subscribe at {self._address}: {exc!r}") from exc
        return NatsSubscription(subscription)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """While there is no connection, one is waited for as long as for the answer."""
        if len(subject) > _LONGEST_SUBJECT:
            raise Unreachable(f"a subject of {len(subject)} characters is longer than NATS takes")
        if not self._up.is_set():
            await self._connected(timeout_s)
        caller = asyncio.current_task()
        assert caller is not None
        cancels = caller.cancelling()
        try:
            reply: bytes = (await self._client.request(subject, data, timeout=timeout_s)).data
        except nats_errors.NoRespondersError as exc:
            raise Unreachable(f"no worker listens at {subject}: it has ended; retry") from exc
        except nats_errors.TimeoutError as exc:
            if not self._client.is_connected:
                raise Disconnected(f"no connection to NATS at {self._address}") from exc
            raise Unreachable(
                f"no answer from {subject} within {timeout_s:.1f} s: its worker is stuck or gone; retry"
            ) from exc
        except (nats_errors.Error, OSError) as exc:
            raise Disconnected(f"can't send to NATS at {self._address}: {exc!r}") from exc
        if caller.cancelling() > cancels:  # the `wait_for` in there, up to Python 3.11, drops a cancel beside the reply
            raise asyncio.CancelledError
        return reply

    async def _connected(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(0 if self._client.is_closed else timeout_s):
                await self._up.wait()
        except TimeoutError as exc:
            raise Disconnected(f"no connection to NATS at {self._address}; is it running?") from exc

    def publish(self, subject: str, data: bytes) -> None:
        if len(subject) > _LONGEST_SUBJECT:
            logger.debug("nothing is posted to a subject of %d characters", len(subject))
            return
        try:
            self._outgoing.put_nowait((subject, data))
        except asyncio.QueueFull:
            self._report_disconnect(Disconnected("NATS takes messages too slowly"))

    async def aclose(self) -> None:
        if self._closing:
            return
        self._closing = True
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                await self._outgoing.join()
        except TimeoutError:
            logger.warning("closing the connection to NATS with %d messages unsent", self._outgoing.qsize())
        if self._writer is not None:
            self._writing = False  # `publish` may swallow the cancel
            await self._tasks.cancel(self._writer)
        await close_client(self._client)

    async def _write(self) -> None:
        while self._writing:
            subject, data = await self._outgoing.get()
            try:
                await self._client.publish(subject, data)
            except nats_errors.BadSubjectError:  # the caller gave this subject: no other caller misses a message
                logger.debug("message dropped: invalid subject %r", subject)
            except (nats_errors.Error, OSError) as exc:
                self._report_disconnect(Disconnected(f"a message to {subject} could not be sent: {exc!r}"))
            finally:
                self._outgoing.task_done()

    def _report_disconnect(self, error: DynamoError) -> None:
        logger.warning("NATS at %s: %s", self._address, error)
        for callback in self._on_disconnect:
            callback(error)

    # nats-py accepts real coroutine functions only

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats_errors.SlowConsumerError):
            self._report_disconnect(
                StreamIncomplete(f"messages to {error.subject} were dropped: this process is too slow")
            )
        elif self._writer is None and not self._is_waiting_logged:
            self._is_waiting_logged = True
            logger.warning("waiting for NATS at %s: %s", self._address, str(error) or type(error).__name__)
        else:
            logger.debug("NATS at %s: %r", self._address, error)

    async def _on_disconnected(self) -> None:
        self._up.clear()
        if not self._closing:
            self._report_disconnect(Disconnected(f"the connection to NATS at {self._address} was lost"))

    async def _on_reconnected(self) -> None:
        self._up.set()
        logger.info("connected to NATS at %s again", self._address)

    async def _on_closed(self) -> None:
        if not self._closing:
            self._ended.set()
            logger.error("the NATS client gave up %s for good; restart this process", self._address)

    def check(self) -> None:
        """Raises Disconnected when the client connects no more, which nats-py does after a protocol error."""
        if self._ended.is_set():
            raise Disconnected(f"the NATS client gave up {self._address} for good; restart this process")

    async def until_ended(self) -> None:
        """Waits until `check` raises, and raises that."""
        await self._ended.wait()
        self.check()


class NatsSubscription:
    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def stop(self) -> None:
        try:
            await self._subscription.unsubscribe()
        except (nats_errors.Error, OSError) as exc:
            logger.debug("unsubscribing: %r", exc)  # already gone with the connection


class NatsPlane(TransportPlane):
    """Made by `connect`."""

    def __init__(self, transport: NatsTransport, limits: PlaneLimits, tasks: BackgroundTasks) -> None:
        super().__init__(transport, limits, tasks)
        self.check = transport.check
        self.until_ended = transport.until_ended

    @classmethod
    async def connect(
        cls,
        url: str,
        limits: PlaneLimits | None = None,
        tasks: BackgroundTasks | None = None,
        *,
        connect_timeout_s: float = 5.0,
    ) -> NatsPlane:
        """Connect to the server at `url`. `tasks` owns what runs in the background.

        Raises Unreachable when no server answers in time.
        """
        tasks = tasks or BackgroundTasks()
        transport = NatsTransport(url, tasks)
        await transport.connect(connect_timeout_s)
        return cls(transport, limits or PlaneLimits(), tasks)

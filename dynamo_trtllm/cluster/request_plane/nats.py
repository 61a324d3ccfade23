"""Implement the request plane over NATS, and translate errors of nats-py.

The module works around these traps of nats-py 2.16:

* An oversized message closes the client for good.
* Only pings detect a frozen server.
* A slow consumer loses messages silently.
* After a `flush` was cancelled or timed out, its reply stops the read loop. So this module never
  calls `flush`.
* `request` may return a reply that was for a cancelled caller. It also takes twice the CPU time of
  the inbox that this module has for all replies. So it never calls `request` either.
* `publish` waits while `pending_size` bytes are unsent, and swallows a cancellation meanwhile. So
  `pending_size` is more than is ever unsent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import Callable
from functools import partial

from nats import errors as nats_errors
from nats.aio.client import NO_RESPONDERS_STATUS
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header

from dynamo_trtllm.cluster.request_plane.client import DEFAULT_LIMITS, PlaneLimits
from dynamo_trtllm.cluster.request_plane.nats_connection import (
    DENIED,
    NO_CREDENTIALS,
    NatsAccess,
    NatsClient,
    close_client,
    connect_client,
    is_rejection,
)
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.transport import (
    OnDisconnect,
    Receive,
    Unsubscribe,
    no_listener,
    no_reply,
)
from dynamo_trtllm.protocol.errors import (
    Disconnected,
    DynamoError,
    StreamIncomplete,
    Unreachable,
    UserRejected,
)
from dynamo_trtllm.protocol.sanitize import mask_address
from dynamo_trtllm.support.background import BackgroundTasks

log = logging.getLogger(__name__)

# Most messages that one subscription receives while the event loop is busy.
_PENDING_MESSAGES = 1 << 20
# Time for which one subscription receives messages that arrived together, before it lets the event
# loop do other work. nats-py makes no pause.
RECEIVING_S = 0.003
# A server closes the connection of a client that sends a line of more than 4096 bytes. A line has
# this subject and that of the reply.
_MAX_SUBJECT = 1024
_DENIED_SUBSCRIPTION = f"{DENIED} for subscription"


class Burst:
    """Messages of one subscription that arrived together, and the time since their first one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun_s: float | None = None

    def needs_pause(self, num_pending: int) -> bool:
        """Return whether to let the event loop do other work. Called after each message.

        After the pause, the next message is the first of another burst.

        Args:
            num_pending: further messages that have arrived.
        """
        if not num_pending:
            self._begun_s = None
            return False
        now_s = self._clock()
        if self._begun_s is None:
            self._begun_s = now_s
        if now_s - self._begun_s < RECEIVING_S:
            return False
        self._begun_s = None
        return True


def _set_reply(reply: asyncio.Future[Msg | None], message: Msg | None) -> None:
    if not reply.done():
        reply.set_result(message)


class NatsTransport:
    """A `Transport` over one NATS connection, which reconnects for ever. Usable after `connect`.

    A task of `tasks` fails with Disconnected when the client stops reconnecting, as it does after a
    protocol error.

    Args:
        url: address of the server.
        tasks: owner of the background task.
        access: how this process proves who it is.
        limits: those of the buffers.

    Raises:
        ConfigError: a file of credentials or certificates can't be read.
    """

    _replies_subscription: Subscription  # set by `connect`

    def __init__(
        self,
        url: str,
        tasks: BackgroundTasks | None = None,
        access: NatsAccess = NO_CREDENTIALS,
        limits: PlaneLimits = DEFAULT_LIMITS,
    ) -> None:
        self._tasks = tasks or BackgroundTasks()
        self._limits = limits
        self._url = url
        self._address = mask_address(url)
        self._no_connection = f"no connection to NATS at {self._address}; check that NATS runs"
        self._client = NatsClient(access)
        self._up = asyncio.Event()  # set while the client is connected
        self._on_disconnect: list[OnDisconnect] = []
        self._outgoing: list[tuple[str, bytes]] = []  # for the next iteration of the event loop
        # Number of messages that callbacks have published when they got the last report of a loss.
        # They are the first ones of `_outgoing`.
        self._num_from_callbacks = 0
        self._is_waiting_logged = False
        # Why the last attempt to connect failed: the server rejects this process, or TLS fails.
        self._rejection = ""
        self._tls_failure = ""
        self._denied_subscription = ""  # last error of the server about a subscription
        self._num_denied = 0  # messages and subscriptions that the server has denied to this user
        # replies to requests, by the subject of the reply; None: it did not come in time
        self._replies: dict[str, asyncio.Future[Msg | None]] = {}
        self._reply_numbers = itertools.count()
        self._reply_prefix = f"{self._client.new_inbox()}."
        self._reply_burst = Burst()
        self._is_open = False  # connected, and not closed by `aclose`

    async def connect(self, timeout_s: float) -> None:
        """Connect to the server.

        Raises:
            Unreachable: no server answers at the address in time.
        """
        try:
            await connect_client(
                self._client,
                self._url,
                timeout_s,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
            )
            # This returns at once: the server does not confirm subscriptions.
            self._replies_subscription = await self._client.subscribe(
                f"{self._reply_prefix}*", cb=self._on_reply
            )
        except (nats_errors.Error, OSError, TimeoutError) as exc:
            raise self._connect_error() from exc
        self._is_open = True
        self._connected()

    def _connect_error(self) -> Unreachable:
        rejection = self.rejection()
        if rejection is not None:
            return UserRejected(rejection, field="nats_credentials_file")
        if self._tls_failure:
            return Unreachable(self._why_down(), field="nats_ca")
        return Unreachable(f"no NATS server at {self._address}; start one, or check --nats-server")

    @property
    def max_message_bytes(self) -> int:
        return self._client.max_payload  # headers would count too, but none are sent

    @property
    def is_writing(self) -> bool:
        return bool(self._outgoing) or self._client.pending_data_size > 0

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    def on_disconnect(self, callback: OnDisconnect) -> None:
        self._on_disconnect.append(callback)

    def unavailable_reason(self) -> str | None:
        return None if self._up.is_set() else self._why_down()

    def _why_down(self) -> str:
        """Return why there is no connection, and what to do."""
        if self._tls_failure:
            return (
                f"TLS with NATS at {self._address} fails ({self._tls_failure}); check --nats-ca,"
                " --nats-cert and --nats-key, and the certificate of NATS"
            )
        return self.rejection() or self._no_connection

    def rejection(self) -> str | None:
        if not self._rejection:
            return None
        return (
            f"NATS at {self._address} rejects this process, {self._client.identity(self._url)}"
            f" ({self._rejection}); check --nats-credentials-file, --nats-cert or the password in"
            " --nats-server, and the users of NATS"
        )

    async def subscribe(
        self, subject: str, receive: Receive, caught_up: Callable[[], None] = lambda: None
    ) -> Unsubscribe:
        burst = Burst()

        async def take(message: Msg) -> None:
            try:
                receive(message.data, message.reply)
            finally:
                # `subscription` is set below, before its first message arrives.
                num_pending = subscription.pending_msgs
                needs_pause = burst.needs_pause(num_pending)
                if needs_pause or not num_pending:
                    caught_up()
            if needs_pause:
                await asyncio.sleep(0)

        try:
            subscription = await self._client.subscribe(
                subject,
                cb=take,
                pending_msgs_limit=_PENDING_MESSAGES,
                pending_bytes_limit=self._limits.received_bytes,
            )
        except (nats_errors.Error, OSError) as exc:
            raise Disconnected(f"can't subscribe at {self._address}: {exc!r}") from exc

        async def unsubscribe() -> None:
            try:
                await subscription.unsubscribe()
            except (nats_errors.Error, OSError) as exc:
                # The subscription ended with the connection.
                log.debug("unsubscribing failed: %r", exc)

        return unsubscribe

    async def until_subscribed(self, timeout_s: float) -> None:
        """Wait until the server has accepted all subscriptions of this process, or denied one.

        A message of this process to itself arrives after the errors of earlier subscriptions.

        Raises:
            UserRejected: the server has denied a subscription.
            Unreachable: the message did not arrive within `timeout_s` seconds.
            Disconnected: the connection is lost.
        """
        own_subject = f"{self._reply_prefix}{next(self._reply_numbers)}"
        message = await self._await_reply(
            own_subject, partial(self._send, own_subject, b""), timeout_s
        )
        if self._denied_subscription:
            raise UserRejected(
                f"NATS at {self._address} rejects a subscription of this process,"
                f" {self._client.identity(self._url)}: {self._denied_subscription}; use the"
                " credentials of its role, or give this user the permissions of that role",
                field="nats_credentials_file",
            )
        if message is None:
            raise Unreachable(
                f"NATS at {self._address} delivers no message of this process to itself within"
                f" {timeout_s:g} s; check its load, and the permissions of the user of this process"
            )

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return the reply.

        Without a connection, wait up to `timeout_s` for one first.
        """
        if len(subject) > _MAX_SUBJECT:
            raise Unreachable(
                f"the subject has {len(subject)} characters; the limit is {_MAX_SUBJECT}"
            )
        if not self._up.is_set():
            await self._wait_for_connection(timeout_s)
        if self._client.pending_data_size >= self._limits.unsent_bytes:
            raise self._overload_error()
        reply_to = f"{self._reply_prefix}{next(self._reply_numbers)}"
        message = await self._await_reply(
            reply_to, partial(self._send, subject, data, reply_to), timeout_s
        )
        if message is None:
            raise no_reply(subject, timeout_s)
        if message.headers and message.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS:
            raise no_listener(subject)
        return message.data

    async def _await_reply(
        self, reply_to: str, send: Callable[[], None], timeout_s: float
    ) -> Msg | None:
        """Send a message and return the one that comes to `reply_to`; None: none came in time.

        Raises:
            Disconnected: the connection is lost.
        """
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Msg | None] = loop.create_future()
        self._replies[reply_to] = reply
        expiry = loop.call_later(timeout_s, _set_reply, reply, None)
        try:
            send()
            message = await reply
        except (nats_errors.Error, OSError) as exc:
            raise Disconnected(f"can't send to NATS at {self._address}: {exc!r}") from exc
        finally:
            expiry.cancel()
            del self._replies[reply_to]
        if message is None and not self._client.is_connected:
            raise Disconnected(self._why_down())
        return message

    async def _on_reply(self, message: Msg) -> None:
        reply = self._replies.get(message.subject)
        if reply is not None:
            _set_reply(reply, message)
        if self._reply_burst.needs_pause(self._replies_subscription.pending_msgs):
            await asyncio.sleep(0)

    async def _wait_for_connection(self, timeout_s: float) -> None:
        """Raise Disconnected if there is no connection in time."""
        if self._client.is_closed:
            raise Disconnected(self._why_down())
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError as exc:
            raise Disconnected(self._why_down()) from exc

    def publish(self, subject: str, data: bytes) -> None:
        if not self._is_open:
            return
        if len(subject) > _MAX_SUBJECT:
            log.debug("message dropped: its subject has %d characters", len(subject))
            return
        # The message is sent after this call. An error while sending ends all streams, and the end
        # of a stream publishes a cancel: this function would be entered again before it has
        # returned.
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._send_outgoing)
        self._outgoing.append((subject, data))

    def _send_outgoing(self) -> None:
        """Pass the published messages to the client. Report a loss once."""
        outgoing = self._outgoing
        self._outgoing = []
        num_from_callbacks = self._num_from_callbacks
        self._num_from_callbacks = 0
        lost: Disconnected | None = None
        for number, (subject, data) in enumerate(outgoing):
            if self._client.pending_data_size >= self._limits.unsent_bytes:
                # The loss of messages of these callbacks is not reported: at a report, they would
                # publish more of them.
                if number >= num_from_callbacks:
                    lost = self._overload_error()
                continue
            try:
                self._send(subject, data)
            except nats_errors.BadSubjectError:
                # A remote caller has chosen this subject for its reply. Others lose no message.
                log.debug("message dropped: invalid subject %r", subject)
            except (nats_errors.Error, OSError) as exc:
                lost = Disconnected(f"sending to {subject} failed: {exc!r}")
        # The loss is reported once, and after all messages are sent: a callback may raise.
        if lost is not None:
            self._report_disconnect(lost)
            self._num_from_callbacks = len(self._outgoing)

    def _overload_error(self) -> Disconnected:
        size_mib = self._client.pending_data_size >> 20
        return Disconnected(
            f"message dropped: {size_mib} MiB to NATS at {self._address} are unsent; check its load"
        )

    def _send(self, subject: str, data: bytes, reply_to: str = "") -> None:
        """Pass a message to the client, which takes it without waiting."""
        # The coroutine runs up to its first wait within this call. A task would begin it later.
        sending = self._client.publish(subject, data, reply_to)
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()  # the client has the message, and would only wait until it is written

    def try_publish(self, subject: str, data: bytes) -> bool:
        is_half_full = self._client.pending_data_size > self._limits.unsent_bytes // 2
        if is_half_full or not self._up.is_set():
            return False
        if len(data) > self.max_message_bytes:
            log.warning(
                "message to %s dropped: %d bytes are more than NATS allows", subject, len(data)
            )
        else:
            self.publish(subject, data)
        return True

    async def aclose(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._send_outgoing()
        await close_client(self._client)

    def _report_disconnect(self, error: DynamoError) -> None:
        log.warning("NATS at %s: %s", self._address, error)
        for callback in self._on_disconnect:
            callback(error)

    # nats-py accepts real coroutine functions only.

    async def _on_error(self, error: Exception) -> None:
        """Note, report or log an error of the client, by its kind."""
        if isinstance(error, nats_errors.SlowConsumerError):
            lost = StreamIncomplete(
                f"messages to {error.subject} were dropped because this process is overloaded"
            )
            self._report_disconnect(lost)
        elif not isinstance(error, nats_errors.Error | OSError | TimeoutError):
            # The receiver of a message has failed: a bug.
            log.error("NATS at %s: unexpected error", self._address, exc_info=error)
        elif isinstance(error, ssl.SSLError):
            self._note_tls_failure(error)
        elif DENIED in str(error):
            self._note_denied(str(error))
        elif not self._is_open:  # during `connect`, or after `aclose`
            reason = str(error) or type(error).__name__
            is_answer_of_server = isinstance(error, nats_errors.Error) and not isinstance(
                error, TimeoutError
            )
            # After a rejection, the server closes the connection. The error of that close must not
            # replace the reason.
            if is_answer_of_server:
                self._rejection = reason
            if not self._is_waiting_logged:
                self._is_waiting_logged = True
                log.warning("waiting for NATS at %s: %s", self._address, reason)
        elif is_rejection(error):
            self._note_rejection(str(error))
        else:
            log.debug("NATS at %s: %r", self._address, error)

    def _note_rejection(self, reason: str) -> None:
        """Note that the server rejects this process, which was connected before. Log it once."""
        is_known = bool(self._rejection)
        self._rejection = reason
        if not is_known:
            log.error("%s; trying again", self.rejection())

    def _note_tls_failure(self, error: ssl.SSLError) -> None:
        """Note that no connection can be made because TLS fails. Log it once."""
        is_known = bool(self._tls_failure)
        self._tls_failure = str(error)
        if not is_known:
            log.error("%s; trying again", self._why_down())

    def _note_denied(self, reason: str) -> None:
        """Log that this user may not do something. A stream may be denied many messages."""
        if _DENIED_SUBSCRIPTION in reason:
            self._denied_subscription = reason
        self._num_denied += 1
        if self._num_denied.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
            text = "NATS at %s denies this process something (%d times so far): %s"
            log.error(text, self._address, self._num_denied, reason)

    async def _on_disconnected(self) -> None:
        self._up.clear()
        self._denied_subscription = ""  # the next connection may be that of another user
        if self._is_open:
            self._report_disconnect(Disconnected(f"connection to NATS at {self._address} lost"))

    async def _on_reconnected(self) -> None:
        self._connected()
        log.info("reconnected to NATS at %s", self._address)

    def _connected(self) -> None:
        self._rejection = ""
        self._tls_failure = ""
        self._up.set()

    async def _on_closed(self) -> None:
        if self._is_open:
            log.error("NATS client at %s stopped reconnecting; restart this process", self._address)
            self._tasks.start(self._fail(), "nats-watch")

    async def _fail(self) -> None:
        raise Disconnected(
            f"NATS client at {self._address} stopped reconnecting; restart this process"
        )


class NatsPlane(RequestPlane):
    """A request plane over NATS. Create it with `connect`."""

    @classmethod
    async def connect(
        cls,
        url: str,
        limits: PlaneLimits = DEFAULT_LIMITS,
        tasks: BackgroundTasks | None = None,
        on_unreadable: Callable[[], None] = lambda: None,
        *,
        access: NatsAccess = NO_CREDENTIALS,
        connect_timeout_s: float = 5.0,
    ) -> NatsPlane:
        """Connect to a NATS server.

        Args:
            url: address of the server.
            limits: time-outs and buffer limits of the plane.
            tasks: owner of the plane's background tasks.
            on_unreadable: called for each message that can't be read.
            access: how this process proves who it is.
            connect_timeout_s: time-out in seconds.

        Raises:
            ConfigError: a file of credentials or certificates can't be read.
            Unreachable: no server answers in time, or it rejects this process.
        """
        tasks = tasks or BackgroundTasks()
        transport = NatsTransport(url, tasks, access, limits)
        await transport.connect(connect_timeout_s)
        return cls(transport, limits, tasks, on_unreadable)

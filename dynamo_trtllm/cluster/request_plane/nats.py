"""Implement the request plane over NATS, and translate errors of nats-py.

The module works around these traps of nats-py 2.16:

* A message that is too large closes the client for good.
* Only pings detect a frozen server.
* A slow consumer loses messages silently.
* If a call of `flush` is cancelled or times out, its late reply stops the read loop. So this module
  never calls `flush`.
* `request` may return a reply that was for a cancelled caller. It also takes twice the CPU time of
  one inbox for all replies. So this module has such an inbox, and never calls `request`.
* `publish` waits while `pending_size` bytes are unsent, and a cancellation of this wait is lost. So
  this module sets `pending_size` to more bytes than are ever unsent.
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
from dynamo_trtllm.protocol.counted import counted
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
# Most characters of a subject. A server closes the connection of a client that sends a line of more
# than 4096 bytes, and a line may have two subjects: of the message and of its reply.
_MAX_SUBJECT_CHARS = 1024
_DENIED_SUBSCRIPTION = f"{DENIED} for subscription"


class Burst:
    """Messages of one subscription that arrived together. It limits the time until a pause."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun_s: float | None = None

    def needs_pause(self, num_pending: int) -> bool:
        """Return whether to let the event loop do other work. Called after each message.

        After the pause, the next message begins a new burst.

        Args:
            num_pending: number of further messages that have arrived.
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
    """A `Transport` over one NATS connection. Usable after `connect`.

    The client reconnects again and again. After a protocol error it stops reconnecting. Then a task
    of `tasks` fails with Disconnected.

    Args:
        url: address of the server.
        tasks: owner of the background task.
        access: how this process proves who it is.
        limits: the limits of the buffers.

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
        # The published messages, as subject and data. The next iteration of the event loop sends
        # them.
        self._outgoing: list[tuple[str, bytes]] = []
        # When the last loss was reported, the callbacks published this number of messages. These
        # are the first ones in `_outgoing`.
        self._num_from_callbacks = 0
        self._is_waiting_logged = False
        # Why the last attempt to connect failed. Both are "" while the client is connected.
        self._rejection = ""  # the server's reason to reject this process
        self._tls_failure = ""  # the error of TLS
        self._denied_subscription = ""  # the server's last error about a subscription
        # Number of messages and subscriptions that the server has denied to this user.
        self._num_denied = 0
        # The replies that are awaited, by the subject of the reply. None: no reply came in time.
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
            # This returns at once, because the server does not confirm subscriptions.
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
        return self._client.max_payload  # the limit includes headers, which are never sent

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

        This process sends a message to itself. The server reports errors of earlier subscriptions
        before it delivers the message.

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
        """Send a request and return the reply, see `Transport.request`.

        Without a connection, wait up to `timeout_s` for a connection first.
        """
        if len(subject) > _MAX_SUBJECT_CHARS:
            raise Unreachable(
                f"the subject has {len(subject)} characters; the limit is {_MAX_SUBJECT_CHARS}"
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
        """Send a message, and return the reply that comes to the subject `reply_to`.

        None: no reply came in time.

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
        if len(subject) > _MAX_SUBJECT_CHARS:
            log.debug("message dropped: its subject has %d characters", len(subject))
            return
        # The message is not sent within this call but soon after it. An error while sending ends
        # all streams, and the end of a stream publishes a cancel. Within this call, that would call
        # this function again before it has returned.
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._send_outgoing)
        self._outgoing.append((subject, data))

    def _send_outgoing(self) -> None:
        """Pass the published messages to the client. If messages are lost, report it once."""
        outgoing = self._outgoing
        self._outgoing = []
        num_from_callbacks = self._num_from_callbacks
        self._num_from_callbacks = 0
        lost: Disconnected | None = None
        for number, (subject, data) in enumerate(outgoing):
            if self._client.pending_data_size >= self._limits.unsent_bytes:
                # Callbacks publish messages when a loss is reported to them. If the loss of these
                # messages were reported, too, the callbacks would publish more of them, without
                # end.
                if number >= num_from_callbacks:
                    lost = self._overload_error()
                continue
            try:
                self._send(subject, data)
            except nats_errors.BadSubjectError:
                # A remote caller has chosen this subject for its reply. No other caller loses a
                # message, so no loss is reported.
                log.debug("message dropped: invalid subject %r", subject)
            except (nats_errors.Error, OSError) as exc:
                lost = Disconnected(f"sending to {subject} failed: {exc!r}")
        # The loss is reported after all other messages are sent, because a callback may raise.
        if lost is not None:
            self._report_disconnect(lost)
            self._num_from_callbacks = len(self._outgoing)

    def _overload_error(self) -> Disconnected:
        size_mib = self._client.pending_data_size >> 20
        return Disconnected(
            f"message dropped: {size_mib} MiB to NATS at {self._address} are unsent; check its load"
        )

    def _send(self, subject: str, data: bytes, reply_to: str = "") -> None:
        """Pass a message to the client, without waiting until it is written."""
        # `send` runs the coroutine up to its first wait. A task would begin it only later.
        publishing = self._client.publish(subject, data, reply_to)
        try:
            publishing.send(None)
        except StopIteration:
            return
        # At its first wait, the coroutine has stored the message, and waits until it is written.
        publishing.close()

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
        """Handle an error that the client reports: note, report or log it."""
        if isinstance(error, nats_errors.SlowConsumerError):
            lost = StreamIncomplete(
                f"messages to {error.subject} were dropped because this process is overloaded"
            )
            self._report_disconnect(lost)
        elif not isinstance(error, nats_errors.Error | OSError | TimeoutError):
            # A bug: the receiver of a message has failed.
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
            # After a rejection, the server closes the connection. The error of the closed
            # connection must not replace the server's reason.
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
        """Note that the server now rejects this process. Log it once."""
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
        """Log that the server has denied this user a message or a subscription."""
        if _DENIED_SUBSCRIPTION in reason:
            self._denied_subscription = reason
        self._num_denied += 1
        # A stream may be denied many messages, so only the 1st, 2nd, 4th, 8th … error is logged.
        is_power_of_two = self._num_denied.bit_count() == 1
        if is_power_of_two:
            text = "NATS at %s denies this process something (%s so far): %s"
            log.error(text, self._address, counted(self._num_denied, "time"), reason)

    async def _on_disconnected(self) -> None:
        self._up.clear()
        self._denied_subscription = ""  # another user may make the next connection
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
            connect_timeout_s: longest wait for the server's answer.

        Raises:
            ConfigError: a file of credentials or certificates can't be read.
            Unreachable: no server answers in time, or the server rejects this process.
        """
        tasks = tasks or BackgroundTasks()
        transport = NatsTransport(url, tasks, access, limits)
        await transport.connect(connect_timeout_s)
        return cls(transport, limits, tasks, on_unreadable)

"""Send requests and control requests to workers over a transport, and receive the streams."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from dynamo_trtllm.cluster.request_plane.frames import (
    PING,
    Ack,
    CancelStream,
    ClientMessage,
    ControlRequest,
    OpenStream,
    Ping,
    StreamReport,
    read_batch,
)
from dynamo_trtllm.cluster.request_plane.latest_keys import remember
from dynamo_trtllm.cluster.request_plane.receivers import StreamDemux, StreamReceiver
from dynamo_trtllm.cluster.request_plane.subjects import control_subject, load_subject
from dynamo_trtllm.cluster.request_plane.transport import (
    Heartbeat,
    Transport,
    Unsubscribe,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Control,
    GenerateRequest,
    LoadReport,
    decode,
    encode,
)
from dynamo_trtllm.protocol.streams import OnEvent
from dynamo_trtllm.support.background import BackgroundTasks

log = logging.getLogger(__name__)

_CANCELS_PER_REPORT = 1024  # further cancels are sent after the next report
_CLOSED = "the request plane is closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """Time-outs of a plane, and limits of the buffers of its transport."""

    ack_timeout_s: float = 2.0  # longest wait for a worker's acknowledgment of a request
    # Longest wait for the reply to a ping. The ping checks whether the worker still listens.
    listener_timeout_s: float = 0.5
    # A lost message is detected within twice this time, a dead peer within three times.
    ping_interval_s: float = 3.0
    # Most bytes that one subscription may receive while the event loop is busy.
    received_bytes: int = 512 << 20
    # Most bytes that may wait to be written. Further messages are dropped.
    unsent_bytes: int = 64 << 20


DEFAULT_LIMITS: Final = PlaneLimits()


class PlaneClient:
    """The caller's side of a `RequestPlane`, which creates and closes it.

    Args:
        transport: the transport. The plane owns it.
        limits: time-outs of the plane.
        tasks: owner of the background tasks.
        on_unreadable: called with the error of each message that can't be read.
    """

    def __init__(
        self,
        transport: Transport,
        limits: PlaneLimits,
        tasks: BackgroundTasks,
        on_unreadable: Callable[[errors.BadFrame], None],
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._is_closed = False
        self._inbox_subject = transport.new_inbox()
        self._inbox = StreamDemux()
        self._numbers = itertools.count(1)  # numbers of streams
        self._unsubscribe: Unsubscribe | None = None
        self._subscribe_lock = asyncio.Lock()  # the first two callers must not both subscribe
        # The running streams, by subject of the worker, then by number.
        self._running: dict[str, dict[int, StreamReceiver]] = {}
        # The number of frames that came for streams that have ended, over all workers.
        self._num_frames_of_ended_streams = 0
        # The same number for each worker with running streams, by subject. The count does not begin
        # at 0, see `generate`.
        self._num_frames_by_subject: dict[str, int] = {}
        # The streams that this client has cancelled: the subject of the worker, by number of the
        # stream. The latest stream is last.
        self._cancelled: dict[int, str] = {}
        self._num_pings = 0  # number of pings that were sent, over all workers
        self._on_unreadable = on_unreadable
        self._on_load: Callable[[LoadReport], None] | None = None
        self._heartbeat = Heartbeat(
            transport=transport,
            interval_s=limits.ping_interval_s,
            peers=self._running.keys,
            message=self._ping_message,
            heard=self._num_received,
            on_peer_lost=self._worker_lost,
            tasks=tasks,
        )
        self._opening: set[asyncio.Task[None]] = set()  # tasks that open streams
        transport.on_disconnect(self._inbox.fail_all)
        transport.on_disconnect(_record_disconnect)

    def generate(self, subject: str, request: GenerateRequest, on_event: OnEvent) -> StreamReceiver:
        """Start one call.

        The chunks of the call come as events, in order and without gaps, see
        `streams.Generator.generate`. Cancelling the stream sends a cancel to the worker, and does
        not wait for it.

        Args:
            subject: request-plane address of a worker's `generate`.
            request: the call.
            on_event: receives the events.

        If the worker fails the call, the stream ends with an error of the worker's class. These
        other errors end a stream:
            Unreachable: no worker acknowledges the request in time.
            WorkerDied: the worker had the request, and no process listens at `subject` any more.
            StreamIncomplete: a frame is missing, or the stream ends without a terminal chunk.
            Disconnected: the request plane is lost.
            DeadlineExceeded: the request's deadline passes.
        """
        number = next(self._numbers)
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            # The timer is set below, before the stream can end.
            self._ended(subject, number, deadline_timer)

        send_cancel = partial(self._send_cancel, subject, number)
        receiver = StreamReceiver(on_event, self._opening, on_end, send_cancel)
        self._inbox[number] = receiver
        if subject not in self._running:
            self._running[subject] = {}
            # The heartbeat compares two values of `_num_received` for this worker, to see whether a
            # frame came in between. Therefore the value must not fall, not even if all streams of
            # the worker end in between and new ones start. So the count does not begin at 0, but at
            # a number that never falls.
            self._num_frames_by_subject[subject] = self._num_frames_of_ended_streams
        self._running[subject][number] = receiver
        left_s = request.deadline - time.time()
        deadline_timer = loop.call_later(left_s, _deadline_passed, receiver)
        opened = self._open(subject, number, request, receiver)
        receiver.run(opened, f"plane-open-{request.request_id}")
        return receiver

    def _ended(self, subject: str, number: int, deadline_timer: asyncio.TimerHandle) -> None:
        deadline_timer.cancel()
        self._inbox.pop(number, None)
        running = self._running[subject]
        num_frames = running.pop(number).num_received
        self._num_frames_by_subject[subject] += num_frames
        self._num_frames_of_ended_streams += num_frames
        if not running:
            del self._running[subject]
            del self._num_frames_by_subject[subject]

    def _send_cancel(self, subject: str, number: int, *, awaits_kv: bool) -> None:
        # `_compare` cancels the streams in `_cancelled` again while the worker reports them. This
        # must not happen to a stream whose last frame may still offer KV.
        if not awaits_kv:
            remember(self._cancelled, number, subject)
        self._cancel(subject, number, awaits_kv=awaits_kv)

    async def control(self, subject: str, verb: Control, *, timeout_s: float = 5.0) -> bytes:
        """Send a control verb to the instance with this generate subject. Return the encoded reply.

        Raises:
            DynamoError: like `generate`; KvTransferError for a verb about a KV transfer.
        """
        reply = await self._transport.request(
            control_subject(subject),
            self._encode_checked(ControlRequest(verb)),
            timeout_s=timeout_s,
        )
        return _ack_data(reply)

    async def check_listener(self, subject: str, *, num_pings: int = 1) -> None:
        """Check whether a process still listens at a subject where one did before.

        Args:
            subject: request-plane address of a worker's `generate`.
            num_pings: most pings that are sent while none is answered. If a process has just ended,
                the first ping may be lost, because the NATS server closes the subscriptions of the
                process a moment later.

        Raises:
            WorkerDied: no process listens. The error is not raised if the worker hangs, or if this
                process has no connection.
        """
        for _ in range(num_pings):
            try:
                await self._transport.request(
                    subject, PING, timeout_s=self._limits.listener_timeout_s
                )
            except errors.NoListener as exc:
                raise _died(subject, exc) from exc
            except errors.PlaneError:
                continue
            return

    async def watch_loads(
        self, namespace: str, on_load: Callable[[LoadReport], None]
    ) -> Unsubscribe:
        """Call `on_load` with each report of the load of a namespace's workers.

        Workers broadcast reports, and also send them together with frames of streams.

        Returns:
            The function that ends the subscription to broadcast reports.
        """

        def receive(data: bytes, _: str) -> None:
            try:
                report = decode(data, LoadReport)
            except errors.BadFrame as exc:
                # The report is skipped. `read_batch` does the same for a report with frames.
                self._on_unreadable(exc)
                return
            on_load(report)

        self._on_load = on_load
        return await self._transport.subscribe(load_subject(namespace), receive)

    async def aclose(self) -> None:
        """End all calls with `Disconnected`. Idempotent."""
        self._is_closed = True
        self._inbox.fail_all(errors.Disconnected(_CLOSED))
        await asyncio.gather(*self._opening, return_exceptions=True)
        await self._heartbeat.aclose()
        if self._unsubscribe is not None:
            await self._unsubscribe()

    # --- streams ----------------------------------------------------------------------------------

    async def _subscribe(self) -> None:
        """Subscribe to the inbox, unless this was done before."""
        async with self._subscribe_lock:
            if self._unsubscribe is None:
                # Messages are received in the context of this task. The context is empty. Otherwise
                # all log lines of received messages would have the id of the first request.
                subscribing = asyncio.get_running_loop().create_task(
                    self._transport.subscribe(
                        self._inbox_subject, self._on_message, self._inbox.pass_on
                    ),
                    context=contextvars.Context(),
                )
                self._unsubscribe = await subscribing
                self._heartbeat.start()

    async def _open(
        self, subject: str, number: int, request: GenerateRequest, receiver: StreamReceiver
    ) -> None:
        """Send a call to its worker, and wait until the worker acknowledges it."""
        if self._is_closed:
            raise errors.Disconnected(_CLOSED)
        if self._unsubscribe is None:
            await self._subscribe()
        left_s = request.deadline - time.time()
        if left_s <= 0:
            raise errors.DeadlineExceeded("the request's deadline had passed before it was sent")
        message = OpenStream(number, self._inbox_subject, request, left_s, wire=WIRE_VERSION)
        data = self._encode_checked(ClientMessage(message))
        try:
            reply = await self._transport.request(
                subject, data, timeout_s=min(left_s, self._limits.ack_timeout_s)
            )
        except errors.Unreachable as exc:
            if time.time() >= request.deadline:
                raise errors.DeadlineExceeded(
                    "the request's deadline passed before a worker took it"
                ) from exc
            # If frames have arrived, only the acknowledgment was lost.
            if not receiver.num_received:
                if not isinstance(exc, errors.NoListener):
                    # If the worker has ended, this raises WorkerDied instead of Unreachable.
                    await self.check_listener(subject)
                raise
        else:
            _ack_data(reply)
        # `compare_with_worker` ignores replies to this ping and earlier ones. The worker may have
        # replied to them before it had the stream.
        receiver.last_ping_before_ack = self._num_pings

    def _encode_checked(self, value: ClientMessage | ControlRequest) -> bytes:
        data = encode(value)
        limit = self._transport.max_message_bytes
        if len(data) > limit:
            raise errors.PayloadTooLarge(
                f"the request has {len(data)} bytes; the limit of the request plane is {limit}:"
                " shorten the request or raise max_payload of the NATS server"
            )
        return data

    def _cancel(self, subject: str, number: int, *, awaits_kv: bool = False) -> None:
        message = ClientMessage(CancelStream(number, self._inbox_subject, awaits_kv))
        self._transport.publish(subject, encode(message))

    def _on_message(self, data: bytes, reply: str) -> None:
        """Receive what a worker sends to the inbox."""
        # Only the heartbeat of a worker awaits a reply.
        if reply:
            self._transport.publish(reply, PING)
        if data == PING:
            return
        try:
            batch = read_batch(data, self._on_unreadable)
        except errors.BadFrame:
            # It is not known which streams the message was for. A stream that has lost a frame by
            # this ends after the next ping.
            return
        self._inbox.add(batch.frames)
        if batch.load is not None and self._on_load is not None:
            self._on_load(batch.load)
        if batch.report is not None:
            self._compare(batch.report)

    def _compare(self, report: StreamReport) -> None:
        """End streams that have lost a frame, and repeat cancels that were lost."""
        # First handle the frames that came before this report.
        self._inbox.pass_on()
        num_sent_by_stream = dict(report.streams)
        running = self._running.get(report.subject, {})
        # Without a ping, the report may have overtaken frames, which are not lost.
        if report.ping:
            for number, receiver in list(running.items()):
                receiver.compare_with_worker(report.ping, num_sent_by_stream.get(number))
        # If the worker still runs a stream that was cancelled, the cancel was lost or has not
        # arrived yet. Streams outside of `_cancelled` are not cancelled. A stream that has ended
        # with its last frame may be in the report because the report is old, or because the KV
        # transfer of the stream is pending.
        still_sent = [
            number for number in num_sent_by_stream if self._cancelled.get(number) == report.subject
        ]
        for number in still_sent[:_CANCELS_PER_REPORT]:
            self._cancel(report.subject, number)

    def _num_received(self, subject: str) -> int:
        """Return a number that grows with each frame of the worker's streams.

        0: no stream of the worker is running.
        """
        running = self._running.get(subject, {})
        num_of_running = sum(receiver.num_received for receiver in running.values())
        num_of_ended = self._num_frames_by_subject.get(subject, 0)
        return num_of_running + num_of_ended

    def _ping_message(self, _subject: str) -> bytes:
        self._num_pings += 1
        return encode(ClientMessage(Ping(self._inbox_subject, self._num_pings)))

    def _worker_lost(self, subject: str, error: DynamoError) -> None:
        """End the streams of a worker that has not replied to the heartbeat."""
        # If this process has lost its connection, the worker may be alive.
        lost_own_connection = isinstance(error, errors.Disconnected)
        stream_error: DynamoError
        if lost_own_connection:
            stream_error = error
        elif isinstance(error, errors.NoListener):
            stream_error = _died(subject, error)
        else:
            stream_error = errors.Disconnected(f"the worker at {subject} is gone: {error.message}")
        for receiver in list(self._running.get(subject, {}).values()):
            # A stream that is not acknowledged is left to `_open`, which still awaits the worker's
            # acknowledgment, and whose error is more exact.
            if lost_own_connection or receiver.is_acknowledged:
                receiver.fail(stream_error)


def _record_disconnect(_error: DynamoError) -> None:
    RECORDER.record_process(RecordedEvent.CONNECTION_LOST, "nats")


def _deadline_passed(receiver: StreamReceiver) -> None:
    receiver.fail(errors.DeadlineExceeded.while_generating())


def _died(subject: str, error: DynamoError) -> errors.WorkerDied:
    return errors.WorkerDied(f"the worker at {subject} is gone: {error.message}")


def _ack_data(reply: bytes) -> bytes:
    answer = decode(reply, Ack)
    if answer.failure is not None:
        raise answer.failure.error()
    return answer.data

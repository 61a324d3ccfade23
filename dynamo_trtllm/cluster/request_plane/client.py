"""Call workers over a transport: requests with their streams, and control requests."""

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
from dynamo_trtllm.cluster.request_plane.receivers import StreamDemux, StreamReceiver
from dynamo_trtllm.cluster.request_plane.server import control_subject, remember
from dynamo_trtllm.cluster.request_plane.transport import (
    Heartbeat,
    Transport,
    Unsubscribe,
    load_subject,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Control,
    GenerateRequest,
    Instance,
    LoadReport,
    ReleaseKv,
    ReleaseSlot,
    decode,
    encode,
)
from dynamo_trtllm.protocol.streams import OnEvent
from dynamo_trtllm.support.background import BackgroundTasks, cancel_all

log = logging.getLogger(__name__)

_CANCELS_AT_ONCE = 1024  # further cancels follow after the next report
_CLOSED = "the request plane is closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """Time-outs of a plane, and limits of the buffers of its transport."""

    ack_timeout_s: float = 2.0  # limit until a worker acknowledges a request
    # Limit until a worker that has not acknowledged a request replies to a ping.
    listener_timeout_s: float = 0.5
    # A lost message is detected within twice this time, a dead peer within three times.
    ping_interval_s: float = 3.0
    # Bytes that one subscription may receive while the event loop is busy.
    received_bytes: int = 512 << 20
    unsent_bytes: int = 64 << 20  # bytes that wait to be written; beyond, messages are dropped


DEFAULT_LIMITS: Final = PlaneLimits()


class PlaneClient:
    """A caller of workers. Its `RequestPlane` creates and closes it.

    Args:
        transport: the transport, which the plane owns.
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
        self._num_ended_frames = 0  # frames of the ended streams of all workers
        # For each worker with running streams, by subject: the number of frames of its ended
        # streams, counted from a start value (see `generate`).
        self._ended_frames: dict[str, int] = {}
        # The subjects of streams that were closed before their last frame arrived, by number of the
        # stream. The latest one is last.
        self._cancelled: dict[int, str] = {}
        self._num_pings = 0  # number of pings that were sent to all workers
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

        Its chunks come as events, in order and without gaps; see `streams.Generator.generate`.

        Cancelling the stream sends a cancel to the worker, without waiting.

        Args:
            subject: request-plane address of a worker's `generate`.
            request: the call.
            on_event: receives the events.

        Errors that end a stream, beside those of the worker, which come as the same class:
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
            # The start value `_num_ended_frames` never falls. So what `_num_received` returns for
            # this worker never falls, not even if all its streams have ended in between.
            self._ended_frames[subject] = self._num_ended_frames
        self._running[subject][number] = receiver
        left_s = request.deadline - time.time()
        deadline_timer = loop.call_later(left_s, _deadline_passed, receiver)
        opening = self._open(subject, number, request, receiver)
        receiver.run(opening, f"plane-open-{request.request_id}")
        return receiver

    def _ended(self, subject: str, number: int, deadline_timer: asyncio.TimerHandle) -> None:
        deadline_timer.cancel()
        self._inbox.pop(number, None)
        running = self._running[subject]
        num_frames = running.pop(number).num_received
        self._ended_frames[subject] += num_frames
        self._num_ended_frames += num_frames
        if not running:
            del self._running[subject]
            del self._ended_frames[subject]

    def _send_cancel(self, subject: str, number: int, *, awaits_kv: bool) -> None:
        # The last frame of a stream that awaits KV may still offer it. So such a stream is not
        # cancelled again.
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
            num_pings: how many pings are sent at most while none is answered. The first ping to a
                process that has just ended may be lost, because the NATS server closes its
                subscriptions a moment later.

        Raises:
            WorkerDied: no process listens. Not raised if it hangs, or if this process has no
                connection.
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

        Reports are broadcast, or come beside a stream's frames. Return the function that ends the
        subscription to the broadcast ones.
        """

        def receive(data: bytes, _: str) -> None:
            try:
                report = decode(data, LoadReport)
            except errors.BadFrame as exc:
                # Unreadable reports that come with frames are skipped, too.
                self._on_unreadable(exc)
                return
            on_load(report)

        self._on_load = on_load
        return await self._transport.subscribe(load_subject(namespace), receive)

    async def aclose(self) -> None:
        """End all calls; their callers get `Disconnected`. Idempotent."""
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
                # Messages are received in the context of this task. It is an empty one, because log
                # lines must not have the id of the first request.
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
        opening = OpenStream(number, self._inbox_subject, request, left_s, WIRE_VERSION)
        data = self._encode_checked(ClientMessage(opening))
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
                    await self.check_listener(subject)
                raise
        else:
            _ack_data(reply)
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
            # The message does not show its streams. Those that lost a frame end at the next ping.
            return
        self._inbox.add(batch.frames)
        if batch.load is not None and self._on_load is not None:
            self._on_load(batch.load)
        if batch.report is not None:
            self._compare(batch.report)

    def _compare(self, report: StreamReport) -> None:
        """End streams that lost a message.

        Cancel streams of the worker that this process no longer reads.
        """
        # Frames that came before this report count.
        self._inbox.pass_on()
        sent = dict(report.streams)
        running = self._running.get(report.subject, {})
        if report.ping:
            for number, receiver in list(running.items()):
                receiver.compare_with_worker(report.ping, sent.get(number))
        # The worker still sends streams whose cancel was lost or has not arrived yet. A stream that
        # ended with its last frame must not be cancelled: the report may be old, or may list it
        # because its KV transfer is pending.
        still_sent = [number for number in sent if self._cancelled.get(number) == report.subject]
        for number in still_sent[:_CANCELS_AT_ONCE]:
            self._cancel(report.subject, number)

    def _num_received(self, subject: str) -> int:
        """Return a number that grows with each frame of the worker's streams.

        0 if none runs.
        """
        running = self._running.get(subject, {})
        num_frames = sum(receiver.num_received for receiver in running.values())
        return num_frames + self._ended_frames.get(subject, 0)

    def _ping_message(self, _subject: str) -> bytes:
        self._num_pings += 1
        return encode(ClientMessage(Ping(self._inbox_subject, self._num_pings)))

    def _worker_lost(self, subject: str, error: DynamoError) -> None:
        """End the streams of a worker that has not replied to its heartbeat."""
        # If this process has lost its connection, the worker may be alive.
        lost_own_connection = isinstance(error, errors.Disconnected)
        if lost_own_connection:
            lost = error
        elif isinstance(error, errors.NoListener):
            lost = _died(subject, error)
        else:
            lost = errors.Disconnected(f"the worker at {subject} is gone: {error.message}")
        for receiver in list(self._running.get(subject, {}).values()):
            # A stream that is not acknowledged ends with an error of its own, which says so.
            if lost_own_connection or receiver.is_acknowledged:
                receiver.fail(lost)


def _record_disconnect(_error: DynamoError) -> None:
    RECORDER.record_process(RecordedEvent.CONNECTION_LOST, "nats")


def _deadline_passed(receiver: StreamReceiver) -> None:
    receiver.fail(errors.DeadlineExceeded("the request's deadline passed"))


def _died(subject: str, error: DynamoError) -> errors.WorkerDied:
    return errors.WorkerDied(f"the worker at {subject} is gone: {error.message}")


def _ack_data(reply: bytes) -> bytes:
    answer = decode(reply, Ack)
    if answer.failure is not None:
        raise answer.failure.error()
    return answer.data


_TIMEOUT_S = 5.0  # limit of one control request
# Pauses between attempts. If all attempts fail, the worker frees the resource when it expires.
_PAUSES_S = (0.2, 0.5, 1.0)


class BackgroundControl:
    """A sender of control requests, which owns their tasks. Close it after the last stream."""

    def __init__(self, plane: PlaneClient) -> None:
        self._plane = plane
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: Instance, message: ReleaseKv | ReleaseSlot) -> None:
        """Start sending and return at once.

        Callers may be closing a cancelled stream, where they must not await.
        """
        task = asyncio.get_running_loop().create_task(self._send(worker, message))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("control request to a worker failed unexpectedly", exc_info=error)

    async def _send(self, worker: Instance, message: ReleaseKv | ReleaseSlot) -> None:
        """Send a request. Try again while the worker can't be reached."""
        for pause_s in (*_PAUSES_S, None):  # None: it is the last attempt
            try:
                await self._plane.control(worker.subject, message, timeout_s=_TIMEOUT_S)
                return
            except DynamoError as exc:
                may_succeed = isinstance(exc, errors.Disconnected | errors.Unreachable)
                if pause_s is None or not may_succeed:
                    # A worker that has exited has freed everything.
                    level = logging.INFO if isinstance(exc, errors.Unreachable) else logging.WARNING
                    text = "worker %x did not get %s (%s): %s"
                    log.log(level, text, worker.id, message, exc.code, exc.message)
                    return
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        """Wait a bounded time for the requests in progress, then cancel them."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=_TIMEOUT_S)
        await cancel_all(late)

"""Implement the request plane over any `Transport`: the caller's side, and the creation of servers (`server`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeVar

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.codec import decode, encode
from dynamo_trtllm.errors import (
    BadFrame,
    DeadlineExceeded,
    Disconnected,
    DynamoError,
    PayloadTooLarge,
    Unreachable,
)
from dynamo_trtllm.messages import WIRE_VERSION, Chunk, Control, GenerateRequest
from dynamo_trtllm.request_plane.base import ServerHandle, Service, Sink
from dynamo_trtllm.request_plane.frames import (
    PING,
    Ack,
    Batch,
    CancelStream,
    ClientMessage,
    ControlRequest,
    Frame,
    OpenStream,
    Ping,
    StreamBuffer,
    StreamDemux,
    StreamReport,
    read_batch,
)
from dynamo_trtllm.request_plane.server import EndpointServer, control_subject
from dynamo_trtllm.request_plane.transport import Heartbeat, Subscription, Transport

CHUNKS_PER_ITERATION = 1024  # 5 to 10 ms of work in a frontend


class FrameDispatcher:
    """Dispatcher of received frames to their streams, at most CHUNKS_PER_ITERATION per iteration of the event loop.

    Frames beyond that wait. Waiting streams are fed one by one, in the order in which they began to wait. The first
    frame of a stream never waits, because it decides the time to first token.
    """

    def __init__(self, inbox: StreamDemux) -> None:
        self._inbox = inbox
        self._backlog: deque[StreamBuffer] = deque()  # streams with waiting frames, each once
        self._chunks_left = CHUNKS_PER_ITERATION
        self._is_scheduled = False

    def feed(self, batch: Batch) -> None:
        """Pass the frames to their streams, now or in the next iterations of the event loop."""
        if self._is_scheduled:
            self._defer(batch.frames)
            return
        left, self._chunks_left = self._chunks_left, self._chunks_left - len(batch.frames)
        if self._chunks_left >= 0:
            self._inbox.feed(batch)
        else:
            self._inbox.feed(Batch(batch.frames[:left]))
            self._defer(batch.frames[left:])
        if self._chunks_left <= 0:  # the limit counts from the last `_run_once`, even over several iterations
            self._schedule()

    def _defer(self, frames: list[Frame]) -> None:
        find = self._inbox.find
        for frame in frames:
            buffer = find(frame.stream)
            if buffer is None:
                continue
            waiting = buffer.waiting
            if not waiting:
                if frame.number == 0:
                    buffer.feed(frame)
                    continue
                self._backlog.append(buffer)
            waiting.append(frame)

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._run_once)

    def _run_once(self) -> None:
        backlog, self._chunks_left = self._backlog, CHUNKS_PER_ITERATION
        while backlog and self._chunks_left > 0:
            self._chunks_left -= backlog.popleft().catch_up()
        self._is_scheduled = False
        if backlog or self._chunks_left <= 0:
            self._schedule()


_log = logging.getLogger(__name__)

_REMEMBERED = 16_384  # latest subjects, and latest cancelled streams
_CANCELS_AT_ONCE = 1024  # the rest follows after the next report
_CLOSED = "the request plane is closed"

K = TypeVar("K")


def _remember(latest: dict[K, None], key: K) -> None:
    """Put the key last. Drop the first key if there are more than _REMEMBERED."""
    latest.pop(key, None)
    latest[key] = None
    if len(latest) > _REMEMBERED:
        del latest[next(iter(latest))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """Time-outs and buffer limits of a plane."""

    ack_timeout_s: float = 2.0  # for a worker to acknowledge a request
    ping_interval_s: float = 3.0  # a lost message is detected within twice this time, a dead peer within three times
    max_pending_tokens: int = 262_144  # that one stream may buffer for a slow reader


class TransportPlane:
    """A `Plane` over one transport, which it owns. `tasks` owns its background tasks."""

    def __init__(self, transport: Transport, limits: PlaneLimits, tasks: BackgroundTasks | None = None) -> None:
        self._transport = transport
        self._limits = limits
        self._is_closed = False
        self._tasks = tasks or BackgroundTasks()
        self._inbox_subject = transport.new_inbox()
        self._inbox = StreamDemux(limits.max_pending_tokens)
        self._dispatcher = FrameDispatcher(self._inbox)
        self._subscription: Subscription | None = None
        self._subscribe_lock = asyncio.Lock()  # the first two callers must not both subscribe
        self._running: dict[str, dict[int, StreamBuffer]] = {}  # by the worker's subject, then by stream
        self._subjects: dict[str, None] = {}  # of the workers called, the latest last
        self._cancelled: dict[int, None] = {}  # streams that this process closed before their last frame, latest last
        self._num_pings = 0  # sent to all workers
        self._num_unreadable = 0  # messages
        self._workers = Heartbeat(
            transport,
            limits.ping_interval_s,
            message=self._ping_message,
            heard=self._frames_from,
            on_peer_lost=self._worker_lost,
            tasks=self._tasks,
        )
        self._servers: list[EndpointServer] = []
        transport.on_disconnect(self._inbox.fail_all)

    async def serve(self, subject: str, service: Service) -> ServerHandle:
        server = EndpointServer(self._transport, service, self._limits.ping_interval_s, self._tasks)
        self._servers.append(server)
        await server.start(subject, self._limits.ack_timeout_s)
        return server

    async def generate(
        self, subject: str, request: GenerateRequest, sink: Sink | None = None
    ) -> AsyncGenerator[Chunk, None]:
        if self._is_closed:
            raise Disconnected(_CLOSED)
        await self._subscribe()
        stream, buffer = self._inbox.open()
        self._running.setdefault(subject, {})[stream] = buffer
        _remember(self._subjects, subject)
        self._workers.add(subject)
        deadline = asyncio.get_running_loop().call_later(
            request.deadline - time.time(), buffer.fail, DeadlineExceeded("the request's deadline passed")
        )
        ended = False
        try:
            await self._open(subject, stream, request)
            buffer.last_ping_before_ack = self._num_pings
            chunk = await buffer.get()
            while True:
                ended = chunk.finish_reason is not None
                yield chunk
                if ended:
                    return
                chunk = await buffer.get(sink)
        finally:
            deadline.cancel()
            self._inbox.close(stream)
            self._forget(subject, stream)
            if not ended:
                _remember(self._cancelled, stream)
                self._cancel(subject, stream)

    async def control(self, subject: str, verb: Control, *, timeout_s: float = 5.0) -> bytes:
        reply = await self._transport.request(
            control_subject(subject), self._encode_checked(ControlRequest(verb)), timeout_s=timeout_s
        )
        return _ack_data(reply)

    def unavailable_reason(self) -> str | None:
        return self._transport.unavailable_reason()

    async def aclose(self) -> None:
        self._is_closed = True
        for server in self._servers:
            await server.aclose()
        self._inbox.fail_all(Disconnected(_CLOSED))
        await self._workers.aclose()
        if self._subscription is not None:
            await self._subscription.stop()
        await self._transport.aclose()

    # --- a caller's streams ----------------------------------------------------------------------------

    async def _subscribe(self) -> None:
        async with self._subscribe_lock:
            if self._subscription is None:
                self._subscription = await self._transport.subscribe(self._inbox_subject, self._on_message)

    async def _open(self, subject: str, stream: int, request: GenerateRequest) -> None:
        left_s = request.deadline - time.time()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed before it was sent")
        data = self._encode_checked(
            ClientMessage(OpenStream(stream, self._inbox_subject, request, left_s, WIRE_VERSION))
        )
        try:
            reply = await self._transport.request(subject, data, timeout_s=min(left_s, self._limits.ack_timeout_s))
        except Unreachable as exc:
            if time.time() >= request.deadline:
                raise DeadlineExceeded("the request's deadline passed before a worker took it") from exc
            raise
        _ack_data(reply)

    def _encode_checked(self, value: ClientMessage | ControlRequest) -> bytes:
        data = encode(value)
        limit = self._transport.max_message_bytes
        if len(data) > limit:
            raise PayloadTooLarge(
                f"the request has {len(data)} bytes; the limit of the request plane is {limit}: shorten the request "
                "or raise max_payload of the NATS server"
            )
        return data

    def _cancel(self, subject: str, stream: int) -> None:
        self._transport.publish(subject, encode(ClientMessage(CancelStream(stream, self._inbox_subject))))

    def _on_message(self, data: bytes, reply: str) -> None:
        if reply:  # the heartbeat of a worker
            self._transport.publish(reply, PING)
        if data == PING:
            return
        try:
            batch = read_batch(data)
        except BadFrame as exc:
            # The message does not show its streams. Those that lost a frame end at the next ping.
            self._num_unreadable += 1
            if self._num_unreadable.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th …
                _log.warning("unreadable message dropped (%d so far): %s", self._num_unreadable, exc.message)
            return
        self._dispatcher.feed(batch)
        if batch.report is not None:
            self._compare(batch.report)

    def _compare(self, report: StreamReport) -> None:
        """End streams that lost a message. Cancel streams of the worker that this process no longer reads."""
        sent = dict(report.streams)
        running = self._running.get(report.subject, {})
        if report.ping:
            for stream, buffer in running.items():
                buffer.compare_with_worker(report.ping, sent.get(stream))
        if report.subject in self._subjects:
            # The first cancel was lost or has not arrived yet. A stream that ended with its last frame must not be
            # cancelled: the report may be old, or may list it because its KV transfer is pending.
            again = [stream for stream in sent if stream in self._cancelled]
            for stream in again[:_CANCELS_AT_ONCE]:
                self._cancel(report.subject, stream)

    def _ping_message(self, _subject: str) -> bytes:
        self._num_pings += 1
        return encode(ClientMessage(Ping(self._inbox_subject, self._num_pings)))

    def _frames_from(self, subject: str) -> int:
        """Return a number that changes with each frame of the worker's running streams."""
        return sum(buffer.received for buffer in self._running.get(subject, {}).values())

    def _forget(self, subject: str, stream: int) -> None:
        self._workers.remove(subject)
        running = self._running[subject]
        del running[stream]
        if not running:
            del self._running[subject]

    def _worker_lost(self, subject: str, error: DynamoError) -> None:
        ours = isinstance(error, Disconnected)  # this process lost its connection; the worker may be alive
        lost = error if ours else Disconnected(f"the worker at {subject} is gone: {error.message}")
        for buffer in self._running.get(subject, {}).values():
            buffer.fail(lost)


def _ack_data(reply: bytes) -> bytes:
    answer = decode(reply, Ack)
    if answer.failure is not None:
        raise answer.failure.error()
    return answer.data

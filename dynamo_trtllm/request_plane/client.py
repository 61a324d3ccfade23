"""The request plane over any link: both sides' semantics in one place, so that every link has the same.

It carries requests, streams, errors, cancels and control verbs, and decides nothing about them.
"""

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

CHUNKS_PER_TURN = 1024  # 5 to 10 ms of work in a frontend


class Rounds:
    """Feeds an inbox: batches at once while the loop keeps up, otherwise stream by stream in the order in which they
    began to wait.

    The first frame of a stream never waits: with it a request goes on, or its answer begins.
    """

    def __init__(self, inbox: StreamDemux) -> None:
        self._inbox = inbox
        self._behind: deque[StreamBuffer] = deque()  # those that have frames waiting, each once
        self._chunks_left = CHUNKS_PER_TURN
        self._is_turn_due = False

    def feed(self, batch: Batch) -> None:
        """Give the streams their frames, now or in the turns of the loop that follow."""
        if self._is_turn_due:
            self._put_by(batch.frames)
            return
        left, self._chunks_left = self._chunks_left, self._chunks_left - len(batch.frames)
        if self._chunks_left >= 0:
            self._inbox.feed(batch)
        else:
            self._inbox.feed(Batch(batch.frames[:left]))
            self._put_by(batch.frames[left:])
        if self._chunks_left <= 0:  # in however many turns it was: none has had more
            self._turn_soon()

    def _put_by(self, frames: list[Frame]) -> None:
        find = self._inbox.find
        for frame in frames:
            arrivals = find(frame.stream)
            if arrivals is None:
                continue
            waiting = arrivals.waiting
            if not waiting:
                if frame.number == 0:
                    arrivals.feed(frame)
                    continue
                self._behind.append(arrivals)
            waiting.append(frame)

    def _turn_soon(self) -> None:
        self._is_turn_due = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        behind, self._chunks_left = self._behind, CHUNKS_PER_TURN
        while behind and self._chunks_left > 0:
            self._chunks_left -= behind.popleft().catch_up()
        self._is_turn_due = False
        if behind or self._chunks_left <= 0:
            self._turn_soon()


_log = logging.getLogger(__name__)

_REMEMBERED = 16_384  # of the latest subjects, and of the latest cancelled streams
_CANCELS_AT_ONCE = 1024  # the next report brings the others
_CLOSED = "the request plane is closed"

K = TypeVar("K")


def _remember(latest: dict[K, None], key: K) -> None:
    """Put the key last, and drop the first one when there are too many."""
    latest.pop(key, None)
    latest[key] = None
    if len(latest) > _REMEMBERED:
        del latest[next(iter(latest))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """How long a plane waits and how much it keeps."""

    ack_timeout_s: float = 2.0  # for a worker to take a request
    ping_interval_s: float = 3.0  # a lost message is noticed within twice this, a dead peer within three times
    max_pending_tokens: int = 262_144  # of one stream whose reader is slow


class TransportPlane:
    """A `Plane` over one link, which it owns. `tasks` owns what it runs in the background."""

    def __init__(self, link: Transport, limits: PlaneLimits, tasks: BackgroundTasks | None = None) -> None:
        self._link = link
        self._limits = limits
        self._is_closed = False
        self._tasks = tasks or BackgroundTasks()
        self._inbox_subject = link.new_inbox()
        self._inbox = StreamDemux(limits.max_pending_tokens)
        self._rounds = Rounds(self._inbox)
        self._listening: Subscription | None = None
        self._listening_lock = asyncio.Lock()  # the first two callers must not both subscribe
        self._running: dict[str, dict[int, StreamBuffer]] = {}  # by the worker's subject, then by stream
        self._subjects: dict[str, None] = {}  # of workers that were asked for a stream, the latest last
        self._cancelled: dict[int, None] = {}  # the latest streams that ended here before their last frame
        self._pings = 0  # sent so far, to all workers
        self._unreadable = 0  # messages so far
        self._workers = Heartbeat(
            link,
            limits.ping_interval_s,
            message=self._ping_message,
            heard=self._frames_from,
            lost=self._worker_lost,
            tasks=self._tasks,
        )
        self._servings: list[EndpointServer] = []
        link.on_lost(self._inbox.fail_all)

    async def serve(self, subject: str, service: Service) -> ServerHandle:
        serving = EndpointServer(self._link, service, self._limits.ping_interval_s, self._tasks)
        self._servings.append(serving)
        await serving.start(subject, self._limits.ack_timeout_s)
        return serving

    async def generate(
        self, subject: str, request: GenerateRequest, sink: Sink | None = None
    ) -> AsyncGenerator[Chunk, None]:
        if self._is_closed:
            raise Disconnected(_CLOSED)
        await self._listen()
        stream, arrivals = self._inbox.open()
        self._running.setdefault(subject, {})[stream] = arrivals
        _remember(self._subjects, subject)
        self._workers.add(subject)
        deadline = asyncio.get_running_loop().call_later(
            request.deadline - time.time(), arrivals.fail, DeadlineExceeded("the request's deadline passed")
        )
        ended = False
        try:
            await self._open(subject, stream, request)
            arrivals.last_ping_before_ack = self._pings
            chunk = await arrivals.get()
            while True:
                ended = chunk.finish_reason is not None
                yield chunk
                if ended:
                    return
                chunk = await arrivals.get(sink)
        finally:
            deadline.cancel()
            self._inbox.close(stream)
            self._forget(subject, stream)
            if not ended:
                _remember(self._cancelled, stream)
                self._cancel(subject, stream)

    async def control(self, subject: str, verb: Control, *, timeout_s: float = 5.0) -> bytes:
        reply = await self._link.ask(control_subject(subject), self._fitting(ControlRequest(verb)), timeout_s=timeout_s)
        return _answered(reply)

    def outage(self) -> str | None:
        return self._link.outage()

    async def aclose(self) -> None:
        self._is_closed = True
        for serving in self._servings:
            await serving.aclose()
        self._inbox.fail_all(Disconnected(_CLOSED))
        await self._workers.aclose()
        if self._listening is not None:
            await self._listening.stop()
        await self._link.aclose()

    # --- a caller's streams ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        async with self._listening_lock:
            if self._listening is None:
                self._listening = await self._link.listen(self._inbox_subject, self._take)

    async def _open(self, subject: str, stream: int, request: GenerateRequest) -> None:
        left_s = request.deadline - time.time()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed before it was sent")
        data = self._fitting(ClientMessage(OpenStream(stream, self._inbox_subject, request, left_s, WIRE_VERSION)))
        try:
            reply = await self._link.ask(subject, data, timeout_s=min(left_s, self._limits.ack_timeout_s))
        except Unreachable as exc:
            if time.time() >= request.deadline:
                raise DeadlineExceeded("the request's deadline passed before a worker took it") from exc
            raise
        _answered(reply)

    def _fitting(self, value: ClientMessage | ControlRequest) -> bytes:
        data = encode(value)
        limit = self._link.max_message_bytes
        if len(data) > limit:
            raise PayloadTooLarge(f"the request takes {len(data)} bytes and the request plane carries {limit}")
        return data

    def _cancel(self, subject: str, stream: int) -> None:
        self._link.post(subject, encode(ClientMessage(CancelStream(stream, self._inbox_subject))))

    def _take(self, data: bytes, reply: str) -> None:
        if reply:  # a worker asks whether this process is alive
            self._link.post(reply, PING)
        if data == PING:
            return
        try:
            batch = read_batch(data)
        except BadFrame as exc:
            # The streams of this message are unknown. Those that lost a frame end at the next ping.
            self._unreadable += 1
            if self._unreadable.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: no flood of lines
                _log.warning(
                    "unreadable message to this process dropped (%d so far): %s", self._unreadable, exc.message
                )
            return
        self._rounds.feed(batch)
        if batch.report is not None:
            self._compare(batch.report)

    def _compare(self, report: StreamReport) -> None:
        """End streams that lost a message; cancel streams in the worker that this process no longer reads."""
        sent = dict(report.streams)
        running = self._running.get(report.subject, {})
        if report.ping:
            for stream, arrivals in running.items():
                arrivals.compare_with_worker(report.ping, sent.get(stream))
        if report.subject in self._subjects:
            # The first cancel was lost, or is still on its way. A stream that ended with its last frame is not
            # cancelled: the report is an old one, or lists a ticket that is in use.
            again = [stream for stream in sent if stream in self._cancelled]
            for stream in again[:_CANCELS_AT_ONCE]:
                self._cancel(report.subject, stream)

    def _ping_message(self, _subject: str) -> bytes:
        self._pings += 1
        return encode(ClientMessage(Ping(self._inbox_subject, self._pings)))

    def _frames_from(self, subject: str) -> int:
        """Return a number that changes with each frame of the worker's running streams."""
        return sum(arrivals.received for arrivals in self._running.get(subject, {}).values())

    def _forget(self, subject: str, stream: int) -> None:
        self._workers.remove(subject)
        running = self._running[subject]
        del running[stream]
        if not running:
            del self._running[subject]

    def _worker_lost(self, subject: str, error: DynamoError) -> None:
        ours = isinstance(error, Disconnected)  # our own connection: nothing is known of the worker
        lost = error if ours else Disconnected(f"the worker at {subject} is gone: {error.message}")
        for arrivals in self._running.get(subject, {}).values():
            arrivals.fail(lost)


def _answered(reply: bytes) -> bytes:
    answer = decode(reply, Ack)
    if answer.failure is not None:
        raise answer.failure.error()
    return answer.data

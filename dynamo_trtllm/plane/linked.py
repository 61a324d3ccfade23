"""The request plane over any link: both sides' semantics in one place, so that every link has the same.

It carries requests, streams, errors, cancels and control verbs, and decides nothing about them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from dynamo_trtllm.codec import decode, encode
from dynamo_trtllm.errors import (
    BadFrame,
    DeadlineExceeded,
    Disconnected,
    DynamoError,
    PayloadTooLarge,
    StreamIncomplete,
    Unreachable,
)
from dynamo_trtllm.messages import Chunk, Control, GenerateRequest
from dynamo_trtllm.plane.base import Service, Serving, Sink
from dynamo_trtllm.plane.link import Link, Listening, PeerWatch
from dynamo_trtllm.plane.serving import LinkServing, control_subject
from dynamo_trtllm.plane.stream import PING, Answer, Arrivals, Batch, Cancel, Envelope, Inbox, Open, Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLimits:
    """How long a plane waits and how much it keeps."""

    ack_timeout_s: float = 2.0  # for a worker to take a request
    ping_interval_s: float = 5.0  # a dead peer of a running stream is noticed within twice this
    max_pending_tokens: int = 262_144  # of one stream whose reader is slow


class LinkPlane:
    """A `Plane` over one link, which it owns."""

    def __init__(self, link: Link, limits: PlaneLimits) -> None:
        self._link = link
        self._limits = limits
        self._inbox_subject = link.new_inbox()
        self._inbox = Inbox(limits.max_pending_tokens)
        self._listening: Listening | None = None
        self._listening_lock = asyncio.Lock()  # the first two callers must not both subscribe
        self._running: dict[str, set[Arrivals]] = {}  # by the worker's subject
        self._peers = PeerWatch(link, limits.ping_interval_s, self._worker_lost)
        self._servings: list[LinkServing] = []
        link.on_lost(self._inbox.fail_all)

    async def serve(self, subject: str, service: Service) -> Serving:
        serving = LinkServing(self._link, service, self._limits.ping_interval_s)
        self._servings.append(serving)
        await serving.start(subject, self._limits.ack_timeout_s)
        return serving

    async def generate(
        self, subject: str, request: GenerateRequest, sink: Sink | None = None
    ) -> AsyncGenerator[Chunk, None]:
        await self._listen()
        stream, arrivals = self._inbox.open()
        self._running.setdefault(subject, set()).add(arrivals)
        self._peers.add(subject)
        deadline = asyncio.get_running_loop().call_later(
            request.deadline - time.time(), arrivals.fail, DeadlineExceeded("the request's deadline passed")
        )
        ended = False
        try:
            await self._open(subject, stream, request)
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
            self._forget(subject, arrivals)
            if not ended:
                self._link.post(subject, encode(Envelope(Cancel(stream, self._inbox_subject))))

    async def control(self, subject: str, verb: Control, *, timeout_s: float = 5.0) -> bytes:
        reply = await self._link.ask(control_subject(subject), self._fitting(Verb(verb)), timeout_s=timeout_s)
        return _answered(reply)

    def outage(self) -> str | None:
        return self._link.outage()

    async def aclose(self) -> None:
        for serving in self._servings:
            await serving.aclose()
        self._inbox.fail_all(Disconnected("the request plane is closed"))
        await self._peers.aclose()
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
        data = self._fitting(Envelope(Open(stream, self._inbox_subject, request, left_s)))
        try:
            reply = await self._link.ask(subject, data, timeout_s=min(left_s, self._limits.ack_timeout_s))
        except Unreachable as exc:
            if time.time() >= request.deadline:
                raise DeadlineExceeded("the request's deadline passed before a worker took it") from exc
            raise
        _answered(reply)

    def _fitting(self, value: Envelope | Verb) -> bytes:
        data = encode(value)
        limit = self._link.max_message_bytes
        if len(data) > limit:
            raise PayloadTooLarge(f"the request takes {len(data)} bytes and the request plane carries {limit}")
        return data

    def _take(self, data: bytes, reply: str) -> None:
        if data == PING:
            self._link.post(reply, PING)
            return
        try:
            self._inbox.feed(decode(data, Batch))
        except BadFrame as exc:
            # It can't be told whose frames these were: each may lack one now, and goes on elsewhere.
            self._inbox.fail_all(StreamIncomplete(f"a message to {self._inbox_subject} can't be read: {exc.message}"))

    def _forget(self, subject: str, arrivals: Arrivals) -> None:
        self._peers.remove(subject)
        running = self._running[subject]
        running.discard(arrivals)
        if not running:
            del self._running[subject]

    def _worker_lost(self, subject: str, error: DynamoError) -> None:
        ours = isinstance(error, Disconnected)  # our own connection: nothing is known of the worker
        lost = error if ours else Disconnected(f"the worker at {subject} is gone: {error.message}")
        for arrivals in self._running.get(subject, ()):
            arrivals.fail(lost)


def _answered(reply: bytes) -> bytes:
    answer = decode(reply, Answer)
    if answer.failure is not None:
        raise answer.failure.error()
    return answer.data

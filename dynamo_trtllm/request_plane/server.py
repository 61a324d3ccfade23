"""Implement the worker's side of the request plane over any `Transport`: run a service's streams for its callers.

An exception of a service that is not a `DynamoError` is logged here, and the caller gets InternalError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.codec import decode, encode
from dynamo_trtllm.errors import (
    BadFrame,
    DeadlineExceeded,
    Disconnected,
    Draining,
    DynamoError,
    InternalError,
    PayloadTooLarge,
    StreamIncomplete,
    VersionMismatch,
)
from dynamo_trtllm.messages import Chunk, wire_mismatch
from dynamo_trtllm.request_plane.base import Service
from dynamo_trtllm.request_plane.frames import (
    PING,
    Ack,
    Batch,
    CancelStream,
    ClientMessage,
    ControlRequest,
    ErrorPayload,
    Frame,
    FrameBatcher,
    OpenStream,
    Ping,
    StreamReport,
)
from dynamo_trtllm.request_plane.transport import Heartbeat, Subscription, Transport
from dynamo_trtllm.streams import StreamEvent, StreamHandle

logger = logging.getLogger(__name__)

_LONGEST_INBOX = 255
_REPORTS_SINCE = 2  # wire version
_REMEMBERED_OPENINGS = 16_384  # enough to detect repeated messages, which arrive soon after the first


def _check_inbox(inbox: str) -> None:
    """Raise BadFrame for an overlong inbox name, because NATS disconnects a client that publishes to one."""
    if len(inbox) > _LONGEST_INBOX:
        raise BadFrame(f"the inbox name has {len(inbox)} characters; the limit is {_LONGEST_INBOX}")


def control_subject(subject: str) -> str:
    """Return the control subject of the instance with this generate subject."""
    return f"{subject}.control"


class StreamKey(NamedTuple):
    """Identity of a stream: the caller's inbox and the stream's number in it."""

    inbox: str
    stream: int


@dataclass(slots=True, eq=False)
class ServerStream:
    """One stream, until it has ended and holds no KV."""

    key: StreamKey
    deadline: asyncio.TimerHandle | None = None
    handle: StreamHandle | None = None
    number: int = 0  # of the next frame


class EndpointServer:
    """Server of one service at one subject. It serves after `start`."""

    def __init__(self, transport: Transport, service: Service, ping_interval_s: float, tasks: BackgroundTasks) -> None:
        self._transport = transport
        self._service = service
        self._calls: dict[StreamKey, ServerStream] = {}
        self._by_inbox: dict[str, dict[int, ServerStream]] = {}  # the same streams, by inbox
        self._idle = asyncio.Event()  # set while no call runs
        self._idle.set()
        self._held: dict[str, dict[int, ServerStream]] = {}  # by inbox: ended streams that held KV at the last report
        self._outboxes: dict[str, FrameBatcher] = {}
        self._flush_due = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []
        self._callers = Heartbeat(
            transport,
            ping_interval_s,
            message=self._ping_message,
            heard=self._heard_from,
            on_peer_lost=self._caller_lost,
            tasks=tasks,
        )
        self._messages: Counter[str] = Counter()  # received messages by caller, while it gets heartbeats
        # inboxes of callers of wire version 2 or later that have streams
        self._report_readers: set[str] = set()
        self._latest_openings: dict[StreamKey, None] = {}  # keys of the latest requests, including ended ones
        self._subject = ""
        self._accepting = True
        self._is_closed = False
        transport.on_disconnect(self.on_disconnect)

    async def start(self, subject: str, timeout_s: float) -> None:
        """Subscribe to the subject and return once requests of every client arrive. Raise PlaneError on failure."""
        self._subject = subject
        self._subscriptions.append(await self._transport.subscribe(control_subject(subject), self._on_control))
        self._subscriptions.append(await self._transport.subscribe(subject, self._on_message))
        await self._transport.request(subject, PING, timeout_s=timeout_s)  # its reply shows that the subject is routed

    async def stop_accepting(self) -> None:
        self._accepting = False

    async def finished(self) -> None:
        await self._idle.wait()

    @property
    def running(self) -> int:
        return len(self._calls)

    async def aclose(self) -> None:
        self._accepting = False
        self._is_closed = True
        for subscription in self._subscriptions:
            await subscription.stop()
        self._end_all(Draining("the worker is shutting down"))
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # runs the tasks' done callbacks
        self._flush()
        await self._callers.aclose()

    # --- what arrives ----------------------------------------------------------------------------------

    def _on_message(self, data: bytes, reply: str) -> None:
        if data == PING:
            self._transport.publish(reply, PING)
            return
        try:
            body = decode(data, ClientMessage).body
            _check_inbox(body.inbox)
            if body.inbox in self._messages:
                self._messages[body.inbox] += 1
            if isinstance(body, CancelStream):
                self._cancel(StreamKey(body.inbox, body.stream))
                return
            if isinstance(body, Ping):
                self._answer(reply, Ack())
                self._answer_ping(body)
                return
            key = StreamKey(body.inbox, body.stream)
            is_new = key not in self._latest_openings and key not in self._calls
            if is_new and not self._accepting:
                raise Draining("the worker is shutting down and accepts no new requests")
            if mismatch := wire_mismatch(body.wire):
                raise VersionMismatch(mismatch)
        except DynamoError as exc:
            self._answer(reply, Ack(ErrorPayload.of(exc)))
            return
        self._answer(reply, Ack())
        if is_new:  # else the transport repeated the message
            self._open(body)

    def _on_control(self, data: bytes, reply: str) -> None:
        self._own(asyncio.create_task(self._control(data, reply), name="plane-control"))

    async def _control(self, data: bytes, reply: str) -> None:
        answer = Ack(ErrorPayload.of(InternalError("the control verb failed in the worker; see its log")))
        try:
            answer = Ack(data=await self._service.control(decode(data, ControlRequest).verb))
        except DynamoError as exc:
            answer = Ack(ErrorPayload.of(exc))
        finally:
            self._answer(reply, answer)

    def _answer(self, reply: str, answer: Ack) -> None:
        if not reply:
            return
        data = encode(answer)
        if len(data) > self._transport.max_message_bytes:
            error = PayloadTooLarge(f"the reply of {len(data)} bytes exceeds the limit of the request plane")
            data = encode(Ack(ErrorPayload.of(error)))
        self._transport.publish(reply, data)

    # --- liveness --------------------------------------------------------------------------------------

    def _answer_ping(self, ping: Ping) -> None:
        """Send a caller the report of its streams, after all frames sent so far."""
        self._flush()
        report = self._report(ping.inbox, ping.number)
        if report != PING:
            self._transport.publish(ping.inbox, report)

    def _ping_message(self, inbox: str) -> bytes:
        """Return the heartbeat message for a caller: the report of its streams, or PING for wire version 1."""
        if inbox not in self._report_readers:
            self._forget_fetched(inbox)  # as `_report` does
        return self._report(inbox, 0) if inbox in self._report_readers else PING

    def _report(self, inbox: str, ping: int) -> bytes:
        """Return the message that reports a caller's streams, or PING if it is too large for the transport."""
        self._forget_fetched(inbox)
        running = self._by_inbox.get(inbox, {})
        streams = [(stream, call.number) for stream, call in running.items()]
        streams += [(stream, call.number) for stream, call in self._held.get(inbox, {}).items()]
        data = encode(Batch([], StreamReport(self._subject, ping, streams)))
        if len(data) <= self._transport.max_message_bytes:
            return data
        text = "stream report for %s too large (%d streams, %d bytes), lost frames go undetected: raise max_payload"
        logger.warning(text, inbox, len(streams), len(data))
        return PING

    def _heard_from(self, inbox: str) -> int:
        """Return a counter that changes whenever the caller is heard from. New streams count, too."""
        return self._messages[inbox]

    def _watch(self, inbox: str) -> None:
        """Count one more stream of a caller."""
        self._callers.add(inbox)
        self._messages[inbox] += 1

    def _unwatch(self, inbox: str) -> None:
        """Remove one stream of a caller from the count."""
        if self._callers.remove(inbox):
            self._report_readers.discard(inbox)
            del self._messages[inbox]

    # --- streams ---------------------------------------------------------------------------------------

    def _open(self, opening: OpenStream) -> None:
        call = ServerStream(StreamKey(opening.inbox, opening.stream))
        self._abort_held(call.key)
        self._calls[call.key] = call
        self._by_inbox.setdefault(opening.inbox, {})[opening.stream] = call
        self._latest_openings[call.key] = None
        if len(self._latest_openings) > _REMEMBERED_OPENINGS:
            del self._latest_openings[next(iter(self._latest_openings))]
        self._idle.clear()
        self._watch(opening.inbox)
        if opening.wire >= _REPORTS_SINCE:
            self._report_readers.add(opening.inbox)
        request = msgspec.structs.replace(opening.request, deadline=time.time() + opening.left_s)  # by this clock
        call.deadline = asyncio.get_running_loop().call_later(opening.left_s, self._deadline_passed, call)
        try:
            call.handle = self._service.generate(request, partial(self._on_event, call))
        except Exception:
            logger.exception("request %s failed", request.request_id)
            self._end(call, InternalError("the request failed in the worker; see its log"))

    def _on_event(self, call: ServerStream, event: StreamEvent) -> None:
        if not isinstance(event, Chunk):
            self._end(call, event)
            return
        self._send(call, Frame(call.key.stream, call.number, event))
        if event.finish_reason is None:
            return
        self._remove(call)
        if call.handle is not None and call.handle.holds_kv:  # its caller is watched until the KV is fetched
            self._held.setdefault(call.key.inbox, {})[call.key.stream] = call
        else:
            self._unwatch(call.key.inbox)

    def _deadline_passed(self, call: ServerStream) -> None:
        self._end(call, DeadlineExceeded("the request's deadline passed in the worker"))

    def _end(self, call: ServerStream, error: DynamoError) -> None:
        """End a stream with an error for its caller."""
        self._send(call, Frame(call.key.stream, call.number, failure=ErrorPayload.of(error)))
        self._close(call)

    def _close(self, call: ServerStream) -> None:
        """Remove a running stream, and cancel it if it has not ended."""
        self._remove(call)
        self._unwatch(call.key.inbox)
        if call.handle is not None:
            call.handle.cancel()

    def _remove(self, call: ServerStream) -> None:
        del self._calls[call.key]
        if call.deadline is not None:
            call.deadline.cancel()
        others = self._by_inbox[call.key.inbox]
        del others[call.key.stream]
        if not others:
            del self._by_inbox[call.key.inbox]
        if not self._calls:
            self._idle.set()

    def _cancel(self, key: StreamKey) -> None:
        call = self._calls.get(key)
        if call is not None:
            self._close(call)
        else:
            self._abort_held(key)  # a cancel shows that the caller did not receive the terminal chunk

    def _end_all(self, error: DynamoError) -> None:
        for call in list(self._calls.values()):
            self._end(call, error)

    def _caller_lost(self, inbox: str, error: DynamoError) -> None:
        gone = list(self._by_inbox.get(inbox, {}).values())
        self._forget_fetched(inbox)
        held = list(self._held.get(inbox, {}).values())
        if gone or held:
            text = "frontend %s is gone: %d streams cancelled, %d KV transfers aborted (%s)"
            logger.warning(text, inbox, len(gone), len(held), error)
        for call in gone:
            text = f"the worker ended this stream because the frontend did not reply to its heartbeat: {error}"
            self._end(call, StreamIncomplete(text))
        for call in held:
            self._abort_held(call.key)

    def on_disconnect(self, error: DynamoError) -> None:
        """End all streams and abort all pending KV transfers, because frames may be lost."""
        # The caller may never have received the KV transfer parameters; then only their expiry would free the KV. A
        # caller that did receive them must prefill again.
        if self._is_closed:
            return  # the service may be closed too
        self._end_all(Disconnected(f"the worker lost the request plane: {error.message}"))
        for call in [call for held in self._held.values() for call in held.values()]:
            self._abort_held(call.key)

    # --- ended streams that hold KV --------------------------------------------------------------------

    def _forget_fetched(self, inbox: str) -> None:
        """Remove a caller's ended streams that hold no KV any more."""
        for call in [call for call in self._held.get(inbox, {}).values() if call.handle and not call.handle.holds_kv]:
            self._pop_held(call.key)

    def _abort_held(self, key: StreamKey) -> None:
        """Free the KV of an ended stream whose caller can't release it."""
        call = self._pop_held(key)
        if call is not None and call.handle is not None:
            call.handle.cancel()

    def _pop_held(self, key: StreamKey) -> ServerStream | None:
        streams = self._held.get(key.inbox, {})
        call = streams.pop(key.stream, None)
        if call is not None:
            if not streams:
                del self._held[key.inbox]
            self._unwatch(key.inbox)
        return call

    # --- what leaves -----------------------------------------------------------------------------------

    def _send(self, call: ServerStream, frame: Frame) -> None:
        call.number += 1
        outbox = self._outboxes.get(call.key.inbox)
        if outbox is None:
            outbox = self._outboxes[call.key.inbox] = FrameBatcher()
        outbox.put(frame)
        if not self._flush_due:
            # all streams of an engine step send in one event-loop iteration; the next one sends them as one batch
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        outboxes, self._outboxes = self._outboxes, {}
        for inbox, outbox in outboxes.items():
            for message in outbox.take(self._transport.max_message_bytes):
                self._transport.publish(inbox, message)

    # --- tasks -----------------------------------------------------------------------------------------

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

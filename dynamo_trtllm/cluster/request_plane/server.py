"""The worker's side of the request plane: run the calls of a service for its callers.

This module works over any `Transport`. If a service raises an exception that is not a
`DynamoError`, the exception is logged here, and the caller gets InternalError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec

from dynamo_trtllm.cluster.request_plane.frames import (
    PING,
    Ack,
    Batch,
    CancelStream,
    ClientMessage,
    ControlRequest,
    ErrorPayload,
    Frame,
    OpenStream,
    Ping,
    StreamReport,
    encode_frames,
)
from dynamo_trtllm.cluster.request_plane.latest_keys import remember
from dynamo_trtllm.cluster.request_plane.subjects import control_subject
from dynamo_trtllm.cluster.request_plane.transport import Heartbeat, Service, Transport, Unsubscribe
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol import errors, former_names
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    LoadReport,
    decode,
    encode,
    wire_mismatch,
)
from dynamo_trtllm.protocol.streams import StreamEvent, StreamHandle
from dynamo_trtllm.support.background import BackgroundTasks

log = logging.getLogger(__name__)

# Most characters of an inbox name. NATS disconnects a client that publishes to a much longer name.
_MAX_INBOX_CHARS = 255
_LOAD_EVERY_S = 0.05  # shortest time between two reports of the load to a caller
# A flush waits until earlier messages are written, but at most for this many iterations of the
# event loop. A transport that takes longer is stuck, or has much to write.
_MAX_WAITED_ITERATIONS = 4


def _ignore(_error: errors.BadFrame) -> None: ...


def _with_former_name(last: Chunk) -> Chunk:
    """Return the last chunk of a stream as callers with the previous wire version expect it."""
    if last.finish_reason is not FinishReason.KV_TRANSFER:
        return last
    # The enum has no member for the former name. The cast is safe, because the value is only
    # encoded.
    former = cast("FinishReason", former_names.FORMER_KV_TRANSFER)
    return msgspec.structs.replace(last, finish_reason=former)


@dataclass(slots=True, eq=False)
class _Caller:
    """A caller with streams that run or hold KV."""

    inbox: str
    wire: int  # wire version of the caller
    latest_message: int  # number of the latest message from this caller
    streams: dict[int, ServerStream] = field(default_factory=dict)  # the open streams, by number
    frames: list[Frame] = field(default_factory=list)  # the frames of the next flush


@dataclass(slots=True, eq=False)
class ServerStream:
    """One stream. An ended stream stays listed while it holds KV."""

    caller: _Caller
    number: int
    num_sent: int = 0  # number of frames that were sent
    has_ended: bool = False
    deadline_timer: asyncio.TimerHandle = field(init=False)
    # `generate` returns the handle before it passes on the first event.
    handle: StreamHandle = field(init=False)


@dataclass(eq=False)
class PlaneServer:
    """The server of one service at one subject. It serves after `start`.

    `load` returns the load that the server reports to its callers. `on_unreadable` is called for
    each message that can't be read.
    """

    transport: Transport
    service: Service
    ping_interval_s: float
    tasks: BackgroundTasks
    load: Callable[[], LoadReport] | None = None
    on_unreadable: Callable[[errors.BadFrame], None] = _ignore

    def __post_init__(self) -> None:
        self._callers: dict[str, _Caller] = {}  # the callers, by inbox
        self._num_messages = 0  # number of messages that were received, over all callers
        self.num_running = 0  # number of streams that have not ended
        self._idle = asyncio.Event()  # set while no stream runs
        self._idle.set()
        self._unsent: list[_Caller] = []  # callers with frames for the next flush
        self._control_tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Unsubscribe] = []
        self._heartbeat = Heartbeat(
            transport=self.transport,
            interval_s=self.ping_interval_s,
            peers=self._callers.keys,
            message=self._heartbeat_message,
            heard=self._latest_message,
            on_peer_lost=self._caller_lost,
            tasks=self.tasks,
        )
        # The inboxes that got the load less than _LOAD_EVERY_S ago. True: a message without the
        # load has followed.
        self._load_was_withheld: dict[str, bool] = {}
        # The latest openings of streams, by inbox and number. Some of these streams have ended.
        self._latest_openings: dict[tuple[str, int], None] = {}
        self._subject = ""
        # False: new requests get `Draining`. Running streams and control verbs continue.
        self.is_accepting = True
        self.failure = ""  # why the worker has failed, or "" if it has not failed
        self._is_closed = False
        self.transport.on_disconnect(self.on_disconnect)

    async def start(self, subject: str, timeout_s: float) -> None:
        """Subscribe to the subject, and return once requests of every client arrive.

        Raises:
            PlaneError: the transport can't subscribe.
        """
        self._subject = subject
        subscribe = self.transport.subscribe
        self._subscriptions.append(await subscribe(control_subject(subject), self._on_control))
        self._subscriptions.append(await subscribe(subject, self._on_message))
        await self.transport.until_subscribed(timeout_s)
        self._heartbeat.start()

    async def until_finished(self) -> None:
        """Wait until no stream runs."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """Stop serving, and end running streams. Idempotent.

        The callers get EngineFailed if the worker has failed, and otherwise Draining.
        """
        self.is_accepting = False
        self._is_closed = True
        for unsubscribe in self._subscriptions:
            await unsubscribe()
        for stream in self._streams():
            if not stream.has_ended:
                self._end_with_error(stream, self._worker_ended_error())
        while self._control_tasks:
            await asyncio.gather(*self._control_tasks, return_exceptions=True)
            await asyncio.sleep(0)  # lets the done callbacks remove the tasks
        self._flush()
        await self._heartbeat.aclose()

    # --- what arrives -----------------------------------------------------------------------------

    def _on_message(self, data: bytes, reply: str) -> None:
        """Handle a message to the subject: the opening of a stream, a cancel, or a ping."""
        if data == PING:
            self.transport.publish(reply, PING)
            return
        try:
            body = decode(data, ClientMessage).body
            num_chars = len(body.inbox)
            if num_chars > _MAX_INBOX_CHARS:
                raise errors.BadFrame(
                    f"the inbox name has {num_chars} characters; the limit is {_MAX_INBOX_CHARS}"
                )
            self._num_messages += 1
            caller = self._callers.get(body.inbox)
            if caller is not None:
                caller.latest_message = self._num_messages
            if isinstance(body, CancelStream):
                stream = None if caller is None else caller.streams.get(body.stream)
                if stream is not None:
                    self._on_cancel(stream, awaits_kv=body.awaits_kv)
                return
            if isinstance(body, Ping):
                self._answer(reply, Ack())
                self._flush()  # the report must come after the frames that it counts
                report = self._report(body.inbox, ping=body.number)
                if report is not None:
                    self.transport.publish(body.inbox, report)
                return
            # The transport may repeat the opening of a stream. The latest openings have the streams
            # that have ended since, and the open streams have those that were opened long ago.
            is_open = caller is not None and body.stream in caller.streams
            was_opened = (body.inbox, body.stream) in self._latest_openings
            is_new = not is_open and not was_opened
            if is_new and not self.is_accepting:
                raise errors.Draining("the worker is shutting down and accepts no new requests")
            mismatch = wire_mismatch(body.wire)
            if mismatch:
                raise errors.VersionMismatch(mismatch)
        except DynamoError as exc:
            if isinstance(exc, errors.BadFrame):
                self.on_unreadable(exc)
            self._answer(reply, Ack(ErrorPayload.of(exc)))
            return
        self._answer(reply, Ack())
        if is_new:
            self._open(body)

    def _worker_ended_error(self) -> DynamoError:
        """Return the error with which streams end that still run when the worker ends."""
        if self.failure:
            return errors.EngineFailed(f"the worker failed: {self.failure}")
        return errors.Draining("the worker is shutting down")

    def _on_control(self, data: bytes, reply: str) -> None:
        task = asyncio.create_task(self._control(data, reply), name="plane-control")
        self._control_tasks.add(task)
        task.add_done_callback(self._control_tasks.discard)

    async def _control(self, data: bytes, reply: str) -> None:
        """Run a control verb, and send the reply."""
        try:
            verb = decode(data, ControlRequest).verb
        except errors.BadFrame as exc:
            self.on_unreadable(exc)
            self._answer(reply, Ack(ErrorPayload.of(exc)))
            return
        try:
            answer = Ack(data=await self.service.control(verb))
        except DynamoError as exc:
            answer = Ack(ErrorPayload.of(exc))
        except Exception:
            # A bug of the worker. It is logged, and the caller gets InternalError.
            log.exception("control verb failed")
            error = errors.InternalError("the control verb failed in the worker; see its log")
            answer = Ack(ErrorPayload.of(error))
        self._answer(reply, answer)

    def _answer(self, reply: str, answer: Ack) -> None:
        if not reply:
            return
        data = encode(answer)
        if len(data) > self.transport.max_message_bytes:
            error = errors.PayloadTooLarge(
                f"the reply of {len(data)} bytes exceeds the limit of the request plane"
            )
            data = encode(Ack(ErrorPayload.of(error)))
        self.transport.publish(reply, data)

    # --- liveness ---------------------------------------------------------------------------------

    def _heartbeat_message(self, inbox: str) -> bytes:
        report = self._report(inbox, ping=0)
        # A message without a report also shows that this worker lives, and asks for a reply.
        return PING if report is None else report

    def _latest_message(self, inbox: str) -> int:
        """Return the number of the latest message from a caller, or 0 if the caller has no streams.

        The heartbeat compares two values to see whether a message came in between. This also works
        if the caller ends its last stream and opens a new one: the messages of all callers are
        numbered together, so the new message has a new number.
        """
        caller = self._callers.get(inbox)
        return 0 if caller is None else caller.latest_message

    def _report(self, inbox: str, *, ping: int) -> bytes | None:
        """Return the message that reports a caller's streams, or None if it is too large to send.

        `ping` is the number of the ping that the message answers. 0: it is a heartbeat.
        """
        streams: list[tuple[int, int]] = []
        caller = self._callers.get(inbox)
        if caller is not None:
            self._forget_fetched(caller)
            streams = [(stream.number, stream.num_sent) for stream in caller.streams.values()]
        data = encode(Batch([], StreamReport(self._subject, ping, streams)))
        if len(data) <= self.transport.max_message_bytes:
            return data
        text = (
            "stream report for %s too large (%d streams, %d bytes), lost frames go undetected:"
            " raise max_payload"
        )
        log.warning(text, inbox, len(streams), len(data))
        return None

    # --- streams ----------------------------------------------------------------------------------

    def _open(self, opening: OpenStream) -> None:
        """Start a stream."""
        caller = self._callers.setdefault(
            opening.inbox, _Caller(opening.inbox, opening.wire, self._num_messages)
        )
        stream = ServerStream(caller, opening.stream)
        caller.streams[opening.stream] = stream
        remember(self._latest_openings, (opening.inbox, opening.stream), None)
        self.num_running += 1
        self._idle.clear()
        # The clocks of the caller and of this machine may differ, so the deadline is computed here
        # from the remaining time.
        request = msgspec.structs.replace(opening.request, deadline=time.time() + opening.left_s)
        stream.deadline_timer = asyncio.get_running_loop().call_later(
            opening.left_s, self._on_deadline, stream
        )
        try:
            stream.handle = self.service.generate(request, partial(self._on_event, stream))
        except Exception:
            # A bug of the worker. It is logged, and the caller gets InternalError.
            log.exception("request %s failed", request.request_id)
            error = errors.InternalError("the request failed in the worker; see its log")
            self._send_error(stream, error)
            self._remove(stream)

    def _on_event(self, stream: ServerStream, event: StreamEvent) -> None:
        """Send an event of a stream to its caller."""
        if not isinstance(event, Chunk):
            self._end_with_error(stream, event)
            return
        ids = event.token_ids
        content: Chunk | int = event
        is_only_a_token = len(ids) == 1 and event.is_plain and not event.logprobs
        if is_only_a_token:
            content = ids[0]
        elif event.finish_reason is not None and stream.caller.wire <= former_names.LAST_VERSION:
            content = _with_former_name(event)
        self._send(stream, Frame(stream.number, stream.num_sent, content))
        if event.finish_reason is None:
            return
        # While the ended stream holds KV, it stays listed. So the heartbeat still watches its
        # caller, and the KV is freed if the caller is lost.
        if stream.handle.holds_kv:
            self._mark_ended(stream)
        else:
            self._remove(stream)

    def _on_deadline(self, stream: ServerStream) -> None:
        self._end_with_error(stream, errors.DeadlineExceeded.while_generating())

    def _streams(self) -> list[ServerStream]:
        return [stream for caller in self._callers.values() for stream in caller.streams.values()]

    def _end_with_error(self, stream: ServerStream, error: DynamoError) -> None:
        """End a stream with an error for its caller.

        If the stream has already ended, no error is sent. Only the KV of the stream is freed,
        because its caller can no longer release the KV.
        """
        if not stream.has_ended:
            self._send_error(stream, error)
        self._remove_and_cancel(stream)

    def _on_cancel(self, stream: ServerStream, *, awaits_kv: bool) -> None:
        """Handle a cancel.

        With `awaits_kv`, the caller still reads the last frame, which may offer KV.
        """
        if awaits_kv:
            if stream.has_ended:
                return  # the last frame was sent, and the stream stays listed while it holds KV
            # `stop` returns whether the stream will still end with a chunk.
            if stream.handle.stop():
                return  # the stream is removed after this chunk, or when its caller is lost
        # If the stream has ended, the cancel means that its caller did not receive the last frame.
        # So the caller can't fetch the KV, which is freed here.
        self._remove_and_cancel(stream)

    def _remove_and_cancel(self, stream: ServerStream) -> None:
        """Remove a stream, and cancel it or free its KV."""
        self._remove(stream)
        stream.handle.cancel()

    def _remove(self, stream: ServerStream) -> None:
        if not stream.has_ended:
            self._mark_ended(stream)
        caller = stream.caller
        del caller.streams[stream.number]
        if not caller.streams:
            del self._callers[caller.inbox]

    def _mark_ended(self, stream: ServerStream) -> None:
        stream.has_ended = True
        stream.deadline_timer.cancel()
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()

    def _forget_fetched(self, caller: _Caller) -> None:
        """Remove a caller's ended streams that hold no KV any more."""
        for stream in list(caller.streams.values()):
            if stream.has_ended and not stream.handle.holds_kv:
                self._remove(stream)

    def _caller_lost(self, inbox: str, error: DynamoError) -> None:
        """End the streams of a caller that has not replied to the heartbeat, and free their KV."""
        caller = self._callers.get(inbox)
        if caller is None:
            return
        self._forget_fetched(caller)
        streams = list(caller.streams.values())
        if streams:
            num_held = sum(1 for stream in streams if stream.has_ended)
            RECORDER.record_process(RecordedEvent.PEER_LOST, error.code)
            text = "frontend %s is gone: %s cancelled, %s aborted (%s)"
            cancelled = counted(len(streams) - num_held, "stream")
            log.warning(text, inbox, cancelled, counted(num_held, "KV transfer"), error)
        reason = (
            "the worker ended this stream because the frontend did not reply to its heartbeat:"
            f" {error}"
        )
        for stream in streams:
            self._end_with_error(stream, errors.StreamIncomplete(reason))

    def on_disconnect(self, error: DynamoError) -> None:
        """End all streams and abort all pending KV transfers, because frames may be lost."""
        if self._is_closed:
            return  # `aclose` has ended the streams, and the service may be closed, too
        reason = f"the worker lost the request plane: {error.message}"
        # A caller may not have received the KV transfer parameters. Then it would never release the
        # KV, which would be held until it expires. So all KV is freed now, and callers that have
        # received the parameters must prefill again.
        for stream in self._streams():
            self._end_with_error(stream, errors.Disconnected(reason))

    # --- what leaves ------------------------------------------------------------------------------

    def _send_error(self, stream: ServerStream, error: DynamoError) -> None:
        failure = ErrorPayload.of(error, stream.caller.wire)
        self._send(stream, Frame(stream.number, stream.num_sent, failure=failure))

    def _send(self, stream: ServerStream, frame: Frame) -> None:
        stream.num_sent += 1
        caller = stream.caller
        if not caller.frames:
            if not self._unsent:
                # All streams of an engine step send their frames in one iteration of the event
                # loop. The next iteration sends these frames as one batch.
                asyncio.get_running_loop().call_soon(
                    self._flush_when_written, _MAX_WAITED_ITERATIONS
                )
            self._unsent.append(caller)
        caller.frames.append(frame)

    def _flush_when_written(self, max_iterations: int) -> None:
        """Flush when the earlier messages are written, or after `max_iterations` iterations.

        Without this wait, each engine step would send a message. Fast steps would send more
        messages than the worker, the NATS server and the frontend can handle.
        """
        if max_iterations > 0 and self.transport.is_writing:
            asyncio.get_running_loop().call_soon(self._flush_when_written, max_iterations - 1)
        else:
            self._flush()

    def _flush(self) -> None:
        """Send the frames that wait, as one batch for each caller."""
        unsent = self._unsent
        self._unsent = []
        for caller in unsent:
            frames = caller.frames
            caller.frames = []
            load = self._load_for(caller.inbox)
            for message in encode_frames(frames, self.transport.max_message_bytes, load):
                self.transport.publish(caller.inbox, message)

    def _load_for(self, inbox: str) -> LoadReport | None:
        """Return the load for the next message to a caller.

        None: the caller got the load less than _LOAD_EVERY_S ago, or the load can't be read.

        If no message with the load follows, a separate message reports the load later. Otherwise
        the caller would still take a worker for busy that has become idle.
        """
        if inbox in self._load_was_withheld:
            self._load_was_withheld[inbox] = True
        elif self.load is not None:
            self._load_was_withheld[inbox] = False
            asyncio.get_running_loop().call_later(_LOAD_EVERY_S, self._load_time_over, inbox)
            try:
                return self.load()
            except Exception:
                # A bug of the worker. It is logged, and the frames are sent without the load.
                log.exception("the load of this worker can't be read")
        return None

    def _load_time_over(self, inbox: str) -> None:
        was_withheld = self._load_was_withheld.pop(inbox)
        if was_withheld:
            # The next message to this caller has the load again. Wait a while for such a message,
            # because it makes the separate one unnecessary.
            asyncio.get_running_loop().call_later(_LOAD_EVERY_S, self._report_load_alone, inbox)

    def _report_load_alone(self, inbox: str) -> None:
        has_got_load = inbox in self._load_was_withheld
        if not has_got_load and not self._is_closed:
            self.transport.publish(inbox, encode(Batch([], None, self._load_for(inbox))))

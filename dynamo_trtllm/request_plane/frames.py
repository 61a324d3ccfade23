"""Define the messages of the request plane, encode batches of frames, and pass received frames to their streams.

The module does no I/O and reads no clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec

from dynamo_trtllm import errors
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.messages import Chunk, Control, GenerateRequest, LoadReport, TokenId, decode, encode, token_ids
from dynamo_trtllm.streams import TOKEN_CHUNKS, OnEvent, StreamEvent, TaskStream

CHUNKS_PER_ITERATION = 1024  # 5 to 10 ms of work in a frontend
MERGED_FRAMES = 64  # at least so many must arrive together; fewer are passed on in half a millisecond
MERGED_PER_STREAM = 4  # the same per open stream; fewer also arrive together if this process was briefly busy


class ErrorPayload(msgspec.Struct, frozen=True, array_like=True):
    """An error as it is sent. The receiver raises the same class."""

    code: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: DynamoError) -> ErrorPayload:
        """Return the payload of an error."""
        return cls(error.code, error.message, error.field)

    def error(self) -> DynamoError:
        """Return the error as an exception."""
        return errors.from_code(self.code, self.message, self.field)


class OpenStream(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Request a stream. Its frames go to `inbox`; `stream` is unique among the streams of this inbox."""

    stream: int
    inbox: str
    request: GenerateRequest
    left_s: float  # seconds from sending to the request's deadline: clocks of two machines may differ
    wire: int = 1  # the caller's WIRE_VERSION


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Ask a worker to send a `StreamReport` to `inbox`, after all earlier frames."""

    inbox: str
    number: int  # counts from 1; the report repeats it


class CancelStream(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel a stream. An unknown stream is not an error."""

    stream: int
    inbox: str


class ClientMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message to a generate subject. All kinds share it, so that a cancel or ping can't overtake an opening."""

    body: OpenStream | CancelStream | Ping


class ControlRequest(msgspec.Struct, frozen=True, array_like=True):
    """A message to a control subject."""

    verb: Control


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """Reply to a control verb or, without data, to an `OpenStream` or `Ping`."""

    failure: ErrorPayload | None = None
    data: bytes = b""


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chunk of one stream, or the error that ends it. `number` counts from 0 without gaps.

    A chunk of one token and nothing else, as nearly all are, is sent as the id of its token.
    """

    stream: int
    number: int
    chunk: Chunk | TokenId | None = None
    failure: ErrorPayload | None = None


class StreamReport(msgspec.Struct, frozen=True, array_like=True):
    """List of the streams that the worker at `subject` runs for the receiver, with the number of frames sent.

    A reply to a ping arrives after the frames that it counts. A report with ping 0, the worker's own heartbeat, may
    overtake frames.
    """

    subject: str
    ping: int  # the `number` of the ping, or 0
    streams: list[tuple[int, int]]  # (stream, frames sent)


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message to an inbox. An older receiver skips the load."""

    frames: list[Frame]
    report: StreamReport | None = None
    load: LoadReport | None = None  # of the sender


class _FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a frame, which every wire version can read."""

    stream: int
    number: int


_NIL = msgspec.Raw(b"\xc0")
_MOST_BAD_FRAMES = 4096  # in one message, because each takes 10 microseconds; more than a frontend's streams


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    frames: list[msgspec.Raw]
    report: msgspec.Raw = _NIL


PING = b""  # the receiver replies with the same bytes


def read_batch(data: bytes) -> Batch:
    """Decode a batch. An unreadable frame fails only its own stream, and the batch has no load then.

    Raises:
        BadFrame: the message can't be split into frames, or more than _MOST_BAD_FRAMES frames are unreadable.
    """
    try:
        return decode(data, Batch)
    except errors.BadFrame:
        raw = decode(data, _RawBatch)
    frames: list[Frame] = []
    bad = 0
    for each in raw.frames:
        frame = _read_frame(each)
        bad += frame is None or frame.failure is not None
        if bad > _MOST_BAD_FRAMES:
            raise errors.BadFrame(f"more than {_MOST_BAD_FRAMES} of {len(raw.frames)} frames are unreadable")
        if frame is not None:
            frames.append(frame)
    try:
        return Batch(frames, decode(raw.report, StreamReport) if raw.report != _NIL else None)
    except errors.BadFrame:
        return Batch(frames)


def _read_frame(data: msgspec.Raw) -> Frame | None:
    """Return the frame, or a failure for its stream, or None if the stream number is unreadable too."""
    try:
        return decode(data, Frame)
    except errors.BadFrame as exc:
        reason = exc.message
    try:
        header = decode(data, _FrameHeader)
    except errors.BadFrame:
        return None
    text = f"unreadable frame ({reason}); check that the worker runs a compatible version"
    return Frame(header.stream, header.number, failure=ErrorPayload.of(errors.StreamIncomplete(text)))


def encode_frames(frames: list[Frame], max_message_bytes: int, load: LoadReport | None = None) -> list[bytes]:
    """Return the frames for one inbox, in order, as encoded messages. Usually it is one message, with the load."""
    try:
        data = encode(Batch(frames, None, load))
    except (TypeError, ValueError, OverflowError) as exc:  # an engine's chunk has a value that can't be encoded
        error: DynamoError = errors.InternalError(f"a chunk can't be encoded: {exc}")
    else:
        if len(data) <= max_message_bytes:
            return [data]
        error = errors.PayloadTooLarge(
            f"a chunk has {len(data)} bytes; the limit of the request plane is {max_message_bytes}: raise max_payload "
            "of the NATS server"
        )
    if len(frames) == 1:
        return [encode(Batch([Frame(frames[0].stream, frames[0].number, failure=ErrorPayload.of(error))]))]
    half = len(frames) // 2
    return encode_frames(frames[:half], max_message_bytes) + encode_frames(frames[half:], max_message_bytes)


def _nothing() -> None: ...


class StreamReceiver(TaskStream):
    """The caller's side of one stream: checks frame numbers and passes the chunks on as events.

    Args:
        on_event: receives the events.
        tasks: running tasks of the owner; the task that opens the stream is one.
        on_end: called once.
        send_cancel: tells the worker that this caller did not receive the terminal chunk.
    """

    __slots__ = ("_next_number", "_on_end", "_send_cancel", "last_ping_before_ack", "waiting")

    def __init__(
        self,
        on_event: OnEvent,
        tasks: set[asyncio.Task[None]],
        on_end: Callable[[], None],
        send_cancel: Callable[[], None],
    ) -> None:
        super().__init__(on_event, tasks)
        self._on_end = on_end
        self._send_cancel = send_cancel
        self._next_number = 0
        # number of the last ping, to any worker, that was sent before the worker acknowledged the stream
        self.last_ping_before_ack: int | None = None
        self.waiting: list[Frame] = []  # received, not yet fed

    @property
    def received(self) -> int:
        """Return the number of frames received, including waiting ones."""
        return self._next_number + len(self.waiting)

    def catch_up(self) -> int:
        """Feed the waiting frames, with consecutive frames that have only tokens merged. Return the number fed."""
        frames, self.waiting = self.waiting, []
        count, run = 0, list[Chunk]()
        for frame in frames:
            chunk = TOKEN_CHUNKS[frame.chunk] if isinstance(frame.chunk, int) else frame.chunk
            if chunk is not None and chunk.is_plain and frame.number == self._next_number + len(run):
                run.append(chunk)
                continue
            count += 1 + self._feed_merged(run)
            run = []
            self.feed(frame)
        return count + self._feed_merged(run)

    def _feed_merged(self, chunks: Sequence[Chunk]) -> int:
        if not chunks:
            return 0
        self._next_number += len(chunks) - 1
        self.feed(Frame(0, self._next_number, chunks[0] if len(chunks) == 1 else _merged(chunks)))
        return 1

    def feed(self, frame: Frame) -> None:
        """Check a frame and pass its chunk on. Ignore repeated frames and frames after the end."""
        chunk, number = frame.chunk, frame.number
        if self._on_event is None or number < self._next_number:
            return
        if number > self._next_number:
            self.emit(errors.StreamIncomplete(f"frame {number} arrived instead of frame {self._next_number}"))
        elif frame.failure is None and chunk is not None:
            self._next_number = number + 1
            if isinstance(chunk, int):
                self._on_event(TOKEN_CHUNKS[chunk])
            elif chunk.finish_reason is None:  # `emit` would do the same, one call later
                self._on_event(chunk)
            else:
                self.emit(chunk)
        elif frame.failure is not None:
            self.emit(frame.failure.error())
        else:
            self.emit(errors.StreamIncomplete(f"frame {frame.number} is empty"))

    def compare_with_worker(self, ping: int, sent: int | None) -> None:
        """End with StreamIncomplete if the worker's reply to a ping shows that frames were lost.

        Args:
            ping: number of the ping.
            sent: number of frames that the worker has sent. None: it does not run the stream, or it has sent the last
                frame.
        """
        if self.last_ping_before_ack is None or self.last_ping_before_ack >= ping:
            return  # the worker may have replied before it received the OpenStream
        self.catch_up()
        if sent is None:
            self.fail(errors.StreamIncomplete("the worker no longer runs this stream and its last frame never arrived"))
        elif sent != self._next_number:
            self.fail(errors.StreamIncomplete(f"the worker sent {sent} frames and {self._next_number} arrived"))

    def fail(self, error: DynamoError) -> None:
        """End the stream with a copy of `error`, after the frames that were received."""
        self.catch_up()
        # A copy: several streams may share the error, whose traceback would reference the frames of each.
        self.emit(type(error)(error.message, field=error.field))

    def _close(self, last: StreamEvent | None) -> None:
        super()._close(last)
        on_end, self._on_end = self._on_end, _nothing  # it refers to this stream's timer: a cycle
        on_end()
        if not isinstance(last, Chunk):
            self._send_cancel()

    def _shutdown_error(self) -> DynamoError:
        return errors.Disconnected("the request plane is closed")

    def cancel(self) -> None:
        """See `StreamHandle.cancel`."""
        if self.has_ended and self._transfer_id:
            self._transfer_id = ""
            self._send_cancel()
        super().cancel()


def _merged(chunks: Sequence[Chunk]) -> Chunk:
    ids = token_ids()
    for chunk in chunks:
        ids.extend(chunk.token_ids)
    return Chunk(token_ids=ids, logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)))


class StreamDemux(dict[int, StreamReceiver]):
    """The open streams of one caller, by number. It passes received frames to them.

    When several frames per stream have arrived together, and many in all, the tokens of each stream become one chunk.
    No token is later, because all would be sent in one write anyway. In one iteration of the event loop, at most
    CHUNKS_PER_ITERATION chunks are passed, and further frames wait. Waiting streams are fed one by one, in the order in
    which they began to wait. The first frame of a stream never waits, because it decides the time to first token.
    """

    def __init__(self) -> None:
        self._messages: deque[list[Frame]] = deque()  # of those that arrived together, not passed on yet
        self._backlog: deque[StreamReceiver] = deque()  # streams with waiting frames, each once
        self._chunks_left = CHUNKS_PER_ITERATION
        self._is_scheduled = False

    def add(self, frames: list[Frame]) -> None:
        """Take the frames of one message, until `pass_on`."""
        self._messages.append(frames)

    def pass_on(self) -> None:
        """Pass the frames of the added messages to their streams. Called when no further message has arrived."""
        messages = self._messages
        is_behind = sum(map(len, messages)) >= max(MERGED_FRAMES, MERGED_PER_STREAM * len(self))
        try:
            while messages:
                frames = messages.popleft()
                if is_behind:
                    self._defer(frames)
                else:
                    self.feed(frames)
        finally:
            if messages:  # a bug in one stream's receiver must not lose other streams' messages
                asyncio.get_running_loop().call_soon(self.pass_on)
            if self._backlog and not self._is_scheduled:
                self._run_once()

    def feed(self, frames: list[Frame]) -> None:
        """Pass the frames of one message to their streams, now or in the next iterations of the event loop."""
        if self._is_scheduled:
            self._defer(frames)
            return
        left, self._chunks_left = self._chunks_left, self._chunks_left - len(frames)
        for frame in frames if self._chunks_left >= 0 else frames[:left]:
            receiver = self.get(frame.stream)
            if receiver is not None:
                receiver.feed(frame)
        if self._chunks_left <= 0:  # the limit counts from the last `_run_once`, even over several iterations
            self._defer(frames[left:])
            self._schedule()

    def _defer(self, frames: list[Frame]) -> None:
        for frame in frames:
            receiver = self.get(frame.stream)
            if receiver is None:
                continue
            waiting = receiver.waiting
            if not waiting:
                if frame.number == 0:
                    receiver.feed(frame)
                    continue
                self._backlog.append(receiver)
            waiting.append(frame)

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._run_once)

    def _run_once(self) -> None:
        backlog, self._chunks_left = self._backlog, CHUNKS_PER_ITERATION
        try:
            while backlog and self._chunks_left > 0:
                self._chunks_left -= backlog.popleft().catch_up()
        finally:  # a bug in one stream's receiver must not stop all streams
            self._is_scheduled = False
            if backlog or self._chunks_left <= 0:
                self._schedule()

    def fail_all(self, error: DynamoError) -> None:
        """End all streams with `error`."""
        self.pass_on()
        for receiver in list(self.values()):
            receiver.fail(error)

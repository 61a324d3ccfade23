"""Define the messages of the request plane, and batch, split and buffer the frames of its streams.

`FrameBatcher` collects the frames that go to one caller. `StreamDemux` passes received frames to the buffers of their
streams. The module does no I/O and reads no clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from dynamo_trtllm.codec import decode, encode
from dynamo_trtllm.errors import (
    BadFrame,
    DynamoError,
    InternalError,
    Overloaded,
    PayloadTooLarge,
    StreamIncomplete,
    from_code,
)
from dynamo_trtllm.messages import Chunk, Control, GenerateRequest, token_ids
from dynamo_trtllm.request_plane.base import Sink


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
        return from_code(self.code, self.message, self.field)


class OpenStream(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Request a stream. Its frames go to `inbox`; `stream` is unique among the streams of this inbox."""

    stream: int
    inbox: str
    request: GenerateRequest
    left_s: float  # seconds from sending to the request's deadline: clocks of two machines may differ
    wire: int = 1  # the caller's WIRE_VERSION; a caller of version 1 does not send it


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
    """One chunk of one stream, or the error that ends it. `number` counts from 0 without gaps."""

    stream: int
    number: int
    chunk: Chunk | None = None
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
    """One message to an inbox. A receiver of wire version 1 skips the report."""

    frames: list[Frame]
    report: StreamReport | None = None


class _FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a frame, which every wire version can read."""

    stream: int
    number: int


_NIL = msgspec.Raw(b"\xc0")
_MOST_BAD_FRAMES = 4096  # in one message, because each takes 10 microseconds; more than a frontend's streams


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    frames: list[msgspec.Raw]
    report: msgspec.Raw = _NIL


PING = b""  # the receiver replies with the same bytes; the only ping of wire version 1


def read_batch(data: bytes) -> Batch:
    """Decode a batch. An unreadable frame fails only its own stream.

    Raises:
        BadFrame: the message can't be split into frames, or more than _MOST_BAD_FRAMES frames are unreadable.
    """
    try:
        return decode(data, Batch)
    except BadFrame:
        raw = decode(data, _RawBatch)
    frames: list[Frame] = []
    bad = 0
    for each in raw.frames:
        frame = _read_frame(each)
        bad += frame is None or frame.failure is not None
        if bad > _MOST_BAD_FRAMES:
            raise BadFrame(f"more than {_MOST_BAD_FRAMES} of {len(raw.frames)} frames are unreadable")
        if frame is not None:
            frames.append(frame)
    try:
        return Batch(frames, decode(raw.report, StreamReport) if raw.report != _NIL else None)
    except BadFrame:
        return Batch(frames)


def _read_frame(data: msgspec.Raw) -> Frame | None:
    """Return the frame, or a failure for its stream, or None if the stream number is unreadable too."""
    try:
        return decode(data, Frame)
    except BadFrame as exc:
        reason = exc.message
    try:
        header = decode(data, _FrameHeader)
    except BadFrame:
        return None
    unreadable = StreamIncomplete(f"unreadable frame ({reason}); check that the worker runs a compatible version")
    return Frame(header.stream, header.number, failure=ErrorPayload.of(unreadable))


class FrameBatcher:
    """The frames for one inbox that wait for the next flush."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: list[Frame] = []

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)

    def take(self, max_message_bytes: int) -> list[bytes]:
        """Remove the waiting frames and return them, in order, as encoded messages. Usually it is one message."""
        frames, self._frames = self._frames, []
        return _messages(frames, max_message_bytes) if frames else []


def _messages(frames: list[Frame], max_bytes: int) -> list[bytes]:
    try:
        data = encode(Batch(frames))
    except (TypeError, ValueError, OverflowError) as exc:  # an engine's chunk has a value that can't be encoded
        error: DynamoError = InternalError(f"a chunk can't be encoded: {exc}")
    else:
        if len(data) <= max_bytes:
            return [data]
        error = PayloadTooLarge(
            f"a chunk has {len(data)} bytes; the limit of the request plane is {max_bytes}: raise max_payload of the "
            "NATS server"
        )
    if len(frames) == 1:
        return [encode(Batch([Frame(frames[0].stream, frames[0].number, failure=ErrorPayload.of(error))]))]
    half = len(frames) // 2
    return _messages(frames[:half], max_bytes) + _messages(frames[half:], max_bytes)


@dataclass(slots=True, eq=False)
class StreamBuffer:
    """The receive buffer of one stream. It checks frame numbers and stores chunks until they are read."""

    max_pending_tokens: int
    # number of the last ping, to any worker, that was sent before the worker acknowledged the stream
    last_ping_before_ack: int | None = None
    _chunks: deque[Chunk] = field(default_factory=deque)
    _pending_tokens: int = 0
    _next_number: int = 0
    _ended: bool = False  # the terminal chunk is in `_chunks` or was read
    _error: Exception | None = None
    _sink: Sink | None = None  # set while its reader waits and `_chunks` is empty
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[Frame] = field(default_factory=list)  # received, not yet fed

    @property
    def received(self) -> int:
        """Return the number of frames received, including waiting ones."""
        return self._next_number + len(self.waiting)

    def catch_up(self) -> int:
        """Feed the waiting frames, with consecutive frames that have only tokens merged. Return the number fed."""
        frames, self.waiting = self.waiting, []
        count, run = 0, list[Chunk]()
        for frame in frames:
            if (chunk := _only_tokens(frame)) is not None and frame.number == self._next_number + len(run):
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
        """Check a frame; pass its chunk to the sink or store it. Ignore repeated frames and frames after the end."""
        if self._ended or self._error is not None or frame.number < self._next_number:
            return
        if frame.number > self._next_number:
            self._end(StreamIncomplete(f"frame {frame.number} arrived instead of frame {self._next_number}"))
        elif frame.failure is not None:
            self._end(frame.failure.error())
        elif frame.chunk is None:
            self._end(StreamIncomplete(f"frame {frame.number} is empty"))
        else:
            self._next_number += 1
            try:
                is_consumed = self._sink is not None and frame.chunk.finish_reason is None and self._sink(frame.chunk)
            except Exception as exc:  # noqa: BLE001 - `get` raises it; frames of other streams follow in this message
                self._end(exc)
                return
            if not is_consumed:
                self._store(frame.chunk)

    def _store(self, chunk: Chunk) -> None:
        self._sink = None
        self._pending_tokens += len(chunk.token_ids) + 1
        if self._pending_tokens > self.max_pending_tokens:
            self._end(Overloaded(f"the client reads too slowly: over {self.max_pending_tokens} tokens are pending"))
            return
        self._ended = chunk.finish_reason is not None
        self._chunks.append(chunk)
        self._arrived.set()

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
            self.fail(StreamIncomplete("the worker no longer runs this stream and its last frame never arrived"))
        elif sent != self._next_number:
            self.fail(StreamIncomplete(f"the worker sent {sent} frames and {self._next_number} arrived"))

    def fail(self, error: Exception) -> None:
        """End the stream with `error` after the chunks that were received. A second end is ignored."""
        self.catch_up()
        self._end(error)

    def _end(self, error: Exception) -> None:
        if not self._ended and self._error is None:
            self._error = error
            self._arrived.set()

    async def get(self, sink: Sink | None = None) -> Chunk:
        """Return the next chunk that `sink` does not consume. Must not be called after the terminal chunk.

        Raises:
            DynamoError: the error that ended the stream.
            Exception: an exception of `sink`.
        """
        while not self._chunks:
            if isinstance(self._error, DynamoError):
                # A copy: all streams may share the error, whose traceback would reference the frames of each.
                raise type(self._error)(self._error.message, field=self._error.field)
            if self._error is not None:  # raised by the sink
                raise self._error
            self._arrived.clear()
            self._sink = sink
            try:
                await self._arrived.wait()
            finally:
                self._sink = None
        chunk = self._chunks.popleft()
        self._pending_tokens -= len(chunk.token_ids) + 1
        return chunk


def _only_tokens(frame: Frame) -> Chunk | None:
    """Return the frame's chunk if it has only tokens and their log-probabilities, else None."""
    chunk = frame.chunk
    if chunk is None or chunk.finish_reason is not None or chunk.kv_params is not None or chunk.stats is not None:
        return None
    return chunk


def _merged(chunks: Sequence[Chunk]) -> Chunk:
    ids = token_ids()
    for chunk in chunks:
        ids.extend(chunk.token_ids)
    return Chunk(token_ids=ids, logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)))


class StreamDemux:
    """The open streams of one caller, by number."""

    def __init__(self, max_pending_tokens: int) -> None:
        self._max_pending_tokens = max_pending_tokens
        self._streams: dict[int, StreamBuffer] = {}
        self.find = self._streams.get  # None: closed, or never opened
        self._last = 0

    def open(self) -> tuple[int, StreamBuffer]:
        """Open a stream. Return its number, which is unique in this inbox, and its buffer."""
        self._last += 1
        buffer = self._streams[self._last] = StreamBuffer(self._max_pending_tokens)
        return self._last, buffer

    def close(self, stream: int) -> None:
        """Remove a stream. Later frames of it are ignored."""
        self._streams.pop(stream, None)

    def feed(self, batch: Batch) -> None:
        """Pass each frame to its stream."""
        streams = self._streams
        for frame in batch.frames:
            buffer = streams.get(frame.stream)
            if buffer is not None:
                buffer.feed(frame)

    def fail_all(self, error: DynamoError) -> None:
        """End all streams with `error`."""
        for buffer in self._streams.values():
            buffer.fail(error)

    def __len__(self) -> int:
        return len(self._streams)

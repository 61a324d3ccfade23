"""The wire of the request plane without a wire: envelopes, numbered frames, the two ends of a stream.

Pure: no socket, no task, no clock. `FrameBatcher` collects what goes to one caller, `StreamDemux` sorts what arrives
at one.
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
    """An error on its way: comes back as the same class."""

    code: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: DynamoError) -> ErrorPayload:
        return cls(error.code, error.message, error.field)

    def error(self) -> DynamoError:
        return from_code(self.code, self.message, self.field)


class OpenStream(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Asks for a stream. `stream` is unique among those of `inbox`, where its frames go."""

    stream: int
    inbox: str
    request: GenerateRequest
    left_s: float  # until the request's deadline, when this was sent: another machine's clock may say another time
    wire: int = 1  # the caller's WIRE_VERSION; a caller of version 1 does not send it


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Ask a worker to send a `StreamReport` to `inbox`, after all earlier frames."""

    inbox: str
    number: int  # counts from 1; the report repeats it


class CancelStream(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The caller is done with a stream; unknown ones are no error."""

    stream: int
    inbox: str


class ClientMessage(msgspec.Struct, frozen=True, array_like=True):
    """What a generate subject takes. One subject for all kinds, so that none overtakes an opening."""

    body: OpenStream | CancelStream | Ping


class ControlRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a control subject takes."""

    verb: Control


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """Reply to a control verb and, with no data, the acknowledgment of an opening."""

    failure: ErrorPayload | None = None
    data: bytes = b""


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chunk of one stream, or the error that ends it. `number` counts from 0 without gaps."""

    stream: int
    number: int
    chunk: Chunk | None = None
    failure: ErrorPayload | None = None


class StreamReport(msgspec.Struct, frozen=True, array_like=True):
    """Lists every stream that the worker at `subject` runs for the receiver, and how many frames of it were sent.

    As the answer to a ping it comes after the frames that it counts. With ping 0 the worker sends it of its own accord
    and it may overtake frames.
    """

    subject: str
    ping: int  # the `number` of the ping that this answers, or 0
    streams: list[tuple[int, int]]  # (stream, frames sent)


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message to an inbox. A receiver of wire version 1 skips the report."""

    frames: list[Frame]
    report: StreamReport | None = None


class _FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """The start of a frame, which every wire version can read."""

    stream: int
    number: int


_NIL = msgspec.Raw(b"\xc0")
_MOST_BAD_FRAMES = 4096  # of one message: streams of one frontend at one worker. Each costs 10 microseconds


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    frames: list[msgspec.Raw]
    report: msgspec.Raw = _NIL


PING = b""  # the receiver replies with the same bytes; the only ping of wire version 1


def read_batch(data: bytes) -> Batch:
    """Return the batch in `data`. An unreadable frame fails its own stream only.

    Raise BadFrame when the message can't be split into frames.
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
            raise BadFrame(f"more than {_MOST_BAD_FRAMES} of {len(raw.frames)} frames can't be read")
        if frame is not None:
            frames.append(frame)
    try:
        return Batch(frames, decode(raw.report, StreamReport) if raw.report != _NIL else None)
    except BadFrame:
        return Batch(frames)


def _read_frame(data: msgspec.Raw) -> Frame | None:
    """Return the frame, a failure for its stream, or None when even the stream number can't be read."""
    try:
        return decode(data, Frame)
    except BadFrame as exc:
        reason = exc.message
    try:
        header = decode(data, _FrameHeader)
    except BadFrame:
        return None
    unreadable = StreamIncomplete(f"a frame can't be read ({reason}); its sender may run another version")
    return Frame(header.stream, header.number, failure=ErrorPayload.of(unreadable))


class FrameBatcher:
    """Frames for one inbox that wait for the next flush."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: list[Frame] = []

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)

    def take(self, max_message_bytes: int) -> list[bytes]:
        """All waiting frames, in order, in as few messages as the limit allows (one, in practice)."""
        frames, self._frames = self._frames, []
        return _messages(frames, max_message_bytes) if frames else []


def _messages(frames: list[Frame], max_bytes: int) -> list[bytes]:
    try:
        data = encode(Batch(frames))
    except (TypeError, ValueError, OverflowError) as exc:  # an engine's value of a type that has no wire form
        error: DynamoError = InternalError(f"a chunk can't be sent: {exc}")
    else:
        if len(data) <= max_bytes:
            return [data]
        error = PayloadTooLarge(
            f"a chunk takes {len(data)} bytes and the request plane carries {max_bytes}; raise max_payload in the NATS "
            "server"
        )
    if len(frames) == 1:
        return [encode(Batch([Frame(frames[0].stream, frames[0].number, failure=ErrorPayload.of(error))]))]
    half = len(frames) // 2
    return _messages(frames[:half], max_bytes) + _messages(frames[half:], max_bytes)


@dataclass(slots=True, eq=False)
class StreamBuffer:
    """The receiving end of one stream: checks the numbers, keeps what the reader has not taken, bounded."""

    max_pending_tokens: int
    # number of the last ping, to any worker, that was sent before the worker acknowledged the opening
    last_ping_before_ack: int | None = None
    _chunks: deque[Chunk] = field(default_factory=deque)
    _pending_tokens: int = 0
    _next_number: int = 0
    _ended: bool = False  # the terminal chunk is in `_chunks` or taken
    _error: Exception | None = None
    _sink: Sink | None = None  # set while a reader that has one waits, and nothing else is to come before
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[Frame] = field(default_factory=list)  # arrived, not yet fed

    @property
    def received(self) -> int:
        """Return how many frames have come, those that wait included."""
        return self._next_number + len(self.waiting)

    def catch_up(self) -> int:
        """Feed the waiting frames; merge consecutive frames that hold only tokens. Return the number fed."""
        frames, self.waiting = self.waiting, []
        count, row = 0, list[Chunk]()
        for frame in frames:
            if (chunk := _only_tokens(frame)) is not None and frame.number == self._next_number + len(row):
                row.append(chunk)
                continue
            count += 1 + self._feed_row(row)
            row = []
            self.feed(frame)
        return count + self._feed_row(row)

    def _feed_row(self, chunks: Sequence[Chunk]) -> int:
        if not chunks:
            return 0
        self._next_number += len(chunks) - 1
        self.feed(Frame(0, self._next_number, chunks[0] if len(chunks) == 1 else _joined(chunks)))
        return 1

    def feed(self, frame: Frame) -> None:
        if self._ended or self._error is not None or frame.number < self._next_number:  # the last: a repeated frame
            return
        if frame.number > self._next_number:
            self._end(StreamIncomplete(f"frame {frame.number} came where {self._next_number} was due"))
        elif frame.failure is not None:
            self._end(frame.failure.error())
        elif frame.chunk is None:
            self._end(StreamIncomplete(f"frame {frame.number} is empty"))
        else:
            self._next_number += 1
            try:
                sunk = self._sink is not None and frame.chunk.finish_reason is None and self._sink(frame.chunk)
            except Exception as exc:  # noqa: BLE001 - the reader's own, which gets it; others' frames follow in this message
                self._end(exc)
                return
            if not sunk:
                self._keep(frame.chunk)

    def _keep(self, chunk: Chunk) -> None:
        self._sink = None
        self._pending_tokens += len(chunk.token_ids) + 1
        if self._pending_tokens > self.max_pending_tokens:
            self._end(Overloaded(f"the reader is more than {self.max_pending_tokens} tokens behind"))
            return
        self._ended = chunk.finish_reason is not None
        self._chunks.append(chunk)
        self._arrived.set()

    def compare_with_worker(self, ping: int, sent: int | None) -> None:
        """End as incomplete when the worker's answer to `ping` shows that frames were lost.

        `sent`: how many frames the worker had sent; None: it does not run the stream, or has sent its last frame.
        """
        if self.last_ping_before_ack is None or self.last_ping_before_ack >= ping:
            return  # the worker may not have had the opening yet when it answered
        self.catch_up()
        if sent is None:
            self.fail(StreamIncomplete("the worker no longer runs this stream and its last frame never arrived"))
        elif sent != self._next_number:
            self.fail(StreamIncomplete(f"the worker sent {sent} frames and {self._next_number} arrived"))

    def fail(self, error: Exception) -> None:
        """End in `error`, after what has arrived. The first end counts."""
        self.catch_up()
        self._end(error)

    def _end(self, error: Exception) -> None:
        if not self._ended and self._error is None:
            self._error = error
            self._arrived.set()

    async def get(self, sink: Sink | None = None) -> Chunk:
        """The next chunk that `sink` does not take. Raises what ended the stream: its error, or what `sink` raised. Not
        to be called after the terminal chunk."""
        while not self._chunks:
            if isinstance(self._error, DynamoError):
                # one of its own: the error may be that of all streams, and would keep what each has in its frames
                raise type(self._error)(self._error.message, field=self._error.field)
            if self._error is not None:  # what the sink raised
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
    """Return the frame's chunk when it holds tokens, and perhaps their log-probabilities, and nothing else."""
    chunk = frame.chunk
    if chunk is None or chunk.finish_reason is not None or chunk.ticket is not None or chunk.stats is not None:
        return None
    return chunk


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    ids = token_ids()
    for chunk in chunks:
        ids.extend(chunk.token_ids)
    return Chunk(token_ids=ids, logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)))


class StreamDemux:
    """All streams of one caller by number."""

    def __init__(self, max_pending_tokens: int) -> None:
        self._max_pending_tokens = max_pending_tokens
        self._streams: dict[int, StreamBuffer] = {}
        self.find = self._streams.get  # None: closed, or never opened
        self._last = 0

    def open(self) -> tuple[int, StreamBuffer]:
        """A new stream's id, never used before in this inbox, and its receiving end."""
        self._last += 1
        buffer = self._streams[self._last] = StreamBuffer(self._max_pending_tokens)
        return self._last, buffer

    def close(self, stream: int) -> None:
        """Frames that still come for it are ignored."""
        self._streams.pop(stream, None)

    def feed(self, batch: Batch) -> None:
        streams = self._streams
        for frame in batch.frames:
            buffer = streams.get(frame.stream)
            if buffer is not None:
                buffer.feed(frame)

    def fail_all(self, error: DynamoError) -> None:
        for buffer in self._streams.values():
            buffer.fail(error)

    def __len__(self) -> int:
        return len(self._streams)

"""Define the messages of the request plane, and encode and decode batches of frames.

The module does no I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.former_names import code_for, current_code
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Chunk,
    Control,
    GenerateRequest,
    LoadReport,
    decode,
    encode,
)
from dynamo_trtllm.protocol.number_types import Count, Number, Seconds, TokenId


class ErrorPayload(msgspec.Struct, frozen=True, array_like=True):
    """An error as it is sent. The receiver raises the same class."""

    code: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: DynamoError, wire: int = WIRE_VERSION) -> ErrorPayload:
        """Return the payload of an error for a process of wire version `wire`."""
        return cls(code_for(error.code, wire), error.message, error.field)

    def error(self) -> DynamoError:
        """Return the error as an exception."""
        return errors.from_code(current_code(self.code), self.message, self.field)


class OpenStream(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Request a stream.

    Its frames go to `inbox`; `stream` is unique among the streams of this inbox.
    """

    stream: Number
    inbox: str
    request: GenerateRequest
    # seconds from sending to the request's deadline: clocks of two machines may differ
    left_s: Seconds
    wire: Count = 1  # the caller's WIRE_VERSION


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Ask a worker to send a `StreamReport` to `inbox`, after all earlier frames."""

    inbox: str
    number: Number  # counts from 1; the report repeats it


class CancelStream(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel a stream. An unknown stream is not an error."""

    stream: Number
    inbox: str
    # The caller reads the last frame, because it collects KV that the call may still offer.
    awaits_kv: bool = False


class ClientMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message to a generate subject.

    All kinds share it, so that a cancel or ping can't overtake an opening.
    """

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

    stream: Number
    number: Number
    chunk: Chunk | TokenId | None = None
    failure: ErrorPayload | None = None


class StreamReport(msgspec.Struct, frozen=True, array_like=True):
    """List of the streams that a worker runs for the receiver, with the number of frames sent.

    A reply to a ping arrives after the frames that it counts. A report with ping 0, the worker's
    own heartbeat, may overtake frames.
    """

    subject: str  # subject of the worker
    ping: Number  # the `number` of the ping, or 0
    streams: list[tuple[Number, Number]]  # (stream, frames sent)


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message to an inbox. An older receiver skips the load."""

    frames: list[Frame]
    report: StreamReport | None = None
    load: LoadReport | None = None  # load of the sender


class _FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a frame, which every wire version can read."""

    stream: Number
    number: Number


_NIL = msgspec.Raw(b"\xc0")
# Maximum of unreadable frames in one message. Each takes 10 microseconds. A frontend has fewer
# streams.
_MAX_BAD_FRAMES = 4096


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    frames: list[msgspec.Raw]
    report: msgspec.Raw = _NIL


PING = b""  # the receiver replies with the same bytes


def read_batch(data: bytes, on_unreadable: Callable[[errors.BadFrame], None]) -> Batch:
    """Decode a batch.

    An unreadable frame fails only its own stream, and the batch has no load then.

    Args:
        data: the message.
        on_unreadable: called once if the message, or a part of it, can't be read.

    Raises:
        BadFrame: the message can't be split into frames, or more than _MAX_BAD_FRAMES frames are
            unreadable.
    """
    try:
        return decode(data, Batch)
    except errors.BadFrame as exc:
        on_unreadable(exc)
        raw = decode(data, _RawBatch)
    frames: list[Frame] = []
    num_bad = 0
    for raw_frame in raw.frames:
        frame = _read_frame(raw_frame)
        if frame is None or frame.failure is not None:
            num_bad += 1
        if num_bad > _MAX_BAD_FRAMES:
            raise errors.BadFrame(
                f"more than {_MAX_BAD_FRAMES} of {len(raw.frames)} frames are unreadable"
            )
        if frame is not None:
            frames.append(frame)
    if raw.report == _NIL:
        return Batch(frames)
    try:
        return Batch(frames, decode(raw.report, StreamReport))
    except errors.BadFrame:
        return Batch(frames)


def _read_frame(data: msgspec.Raw) -> Frame | None:
    """Return the frame, or a failure for its stream; None: even its stream is unreadable."""
    try:
        return decode(data, Frame)
    except errors.BadFrame as exc:
        reason = exc.message
    try:
        header = decode(data, _FrameHeader)
    except errors.BadFrame:
        return None
    error = errors.StreamIncomplete(
        f"unreadable frame ({reason}); check that the worker runs a compatible version"
    )
    return Frame(header.stream, header.number, failure=ErrorPayload.of(error))


def encode_frames(
    frames: list[Frame], max_message_bytes: int, load: LoadReport | None = None
) -> list[bytes]:
    """Return the frames for one inbox, in order, as encoded messages.

    Usually it is one message, with the load.
    """
    try:
        data = encode(Batch(frames, None, load))
    except (TypeError, ValueError, OverflowError) as exc:
        # An engine's chunk has a value that can't be encoded.
        error: DynamoError = errors.InternalError(f"a chunk can't be encoded: {exc}")
    else:
        if len(data) <= max_message_bytes:
            return [data]
        error = errors.PayloadTooLarge(
            f"a chunk has {len(data)} bytes; the limit of the request plane is {max_message_bytes}:"
            " raise max_payload of the NATS server"
        )
    if len(frames) == 1:
        frame = frames[0]
        failed = Frame(frame.stream, frame.number, failure=ErrorPayload.of(error))
        return [encode(Batch([failed]))]
    # Only the frame that can't be sent must fail: try each half.
    half = len(frames) // 2
    first_messages = encode_frames(frames[:half], max_message_bytes)
    return first_messages + encode_frames(frames[half:], max_message_bytes)

from __future__ import annotations

import asyncio
import weakref

import pytest

from dynamo_trtllm.cluster.request_plane.frames import (
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
from dynamo_trtllm.cluster.request_plane.receivers import StreamDemux
from dynamo_trtllm.protocol.errors import (
    CLASSES,
    BadFrame,
    Disconnected,
    DynamoError,
    InternalError,
    Overloaded,
    PayloadTooLarge,
    StreamIncomplete,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    GetFile,
    Sampling,
    decode,
    encode,
    token_ids,
)
from tests.kit.cases import each_case
from tests.unit.cluster.request_plane.arrivals import Arrivals, opened

LIMIT = 1 << 20


def make_chunk(*ids: int, finish: FinishReason | None = None) -> Chunk:
    return Chunk(token_ids=token_ids(ids), finish_reason=finish)


def make_arrivals(*frames: Frame) -> Arrivals:
    arrivals = Arrivals()
    for frame in frames:
        arrivals.feed(frame)
    return arrivals


REQUEST = GenerateRequest(
    request_id="r",
    model="m",
    token_ids=token_ids([1, 2**32 - 1]),
    sampling=Sampling(max_tokens=1),
    deadline=1.5,
)


@each_case(
    "value",
    [
        ClientMessage(OpenStream(3, "_INBOX.x", REQUEST, 2.5)),
        ClientMessage(CancelStream(3, "_INBOX.x", awaits_kv=True)),
        ClientMessage(Ping("_INBOX.x", 7)),
        Batch([], StreamReport("ns.g-1", 7, [(3, 12), (2**32, 0)])),
        ControlRequest(GetFile("abc", 7)),
        Ack(ErrorPayload("overloaded", "full")),
        Ack(data=b"\x00\xff"),
        Batch(
            [
                Frame(1, 0, make_chunk(5, finish=FinishReason.STOP)),
                Frame(2, 4, failure=ErrorPayload("x", "y", "z")),
            ]
        ),
    ],
)
def test_wire_value_when_encoded_then_decodes_equal(value: object) -> None:
    assert decode(encode(value), type(value)) == value


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x00", encode(Ack())[:-1], encode(ClientMessage(CancelStream(1, "i")))]
)
def test_batch_when_bytes_are_something_else_then_bad_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(data, Batch)


@each_case("cls", sorted(CLASSES.values(), key=lambda cls: cls.code))
def test_failure_when_sent_then_same_class_message_and_field(cls: type[DynamoError]) -> None:
    error = decode(encode(ErrorPayload.of(cls("why", field="f"))), ErrorPayload).error()
    assert (type(error), error.message, error.field) == (cls, "why", "f")


def test_failure_when_code_is_unknown_then_internal() -> None:
    assert type(ErrorPayload("from_the_future", "why").error()) is InternalError


def test_outbox_sends_64_streams_in_one_message() -> None:
    (message,) = encode_frames(
        [Frame(stream, 1000, make_chunk(stream)) for stream in range(64)], LIMIT
    )
    assert len(decode(message, Batch).frames) == 64
    assert len(message) / 64 < 32


def test_outbox_when_frames_exceed_the_limit_then_split_in_order() -> None:
    frames = [Frame(stream, 0, make_chunk(*range(stream))) for stream in range(50)]
    messages = encode_frames(frames, 500)
    assert len(messages) > 1
    assert max(map(len, messages)) <= 500
    assert [frame for message in messages for frame in decode(message, Batch).frames] == frames


def test_outbox_turns_only_an_oversized_frame_into_an_error() -> None:
    frames = [
        Frame(1, 0, make_chunk(1)),
        Frame(2, 7, make_chunk(*range(1000))),
        Frame(3, 0, make_chunk(3)),
    ]
    got = [
        frame for message in encode_frames(frames, 500) for frame in decode(message, Batch).frames
    ]
    assert [got[0], got[2]] == [frames[0], frames[2]]
    assert (got[1].stream, got[1].number, got[1].chunk) == (2, 7, None)
    assert got[1].failure is not None
    assert got[1].failure.code == PayloadTooLarge.code


async def test_arrivals_with_missing_frame_end_incomplete() -> None:
    arrivals = make_arrivals(Frame(1, 0, make_chunk(1)), Frame(1, 2, make_chunk(2)))
    assert await arrivals.get() == make_chunk(1)
    with pytest.raises(StreamIncomplete, match="frame 2 arrived instead of frame 1"):
        await arrivals.get()


async def test_arrivals_when_a_frame_is_repeated_then_it_is_taken_once() -> None:
    arrivals = make_arrivals(*(Frame(1, number, make_chunk(number)) for number in (0, 0, 1, 0, 2)))
    assert [(await arrivals.get()).token_ids[0] for _ in range(3)] == [0, 1, 2]


@each_case(
    ("last_ping_before_ack", "ping", "sent", "message"),
    [
        (None, 1, None, ""),  # not acknowledged: the worker may never have had it
        (1, 1, None, ""),  # acknowledged after the ping was sent
        (0, 1, None, "no longer runs this stream"),
        (0, 1, 2, ""),
        (0, 1, 3, "sent 3 frames and 2 arrived"),
        (1, 1, 3, ""),
    ],
)
async def test_check_when_acknowledged_frames_are_lost_then_incomplete(
    last_ping_before_ack: int | None, ping: int, sent: int | None, message: str
) -> None:
    arrivals = make_arrivals(Frame(1, 0, make_chunk(1)), Frame(1, 1, make_chunk(2)))
    arrivals.last_ping_before_ack = last_ping_before_ack
    arrivals.compare_with_worker(ping, sent)
    assert [len((await arrivals.get()).token_ids) for _ in range(2)] == [1, 1]
    if message:
        with pytest.raises(StreamIncomplete, match=message):
            await arrivals.get()
    else:
        arrivals.fail(Overloaded("nothing ended it before"))
        with pytest.raises(Overloaded):
            await arrivals.get()


async def test_check_after_last_frame_is_complete() -> None:
    last = make_chunk(1, finish=FinishReason.STOP)
    arrivals = make_arrivals(Frame(1, 0, last))
    arrivals.last_ping_before_ack = 0
    arrivals.compare_with_worker(1, None)
    assert await arrivals.get() == last


async def test_arrivals_when_frame_is_empty_then_incomplete() -> None:
    with pytest.raises(StreamIncomplete):
        await make_arrivals(Frame(1, 0)).get()


async def test_arrivals_ignore_errors_after_the_terminal_chunk() -> None:
    last = make_chunk(1, finish=FinishReason.STOP)
    arrivals = make_arrivals(Frame(1, 0, last), Frame(1, 5, make_chunk(2)))
    arrivals.fail(Overloaded("late"))
    assert await arrivals.get() == last


async def test_arrivals_wake_a_waiting_reader_by_chunk_or_error() -> None:
    arrivals = Arrivals()
    reader = asyncio.create_task(arrivals.get())
    await asyncio.sleep(0)
    arrivals.feed(Frame(1, 0, make_chunk(4)))
    assert await reader == make_chunk(4)
    reader = asyncio.create_task(arrivals.get())
    await asyncio.sleep(0)
    arrivals.fail(Overloaded("now"))
    with pytest.raises(Overloaded):
        await reader


async def test_inbox_gives_each_stream_its_frames() -> None:
    inbox = StreamDemux()
    first, first_arrivals = opened(inbox)
    second, second_arrivals = opened(inbox)
    gone, gone_arrivals = opened(inbox)
    del inbox[gone]
    frames = [Frame(s, 0, make_chunk(s)) for s in (second, 999, gone, first)]
    inbox.add(frames)
    inbox.pass_on()
    assert await first_arrivals.get() == make_chunk(first)
    assert await second_arrivals.get() == make_chunk(second)
    gone_arrivals.fail(Overloaded("nothing came"))
    with pytest.raises(Overloaded):
        await gone_arrivals.get()


async def test_arrivals_when_they_end_then_the_owner_learns_once_how() -> None:
    last = make_chunk(1, finish=FinishReason.STOP)
    whole = make_arrivals(Frame(1, 0, last))
    failed = make_arrivals()
    left = make_arrivals()
    whole.cancel()
    failed.fail(Overloaded("full"))
    failed.cancel()
    left.cancel()
    left.fail(Overloaded("late"))
    assert (whole.ends, failed.ends, left.ends) == (["end"], ["end", "cancel"], ["end", "cancel"])
    assert left.events.empty()


async def test_fail_all_error_retains_no_other_stream() -> None:
    class Prompt:
        """The state of a reader of one stream."""

    kept: list[DynamoError] = []

    async def read(arrivals: Arrivals, prompt: Prompt) -> None:
        try:
            await arrivals.get()
        except Disconnected as exc:
            if arrivals is streams[0]:
                kept.append(exc)

    inbox = StreamDemux()
    streams = [opened(inbox)[1] for _ in range(3)]
    prompts = [Prompt() for _ in streams]
    gone = [weakref.ref(prompt) for prompt in prompts]
    readers = [asyncio.create_task(read(*stream)) for stream in zip(streams, prompts, strict=True)]
    prompts.clear()
    await asyncio.sleep(0)
    inbox.fail_all(Disconnected("lost", field="x"))
    await asyncio.gather(*readers)
    readers.clear()
    assert [(error.message, error.field) for error in kept] == [("lost", "x")]
    assert [ref() is None for ref in gone] == [False, True, True]

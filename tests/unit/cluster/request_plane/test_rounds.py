"""What a caller gives its streams when more arrives than a turn of the loop is to take."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.cluster.request_plane import receivers
from dynamo_trtllm.cluster.request_plane.frames import ErrorPayload, Frame
from dynamo_trtllm.cluster.request_plane.receivers import StreamDemux
from dynamo_trtllm.protocol.errors import Disconnected, DynamoError, Overloaded, StreamIncomplete
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, TokenLogprob, token_ids
from dynamo_trtllm.protocol.streams import StreamEvent
from tests.unit.cluster.request_plane.arrivals import Arrivals, opened

PER_TURN = 6


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a `Bench` counts chunks: an iteration passes PER_TURN of them on."""
    monkeypatch.setattr(receivers, "PASSING_S", PER_TURN)
    monkeypatch.setattr(receivers, "FRAMES_PER_CHECK", 1)


class Reader:
    """The reader of one stream. `seen` has the tokens that all readers have received."""

    def __init__(self, inbox: StreamDemux, seen: list[tuple[int, list[int]]]) -> None:
        self.stream, self.arrivals = opened(inbox)
        self._seen = seen
        self._number = 0
        self.error: DynamoError | None = None

    def frame(self, finish: FinishReason | None = None) -> Frame:
        """Its next one; the token's id is the frame's number."""
        self._number += 1
        return Frame(
            self.stream,
            self._number - 1,
            Chunk(token_ids=token_ids([self._number - 1]), finish_reason=finish),
        )

    def begin(self) -> None:
        self.arrivals.feed(self.frame())
        self.arrivals._on_event = self._take

    def _take(self, event: StreamEvent) -> None:
        if isinstance(event, Chunk):
            self._seen.append((self.stream, list(event.token_ids)))
        else:
            self.error = event


class Bench:
    """The streams of one inbox, and the tokens that their readers have received."""

    def __init__(self) -> None:
        self.inbox = StreamDemux(lambda: len(self.seen))
        self.seen: list[tuple[int, list[int]]] = []

    async def begun(self, count: int) -> list[Reader]:
        readers = [Reader(self.inbox, self.seen) for _ in range(count)]
        for reader in readers:
            reader.begin()
        return readers

    def feed(self, *frames: Frame) -> None:
        self.inbox.add(list(frames))
        self.inbox.pass_on()

    def tokens_of(self, reader: Reader) -> list[int]:
        return [
            token for stream, tokens in self.seen for token in tokens if stream == reader.stream
        ]

    async def in_turns(self) -> list[int]:
        """How many chunks each of the loop's next turns gives, until one gives none."""
        counts = []
        while not counts or counts[-1]:
            before = len(self.seen)
            await asyncio.sleep(0)
            counts.append(len(self.seen) - before)
        return counts[:-1]


async def test_feed_of_little_reaches_streams_within_the_call() -> None:
    bench = Bench()
    one, other = await bench.begun(2)
    bench.feed(one.frame(), other.frame())
    assert bench.seen == [(one.stream, [1]), (other.stream, [1])]
    bench.feed(one.frame(), other.frame())
    assert bench.seen[2:] == [(one.stream, [2]), (other.stream, [2])]


@pytest.mark.parametrize(
    ("in_all", "per_stream", "is_merged"), [(5, 2, True), (6, 2, False), (5, 3, False)]
)
async def test_pass_on_joins_tokens_of_a_stream_in_one_chunk(
    monkeypatch: pytest.MonkeyPatch, in_all: int, per_stream: int, is_merged: bool
) -> None:
    monkeypatch.setattr(receivers, "MERGED_FRAMES", in_all)
    monkeypatch.setattr(receivers, "MERGED_PER_STREAM", per_stream)
    bench = Bench()
    one, other = await bench.begun(2)
    for reader in (one, one, other, one, one):
        bench.inbox.add([reader.frame()])
    assert not bench.seen
    bench.inbox.pass_on()
    chunks = [tokens for stream, tokens in bench.seen if stream == one.stream]
    assert chunks == ([[1, 2, 3, 4]] if is_merged else [[1], [2], [3], [4]])
    assert bench.tokens_of(other) == [1]


@pytest.mark.parametrize("size", [1, 4, PER_TURN, 20], ids=lambda size: f"batches-of-{size}")
async def test_feed_of_much_limits_each_turn(size: int) -> None:
    bench = Bench()
    readers = await bench.begun(20)
    frames = [reader.frame() for reader in readers]
    for at in range(0, len(frames), size):
        bench.inbox.add(frames[at : at + size])
    bench.inbox.pass_on()
    assert len(bench.seen) == PER_TURN
    assert await bench.in_turns() == [PER_TURN, PER_TURN, 20 - 3 * PER_TURN]
    # in the order in which they came
    assert bench.seen == [(reader.stream, [1]) for reader in readers]


async def test_turn_with_receiver_bug_continues_other_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    readers = await bench.begun(PER_TURN + 3)
    bugs: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, bug: bugs.append(bug))
    monkeypatch.setattr(readers[PER_TURN].arrivals, "_on_event", [].pop)  # raises TypeError
    for _ in range(2):
        bench.feed(*(reader.frame() for reader in readers))
        await bench.in_turns()
    assert [bench.tokens_of(reader) for reader in readers[PER_TURN + 1 :]] == [[1, 2]] * 2
    assert isinstance(bugs[0]["exception"], TypeError)


@pytest.mark.parametrize("merged_frames", [2, 99], ids=["merged", "not-merged"])
async def test_pass_on_with_receiver_bug_keeps_message_order(
    monkeypatch: pytest.MonkeyPatch, merged_frames: int
) -> None:
    monkeypatch.setattr(receivers, "MERGED_FRAMES", merged_frames)
    monkeypatch.setattr(receivers, "MERGED_PER_STREAM", 0)
    bench = Bench()
    (one,) = await bench.begun(1)
    broken = Reader(bench.inbox, bench.seen)
    monkeypatch.setattr(broken.arrivals, "_on_event", [].pop)  # raises TypeError
    for reader in (one, broken, one, one):
        bench.inbox.add([reader.frame()])
    with pytest.raises(TypeError):
        bench.inbox.pass_on()
    bench.inbox.add([one.frame()])
    bench.inbox.pass_on()
    await bench.in_turns()
    assert bench.tokens_of(one) == [1, 2, 3, 4]


async def test_receiver_bug_keeps_other_frames_of_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    (one,) = await bench.begun(1)
    broken = Reader(bench.inbox, bench.seen)
    monkeypatch.setattr(broken.arrivals, "_on_event", [].pop)  # raises TypeError
    bench.inbox.add([broken.frame(), one.frame()])
    bench.inbox.add([one.frame()])
    with pytest.raises(TypeError):
        bench.inbox.pass_on()
    await bench.in_turns()
    assert bench.tokens_of(one) == [1, 2]


async def test_turn_joins_waiting_frames_of_a_stream() -> None:
    bench = Bench()
    readers = await bench.begun(3)
    bench.feed(*(readers[0].frame() for _ in range(PER_TURN + 1)))
    for _ in range(4):
        bench.feed(*(reader.frame() for reader in readers))
    del bench.seen[:]
    assert await bench.in_turns() == [3]
    assert bench.seen == [(readers[0].stream, [7, 8, 9, 10, 11])] + [
        (r.stream, [1, 2, 3, 4]) for r in readers[1:]
    ]


async def test_feed_of_little_in_many_turns_never_waits() -> None:
    bench = Bench()
    (one,) = await bench.begun(1)
    for number in range(1, 4 * PER_TURN):
        bench.feed(one.frame())
        assert bench.seen[-1] == (one.stream, [number])
        await asyncio.sleep(0)


async def test_first_frame_when_others_are_behind_then_it_passes_them() -> None:
    bench = Bench()
    running = await bench.begun(9 * PER_TURN)
    new = Reader(bench.inbox, bench.seen)
    waiting = asyncio.create_task(new.arrivals.get())
    await asyncio.sleep(0)
    bench.feed(*(reader.frame() for reader in running), new.frame())
    assert (await waiting).token_ids == token_ids([0])
    assert len(bench.seen) < 4 * PER_TURN


async def test_first_frames_are_passed_few_per_iteration() -> None:
    bench = Bench()
    running = await bench.begun(2 * PER_TURN)
    new = [Reader(bench.inbox, bench.seen) for _ in range(5 * PER_TURN)]
    for reader in new:
        reader.arrivals._on_event = reader._take
    bench.feed(*(reader.frame() for reader in [*new, *running]))
    await asyncio.sleep(0)
    assert len(bench.seen) <= 2 * PER_TURN + 1
    assert {stream for stream, _ in bench.seen} & {reader.stream for reader in running}
    await bench.in_turns()
    assert len(bench.seen) == 7 * PER_TURN


async def test_frames_after_a_waiting_first_come_in_order() -> None:
    bench = Bench()
    running = await bench.begun(2 * PER_TURN)
    new = Reader(bench.inbox, bench.seen)
    bench.feed(*(reader.frame() for reader in running))
    bench.feed(
        new.frame(), new.frame(), running[0].frame(), new.frame(), new.frame(FinishReason.STOP)
    )
    got = [await new.arrivals.get() for _ in range(2)]
    assert [list(chunk.token_ids) for chunk in got] == [[0, 1, 2], [3]]
    assert got[-1].finish_reason is FinishReason.STOP
    await bench.in_turns()
    assert bench.tokens_of(running[0]) == [1, 2]


async def test_waiting_frames_may_be_lost_or_repeated() -> None:
    for numbers, given, message in (
        ((1, 2, 2, 1, 3), [1, 2, 3], ""),
        ((1, 2, 4, 5), [1, 2], "frame 4 arrived instead of frame 3"),
    ):
        bench = Bench()
        busy, one = await bench.begun(2)
        bench.feed(*(busy.frame() for _ in range(PER_TURN + 1)))
        bench.feed(*(Frame(one.stream, n, Chunk(token_ids=token_ids([n]))) for n in numbers))
        await bench.in_turns()
        assert bench.tokens_of(one) == given
        one.arrivals.fail(Disconnected("only if nothing ended it before"))
        assert one.error is not None
        assert (message or "only if") in one.error.message


async def test_logprobs_stay_with_tokens_of_joined_chunks() -> None:
    inbox = StreamDemux()
    stream, arrivals = opened(inbox)
    arrivals.waiting += [
        Frame(stream, n, Chunk(token_ids=token_ids([n]), logprobs=(TokenLogprob(n, -1.0 * n),)))
        for n in range(3)
    ]
    arrivals.catch_up()
    chunk = await arrivals.get()
    assert list(chunk.token_ids) == [logprob.token_id for logprob in chunk.logprobs] == [0, 1, 2]


async def test_catch_up_joins_tokens_with_and_without_logprobs() -> None:
    logprob = TokenLogprob(5, -1.0)
    scored = Chunk(token_ids=token_ids([5]), logprobs=(logprob,))
    arrivals = behind(Frame(1, 0, 4), Frame(1, 1, scored), Frame(1, 2, 6))
    arrivals.catch_up()
    assert await arrivals.get() == Chunk(token_ids=token_ids([4, 5, 6]), logprobs=(logprob,))
    assert arrivals.num_received == 3
    arrivals.feed(Frame(1, 3, 7))
    assert list((await arrivals.get()).token_ids) == [7]


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (Frame(1, 3, 6), StreamIncomplete),
        (Frame(1, 2, 6, ErrorPayload.of(Overloaded("busy"))), Overloaded),
    ],
    ids=["one-is-lost", "failure"],
)
async def test_catch_up_passes_tokens_before_an_error(
    frame: Frame, error: type[DynamoError]
) -> None:
    arrivals = behind(Frame(1, 0, 4), Frame(1, 1, 5), frame, Frame(1, 4, 7))
    arrivals.catch_up()
    assert list((await arrivals.get()).token_ids) == [4, 5]
    with pytest.raises(error):
        await arrivals.get()
    assert arrivals.events.empty()


async def test_prompt_logprobs_are_not_joined() -> None:
    inbox = StreamDemux()
    stream, arrivals = opened(inbox)
    scored = Chunk(prompt_logprobs=(TokenLogprob(7, -1.0),))
    chunks = [scored, Chunk(token_ids=token_ids([1])), Chunk(token_ids=token_ids([2]))]
    arrivals.waiting += [Frame(stream, n, chunk) for n, chunk in enumerate(chunks)]
    arrivals.catch_up()
    assert await arrivals.get() == scored
    assert list((await arrivals.get()).token_ids) == [1, 2]


async def test_close_drops_only_its_waiting_frames() -> None:
    bench = Bench()
    gone, stays = await bench.begun(2)
    bench.feed(*(gone.frame() for _ in range(3 * PER_TURN)), stays.frame())
    gone.arrivals.cancel()
    del bench.inbox[gone.stream]
    taken = bench.tokens_of(gone)
    bench.feed(gone.frame(), stays.frame())
    await bench.in_turns()
    assert bench.tokens_of(stays) == [1, 2]
    assert bench.tokens_of(gone) == taken


@pytest.mark.parametrize("sent", [3, 4, None], ids=["all-arrived", "one-is-lost", "ended"])
async def test_compare_with_waiting_frames_defers_to_next_report(sent: int | None) -> None:
    arrivals = behind(*(Frame(1, n, Chunk(token_ids=token_ids([n]))) for n in range(3)))
    arrivals.last_ping_before_ack = 0
    arrivals.compare_with_worker(1, sent)
    assert arrivals.events.empty()
    arrivals.catch_up()
    assert list((await arrivals.get()).token_ids) == [0, 1, 2]
    arrivals.compare_with_worker(2, sent)
    assert arrivals.has_ended == (sent != 3)


def behind(*frames: Frame) -> Arrivals:
    arrivals = Arrivals()
    arrivals.waiting.extend(frames)
    return arrivals


async def test_fail_when_frames_wait_then_they_come_before_the_error() -> None:
    arrivals = behind(Frame(1, 0, Chunk(token_ids=token_ids([7]))))
    arrivals.fail(Disconnected("the worker is gone"))
    assert (await arrivals.get()).token_ids == token_ids([7])
    with pytest.raises(Disconnected):
        await arrivals.get()


async def test_fail_when_the_end_waits_then_the_stream_is_whole() -> None:
    last = Chunk(token_ids=token_ids([7]), finish_reason=FinishReason.STOP)
    arrivals = behind(Frame(1, 0, last))
    arrivals.fail(Disconnected("the worker is gone, having sent all"))
    assert await arrivals.get() == last

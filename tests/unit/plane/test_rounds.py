"""What a caller gives its streams when more arrives than a turn of the loop is to take."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.errors import Disconnected
from dynamo_trtllm.messages import Chunk, FinishReason, token_ids
from dynamo_trtllm.plane import rounds
from dynamo_trtllm.plane.rounds import Rounds
from dynamo_trtllm.plane.stream import Arrivals, Batch, Frame, Inbox

PER_TURN, AT_ONCE = 6, 2


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "FRAMES_PER_TURN", PER_TURN)
    monkeypatch.setattr(rounds, "FRAMES_AT_ONCE", AT_ONCE)


class Reader:
    """One stream that has begun, whose sink takes all; `seen` is shared with other readers."""

    def __init__(self, inbox: Inbox, seen: list[tuple[int, int]]) -> None:
        self.stream, self.arrivals = inbox.open()
        self._seen = seen
        self._number = 0
        self.rest: asyncio.Task[Chunk] | None = None

    def frame(self, finish: FinishReason | None = None) -> Frame:
        """Its next one; the token's id is the frame's number."""
        self._number += 1
        return Frame(
            self.stream, self._number - 1, Chunk(token_ids=token_ids([self._number - 1]), finish_reason=finish)
        )

    async def begin(self) -> None:
        self.arrivals.feed(self.frame())
        await self.arrivals.get()
        self.rest = asyncio.create_task(self.arrivals.get(self._sink))
        await asyncio.sleep(0)

    def _sink(self, chunk: Chunk) -> bool:
        self._seen.append((self.stream, chunk.token_ids[0]))
        return True


class Bench:
    """Streams of one inbox, and what their readers saw: stream and frame number."""

    def __init__(self) -> None:
        self.inbox = Inbox(1000)
        self.rounds = Rounds(self.inbox)
        self.seen: list[tuple[int, int]] = []

    async def begun(self, count: int) -> list[Reader]:
        readers = [Reader(self.inbox, self.seen) for _ in range(count)]
        for reader in readers:
            await reader.begin()
        return readers

    def feed(self, *frames: Frame) -> None:
        self.rounds.feed(Batch(list(frames)))

    async def in_turns(self) -> list[int]:
        """How many frames each of the loop's next turns takes, until one takes none."""
        counts = []
        while not counts or counts[-1]:
            before = len(self.seen)
            await asyncio.sleep(0)
            counts.append(len(self.seen) - before)
        return counts[:-1]


async def test_feed_when_there_is_little_then_streams_have_it_within_the_call() -> None:
    bench = Bench()
    one, other = await bench.begun(2)
    bench.feed(one.frame(), other.frame())
    assert bench.seen == [(one.stream, 1), (other.stream, 1)]
    bench.feed(one.frame(), other.frame())
    assert bench.seen[2:] == [(one.stream, 2), (other.stream, 2)]


@pytest.mark.parametrize("size", [1, 4, PER_TURN, 20], ids=lambda size: f"batches-of-{size}")
async def test_feed_when_much_comes_at_once_then_no_turn_takes_more_than_its_share(size: int) -> None:
    bench = Bench()
    (one,) = await bench.begun(1)
    frames = [one.frame() for _ in range(20)]
    for at in range(0, len(frames), size):
        bench.feed(*frames[at : at + size])
    assert len(bench.seen) == PER_TURN
    assert await bench.in_turns() == [PER_TURN, PER_TURN, 20 - 3 * PER_TURN]
    assert [number for _, number in bench.seen] == list(range(1, 21))


async def test_feed_when_little_comes_in_each_of_many_turns_then_it_never_waits() -> None:
    bench = Bench()
    (one,) = await bench.begun(1)
    for number in range(1, 4 * PER_TURN):
        bench.feed(one.frame())
        assert bench.seen[-1] == (one.stream, number)
        await asyncio.sleep(0)


async def test_turns_when_streams_are_behind_then_each_gets_some_and_all_stay_in_order() -> None:
    bench = Bench()
    readers = await bench.begun(4)
    bench.feed(*(readers[0].frame() for _ in range(PER_TURN)))
    for reader in readers:  # one after the other, as if the first had been much faster
        bench.feed(*(reader.frame() for _ in range(5)))
    del bench.seen[:]
    assert await bench.in_turns() == [PER_TURN, PER_TURN, PER_TURN, 2]
    streams = [reader.stream for reader in readers]
    assert [stream for stream, _ in bench.seen] == [
        *(stream for stream in streams for _ in range(AT_ONCE)),
        *(stream for stream in streams for _ in range(AT_ONCE)),
        *streams,
    ]
    for stream in streams:
        numbers = [number for each, number in bench.seen if each == stream]
        assert numbers == list(range(numbers[0], numbers[0] + 5))


async def test_first_frame_when_others_are_behind_then_it_passes_them() -> None:
    bench = Bench()
    (running,) = await bench.begun(1)
    new = Reader(bench.inbox, bench.seen)
    waiting = asyncio.create_task(new.arrivals.get())
    await asyncio.sleep(0)
    bench.feed(*(running.frame() for _ in range(5 * PER_TURN)), new.frame())
    assert (await waiting).token_ids == token_ids([0])
    assert len(bench.seen) < 5 * PER_TURN


async def test_later_frames_when_the_first_has_passed_then_they_come_after_it_in_order() -> None:
    bench = Bench()
    (running,) = await bench.begun(1)
    new = Reader(bench.inbox, bench.seen)
    bench.feed(*(running.frame() for _ in range(2 * PER_TURN)))
    bench.feed(new.frame(), new.frame(), running.frame(), new.frame(FinishReason.STOP))
    got = [await new.arrivals.get() for _ in range(3)]
    assert [chunk.token_ids[0] for chunk in got] == [0, 1, 2]
    assert await bench.in_turns() is not None
    assert [number for _, number in bench.seen] == list(range(1, 2 * PER_TURN + 2))


async def test_close_when_frames_wait_then_they_are_dropped_and_the_others_go_on() -> None:
    bench = Bench()
    gone, stays = await bench.begun(2)
    bench.feed(*(gone.frame() for _ in range(3 * PER_TURN)), stays.frame())
    assert gone.rest is not None
    gone.rest.cancel()
    await asyncio.gather(gone.rest, return_exceptions=True)
    bench.inbox.close(gone.stream)
    taken = [stream for stream, _ in bench.seen].count(gone.stream)
    bench.feed(gone.frame(), stays.frame())
    for _ in range(4 * PER_TURN):
        await asyncio.sleep(0)
    assert bench.seen[-1] == (stays.stream, 2)
    assert [stream for stream, _ in bench.seen].count(gone.stream) == taken


def behind(*frames: Frame) -> Arrivals:
    arrivals = Arrivals(1000)
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

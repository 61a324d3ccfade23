"""Send the recording of this process, or a part of it, to commands on other machines.

A query is broadcast to all processes of a namespace. It never stops them: an answer is made in
pieces of about 2 ms, between which the event loop does its other work, and there is a pause between
two answers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from dynamo_trtllm.observability.recorder import (
    HEADER_BYTES,
    RECORDER,
    SLOT,
    RecordedEvent,
    RecordingHeader,
)
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.messages import decode, encode
from dynamo_trtllm.protocol.number_types import Int64, Number, UInt64

_SLICE_BYTES: Final = 256 * SLOT.size  # of the ring, read before the event loop does other work
_PART_BYTES: Final = 64 << 10  # of an answer
_MAX_WAITING: Final = 16  # queries; more are not answered
_REMEMBERED: Final = 64  # queries
NUM_LATEST: Final = 20  # requests
# Events that end something, and the event with which it began.
_CLOSES: Final = {
    RecordedEvent.FINISHED: RecordedEvent.RECEIVED,
    RecordedEvent.CALL_ENDED: RecordedEvent.CALL_RECEIVED,
    RecordedEvent.KV_RELEASED: RecordedEvent.KV_PUBLISHED,
    RecordedEvent.KV_EXPIRED: RecordedEvent.KV_PUBLISHED,
}
_OPENS: Final = frozenset(_CLOSES.values())


class Selection(StrEnum):
    """The requests whose events are wanted."""

    GIVEN = "given"  # only requests with an id of the query
    OPEN = "open"  # requests that have not ended in the process
    LATEST = "latest"
    ALL = "all"


class RecordingQuery(msgspec.Struct, frozen=True, array_like=True):
    """Ask all processes of a namespace for their recordings."""

    inbox: str  # receives the answers, and identifies the query
    selection: Selection
    keys: list[UInt64] = []  # numbers of requests that are wanted in any case
    prefix: Int64 = -1  # upper 32 bits of such keys
    client_id: UInt64 = 0  # hash of a client's id of such a request; 0: none
    known: list[Number] = []  # `epoch_ns` of recordings that the caller has


class RecordingPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of an answer.

    The first one has no slots and is sent at once: its time aligns the clocks.
    """

    instance_id: Number  # id of the worker that answers; 0: a frontend
    host: str
    now_ns: Number  # current time by the clock of the events
    header: bytes  # the header of the file; b"": the process records nothing
    is_last: bool
    slots: bytes = b""
    oldest_ns: Number = 0  # time of the oldest event in the ring; only in the last part
    num_overwritten: Number = 0  # number of overwritten events; only in the last part


class MessagePlane(Protocol):
    """The part of a request plane that carries queries and answers."""

    async def subscribe(
        self, subject: str, receive: Callable[[bytes, str], None]
    ) -> Callable[[], Awaitable[None]]: ...

    def try_publish(self, subject: str, data: bytes) -> bool: ...


def recordings_subject(namespace: str) -> str:
    """Return the subject at which all processes of a namespace receive `RecordingQuery`."""
    return f"{namespace}.recordings"


def timelines_prefix(namespace: str) -> str:
    """Return the beginning of the subjects at which frontends receive the answers of others."""
    return f"{namespace}.timelines."


class KeySelector:
    """Finds the requests of one process that a query wants.

    `add_event` is called for every event; their order does not matter.
    """

    def __init__(self, query: RecordingQuery) -> None:
        self._query = query
        self._given = set(query.keys)
        self._begun: dict[int, int] = {}  # time of the first event
        # Open spans, by request and event that opens them.
        self._num_open: Counter[tuple[int, int]] = Counter()
        self._closed: set[int] = set()

    def add_event(self, key: int, event: int, ns: int, a: int) -> None:
        """Take one event of a request."""
        query = self._query
        # With the event RECEIVED, `a` is a hash of the client's id of the request; 0: it has none.
        is_received = event == RecordedEvent.RECEIVED
        has_client_id = is_received and query.client_id > 0 and a == query.client_id
        if has_client_id or key >> 32 == query.prefix:
            self._given.add(key)
        if query.selection is Selection.GIVEN:
            return
        self._begun[key] = min(ns, self._begun.get(key, ns))
        if event in _OPENS:
            self._num_open[key, event] += 1
        elif event in _CLOSES:
            self._num_open[key, _CLOSES[RecordedEvent(event)]] -= 1
            self._closed.add(key)

    def keys(self) -> set[int]:
        """Return the requests that were found. With `Selection.ALL` these are all."""
        match self._query.selection:
            case Selection.GIVEN:
                return self._given
            case Selection.OPEN:
                is_open = {key for (key, _), count in self._num_open.items() if count > 0}
                # The event that opened a request may be overwritten.
                never_closed = self._begun.keys() - self._closed
                return self._given | is_open | never_closed
            case Selection.LATEST:
                latest = heapq.nlargest(NUM_LATEST, self._begun, key=self._begun.__getitem__)
                return self._given.union(latest)
            case Selection.ALL:
                return self._given | self._begun.keys()


# The latest queries, by inbox. Several workers of one process have one recording, which only the
# first of them sends.
_answered: dict[str, None] = {}


async def answer_queries(
    plane: MessagePlane, namespace: str, instance_id: int = 0, *, pause_s: float = 0.25
) -> None:
    """Answer queries until cancelled.

    Args:
        plane: request plane of the process.
        namespace: namespace of the process.
        instance_id: id of a worker; 0 for a frontend.
        pause_s: pause after an answer. Without it, clients that ask often would take most of the
            time of the event loop.
    """
    waiting: asyncio.Queue[RecordingQuery] = asyncio.Queue(_MAX_WAITING)

    def receive(data: bytes, _reply: str) -> None:
        with suppress(BadFrame, asyncio.QueueFull):  # BadFrame: of another release
            query = decode(data, RecordingQuery)
            header = RECORDER.content(0, HEADER_BYTES)
            is_last = not header or RecordingHeader.read(header).epoch_ns in query.known
            plane.try_publish(query.inbox, encode(_part(instance_id, header, is_last=is_last)))
            if not is_last and query.inbox not in _answered:
                waiting.put_nowait(query)
                _answered[query.inbox] = None
                if len(_answered) > _REMEMBERED:
                    del _answered[next(iter(_answered))]

    unsubscribe = await plane.subscribe(recordings_subject(namespace), receive)
    try:
        while True:
            await _answer(await waiting.get(), plane.try_publish, instance_id)
            await asyncio.sleep(pause_s)
    finally:
        await unsubscribe()


def _part(instance_id: int, header: bytes, *, is_last: bool) -> RecordingPart:
    return RecordingPart(instance_id, socket.gethostname(), time.monotonic_ns(), header, is_last)


async def _answer(
    query: RecordingQuery, publish: Callable[[str, bytes], bool], instance_id: int
) -> None:
    """Send the events that a query wants, in parts."""
    selector = KeySelector(query)
    # Without these, the query has the keys of all requests that it wants.
    needs_search = query.prefix >= 0 or query.client_id > 0
    if query.selection is not Selection.GIVEN or needs_search:
        for slots in _slices():
            for _, ns, key, event, _, a, _, _, _, _ in SLOT.iter_unpack(slots):
                if key:
                    selector.add_event(key, event, ns, a)
            await asyncio.sleep(0)
    keys = selector.keys()
    part = _part(instance_id, RECORDER.content(0, HEADER_BYTES), is_last=False)
    wanted = bytearray()
    num_slots = 0
    last = 0
    oldest_ns = part.now_ns
    for slots in _slices():
        num_slots += len(slots) // SLOT.size
        for index, (number, ns, key, _, _, _, _, _, _, _) in enumerate(SLOT.iter_unpack(slots)):
            if not number:
                continue
            if ns < oldest_ns:
                oldest_ns = ns
            if number > last:
                last = number
            if not key or key in keys:
                wanted += slots[index * SLOT.size : (index + 1) * SLOT.size]
        if len(wanted) >= _PART_BYTES:
            full = msgspec.structs.replace(part, slots=bytes(wanted))
            if not publish(query.inbox, encode(full)):
                return
            wanted.clear()
        await asyncio.sleep(0)
    last_part = msgspec.structs.replace(
        part,
        is_last=True,
        slots=bytes(wanted),
        oldest_ns=oldest_ns,
        num_overwritten=max(0, last - num_slots),
    )
    publish(query.inbox, encode(last_part))


def _slices() -> Iterator[bytes]:
    """Yield the slots of the ring.

    Slots that are written meanwhile may be newer than the others.
    """
    for begin in itertools.count(HEADER_BYTES, _SLICE_BYTES):
        slots = RECORDER.content(begin, begin + _SLICE_BYTES)
        if not slots:
            return
        yield slots

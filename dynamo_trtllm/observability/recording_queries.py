"""Ask the running processes of a deployment for their recordings.

The times in the recordings are converted to the clock of this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec

from dynamo_trtllm.observability.recorder import SLOT, RecordingHeader, boot_id
from dynamo_trtllm.observability.recording_server import (
    RecordingPart,
    RecordingQuery,
    Selection,
    recordings_subject,
)
from dynamo_trtllm.observability.recordings import (
    Entry,
    Holder,
    ProcessRecording,
    ProcessState,
    Recordings,
    read_slots,
)
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.messages import Instance, decode, encode
from dynamo_trtllm.protocol.sanitize import escape_controls, shorten

_ANSWER_GRACE_S: Final = 0.5  # the least wait for answers
_CLOCK_READINGS: Final = 3  # queries for the clocks
_CLOCK_TIMEOUT_S: Final = 0.25  # of each of these queries
_MAX_HOST_CHARS: Final = 256


class QueryTransport(Protocol):
    """The part of a transport that carries queries and their answers."""

    def new_inbox(self) -> str: ...

    async def subscribe(
        self, subject: str, receive: Callable[[bytes, str], None]
    ) -> Callable[[], Awaitable[None]]: ...

    def publish(self, subject: str, data: bytes) -> None: ...


class ClockOffset(NamedTuple):
    """The offset between the clocks of another machine and of this one, between two bounds.

    Added to a time of the other machine, it gives the time of this one.
    """

    low_ns: int
    high_ns: int

    @property
    def ns(self) -> int:
        return (self.low_ns + self.high_ns) // 2

    @property
    def error_s(self) -> float:
        return (self.high_ns - self.low_ns) / 2e9

    def within(self, low_ns: int, high_ns: int) -> ClockOffset:
        """Return the offset, limited to this interval, too."""
        limited = ClockOffset(max(self.low_ns, low_ns), min(self.high_ns, high_ns))
        # Clocks drift, so the bounds may exclude each other.
        is_possible = limited.low_ns <= limited.high_ns
        return limited if is_possible else self


_UNBOUNDED: Final = ClockOffset(-(1 << 63), 1 << 63)
_EXACT: Final = ClockOffset(0, 0)


@dataclass(slots=True)
class _Sender:
    """A process that answers."""

    header: RecordingHeader
    host: str
    slots: list[bytes] = field(default_factory=list)
    is_complete: bool = False
    oldest_ns: int = 0
    num_overwritten: int = 0


@dataclass(eq=False)
class RecordingQueries:
    """Queries to all processes of a namespace."""

    transport: QueryTransport
    namespace: str
    instances: Mapping[int, Instance]  # workers that have to answer, by id
    timeout_s: float  # the most time for all answers to a query
    # The least time for them: frontends are not registered, so their number is not known.
    settle_s: float = _ANSWER_GRACE_S

    def __post_init__(self) -> None:
        self._answered = set[int]()  # instances
        self._expected = set(self.instances)
        self._senders: dict[tuple[bytes, int, int], _Sender] = {}
        # The offsets, by the boot of the machine.
        self._offsets: dict[bytes, ClockOffset] = {boot_id(): _EXACT}
        self._asked_ns = 0
        self._news = asyncio.Event()
        self.problems: list[str] = []

    async def ask(self, query: RecordingQuery) -> None:
        """Send a query, and wait for the answers."""
        await self._ask(query, self.settle_s, self.timeout_s)
        for sender in self._senders.values():
            if not sender.is_complete:
                self.problems.append(
                    f"only a part of the recording of process {sender.header.pid} on {sender.host}"
                    " came in time"
                )

    async def read_clocks(self) -> None:
        """Ask the processes that have answered for their clocks alone, which they tell at once."""
        known = [sender.header.epoch_ns for sender in self._senders.values()]
        query = RecordingQuery("", Selection.GIVEN, known=known)
        for _ in range(_CLOCK_READINGS):
            await self._ask(query, 0.0, _CLOCK_TIMEOUT_S)

    async def _ask(self, query: RecordingQuery, settle_s: float, timeout_s: float) -> None:
        """Send a query, and wait for the answers: at least `settle_s`, and at most `timeout_s`."""
        inbox = self.transport.new_inbox()
        unsubscribe = await self.transport.subscribe(inbox, self._receive)
        for sender in self._senders.values():
            sender.is_complete = False
        self._asked_ns = time.monotonic_ns()
        addressed = msgspec.structs.replace(query, inbox=inbox)
        self.transport.publish(recordings_subject(self.namespace), encode(addressed))
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(settle_s)
                while not self._has_all_answers():
                    self._news.clear()
                    await self._news.wait()
        # A worker that has not answered one query is not waited for again.
        self._expected &= self._answered
        await unsubscribe()

    def _has_all_answers(self) -> bool:
        if not self._expected <= self._answered:
            return False
        return all(sender.is_complete for sender in self._senders.values())

    def _receive(self, data: bytes, _reply: str) -> None:
        received_ns = time.monotonic_ns()
        try:
            part = decode(data, RecordingPart)
            self._answered.add(part.instance_id)
            if part.header:
                self._take(part, RecordingHeader.read(part.header), received_ns)
        except (BadFrame, ValueError) as exc:
            self.problems.append(f"the answer of a process can't be read: {exc}")
        self._news.set()

    def _take(self, part: RecordingPart, header: RecordingHeader, received_ns: int) -> None:
        """Take a part of an answer. Its time narrows the bounds of the offset."""
        offset = self._offsets.get(header.boot_id, _UNBOUNDED)
        self._offsets[header.boot_id] = offset.within(
            self._asked_ns - part.now_ns, received_ns - part.now_ns
        )
        key = (header.boot_id, header.pid, header.epoch_ns)
        host = escape_controls(shorten(part.host, _MAX_HOST_CHARS))
        sender = self._senders.setdefault(key, _Sender(header, host))
        sender.header = header
        if part.slots:
            if len(part.slots) % SLOT.size:
                raise ValueError("an event is incomplete")
            sender.slots.append(part.slots)
        # Only the last part of a whole answer has these. It may have no slots.
        if part.oldest_ns > 0:
            sender.oldest_ns = part.oldest_ns
            sender.num_overwritten = part.num_overwritten
        if part.is_last:
            sender.is_complete = True

    def processes(self) -> list[ProcessRecording]:
        """Return what the processes have sent so far, each in its own clock."""
        return [
            _recording(sender, _EXACT, sender.header.boot_id)
            for sender in self._senders.values()
            if sender.slots
        ]

    def result(self, local: Recordings) -> Recordings:
        """Return the recordings of this machine and those that were sent.

        The result also names the workers that are silent, and why.
        """
        reason = (
            f"it has not answered for {self.timeout_s:g} s: it is frozen, blocked, gone or cut off"
            " from NATS"
        )
        unanswered = {
            instance.id: Holder(f"{instance.role} {instance.id:x}", reason)
            for instance in self.instances.values()
            if instance.id not in self._answered
        }
        # The times are converted to the clock of this machine, so they have its boot, too.
        own_boot = boot_id()
        asked = [
            _recording(sender, self._offsets[sender.header.boot_id], own_boot)
            for sender in self._senders.values()
            if sender.slots
        ]
        problems = [*local.problems, *dict.fromkeys(self.problems)]
        return Recordings([*local.processes, *asked], problems, unanswered, has_asked=True)


def _recording(sender: _Sender, offset: ClockOffset, boot: bytes) -> ProcessRecording:
    header = sender.header
    entries: dict[int, Entry] = {}
    for slots in sender.slots:
        entries.update(read_slots(slots, offset.ns))
    alive_ns = 0  # it has not written this time yet
    if header.alive_ns:
        alive_ns = header.alive_ns + offset.ns
    converted = header._replace(
        monotonic_ns=header.monotonic_ns + offset.ns, alive_ns=alive_ns, boot_id=boot
    )
    return ProcessRecording(
        header=converted,
        state=ProcessState.RUNNING,
        silent_s=0.0,
        num_overwritten=sender.num_overwritten,
        oldest_ns=sender.oldest_ns + offset.ns,
        entries=[entries[number] for number in sorted(entries)],
        host=sender.host,
        clock_error_s=offset.error_s,
    )

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

_SHORTEST_WAIT_S: Final = 0.5  # for the answers to a query
_CLOCK_READINGS: Final = 3  # how many queries read the clocks
_CLOCK_TIMEOUT_S: Final = 0.25  # longest wait for the answers to one of these queries
_MAX_HOST_CHARS: Final = 256


class QueryTransport(Protocol):
    """The part of a transport that carries queries and their answers."""

    def new_inbox(self) -> str: ...

    async def subscribe(
        self, subject: str, receive: Callable[[bytes, str], None]
    ) -> Callable[[], Awaitable[None]]: ...

    def publish(self, subject: str, data: bytes) -> None: ...


class ClockOffset(NamedTuple):
    """The offset of this machine's clock from the clock of another machine, between two bounds.

    A time of the other machine plus the offset is a time of this machine.
    """

    low_ns: int
    high_ns: int

    @property
    def ns(self) -> int:
        """Return the middle of the bounds."""
        return (self.low_ns + self.high_ns) // 2

    @property
    def error_s(self) -> float:
        """Return the largest error of `ns`, in seconds."""
        error_ns = (self.high_ns - self.low_ns) / 2
        return error_ns / 1e9

    def within(self, low_ns: int, high_ns: int) -> ClockOffset:
        """Return the offset with its bounds narrowed by these bounds."""
        narrowed = ClockOffset(max(self.low_ns, low_ns), min(self.high_ns, high_ns))
        # Clocks drift, so the new bounds may exclude the former ones.
        is_possible = narrowed.low_ns <= narrowed.high_ns
        return narrowed if is_possible else self


_UNBOUNDED: Final = ClockOffset(-(1 << 63), 1 << 63)
_EXACT: Final = ClockOffset(0, 0)


@dataclass(slots=True)
class _Sender:
    """A process that answers."""

    header: RecordingHeader
    host: str
    slots: list[bytes] = field(default_factory=list)
    is_complete: bool = False  # the last part of the answer to this query has come
    # The next two are 0 until the last part of an answer with events has come.
    oldest_ns: int = 0
    num_overwritten: int = 0


@dataclass(eq=False)
class RecordingQueries:
    """Queries to all processes of a namespace."""

    transport: QueryTransport
    namespace: str
    instances: Mapping[int, Instance]  # workers that have to answer, by id
    timeout_s: float  # longest wait for the answers to a query
    # The shortest wait for the answers. Frontends are not registered, so it is not known how many
    # of them will answer.
    settle_s: float = _SHORTEST_WAIT_S

    def __post_init__(self) -> None:
        self._answered = set[int]()  # ids of the instances that have answered
        self._expected = set(self.instances)  # ids of the workers that are waited for
        # The processes that answer, by boot of the machine, process id and start of the recording.
        self._senders: dict[tuple[bytes, int, int], _Sender] = {}
        # The offsets of the clocks, by boot of the machine.
        self._offsets: dict[bytes, ClockOffset] = {boot_id(): _EXACT}
        self._asked_ns = 0  # when the current query was sent
        self._has_received = asyncio.Event()
        self.problems: list[str] = []

    async def ask(self, query: RecordingQuery) -> None:
        """Send a query, and wait for the answers."""
        await self._ask(query, settle_s=self.settle_s, timeout_s=self.timeout_s)
        for sender in self._senders.values():
            if not sender.is_complete:
                self.problems.append(
                    f"only a part of the recording of process {sender.header.pid} on {sender.host}"
                    " came in time"
                )

    async def read_clocks(self) -> None:
        """Ask the known processes for their clocks only. They answer at once."""
        known = [sender.header.epoch_ns for sender in self._senders.values()]
        # A process whose recording is known sends no events. `_ask` sets the inbox.
        query = RecordingQuery(inbox="", selection=Selection.GIVEN, known=known)
        for _ in range(_CLOCK_READINGS):
            await self._ask(query, settle_s=0.0, timeout_s=_CLOCK_TIMEOUT_S)

    async def _ask(self, query: RecordingQuery, *, settle_s: float, timeout_s: float) -> None:
        """Send a query, and wait for the answers.

        Args:
            query: the query, without an inbox.
            settle_s: the shortest wait.
            timeout_s: the longest wait.
        """
        inbox = self.transport.new_inbox()
        unsubscribe = await self.transport.subscribe(inbox, self._receive)
        try:
            for sender in self._senders.values():
                sender.is_complete = False
            self._asked_ns = time.monotonic_ns()
            addressed = msgspec.structs.replace(query, inbox=inbox)
            self.transport.publish(recordings_subject(self.namespace), encode(addressed))
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.sleep(settle_s)
                    while not self._has_all_answers():
                        self._has_received.clear()
                        await self._has_received.wait()
        finally:
            await unsubscribe()
        # If a worker has not answered one query, later queries do not wait for the worker.
        self._expected &= self._answered

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
        self._has_received.set()

    def _take(self, part: RecordingPart, header: RecordingHeader, received_ns: int) -> None:
        """Take a part of an answer."""
        # The process read its clock between the query and the arrival of this part.
        offset = self._offsets.get(header.boot_id, _UNBOUNDED)
        self._offsets[header.boot_id] = offset.within(
            low_ns=self._asked_ns - part.now_ns, high_ns=received_ns - part.now_ns
        )
        key = (header.boot_id, header.pid, header.epoch_ns)
        host = escape_controls(shorten(part.host, _MAX_HOST_CHARS))
        sender = self._senders.setdefault(key, _Sender(header, host))
        sender.header = header
        if part.slots:
            if len(part.slots) % SLOT.size:
                raise ValueError("an event is incomplete")
            sender.slots.append(part.slots)
        # Only the last part of an answer with events has the next two values. This part itself may
        # be without slots.
        if part.oldest_ns > 0:
            sender.oldest_ns = part.oldest_ns
            sender.num_overwritten = part.num_overwritten
        if part.is_last:
            sender.is_complete = True

    def processes(self) -> list[ProcessRecording]:
        """Return the recordings that were sent so far, with times in the clock of the sender."""
        return [
            _recording(sender, _EXACT, sender.header.boot_id)
            for sender in self._senders.values()
            if sender.slots
        ]

    def result(self, local: Recordings) -> Recordings:
        """Return `local`, which are the recordings of this machine, and those that were sent.

        The result also names the workers that have not answered, and the reason.
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
        # The times are converted to the clock of this machine. Therefore the recordings get the
        # boot id of this machine.
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
    # These times are 0 if the process has not written or sent them yet.
    alive_ns = header.alive_ns + offset.ns if header.alive_ns else 0
    oldest_ns = sender.oldest_ns + offset.ns if sender.oldest_ns else 0
    converted = header._replace(
        monotonic_ns=header.monotonic_ns + offset.ns, alive_ns=alive_ns, boot_id=boot
    )
    return ProcessRecording(
        header=converted,
        state=ProcessState.RUNNING,
        silent_s=0.0,
        num_overwritten=sender.num_overwritten,
        oldest_ns=oldest_ns,
        entries=[entries[number] for number in sorted(entries)],
        host=sender.host,
        clock_error_s=offset.error_s,
    )

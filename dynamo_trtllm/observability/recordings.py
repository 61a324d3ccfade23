"""Read the files of flight recorders.

This needs no help of the processes that write the files. They may run, be frozen or have ended.
"""

from __future__ import annotations

import functools
import gc
import mmap
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from dynamo_trtllm.observability.recorder import (
    HEADER_BYTES,
    SLOT,
    SUFFIX,
    TICK_S,
    RecordedEvent,
    RecordingHeader,
    boot_id,
    id_hash,
    is_locked,
    request_key,
    start_ticks,
)
from dynamo_trtllm.protocol.sanitize import escape_controls

BLOCKED_S: Final = 5.0  # after this time without a tick, an event loop counts as blocked
_CONNECTIONS: Final = frozenset(
    {RecordedEvent.CONNECTION_AWAITED, RecordedEvent.CONNECTION_LOST, RecordedEvent.CONNECTED}
)
_HEX: Final = re.compile("[0-9a-f]*")


class ProcessState(Enum):
    """What is known about the process that wrote a file."""

    RUNNING = "running"
    FROZEN = "frozen"  # stopped by a signal or a debugger
    BLOCKED = "blocked"  # the event loop has not run for BLOCKED_S
    ENDED = "ended"
    KILLED = "killed"  # the process has ended without its last event


class Entry(NamedTuple):
    """One event."""

    ns: int  # time since boot
    event: int  # a `RecordedEvent`, unless a newer version wrote it
    key: int  # the number of the request; 0: an event of the process
    choice: int
    # The three values. The comments of `RecordedEvent` say what they mean.
    a: int
    b: int
    c: int
    reason: str

    @property
    def instance_id(self) -> int:
        """The instance that the event names. Only for events whose `a` is an instance."""
        return self.a

    @property
    def num_tokens(self) -> int:
        """The number of tokens. Only for events whose `a` is a number of tokens."""
        return self.a

    @property
    def is_quarantined(self) -> bool:
        """True if WAITING_FOR_WORKERS names a quarantined pair or instance."""
        return bool(self.b)

    @property
    def name(self) -> str:
        """The event as text for people."""
        try:
            return RecordedEvent(self.event).name.lower().replace("_", " ")
        except ValueError:
            return f"event {self.event}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecording:
    """The events of one process that are still in its file, oldest first."""

    header: RecordingHeader
    state: ProcessState
    silent_s: float  # time since the last tick; 0.0 if the process has ended
    num_overwritten: int  # number of older events, which are no longer in the file
    oldest_ns: int = 0  # time of the oldest event that is not overwritten; 0: not known
    entries: list[Entry]
    # The machine of a process that has sent its recording. "": the file was read on this machine.
    host: str = ""
    # The largest error of the times that were converted to the clock of this machine.
    clock_error_s: float = 0.0

    @property
    def kind(self) -> str:
        return _text(self.header.kind)

    @property
    def namespace(self) -> str:
        return _text(self.header.namespace)

    @property
    def is_frontend(self) -> bool:
        return not self.header.instance_id

    @property
    def is_over(self) -> bool:
        return self.state in (ProcessState.ENDED, ProcessState.KILLED)

    @property
    def title(self) -> str:
        """The name of the process for people: its kind, and its instance or process id."""
        header = self.header
        if not self.is_frontend:
            return f"{self.kind} {header.instance_id:x}"
        # Process ids are unique only within a container, so the host is named, too.
        host = f"@{self.host}" if self.host else ""
        return f"{self.kind} {header.pid}{host}"

    @property
    def ahead_s(self) -> float:
        """By how many seconds the date of the process's machine is ahead of the date here."""
        header = self.header
        if not header.alive_epoch_ns:
            return 0.0
        their_offset_ns = header.alive_epoch_ns - header.alive_ns
        own_offset_ns = time.time_ns() - time.monotonic_ns()
        return (their_offset_ns - own_offset_ns) / 1e9

    @property
    def waits_for_etcd_s(self) -> float:
        """For how long the process has waited for an answer of etcd, or 0.0 if it does not wait."""
        if self.is_over:
            return 0.0
        for entry in reversed(self.entries):
            if entry.event in _CONNECTIONS and entry.reason == "etcd":
                if entry.event == RecordedEvent.CONNECTED:
                    return 0.0
                return (time.monotonic_ns() - entry.ns) / 1e9
        return 0.0

    def epoch_s(self, ns: int) -> float:
        """Return the time of an event in seconds since the epoch."""
        return self.epoch_ns(ns) / 1e9

    def epoch_ns(self, ns: int) -> int:
        """Return the time of an event in nanoseconds since the epoch."""
        return self.header.epoch_ns + ns - self.header.monotonic_ns


class Step(NamedTuple):
    """One event of a request with the process that recorded it."""

    process: ProcessRecording
    entry: Entry


@dataclass(slots=True)
class RequestRecording:
    """The events of one request in all processes, oldest first."""

    key: int
    steps: list[Step] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.key:016x}"

    @property
    def began_epoch_ns(self) -> int:
        """The time of the first event since the epoch.

        Unlike times of the clock of the events, it can be compared over several boots.
        """
        first = self.steps[0]
        return first.process.epoch_ns(first.entry.ns)

    @property
    def finished(self) -> Step | None:
        """The last step of the frontend, if it has finished the request."""
        for step in reversed(self.steps):
            if step.entry.event == RecordedEvent.FINISHED:
                return step
        return None

    def processes(self) -> list[ProcessRecording]:
        """Return the processes, in the order of their first events."""
        by_id = {id(step.process): step.process for step in self.steps}
        return list(by_id.values())


class Holder(NamedTuple):
    """A process for which a request waits, or something else, such as NATS.

    It may also be a worker that has no recording. Requests may wait for such a worker.
    """

    title: str
    reason: str  # why the request waits, or why there is no recording


class RequestIds(NamedTuple):
    """What an id that a user has typed may mean.

    It may be the number of a request, the first half of such a number, or the client's id.
    """

    keys: frozenset[int]  # the numbers of requests
    prefix: int  # the upper 32 bits of such a number; -1: none
    client_id: int  # the hash of an `X-Request-Id`

    @classmethod
    def parse(cls, text: str) -> RequestIds:
        """Read an id of a response, of `X-Request-Id`, of a log line, or of `explain`."""
        key, _ = request_key(text)
        keys = {key}
        prefix = -1
        # Ids end with "-" or "_" and hexadecimal digits.
        tail = text.rpartition("-")[2].rpartition("_")[2]
        if len(tail) >= 32:
            # The first 16 of the last 32 digits of a response's id are the id of the request.
            tail = tail[-32:][:16]
        if len(tail) == 8 and _HEX.fullmatch(tail):
            prefix = int(tail, 16)
        elif len(tail) == 16:
            key, _ = request_key(tail)
            keys.add(key)
        return cls(frozenset(keys), prefix, id_hash(text))


@dataclass(eq=False)
class Recordings:
    """Recordings of processes: from files in a folder, or sent by the processes."""

    processes: list[ProcessRecording]
    # A line for each recording that can't be read.
    problems: list[str] = field(default_factory=list)
    # The workers that have not answered a query, by instance id.
    unanswered: Mapping[int, Holder] = field(default_factory=dict)
    has_asked: bool = False  # the processes of other machines were asked for their recordings

    def __post_init__(self) -> None:
        self.requests: dict[int, RequestRecording] = {}
        # The keys of requests, by the hash of their X-Request-Id.
        self._keys_by_client_id: defaultdict[int, set[int]] = defaultdict(set)
        boot = boot_id()
        for process in self.processes:
            for entry in process.entries:
                key = entry.key
                if key:
                    request = self.requests.get(key)
                    if request is None:
                        request = RequestRecording(key)
                        self.requests[key] = request
                    request.steps.append(Step(process, entry))
                    if entry.event == RecordedEvent.RECEIVED:
                        self._keys_by_client_id[entry.a].add(key)

        def time_order(step: Step) -> tuple[bool, int]:
            # The clock of the events starts at each boot. So events of earlier boots come first.
            return step.process.header.boot_id == boot, step.entry.ns

        for request in self.requests.values():
            request.steps.sort(key=time_order)

    @classmethod
    def read(cls, folder: Path) -> Recordings:
        """Read the files in a folder. Raises OSError if the folder can't be read."""
        processes = list[ProcessRecording]()
        problems = list[str]()
        is_collecting = gc.isenabled()
        # While a million events are read, the garbage collector would look at all of them again and
        # again, although none is garbage.
        gc.disable()
        try:
            for name in sorted(os.listdir(folder)):
                if not name.endswith(SUFFIX):
                    continue
                path = folder / name
                try:
                    processes.append(read_process(path))
                except FileNotFoundError:
                    # The file was just removed.
                    continue
                except (OSError, ValueError) as exc:
                    reason = getattr(exc, "strerror", None) or exc
                    problems.append(f"{path} can't be read: {reason}")
            return cls(processes, problems)
        finally:
            if is_collecting:
                gc.enable()

    def instance(self, instance_id: int) -> ProcessRecording | None:
        """Return the recording of a worker."""
        for process in self.processes:
            if process.header.instance_id == instance_id:
                return process
        return None

    def without_recording(self, instance_id: int) -> Holder:
        """Return what is known of a worker that has no recording here."""
        if self.has_asked:
            reason = (
                "it records nothing, or is not registered: then it has ended, or was frozen or cut"
                " off from etcd"
            )
        else:
            reason = (
                "it has no recording on this machine; run this command on its machine, or without"
                " --local"
            )
        return self.unanswered.get(instance_id) or Holder(f"worker {instance_id:x}", reason)

    def find(self, text: str) -> list[RequestRecording]:
        """Return the requests with this id, see `RequestIds`."""
        ids = RequestIds.parse(text)
        found = set(self._keys_by_client_id.get(ids.client_id, ()))
        found |= {key for key in self.requests if key >> 32 == ids.prefix}
        found |= self.requests.keys() & ids.keys
        return [self.requests[key] for key in sorted(found)]


def read_process(path: Path) -> ProcessRecording:
    """Read one file.

    Raises:
        OSError: the file can't be read.
        ValueError: the file was not written by a flight recorder, or is damaged.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < HEADER_BYTES:
            raise ValueError("it is not a file of the flight recorder")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            header = RecordingHeader.read(memory[:HEADER_BYTES])
            if size != HEADER_BYTES + header.num_slots * SLOT.size:
                raise ValueError(
                    f"it has {size} bytes, which does not fit its {header.num_slots} slots"
                )
            # If a slot is being written, it differs in the two copies.
            first = memory[HEADER_BYTES:]
            second = memory[HEADER_BYTES:]
    entries = []
    last = 0
    for number, entry in sorted(read_slots(unchanged_slots(first, second))):
        last = number
        entries.append(entry)
    is_running = is_locked(path)
    silent_s = max(0.0, (time.monotonic_ns() - header.alive_ns) / 1e9) if is_running else 0.0
    has_stopped = bool(entries) and entries[-1].event == RecordedEvent.STOPPED
    return ProcessRecording(
        header=header,
        state=_state(header, is_running=is_running, has_stopped=has_stopped, silent_s=silent_s),
        silent_s=silent_s,
        num_overwritten=max(0, last - header.num_slots),
        oldest_ns=entries[0].ns if entries else 0,
        entries=entries,
    )


def unchanged_slots(first: bytes, second: bytes) -> bytes:
    """Return the slots that are equal in two copies. The other slots were being written."""
    if first == second:
        return first
    unchanged = bytearray()
    for begin in range(0, len(first), SLOT.size):
        slot = first[begin : begin + SLOT.size]
        if slot == second[begin : begin + SLOT.size]:
            unchanged += slot
    return bytes(unchanged)


def read_slots(slots: bytes, offset_ns: int = 0) -> Iterator[tuple[int, Entry]]:
    """Yield number and event of each complete slot.

    A slot is incomplete if the process was killed while it wrote the slot.

    Args:
        slots: the slots, in any order.
        offset_ns: is added to the times, to convert them to the clock of this machine.
    """
    for number, ns, key, event, choice, a, b, c, reason, again in SLOT.iter_unpack(slots):
        if number and number == again:
            yield number, Entry(ns + offset_ns, event, key, choice, a, b, c, _text(reason))


def _state(
    header: RecordingHeader, *, is_running: bool, has_stopped: bool, silent_s: float
) -> ProcessState:
    if not is_running:
        return ProcessState.ENDED if has_stopped else ProcessState.KILLED
    try:
        status = Path(f"/proc/{header.pid}/stat").read_text(encoding="ascii", errors="replace")
        state = status.rpartition(")")[2].split()[0]
        # By now, another process may have the same id, so the start time is compared, too.
        is_stopped = state in "Tt" and start_ticks(header.pid) == header.start_ticks
    except OSError:  # a process of another container
        is_stopped = False
    if is_stopped:
        return ProcessState.FROZEN
    return ProcessState.BLOCKED if silent_s > BLOCKED_S + TICK_S else ProcessState.RUNNING


@functools.lru_cache(maxsize=1024)
def _text(packed: bytes) -> str:
    # Another machine may have sent the text, so it may contain control characters.
    return escape_controls(packed.rstrip(b"\x00").decode(errors="replace"))

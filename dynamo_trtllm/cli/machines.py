"""Ask the processes of a deployment on all machines for their recordings, and convert the times to
one clock.
"""

from __future__ import annotations

import asyncio
import heapq
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.config.base import DEFAULT_SOURCE
from dynamo_trtllm.config.commands import ExplainConfig
from dynamo_trtllm.discovery.etcd_store import EtcdStore
from dynamo_trtllm.discovery.records import BadRecord, namespace_prefix, read_instance
from dynamo_trtllm.errors import BadFrame, PlaneError, Unreachable
from dynamo_trtllm.launch.launcher import launch_records
from dynamo_trtllm.messages import Instance, decode, encode
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.recorder import (
    HEADER_BYTES,
    SLOT,
    RecordedEvent,
    RecordingHeader,
    boot_id,
)
from dynamo_trtllm.observability.recording_server import (
    NUM_LATEST,
    KeySelector,
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
    RequestIds,
    RequestRecording,
    Step,
    sent_slots,
)
from dynamo_trtllm.request_plane.frames import PING
from dynamo_trtllm.request_plane.nats import NatsTransport
from dynamo_trtllm.request_plane.transport import Transport
from dynamo_trtllm.sanitize import escape_controls, mask_address, shorten

_SETTLE_S: Final = 0.5
_PING_TIMEOUT_S: Final = 1.0
_CLOCK_READINGS: Final = 3
_CLOCK_TIMEOUT_S: Final = 0.25
_MOST_SLOT_BYTES: Final = 1 << 20  # of one part
_MOST_HOST_CHARS: Final = 256
_MOST_KEYS: Final = 50_000  # which fit into one message


def with_other_machines(config: ExplainConfig, local: Recordings) -> Recordings:
    """Return the recordings of this machine, and what the processes of other machines and
    containers send.

    If etcd or NATS can't be reached, the result has only those of this machine, and a line that
    says so.
    """
    observe_logging.setup(config.log_level, "explain", config.log_format)
    config = _connection(config)
    try:
        return asyncio.run(_gather(config, local))
    except (PlaneError, TimeoutError) as exc:
        is_etcd = isinstance(exc, TimeoutError) or exc.field == "etcd_endpoints"
        name, address = ("etcd", config.etcd_endpoints) if is_etcd else ("NATS", config.nats_server)
        flag = "--etcd-endpoints" if is_etcd else "--nats-server"
        line = (
            f"no {name} answers at {mask_address(address)}, so only files of this machine are read;"
            f" pass {flag} or "
        )
        return Recordings(local.processes, [*local.problems, f"{line}--local"])


def _connection(config: ExplainConfig) -> ExplainConfig:
    """Return the settings with the addresses of the deployment that was launched here, if it is one
    and none is set.
    """
    names = ("namespace", "etcd_endpoints", "nats_server")
    records = [record for record in launch_records() if record.etcd and record.nats]
    if len(records) != 1 or any(config.source_of(name) != DEFAULT_SOURCE for name in names):
        return config
    (record,) = records
    values = {
        "namespace": record.namespace,
        "etcd_endpoints": record.etcd,
        "nats_server": record.nats,
    }
    return config.model_copy(update=values)


async def _gather(config: ExplainConfig, local: Recordings) -> Recordings:
    async with asyncio.timeout(config.timeout_s), aclosing(EtcdStore(config)) as store:
        records = (await store.read_all(namespace_prefix(config.namespace))).records
    transport = NatsTransport(config.nats_server)
    await transport.connect(config.timeout_s)
    try:
        inquiry = Inquiry(transport, config.namespace, _instances(records, local), config.timeout_s)
        selection = _selection(config)
        ids = (
            RequestIds.parse(config.request)
            if config.request is not None
            else RequestIds(frozenset(), -1, 0)
        )
        known = [process.header.epoch_ns for process in local.processes]
        query = RecordingQuery("", selection, sorted(ids.keys), ids.prefix, ids.client_id, known)
        keys = _keys(query, local.processes)
        await inquiry.ask(query)
        found = keys | _keys(query, inquiry.processes())
        if selection is Selection.LATEST:  # each process has named its own
            found = latest_keys([*local.processes, *inquiry.processes()])
        # what the other processes know of these requests
        if selection is not Selection.ALL and found - ids.keys:
            kept = sorted(found)[:_MOST_KEYS]
            await inquiry.ask(RecordingQuery("", Selection.GIVEN, kept, known=known))
            if len(kept) < len(found):
                inquiry.problems.append(
                    f"other machines were asked for {len(kept)} of {len(found)} requests"
                )
        await inquiry.read_clocks()
        return await inquiry.result(local)
    finally:
        await transport.aclose()


def _selection(config: ExplainConfig) -> Selection:
    if config.request is not None:
        return Selection.GIVEN
    if config.stuck:
        return Selection.OPEN
    return Selection.LATEST if config.perfetto is None and config.trace is None else Selection.ALL


def _keys(query: RecordingQuery, processes: list[ProcessRecording]) -> set[int]:
    """Return the requests of these processes that a query wants."""
    found = set[int]()
    for process in processes:
        selector = KeySelector(query)
        for entry in process.entries:
            if entry.key:
                selector.see(entry.key, entry.event, entry.ns, entry.a)
        found |= selector.keys()
    return found


def latest_keys(processes: Iterable[ProcessRecording]) -> set[int]:
    """Return the latest requests of all processes, by the dates of their machines: the clocks are
    not aligned yet.
    """
    begun_s = dict[int, float]()
    for process in processes:
        for entry in process.entries:
            if entry.key:
                at_s = process.epoch_s(entry.ns)
                begun_s[entry.key] = min(at_s, begun_s.get(entry.key, at_s))
    return set(heapq.nlargest(NUM_LATEST, begun_s, key=lambda key: begun_s[key]))


def _instances(records: Mapping[str, bytes], local: Recordings) -> dict[int, Instance]:
    """Return the registered workers without a recording of this machine."""
    found = {}
    for key, record in records.items():
        with suppress(BadRecord):  # `status` shows it
            instance = read_instance(key, record)
            if local.instance(instance.id) is None:
                found[instance.id] = instance
    return found


class ClockOffset(NamedTuple):
    """What has to be added to the times of a machine to convert them to the clock of this one: from
    low to high.
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
        low, high = max(self.low_ns, low_ns), min(self.high_ns, high_ns)
        # clocks drift: then the bounds may exclude each other
        return self if low > high else ClockOffset(low, high)


def aligned(
    offsets: Mapping[bytes, ClockOffset], recordings: Recordings
) -> dict[bytes, ClockOffset]:
    """Return the offsets that also let no effect be earlier than its cause, with the errors that
    remain.

    Args:
        offsets: bounds, by the boot of the machine.
        recordings: recordings of these machines, each in its own clock.
    """
    # by how much the second offset is higher than the first
    least = dict[tuple[bytes, bytes], int]()
    for request in recordings.requests.values():
        for cause, effect in _causes(request):
            pair = cause.process.header.boot_id, effect.process.header.boot_id
            if pair[0] != pair[1] and offsets.keys() >= set(pair):
                least[pair] = max(
                    cause.entry.ns - effect.entry.ns,
                    least.get(pair, cause.entry.ns - effect.entry.ns),
                )
    found, bounds = dict(offsets), {boot: offsets[boot] for pair in least for boot in pair}
    for boot in sorted(bounds, key=lambda each: bounds[each].error_s):
        for _ in bounds:  # a bound passes on from machine to machine
            has_changed = False
            for (cause_at, effect_at), ns in least.items():
                before, after = bounds[cause_at], bounds[effect_at]
                bounds[effect_at] = after.within(before.low_ns + ns, after.high_ns)
                bounds[cause_at] = before.within(before.low_ns, after.high_ns - ns)
                has_changed = (
                    has_changed or bounds[effect_at] != after or bounds[cause_at] != before
                )
            if not has_changed:
                break
        found[boot] = bounds[boot]
        bounds[boot] = ClockOffset(bounds[boot].ns, bounds[boot].ns)
    return found


def _causes(request: RequestRecording) -> Iterator[tuple[Step, Step]]:
    """Yield events of a request's calls, each with one that it caused.

    Choices with a repeated call are left out.
    """
    for choice in {step.entry.choice for step in request.steps}:
        own = [step for step in request.steps if step.entry.choice == choice]
        first = {
            (step.process.header.instance_id, step.entry.event): step for step in reversed(own)
        }
        sent = [step for step in own if step.entry.event == RecordedEvent.CALL_SENT]
        if [step.entry.reason for step in sent] not in (
            ["prefill", "decode"],
            ["prefill"],
            ["aggregated"],
        ):
            continue
        ids = [step.entry.a for step in sent]
        pairs: list[tuple[Step | None, Step | None]]
        pairs = [(step, first.get((step.entry.a, RecordedEvent.CALL_RECEIVED))) for step in sent]
        pairs.append(
            (
                first.get((ids[-1], RecordedEvent.FIRST_TOKEN)),
                first.get((0, RecordedEvent.FIRST_TOKEN)),
            )
        )
        if len(sent) == 2:
            published = first.get((ids[0], RecordedEvent.KV_PUBLISHED))
            pairs += [
                (published, sent[1]),
                (published, first.get((ids[1], RecordedEvent.KV_FETCH_STARTED))),
            ]
        yield from (
            (cause, effect) for cause, effect in pairs if cause is not None and effect is not None
        )


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
class Inquiry:
    """Queries to all processes of a namespace."""

    transport: Transport
    namespace: str
    instances: Mapping[int, Instance]  # workers that have to answer, by id
    timeout_s: float  # the most time for all answers to a query
    settle_s: float = _SETTLE_S  # the least time for them, because frontends are not registered

    def __post_init__(self) -> None:
        self._answered = set[int]()  # instances
        self._expected = set(self.instances)
        self._senders: dict[tuple[bytes, int, int], _Sender] = {}
        self._offsets: dict[bytes, ClockOffset] = {boot_id(): _EXACT}  # by the boot of the machine
        self._asked_ns = 0
        self._news = asyncio.Event()
        self.problems: list[str] = []

    async def ask(self, query: RecordingQuery) -> None:
        """Send a query, and wait for the answers."""
        await self._ask(query, self.settle_s, self.timeout_s)
        for sender in self._senders.values():
            if not sender.is_complete:
                line = (
                    f"only a part of the recording of process {sender.header.pid} on {sender.host}"
                    " came in time"
                )
                self.problems.append(line)

    async def read_clocks(self) -> None:
        """Ask the processes that have answered for their clocks alone, which they answer at
        once.
        """
        known = [sender.header.epoch_ns for sender in self._senders.values()]
        for _ in range(_CLOCK_READINGS):
            await self._ask(RecordingQuery("", Selection.GIVEN, known=known), 0.0, _CLOCK_TIMEOUT_S)

    async def _ask(self, query: RecordingQuery, settle_s: float, timeout_s: float) -> None:
        inbox = self.transport.new_inbox()
        unsubscribe = await self.transport.subscribe(inbox, self._receive)
        for sender in self._senders.values():
            sender.is_complete = False
        self._asked_ns = time.monotonic_ns()
        self.transport.publish(
            recordings_subject(self.namespace), encode(msgspec.structs.replace(query, inbox=inbox))
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(settle_s)
                while not (
                    self._expected <= self._answered
                    and all(e.is_complete for e in self._senders.values())
                ):
                    self._news.clear()
                    await self._news.wait()
        self._expected &= self._answered
        await unsubscribe()

    def _receive(self, data: bytes, _reply: str) -> None:
        received_ns = time.monotonic_ns()
        try:
            part = decode(data, RecordingPart)
            self._answered.add(part.instance_id)
            if part.header:
                self._take(
                    part,
                    RecordingHeader.read(_decompressed(part.header, HEADER_BYTES)),
                    received_ns,
                )
        except (BadFrame, ValueError, zlib.error) as exc:
            self.problems.append(f"the answer of a process can't be read: {exc}")
        self._news.set()

    def _take(self, part: RecordingPart, header: RecordingHeader, received_ns: int) -> None:
        offset = self._offsets.get(header.boot_id, _UNBOUNDED)
        self._offsets[header.boot_id] = offset.within(
            self._asked_ns - part.now_ns, received_ns - part.now_ns
        )
        key, host = (
            (header.boot_id, header.pid, header.epoch_ns),
            escape_controls(shorten(part.host, _MOST_HOST_CHARS)),
        )
        sender = self._senders.setdefault(key, _Sender(header, host))
        sender.header = header
        if part.slots:
            slots = _decompressed(part.slots, _MOST_SLOT_BYTES)
            if len(slots) % SLOT.size:
                raise ValueError("an event is incomplete")
            sender.slots.append(slots)
            sender.oldest_ns, sender.num_overwritten = part.oldest_ns, part.num_overwritten
        sender.is_complete |= part.is_last

    def processes(self) -> list[ProcessRecording]:
        """Return what the processes have sent so far, each in its own clock."""
        return [
            _recording(each, _EXACT, each.header.boot_id)
            for each in self._senders.values()
            if each.slots
        ]

    async def result(self, local: Recordings) -> Recordings:
        """Return the recordings of this machine and those that were sent, and what is known of the
        silent workers.
        """
        silent = [each for each in self.instances.values() if each.id not in self._answered]
        pings = await asyncio.gather(*(self._answers_ping(each) for each in silent))
        unanswered = dict[int, Holder]()
        for instance, is_older in zip(silent, pings, strict=True):
            title = f"{instance.role} {instance.id:x}"
            if is_older:
                self.problems.append(
                    f"{title} sends no recording; its release is older, or it is overloaded"
                )
                continue
            reason = (
                f"it has not answered for {self.timeout_s:g} s: it is frozen, blocked, gone or cut"
                " off from NATS"
            )
            unanswered[instance.id] = Holder(title, reason)
        offsets = self._offsets
        if len(offsets) > 1:
            offsets = aligned(offsets, Recordings([*local.processes, *self.processes()]))
        own = boot_id()
        asked = [
            _recording(each, offsets[each.header.boot_id], own)
            for each in self._senders.values()
            if each.slots
        ]
        processes = [*local.processes, *asked]
        return Recordings(
            processes, [*local.problems, *dict.fromkeys(self.problems)], unanswered, has_asked=True
        )

    async def _answers_ping(self, instance: Instance) -> bool:
        try:
            await self.transport.request(
                instance.subject, PING, timeout_s=min(self.timeout_s, _PING_TIMEOUT_S)
            )
        except Unreachable:
            return False
        return True


def _decompressed(data: bytes, most_bytes: int) -> bytes:
    return zlib.decompressobj().decompress(data, most_bytes)


def _recording(sender: _Sender, offset: ClockOffset, boot: bytes) -> ProcessRecording:
    header, entries = sender.header, dict[int, Entry]()
    for slots in sender.slots:
        entries.update(sent_slots(slots, offset.ns))
    alive_ns = header.alive_ns + offset.ns if header.alive_ns else 0
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

"""Ask the processes of a deployment on all machines for their recordings.

The times in these are converted to the clock of this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.discovery.records import BadRecord, namespace_prefix, read_instance
from dynamo_trtllm.cluster.request_plane.nats import NatsTransport
from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess
from dynamo_trtllm.cluster.request_plane.transport import Transport
from dynamo_trtllm.config.commands import ExplainConfig
from dynamo_trtllm.config.config_base import DEFAULT_SOURCE
from dynamo_trtllm.launch.launcher import launch_records
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.recorder import SLOT, RecordingHeader, boot_id
from dynamo_trtllm.observability.recording_server import (
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
    read_slots,
)
from dynamo_trtllm.protocol.errors import BadFrame, PlaneError, UserRejected
from dynamo_trtllm.protocol.messages import Instance, decode, encode
from dynamo_trtllm.protocol.sanitize import escape_controls, mask_address, shorten

_ANSWER_GRACE_S: Final = 0.5
_CLOCK_READINGS: Final = 3
_SUBSCRIBED_S: Final = 2.0
_CLOCK_TIMEOUT_S: Final = 0.25
_MAX_HOST_CHARS: Final = 256
_MAX_KEYS: Final = 50_000  # as many keys fit into one message


def with_other_machines(config: ExplainConfig, local: Recordings) -> Recordings:
    """Return the recordings of this machine, and those that other machines and containers send.

    If etcd or NATS can't be reached or rejects this process, the result has only those of this
    machine, and a line that says so.
    """
    observe_logging.setup(config.log_level, "explain", config.log_format)
    config = _connection(config)
    try:
        return asyncio.run(_gather(config, local))
    except UserRejected as exc:
        line = f"{exc.message}; only files of this machine are read (--local)"
        return Recordings(local.processes, [*local.problems, line])
    except (PlaneError, TimeoutError) as exc:
        if isinstance(exc, TimeoutError) or exc.field == "etcd_endpoints":
            name = "etcd"
            address = config.etcd_endpoints
            flag = "--etcd-endpoints"
        else:
            name = "NATS"
            address = config.nats_server
            flag = "--nats-server"
        line = (
            f"no {name} answers at {mask_address(address)}, so only files of this machine are read;"
            f" pass {flag} or --local"
        )
        return Recordings(local.processes, [*local.problems, line])


def _connection(config: ExplainConfig) -> ExplainConfig:
    """Return the settings with the addresses of the deployment that was launched here.

    They are unchanged if it is not exactly one, or if an address is set.
    """
    records = [record for record in launch_records() if record.etcd and record.nats]
    if len(records) != 1:
        return config
    record = records[0]
    launched: dict[str, object] = {
        "namespace": record.namespace,
        "etcd_endpoints": record.etcd,
        "nats_server": record.nats,
    }
    if any(config.source_of(name) != DEFAULT_SOURCE for name in launched):
        return config
    if record.etcd_credentials_file:
        launched["etcd_credentials_file"] = Path(record.etcd_credentials_file)
    if record.nats_credentials_file:
        launched["nats_credentials_file"] = Path(record.nats_credentials_file)
    return config.model_copy(update=launched)


async def _gather(config: ExplainConfig, local: Recordings) -> Recordings:
    async with asyncio.timeout(config.timeout_s), aclosing(EtcdStore(config)) as store:
        records = (await store.read_all(namespace_prefix(config.namespace))).records
    transport = NatsTransport(config.nats_server, access=NatsAccess.of(config))
    await transport.connect(config.timeout_s)
    try:
        # A user of another role, such as that of a worker, would get no answers.
        await transport.until_subscribed(min(config.timeout_s, _SUBSCRIBED_S))
        queries = RecordingQueries(
            transport, config.namespace, _instances(records, local), config.timeout_s
        )
        selection = _selection(config)
        if config.request is not None:
            ids = RequestIds.parse(config.request)
        else:
            ids = RequestIds(frozenset(), -1, 0)
        known = [process.header.epoch_ns for process in local.processes]
        query = RecordingQuery("", selection, sorted(ids.keys), ids.prefix, ids.client_id, known)
        await queries.ask(query)
        found = _keys(query, [*local.processes, *queries.processes()])
        # Ask all again, for what each knows of the requests that any process has named.
        if selection is not Selection.ALL and found - ids.keys:
            kept = sorted(found)[:_MAX_KEYS]
            await queries.ask(RecordingQuery("", Selection.GIVEN, kept, known=known))
            if len(kept) < len(found):
                queries.problems.append(
                    f"other machines were asked for {len(kept)} of {len(found)} requests"
                )
        await queries.read_clocks()
        return queries.result(local)
    finally:
        await transport.aclose()


def _selection(config: ExplainConfig) -> Selection:
    if config.request is not None:
        return Selection.GIVEN
    if config.stuck:
        return Selection.OPEN
    if config.perfetto is not None or config.trace is not None:
        return Selection.ALL
    return Selection.LATEST


def _keys(query: RecordingQuery, processes: list[ProcessRecording]) -> set[int]:
    """Return the requests of these processes that a query wants."""
    found = set[int]()
    for process in processes:
        selector = KeySelector(query)
        for entry in process.entries:
            if entry.key:
                selector.add_event(entry.key, entry.event, entry.ns, entry.a)
        found |= selector.keys()
    return found


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
    """What converts times of a machine to the clock of this one, by addition: from low to high."""

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
        return self if limited.low_ns > limited.high_ns else limited


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

    transport: Transport
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
        # Who has not answered one query is not waited for again.
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

        They name the workers that are silent, and why.
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
    converted = header._replace(
        monotonic_ns=header.monotonic_ns + offset.ns,
        alive_ns=header.alive_ns + offset.ns if header.alive_ns else 0,
        boot_id=boot,
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

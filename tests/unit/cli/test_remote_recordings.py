"""What `explain` learns from processes of other machines: the part of a recording that was wanted,
in its own clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.cli.launched_servers import with_servers_of
from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane, InprocTransport
from dynamo_trtllm.config.commands import ExplainConfig
from dynamo_trtllm.launch.running_deployments import LaunchRecord
from dynamo_trtllm.observability import recorder
from dynamo_trtllm.observability.recorder import RECORDER, SLOT, RecordedEvent, id_hash
from dynamo_trtllm.observability.recording_queries import RecordingQueries
from dynamo_trtllm.observability.recording_server import (
    NUM_LATEST,
    KeySelector,
    RecordingPart,
    RecordingQuery,
    Selection,
    answer_queries,
    recordings_subject,
)
from dynamo_trtllm.observability.recordings import ProcessRecording, Recordings
from dynamo_trtllm.protocol.messages import decode, encode
from tests.kit.instances import make_instance
from tests.kit.waiting import SOON_S

E = RecordedEvent
NS = "dynamo"
DECODE = 0xBBB
ENDED = "a" * 16
OPEN = "b" * 16
OTHERS = range(2000)


@asynccontextmanager
async def recording_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.0
) -> AsyncIterator[InprocTransport]:
    """This process as a worker that answers; its ring has wrapped."""
    monkeypatch.setattr(recorder, "NUM_SLOTS", 6000)
    RECORDER.start(folder, namespace=NS, kind="decode", instance_id=DECODE)
    for number in OTHERS:
        for event in (E.RECEIVED, E.PROGRESS, E.FINISHED):
            RECORDER.record(f"{number + 1:016x}", event, number)
    for request_id in (ENDED, OPEN):
        RECORDER.record(request_id, E.RECEIVED, id_hash("job-7"))
    RECORDER.record(ENDED, E.FINISHED)
    plane = InprocPlane()
    transport = plane._transport
    assert isinstance(transport, InprocTransport)
    answering = asyncio.create_task(answer_queries(plane, NS, DECODE, pause_s=pause_s))
    await asyncio.sleep(0)
    assert recordings_subject(NS) in transport._bus._subscriptions
    try:
        yield transport
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        RECORDER.stop()


async def test_inquiry_returns_the_same_as_the_file(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Recordings([])
    async with recording_process(memory_path, monkeypatch) as transport:

        async def asked(selection: Selection, **wanted: object) -> ProcessRecording:
            inquiry = RecordingQueries(
                transport, NS, {DECODE: make_instance(DECODE, namespace=NS)}, SOON_S, settle_s=0.0
            )
            await inquiry.ask(RecordingQuery("", selection, **wanted))  # type: ignore[arg-type]
            (sent,) = inquiry.result(nothing).processes
            return sent

        (local,) = Recordings.read(memory_path).processes
        everything = await asked(Selection.ALL)
        assert everything.entries == local.entries
        assert (everything.num_overwritten, everything.oldest_ns) == (
            local.num_overwritten,
            local.oldest_ns,
        )
        assert local.num_overwritten
        both = {int(ENDED, 16), int(OPEN, 16)}
        unfinished = {int(OPEN, 16)}
        for recording, keys in (
            (await asked(Selection.GIVEN, keys=[int(ENDED, 16)]), both - unfinished),
            (await asked(Selection.GIVEN, prefix=int(OPEN[:8], 16)), unfinished),
            (await asked(Selection.GIVEN, client_id=id_hash("job-7")), both),
            (await asked(Selection.OPEN), unfinished),
        ):
            assert {entry.key for entry in recording.entries} - {0} == keys
        latest = await asked(Selection.LATEST)
        assert both < {entry.key for entry in latest.entries}
        assert len(latest.entries) < 100


async def test_inquiry_when_a_worker_does_not_answer_then_it_is_silent(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, answers = (make_instance(number, namespace=NS) for number in (2, DECODE))
    async with recording_process(memory_path, monkeypatch) as transport:
        inquiry = RecordingQueries(
            transport, NS, {instance.id: instance for instance in (frozen, answers)}, 0.05
        )
        (local,) = Recordings.read(memory_path).processes
        await inquiry.ask(RecordingQuery("", Selection.OPEN, known=[local.header.epoch_ns]))
        found = inquiry.result(Recordings([]))
    assert list(found.unanswered) == [frozen.id]
    assert found.unanswered[frozen.id].reason.startswith(
        "it has not answered for 0.05 s: it is frozen"
    )
    assert not found.problems


def packed_header() -> bytes:
    header = recorder._packed_header(NS, "decode\x1b[2J", 7, 8)
    return header.ljust(recorder.HEADER_BYTES, b"\0")


async def test_inquiry_converts_times_of_a_machine_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    hour_ns = 3600 * 10**9
    transport = InprocTransport()
    recorded_ns = time.monotonic_ns()
    monkeypatch.setattr(recorder, "boot_id", lambda: b"0" * 36)
    header = packed_header()
    slots = SLOT.pack(1, recorded_ns + hour_ns, 5, E.RECEIVED, 0, 0, 0, 0, b"", 1)

    def answer(data: bytes, _: str) -> None:
        inbox = decode(data, RecordingQuery).inbox
        now_ns = time.monotonic_ns() + hour_ns
        transport.publish(inbox, encode(RecordingPart(7, "gpu", now_ns, header, True, slots)))

    await transport.subscribe(recordings_subject(NS), answer)
    inquiry = RecordingQueries(transport, NS, {}, SOON_S, settle_s=0.01)
    await inquiry.ask(RecordingQuery("", Selection.ALL))
    await inquiry.read_clocks()
    (sent,) = inquiry.result(Recordings([])).processes
    assert 0 < sent.clock_error_s < SOON_S
    assert abs(sent.entries[0].ns - recorded_ns) <= sent.clock_error_s * 1e9 + 1


async def test_inquiry_when_cancelled_then_it_has_no_subscription() -> None:
    transport = InprocTransport()
    inquiry = RecordingQueries(transport, NS, {1: make_instance(1, namespace=NS)}, SOON_S)
    asking = asyncio.create_task(inquiry.ask(RecordingQuery("", Selection.ALL)))
    await asyncio.sleep(0)
    assert transport._bus._subscriptions
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not transport._bus._subscriptions


async def test_inquiry_without_the_last_part_has_no_oldest_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = InprocTransport()
    monkeypatch.setattr(recorder, "boot_id", lambda: b"0" * 36)
    slots = SLOT.pack(1, 10, 5, E.RECEIVED, 0, 0, 0, 0, b"", 1)
    part = RecordingPart(7, "gpu", 20, packed_header(), is_last=False, slots=slots)

    def answer(data: bytes, _: str) -> None:
        transport.publish(decode(data, RecordingQuery).inbox, encode(part))

    await transport.subscribe(recordings_subject(NS), answer)
    inquiry = RecordingQueries(transport, NS, {}, 0.02, settle_s=0.01)
    await inquiry.ask(RecordingQuery("", Selection.ALL))
    (sent,) = inquiry.result(Recordings([])).processes
    assert sent.oldest_ns == 0


async def test_inquiry_reads_the_end_of_an_answer_without_events() -> None:
    transport = InprocTransport()
    part = RecordingPart(7, "gpu", 20, packed_header(), is_last=False)
    slots = SLOT.pack(9, 10, 5, E.RECEIVED, 0, 0, 0, 0, b"", 9)
    with_slots = msgspec.structs.replace(part, slots=slots)
    end = msgspec.structs.replace(part, is_last=True, oldest_ns=10, num_overwritten=8)

    def answer(data: bytes, _: str) -> None:
        inbox = decode(data, RecordingQuery).inbox
        for sent in (part, with_slots, end):
            transport.publish(inbox, encode(sent))

    await transport.subscribe(recordings_subject(NS), answer)
    inquiry = RecordingQueries(transport, NS, {}, SOON_S, settle_s=0.01)
    await inquiry.ask(RecordingQuery("", Selection.ALL))
    (found,) = inquiry.processes()
    assert (found.num_overwritten, found.oldest_ns) == (8, 10)


async def test_inquiry_reports_damaged_answers_without_control_codes() -> None:
    transport = InprocTransport()
    part = RecordingPart(7, "gpu\x1b[2J", 1, packed_header(), is_last=True)
    incomplete = bytes(SLOT.size + 1)
    empty = bytes(SLOT.size)

    def answer(data: bytes, _: str) -> None:
        inbox = decode(data, RecordingQuery).inbox
        transport.publish(inbox, b"no part")
        transport.publish(inbox, encode(msgspec.structs.replace(part, header=b"no header")))
        for slots in (incomplete, empty):
            transport.publish(inbox, encode(msgspec.structs.replace(part, slots=slots)))

    await transport.subscribe(recordings_subject(NS), answer)
    inquiry = RecordingQueries(transport, NS, {}, SOON_S, settle_s=0.01)
    await inquiry.ask(RecordingQuery("", Selection.ALL))
    found = inquiry.result(Recordings([]))
    (sent,) = found.processes
    assert "\x1b" not in f"{sent.title} {sent.host} {sent.kind}"
    assert len(found.problems) == 3  # equal ones are reported once


async def test_answers_to_consecutive_queries_pause_between(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list[RecordingPart]()
    has_ended = asyncio.Event()

    def receive(data: bytes, _: str) -> None:
        parts.append(part := decode(data, RecordingPart))
        if part.is_last:
            has_ended.set()

    async with recording_process(memory_path, monkeypatch, pause_s=3600.0) as transport:
        for inbox in ("first", "second"):
            await transport.subscribe(inbox, receive)
            transport.publish(
                recordings_subject(NS), encode(RecordingQuery(inbox, Selection.GIVEN))
            )
        await asyncio.wait_for(has_ended.wait(), SOON_S)
        await asyncio.sleep(0.02)
    assert [part.is_last for part in parts] == [False, False, True]


def test_explain_has_the_credentials_of_the_launched_deployment() -> None:
    path = "/tmp/d/{role}.credentials"
    record = LaunchRecord(
        pid=1,
        namespace="n",
        etcd="127.0.0.1:1",
        nats="nats://127.0.0.1:2",
        etcd_credentials_file=path,
        nats_credentials_file=path,
    )
    config = with_servers_of(ExplainConfig(), record)
    assert (config.namespace, config.nats_server) == ("n", "nats://127.0.0.1:2")
    files = (config.etcd_credentials_file, config.nats_credentials_file)
    assert [config.file_of_role(file) for file in files] == 2 * [Path("/tmp/d/tool.credentials")]


def test_latest_requests_without_an_id_are_limited() -> None:
    selector = KeySelector(RecordingQuery("", Selection.LATEST))
    keys = range(1, NUM_LATEST + 11)
    for key in keys:
        no_client_id = 0
        selector.add_event(key, RecordedEvent.RECEIVED, key, no_client_id)
    assert selector.keys() == set(keys[-NUM_LATEST:])


def test_open_requests_without_an_id_exclude_ended_ones() -> None:
    selector = KeySelector(RecordingQuery("", Selection.OPEN))
    ended = 1
    running = 2
    selector.add_event(ended, RecordedEvent.RECEIVED, 1, 0)
    selector.add_event(running, RecordedEvent.RECEIVED, 2, 0)
    selector.add_event(ended, RecordedEvent.FINISHED, 3, 0)
    assert selector.keys() == {running}

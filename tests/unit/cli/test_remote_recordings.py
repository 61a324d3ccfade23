"""What `explain` learns from processes of other machines: the part of a recording that was wanted,
in its own clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.cli.clock_alignment import ClockOffset, aligned
from dynamo_trtllm.cli.remote_recordings import RecordingQueries, latest_keys
from dynamo_trtllm.cluster.request_plane.frames import PING
from dynamo_trtllm.observability import recorder, recording_server
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent, boot_id, id_hash
from dynamo_trtllm.observability.recording_server import (
    RecordingPart,
    RecordingQuery,
    Selection,
    answer_queries,
    recordings_subject,
)
from dynamo_trtllm.observability.recordings import ProcessRecording, Recordings
from dynamo_trtllm.protocol.messages import decode, encode
from tests.inproc_plane import InprocPlane, InprocTransport
from tests.instances import make_instance
from tests.unit.cli.test_explain import DECODE, DECODING, FETCHING, KEY, PREFILL, process
from tests.waiting import SOON_S

E = RecordedEvent
NS = "dynamo"
ENDED = "a" * 16
OPEN = "b" * 16
OTHERS = range(2000)


@asynccontextmanager
async def recording_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InprocTransport]:
    """This process as a worker that answers; its ring has wrapped."""
    monkeypatch.setattr(recorder, "NUM_SLOTS", 6000)
    monkeypatch.setattr(recording_server, "_PAUSE_S", 0.0)
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
    answering = asyncio.create_task(answer_queries(plane, NS, DECODE))
    await asyncio.sleep(0)
    assert recordings_subject(NS) in transport._listeners
    try:
        yield transport
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        RECORDER.stop()


async def test_inquiry_when_a_process_answers_then_it_sends_what_is_wanted_and_its_file_has_the_same(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Recordings([])
    async with recording_process(memory_path, monkeypatch) as transport:

        async def asked(selection: Selection, **wanted: object) -> ProcessRecording:
            inquiry = RecordingQueries(
                transport, NS, {DECODE: make_instance(DECODE, namespace=NS)}, SOON_S, settle_s=0.0
            )
            await inquiry.ask(RecordingQuery("", selection, **wanted))  # type: ignore[arg-type]
            (sent,) = (await inquiry.result(nothing)).processes
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


async def test_inquiry_when_workers_do_not_send_then_one_is_silent_and_one_of_an_older_release(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, frozen, answers = (make_instance(number, namespace=NS) for number in (1, 2, DECODE))
    async with recording_process(memory_path, monkeypatch) as transport:
        await transport.subscribe(older.subject, lambda data, reply: transport.publish(reply, PING))
        inquiry = RecordingQueries(
            transport, NS, {each.id: each for each in (older, frozen, answers)}, 0.05
        )
        (local,) = Recordings.read(memory_path).processes
        await inquiry.ask(RecordingQuery("", Selection.OPEN, known=[local.header.epoch_ns]))
        found = await inquiry.result(Recordings([]))
    assert list(found.unanswered) == [frozen.id]
    assert found.unanswered[frozen.id].reason.startswith(
        "it has not answered for 0.05 s: it is frozen"
    )
    (note,) = found.problems
    assert note.startswith(f"{older.role} 1 sends no recording")


async def test_inquiry_when_answers_are_damaged_then_it_reports_them_and_shows_no_control_characters() -> (
    None
):
    transport = InprocTransport()
    header = zlib.compress(
        recorder._packed_header(NS, "decode\x1b[2J", 7, 8).ljust(recorder.HEADER_BYTES, b"\0")
    )
    part = RecordingPart(7, "gpu\x1b[2J", 1, header, is_last=True)
    slots = (
        zlib.compress(bytes(recorder.SLOT.size + 1)),
        b"no zlib",
        zlib.compress(bytes(recorder.SLOT.size)),
    )

    def answer(data: bytes, _: str) -> None:
        inbox = decode(data, RecordingQuery).inbox
        transport.publish(inbox, b"no part")
        transport.publish(inbox, encode(msgspec.structs.replace(part, header=b"no zlib")))
        for each in slots:
            transport.publish(inbox, encode(msgspec.structs.replace(part, slots=each)))

    await transport.subscribe(recordings_subject(NS), answer)
    inquiry = RecordingQueries(transport, NS, {}, SOON_S, settle_s=0.01)
    await inquiry.ask(RecordingQuery("", Selection.ALL))
    found = await inquiry.result(Recordings([]))
    (sent,) = found.processes
    assert "\x1b" not in f"{sent.title} {sent.host} {sent.kind}"
    assert len(found.problems) == 3  # equal ones are reported once


async def test_answers_when_queries_come_one_after_the_other_then_the_process_pauses_between_them(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list[RecordingPart]()
    has_ended = asyncio.Event()

    def receive(data: bytes, _: str) -> None:
        parts.append(part := decode(data, RecordingPart))
        if part.is_last:
            has_ended.set()

    async with recording_process(memory_path, monkeypatch) as transport:
        monkeypatch.setattr(recording_server, "_PAUSE_S", 3600.0)
        for inbox in ("first", "second"):
            await transport.subscribe(inbox, receive)
            transport.publish(
                recordings_subject(NS), encode(RecordingQuery(inbox, Selection.GIVEN))
            )
        await asyncio.wait_for(has_ended.wait(), SOON_S)
        await asyncio.sleep(0.02)
    assert [part.is_last for part in parts] == [False, False, True]


def on_another_machine(one: ProcessRecording, boot: bytes, ahead_ns: int) -> ProcessRecording:
    """A process of another machine, whose clock is ahead."""
    one.entries[:] = [entry._replace(ns=entry.ns + ahead_ns) for entry in one.entries]
    return ProcessRecording(
        header=one.header._replace(boot_id=boot),
        state=one.state,
        silent_s=0.0,
        num_overwritten=0,
        entries=one.entries,
    )


def test_latest_keys_when_clocks_differ_then_those_with_the_latest_dates() -> None:
    processes = [
        process("frontend", [(1000 * key, E.RECEIVED, 0, 0, "")], key=key) for key in range(1, 31)
    ]
    for number, one in enumerate(processes):
        ahead_ns = number % 2 * 3600 * 10**9
        processes[number] = on_another_machine(one, b"B", ahead_ns)
        header = processes[number].header
        moved = header._replace(monotonic_ns=header.monotonic_ns + ahead_ns)
        processes[number] = dataclasses.replace(processes[number], header=moved)
    assert latest_keys(processes) == {*range(11, 31)}


def test_aligned_when_answers_were_slow_then_no_effect_is_before_its_cause_on_three_machines() -> (
    None
):
    hour = 3600 * 10**9
    ms = 10**6
    published = (21, E.KV_PUBLISHED, 9, 0, "")
    frontend = process("frontend", DECODING)
    prefill = on_another_machine(
        process("prefill", [(5, E.CALL_RECEIVED, 1, 0, ""), published], PREFILL), b"B", hour
    )
    decode = on_another_machine(process("decode", FETCHING, DECODE), b"C", -hour)
    slow = {
        boot_id(): ClockOffset(0, 0),
        b"B": ClockOffset(-hour - 90 * ms, -hour + 10 * ms),
        b"C": ClockOffset(hour - 10 * ms, hour + 90 * ms),
    }
    found = aligned(slow, Recordings([frontend, prefill, decode]))
    offset_b = found[b"B"]
    offset_c = found[b"C"]
    sent_ns = frontend.entries[3].ns
    received_ns = prefill.entries[0].ns + offset_b.ns
    assert sent_ns <= received_ns <= prefill.entries[1].ns + offset_b.ns <= frontend.entries[4].ns
    assert frontend.entries[4].ns <= decode.entries[0].ns + offset_c.ns
    # the recordings are not of the same moment
    assert offset_b.low_ns - ms <= -hour <= offset_b.high_ns + ms
    assert offset_b.error_s < 10e-3 < offset_c.error_s
    assert {entry.key for entry in frontend.entries} == {KEY}

"""What `explain` says of recordings: who holds a stuck request, and the exports."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from dynamo_trtllm.cli import explain
from dynamo_trtllm.cli import shares as shares_command
from dynamo_trtllm.cli.explain import of_deployment, timeline
from dynamo_trtllm.cli.stuck_requests import StuckReport, process_problems
from dynamo_trtllm.cli.trace_formats import mooncake, perfetto
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord
from dynamo_trtllm.observability.recorded_shares import PackedShares, packed_shares
from dynamo_trtllm.observability.recorder import (
    MAGIC,
    NO_COST,
    RecordedEvent,
    RecordingHeader,
    boot_id,
)
from dynamo_trtllm.observability.recordings import Entry, ProcessRecording, ProcessState, Recordings
from dynamo_trtllm.simulate.workload import read_trace
from tests.kit.cases import each_case

E = RecordedEvent
S = ProcessState
PREFILL = 0xAAA
DECODE = 0xBBB
KEY = 0x0123456789ABCDEF
Events: TypeAlias = Sequence[tuple[int, RecordedEvent, int, int, str]]  # ms, event, a, b, reason

BEGUN: Events = [
    (0, E.RECEIVED, 0, 0, ""),
    (1, E.TOKENIZED, 100, 10, ""),
    (2, E.PLACED, PREFILL, DECODE, ""),
]
SENT: Events = [*BEGUN, (3, E.CALL_SENT, PREFILL, 0, "prefill")]
DECODING: Events = [
    *SENT,
    (30, E.CALL_SENT, DECODE, 0, "decode"),
]
STREAMING: Events = [*DECODING, (40, E.FIRST_TOKEN, 0, 0, ""), (1040, E.PROGRESS, 20, 0, "")]
LAST = (1050, E.LAST_TOKEN, 20, 0, "")
RECEIVED: Events = [(5, E.CALL_RECEIVED, 100, 0, "prefill")]
STARTED: Events = [*RECEIVED, (6, E.STARTED_IN_ENGINE, 0, 0, "")]
ANSWERED: Events = [
    *STARTED,
    (20, E.PREFILL_DONE, 0, 0, ""),
    (21, E.KV_PUBLISHED, 9, 0, ""),
    (22, E.CALL_ENDED, 0, 0, ""),
]
FETCHING: Events = [
    (31, E.CALL_RECEIVED, 100, 0, "decode"),
    (33, E.KV_FETCH_STARTED, PREFILL, 9, ""),
]
GENERATED: Events = [
    *FETCHING,
    (35, E.KV_FETCHED, 0, 0, ""),
    (36, E.FIRST_TOKEN, 0, 0, ""),
    (1036, E.PROGRESS, 20, 0, ""),
]


def minute_ago_ns() -> int:
    return time.monotonic_ns() - 60_000_000_000


def process(
    kind: str,
    events: Events,
    instance_id: int = 0,
    state: ProcessState = S.RUNNING,
    key: int = KEY,
    begun_ns: int | None = None,
) -> ProcessRecording:
    """A process whose first event was a minute ago, or at the time that others began, too."""
    if begun_ns is None:
        begun_ns = minute_ago_ns()
    header = RecordingHeader(
        MAGIC, 1, 64, 65536, 4096, 77, 0, time.time_ns(), time.monotonic_ns(), boot_id(), instance_id, kind.encode(),
        b"dynamo", 0, time.monotonic_ns(), 1,
    )  # fmt: skip
    entries = [
        Entry(begun_ns + ms * 1_000_000, event, key, 0, a, b, 0, reason)
        for ms, event, a, b, reason in events
    ]
    silent_s = 0.0 if state in (S.RUNNING, S.ENDED, S.KILLED) else 59.0
    return ProcessRecording(
        header=header, state=state, silent_s=silent_s, num_overwritten=0, entries=entries
    )


def said(
    frontend: Events,
    prefill: Events | None = (),
    decode: Events = (),
    states: tuple[ProcessState, ProcessState, ProcessState] = (S.RUNNING, S.RUNNING, S.RUNNING),
) -> tuple[str, int]:
    begun_ns = minute_ago_ns()
    processes = [
        process("frontend", frontend, 0, states[0], begun_ns=begun_ns),
        process("decode", decode, DECODE, states[2], begun_ns=begun_ns),
    ]
    if prefill is not None:
        processes.append(process("prefill", prefill, PREFILL, states[1], begun_ns=begun_ns))
    report = StuckReport.of(Recordings(processes), 10.0)
    return report.text(), report.exit_status


FROZEN_PREFILL = (S.RUNNING, S.FROZEN, S.RUNNING)
FROZEN_DECODE = (S.RUNNING, S.RUNNING, S.FROZEN)


@each_case(
    ("recorded", "holder", "reason"),
    [
        (said([BEGUN[0]]), "frontend 77", "body has not arrived"),
        (said(BEGUN[:2]), "frontend 77", "--max-inflight"),
        (
            said([*BEGUN[:2], (3, E.WAITING_FOR_WORKERS, 0, 0, "")]),
            "frontend 77",
            "no worker can take it",
        ),
        (
            said([*BEGUN, (4, E.RESERVING_SLOT, DECODE, 0, "")]),
            "decode bbb",
            "reservation of a slot",
        ),
        (
            said([*BEGUN[:2], (3, E.WAITING_FOR_WORKERS, PREFILL, DECODE, "")]),
            "frontend 77",
            "pair aaa -> bbb is quar",
        ),
        (said(SENT), "NATS", "the call has not arrived at prefill aaa"),
        (said(SENT, None), "worker aaa", "no recording on this machine"),
        (said(SENT, RECEIVED, states=FROZEN_PREFILL), "prefill aaa", "frozen"),
        (
            said(SENT, RECEIVED, states=(S.RUNNING, S.BLOCKED, S.RUNNING)),
            "prefill aaa",
            "event loop is blocked",
        ),
        (said(SENT, RECEIVED, states=(S.FROZEN, S.RUNNING, S.RUNNING)), "frontend 77", "frozen"),
        (
            said(SENT, RECEIVED, states=(S.RUNNING, S.KILLED, S.RUNNING)),
            "prefill aaa",
            "killed or crashed",
        ),
        (said(SENT, RECEIVED), "prefill aaa", "engine's queue"),
        (
            said(SENT, [*RECEIVED, (7, E.WAITING_FOR_KV_BLOCKS, 0, 0, "")]),
            "prefill aaa",
            "waits for KV blocks",
        ),
        (said(SENT, STARTED), "prefill aaa", "has not computed its prompt"),
        (said(SENT, ANSWERED[:3]), "prefill aaa", "space in the transfer buffer"),
        (
            said(SENT, ANSWERED),
            "NATS",
            "prefill aaa has ended the call, and frontend 77 has not received the end",
        ),
        (said(DECODING, ANSWERED), "NATS", "the call has not arrived at decode bbb"),
        (
            said(DECODING, ANSWERED, FETCHING),
            "decode bbb",
            "it fetches KV from prefill aaa, which works",
        ),
        (
            said(DECODING, ANSWERED, FETCHING, FROZEN_PREFILL),
            "prefill aaa",
            "decode bbb fetches KV from it",
        ),
        (
            said(STREAMING, ANSWERED, GENERATED),
            "decode bbb",
            "has generated 20 tokens of the call, and no more",
        ),
        (said(STREAMING, ANSWERED, GENERATED, FROZEN_DECODE), "decode bbb", "frozen"),
        (
            said([*STREAMING, (1050, E.LAST_TOKEN, 20, 0, "")], ANSWERED, GENERATED),
            "the client of frontend 77",
            "does not read",
        ),
        (
            said([*SENT, (90, E.FINISHED, 0, 0, "cancelled")], STARTED),
            "prefill aaa",
            "its request has finished",
        ),
        (
            said([*STREAMING, (1090, E.FINISHED, 0, 0, "cancelled")], ANSWERED),
            "prefill aaa",
            "holds the KV",
        ),
        (
            said(SENT, STARTED, states=(S.KILLED, S.RUNNING, S.RUNNING)),
            "prefill aaa",
            "its frontend is gone",
        ),
    ],
)
def test_stuck_names_holder_and_reason_of_silent_request(
    recorded: tuple[str, int], holder: str, reason: str
) -> None:
    text, status = recorded
    (line,) = [line for line in text.splitlines() if line.startswith("request ")]
    assert f"held by {holder}: " in line, text
    assert reason in line, text
    assert status == 1


def test_stuck_queued_call_names_the_longest_earlier_prompt() -> None:
    begun_ns = minute_ago_ns()
    before = process("prefill", STARTED, PREFILL, key=0xF00D, begun_ns=begun_ns)
    queued = process("prefill", RECEIVED, PREFILL, begun_ns=begun_ns)
    later = process("prefill", RECEIVED, PREFILL, key=0xBEEF, begun_ns=begun_ns)
    entries = [*before.entries, *queued.entries, *later.entries]
    both = dataclasses.replace(before, entries=entries)
    recordings = Recordings([process("frontend", SENT, begun_ns=begun_ns), both])
    text = StuckReport.of(recordings, older_than_s=10.0).text()
    assert "behind 1 call; the longest is request 000000000000f00d with 100 prompt tokens" in text


def test_stuck_when_all_has_ended_or_is_recent_then_nothing() -> None:
    done: Events = [
        *STREAMING,
        (1100, E.LAST_TOKEN, 21, 0, "stop"),
        (1101, E.FINISHED, 200, 21, "stop"),
    ]
    prefill: Events = [*ANSWERED, (38, E.KV_RELEASED, 0, 0, "")]
    decode: Events = [*GENERATED, (1099, E.CALL_ENDED, 21, 0, "stop")]
    assert said(done, prefill, decode)[1] == 0
    running: Events = [*STREAMING, (59_000, E.PROGRESS, 900, 0, "")]
    text, status = said(running, prefill, GENERATED)
    assert (text, status) == (
        "nothing is stuck: no request of 3 running processes is silent for 10 s\n",
        0,
    )


def test_stuck_names_killed_process_without_waiting_requests() -> None:
    report = StuckReport.of(Recordings([process("decode", [], DECODE, S.KILLED)]), 10.0)
    assert report.text().splitlines()[0] == "process 77, decode bbb: it was killed or crashed"
    assert report.exit_status == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_stuck_names_worker_that_waits_for_etcd(is_lost: bool) -> None:
    waiting: Events = [*BEGUN[:2], (3, E.WAITING_FOR_WORKERS, 0, 0, "")]
    awaits: Events = [(1, E.CONNECTION_AWAITED, 0, 0, "etcd"), (2, E.CONNECTED, 0, 0, "etcd")]
    lost = E.CONNECTION_LOST if is_lost else E.CONNECTION_AWAITED
    again: Events = [(9, lost, 0, 0, "etcd"), (10, E.CONNECTION_LOST, 0, 0, "nats")]
    frontend = process("frontend", waiting)
    assert not process_problems(Recordings([process("decode", awaits, DECODE, key=0)]))
    report = StuckReport.of(
        Recordings([frontend, process("decode", [*awaits, *again], DECODE, key=0)]), 10.0
    )
    unanswered = "decode bbb: etcd has not answered it for 60 s"
    assert report.text().splitlines()[:2] == [
        f"process 77, {unanswered}",
        (
            f"request {KEY:016x}: silent for 60.0 s, held by etcd: no worker can take it: a role"
            f" has no worker, and {unanswered}"
        ),
    ]


@pytest.mark.parametrize(("ahead_s", "side"), [(90, "ahead of"), (-90, "behind")])
def test_stuck_names_process_with_a_wrong_date(ahead_s: int, side: str) -> None:
    one = process("decode", [], DECODE)
    now_ns = time.time_ns()
    assert not process_problems(Recordings([dated(one, now_ns)]))
    (found,) = process_problems(Recordings([dated(one, now_ns + ahead_s * 10**9)]))
    why = "KV transfers expire at a date; synchronize the clocks"
    assert found.reason == f"its date is 90 s {side} that of this command, and {why}"


def test_stuck_with_wrong_date_still_finds_the_frozen_process() -> None:
    wrong_ns = time.time_ns() + 90 * 10**9
    frontend = dated(process("frontend", SENT), wrong_ns)
    worker = dated(process("prefill", RECEIVED, PREFILL, S.FROZEN), wrong_ns)
    report = StuckReport.of(Recordings([frontend, worker]), 10.0)
    (request,) = report.requests
    assert request.held_by == "prefill aaa"
    assert request.reason.startswith("it is frozen for 59 s")
    assert "; frontend 77: its date is 90 s ahead of" in request.reason
    frozen = {explained.title: explained.reason for explained in report.processes}["prefill aaa"]
    assert frozen.startswith("it is frozen for 59 s")
    assert "; its date is 90 s ahead of" in frozen


def dated(one: ProcessRecording, epoch_ns: int) -> ProcessRecording:
    return dataclasses.replace(
        one, header=one.header._replace(alive_ns=time.monotonic_ns(), alive_epoch_ns=epoch_ns)
    )


def test_stuck_when_json_is_wanted_then_the_same_facts() -> None:
    report = StuckReport.of(
        Recordings([process("frontend", SENT), process("prefill", RECEIVED, PREFILL)]), 10.0
    )
    (request,) = json.loads(report.json())["requests"]
    assert (request["request"], request["held_by"]) == ("0123456789abcdef", "prefill aaa")
    assert [event["event"] for event in request["last_events"]] == [
        "call sent: prefill at aaa",
        "call received: prefill of 100 prompt tokens",
    ]


def test_timeline_includes_killed_processes() -> None:
    recordings = Recordings(
        [
            process("frontend", DECODING, state=S.KILLED),
            process("decode", FETCHING, DECODE, S.KILLED),
        ]
    )
    title, began, head, *lines = timeline(recordings.requests[KEY]).splitlines()
    assert title == "request 0123456789abcdef: not finished, its frontend was killed"
    assert began.startswith("began ")
    assert head.split() == ["ms", "process", "event"]
    assert lines[1].split(maxsplit=3) == [
        "1.000",
        "frontend",
        "77",
        "tokenized: 100 prompt tokens, at most 10 output tokens",
    ]
    assert lines[-3].endswith("kv fetch started: 9 bytes from aaa")
    assert lines[-1] == "note: decode bbb (process 77) was killed or crashed"


def test_timeline_has_the_singular_of_one_token() -> None:
    asked: Events = [(0, E.TOKENIZED, 1, 1, ""), (1, E.CALL_RECEIVED, 1, 0, "prefill")]
    recordings = Recordings([process("frontend", asked)])
    lines = timeline(recordings.requests[KEY]).splitlines()
    assert lines[3].endswith("tokenized: 1 prompt token, at most 1 output token")
    assert lines[4].endswith("call received: prefill of 1 prompt token")


def test_many_recordings_that_can_not_be_read_are_few_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recordings = Recordings([process("frontend", SENT)], [f"{n}.ring is old" for n in range(9)])
    monkeypatch.setattr(explain, "_read", lambda config: recordings)
    with pytest.raises(SystemExit):
        explain.main([])
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        "note: 0.ring is old",
        "note: 1.ring is old",
        "note: 2.ring is old",
        "note: 6 more notes are left out",
    ]


def test_timeline_of_a_finished_request_has_longest_intervals() -> None:
    begun_ns = minute_ago_ns()
    finished = [*STREAMING, (1050, E.FINISHED, 200, 20, "stop")]
    ended = [*GENERATED, (1045, E.CALL_ENDED, 20, 0, "stop")]
    recordings = Recordings(
        [
            process("frontend", finished, begun_ns=begun_ns),
            process("decode", ended, DECODE, begun_ns=begun_ns),
        ]
    )
    lines = timeline(recordings.requests[KEY]).splitlines()
    longest = [line for line in lines if line.startswith("longest: ")]
    # Progress does not divide the time of the tokens.
    assert longest == ["longest: 1005.000 ms (96%) first token → call ended, decode bbb"]


def test_timeline_includes_lost_nats_connection() -> None:
    frontend = process("frontend", STREAMING)
    lost = Entry(frontend.entries[4].ns + 1, E.CONNECTION_LOST, 0, 0, 0, 0, 0, "nats")
    recorded = dataclasses.replace(frontend, entries=[*frontend.entries, lost])
    lines = timeline(Recordings([recorded]).requests[KEY]).splitlines()
    assert lines[-3].endswith("connection lost: nats")


def test_timeline_includes_changes_of_shares() -> None:
    frontend = process("frontend", STREAMING)
    at_ns = frontend.entries[4].ns + 1
    changed = Entry(at_ns, E.SHARES_CHANGED, 0, 0, 345, 12, 0, "")
    recorded = dataclasses.replace(frontend, entries=[*frontend.entries, changed])
    lines = timeline(Recordings([recorded]).requests[KEY]).splitlines()
    assert lines[-4].endswith("shares changed: revision 12 of epoch 345")
    assert lines[-1] == "note: why shares changed: dynamo-trtllm shares --history"


def test_perfetto_export_has_a_slice_between_events() -> None:
    recordings = Recordings([process("frontend", SENT), process("prefill", STARTED, PREFILL)])
    trace = json.loads("".join(perfetto(list(recordings.requests.values()))))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in slices] == [
        "received",
        "tokenized",
        "placed",
        "call received",
    ]
    assert all(event["dur"] == pytest.approx(1000) for event in slices)


def test_mooncake_shares_block_ids_of_equal_prefixes() -> None:
    begun_ns = minute_ago_ns()

    def prompt(at_ms: int, key: int, hashes: tuple[int, int]) -> ProcessRecording:
        events: Events = [
            (at_ms, E.RECEIVED, 0, 0, ""),
            (at_ms + 1, E.TOKENIZED, 1500, 10, ""),
            (at_ms + 2, E.PROMPT_HASHES, hashes[0], hashes[1], ""),
            (at_ms + 3, E.LAST_TOKEN, 7, 0, "stop"),
            (at_ms + 4, E.FINISHED, 200, 7, "stop"),
        ]
        return process("frontend", events, key=key, begun_ns=begun_ns)

    recordings = Recordings([prompt(0, 1, (5, 6)), prompt(20, 2, (5, 7))])
    lines = [json.loads(line) for line in mooncake(list(recordings.requests.values()))]
    assert [line["timestamp"] for line in lines] == [0, pytest.approx(20, abs=5)]
    assert {(line["input_length"], line["output_length"]) for line in lines} == {(1500, 7)}
    first, second = (line["hash_ids"] for line in lines)
    assert (len(first), len(second)) == (3, 3)
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_mooncake_has_only_lines_that_simulate_accepts(tmp_path: Path) -> None:
    """An answer may have no tokens but the one that ends it. A failed request may have none."""
    begun_ns = minute_ago_ns()
    tokenized = (1, E.TOKENIZED, 100, 0, "")
    empty: Events = [BEGUN[0], tokenized, (3, E.LAST_TOKEN, 0, 0, "stop")]
    failed: Events = [BEGUN[0], tokenized, (3, E.FINISHED, 503, 0, "no_instances")]
    processes = [
        process("frontend", events, key=key, begun_ns=begun_ns)
        for key, events in enumerate((empty, failed), start=1)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(mooncake(list(Recordings(processes).requests.values()))))
    assert [arrival.output_tokens for arrival in read_trace(trace)] == [1]


def test_requests_of_an_earlier_boot_come_first() -> None:
    """The clock started again with this boot, so the times of the earlier one may be larger."""
    events: Events = [*BEGUN, (3, E.LAST_TOKEN, 7, 0, "stop")]
    before = process("frontend", events, key=1)
    later_ns = time.monotonic_ns() + 1_000_000_000_000
    header = before.header._replace(
        boot_id=b"0" * 36,
        epoch_ns=time.time_ns() - 86_400_000_000_000,
        monotonic_ns=later_ns,
    )
    shift_ns = later_ns - before.entries[0].ns
    entries = [entry._replace(ns=entry.ns + shift_ns) for entry in before.entries]
    before = dataclasses.replace(before, header=header, entries=entries)
    recordings = Recordings([before, process("frontend", events, key=2)])
    requests = list(recordings.requests.values())
    listed = [row.split()[0] for row in explain._latest(requests).splitlines()]
    assert listed[1:] == [request.id for request in requests]
    timestamps = [json.loads(line)["timestamp"] for line in mooncake(requests)]
    assert timestamps == [0, pytest.approx(86_340_000, abs=1000)]


def test_latest_requests_of_an_idle_deployment_are_a_sentence() -> None:
    assert explain._latest([]).startswith("no request was recorded yet; send one")


def test_timeline_shows_costs_of_placement() -> None:
    recording = process(
        "frontend",
        [
            *BEGUN[:2],
            (2, E.PLACED_BY_COST, PREFILL, 812, "least-loaded"),
            (2, E.PLACED_BY_COST, DECODE, 40, "least-loaded"),
        ],
    )
    for index, next_cost in ((-2, 5231), (-1, NO_COST)):
        recording.entries[index] = recording.entries[index]._replace(c=next_cost)
    lines = timeline(Recordings([recording]).requests[KEY]).splitlines()
    assert lines[-2].endswith("placed by cost: least-loaded, aaa costs 812 (next 5231)")
    assert lines[-1].endswith("placed by cost: least-loaded, bbb costs 40 (next none)")


def test_timeline_shows_shares_of_elastic_workers() -> None:
    recording = process("frontend", list(BEGUN))
    for shares, text in (
        (
            PackedShares(0.25, 1.0),
            "prefill aaa (elastic, share 0.25), decode bbb (elastic, share 1)",
        ),
        (PackedShares(None, 0.0), "prefill aaa, decode bbb (elastic, share 0)"),
        (PackedShares(None, None), "prefill aaa, decode bbb"),
    ):
        recording.entries[-1] = recording.entries[-1]._replace(c=packed_shares(shares))
        lines = timeline(Recordings([recording]).requests[KEY]).splitlines()
        assert lines[-1].endswith(f"placed: {text}")


def test_timeline_shows_path_and_predicted_times() -> None:
    path = (2, E.PATH_CHOSEN, 312_400, 14_600, "aggregated_on_decode")
    recording = process("frontend", [*BEGUN[:2], path, path])
    recording.entries[-1] = recording.entries[-1]._replace(c=3)
    lines = timeline(Recordings([recording]).requests[KEY]).splitlines()
    predicted = "path chosen: aggregated_on_decode, predicted first token after 312 ms, gaps of 15"
    assert lines[-2].endswith(f"{predicted} ms, within the limits")
    assert lines[-1].endswith(f"{predicted} ms, requests that miss a limit: 3")


def test_requests_of_other_deployments_are_left_out() -> None:
    def recorded(
        pid: int, started: int = 100, namespace: str = "n", host: str = ""
    ) -> ProcessRecording:
        one = process("frontend", BEGUN, key=pid)
        header = one.header._replace(pid=pid, start_ticks=started, namespace=namespace.encode())
        return dataclasses.replace(one, header=header, host=host)

    def launched(pid: int, *pids: int) -> LaunchRecord:
        processes = [
            ProcessRecord(name="frontend", role="frontend", host="h", port=1, pid=each)
            for each in pids
        ]
        return LaunchRecord(pid=pid, start_ticks=50, namespace="n", processes=processes)

    recordings = Recordings(
        [
            recorded(1),
            recorded(2),  # of a deployment with the same namespace
            recorded(3, namespace="other"),
            recorded(4, started=40),  # of an earlier deployment
            recorded(5, host="far"),
        ]
    )
    kept = of_deployment(recordings, launched(10, 1), [launched(20, 2)])
    assert [one.header.pid for one in kept.processes] == [1, 5]
    assert set(kept.requests) == {1, 5}


def test_address_of_a_frontend_then_what_to_pass_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in (explain, shares_command):
        with pytest.raises(SystemExit) as ended:
            command.main(["--url", "gpu-host:8000"])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert "unknown flag --url; this command asks etcd and NATS, not a frontend" in said
        assert "pass its --etcd-endpoints, --nats-server and --namespace" in said

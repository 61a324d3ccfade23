"""The flight recorder's file: what is read of it while it is written, after a kill, and from a file
that is none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from dynamo_trtllm.observability import recorder as module
from dynamo_trtllm.observability import recordings
from dynamo_trtllm.observability.recorder import (
    SLOT,
    TICK_S,
    RecordedEvent,
    Recorder,
    file_system,
    id_hash,
    recorder_folder,
    request_key,
)
from dynamo_trtllm.observability.recordings import (
    ProcessState,
    Recordings,
    read_process,
    read_slots,
    unchanged_slots,
)
from dynamo_trtllm.protocol.messages import token_ids
from tests.kit.cases import each_case

UNIQUE = "0123456789abcdef"
KEY = 0x0123456789ABCDEF


def recording(folder: Path, act: Callable[[Recorder], None]) -> None:
    """Run `act` with a recorder that records into `folder`."""

    async def run() -> None:
        recorder = Recorder()
        recorder.start(folder, namespace="dynamo", kind="frontend")
        try:
            act(recorder)
        finally:
            recorder.stop()

    asyncio.run(run())


def count(events: int, recorder: Recorder) -> None:
    for n in range(events):
        recorder.record(UNIQUE, RecordedEvent.PROGRESS, n)


def receive(request_id: str, recorder: Recorder) -> None:
    recorder.record(request_id, RecordedEvent.RECEIVED)


@contextmanager
def slots(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(module, "NUM_SLOTS", count)
        yield


def test_recording_of_wrapped_ring_has_newest_events(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slots(monkeypatch, 16):
        recording(memory_path, partial(count, 40))
    (path,) = memory_path.iterdir()
    # `explain` on a machine with larger pages reads it, too
    assert path.stat().st_size == 4096 + 16 * SLOT.size
    (process,) = Recordings.read(memory_path).processes
    assert [entry.a for entry in process.entries] == [*range(25, 40), 0]
    assert process.entries[-1].event == RecordedEvent.STOPPED
    assert (process.num_overwritten, process.state) == (26, ProcessState.ENDED)


def test_recording_when_a_slot_is_torn_then_the_other_events(memory_path: Path) -> None:
    recording(memory_path, partial(count, 5))
    (path,) = memory_path.iterdir()
    data = bytearray(path.read_bytes())
    # the number at the begin of the slot, without that at its end
    data[module.HEADER_BYTES + 4 * SLOT.size] += 1
    path.write_bytes(data)
    assert [entry.a for entry in read_process(path).entries if entry.key] == [0, 1, 3, 4]


def test_unchanged_slots_exclude_one_written_between_reads() -> None:
    def slots(middle: int) -> bytes:
        values = ((1, 7), (2, middle), (3, 9))
        return b"".join(
            SLOT.pack(number, 0, KEY, RecordedEvent.PROGRESS, 0, a, 0, 0, b"", number)
            for number, a in values
        )

    found = read_slots(unchanged_slots(slots(middle=8), slots(middle=80)))
    assert [(number, entry.a) for number, entry in found] == [(1, 7), (3, 9)]


def test_recording_read_during_writes_mixes_no_events(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(recorder: Recorder) -> None:
        is_over = threading.Event()

        def write(base: int) -> None:
            n = base
            while not is_over.is_set():
                n += 1
                recorder.record(UNIQUE, RecordedEvent.PROGRESS, n, n, n)

        threads = [threading.Thread(target=write, args=(base << 32,)) for base in (1, 2)]
        for thread in threads:
            thread.start()
        (path,) = memory_path.iterdir()
        for _ in range(20):
            process = read_process(path)
            assert all(entry.a == entry.b == entry.c for entry in process.entries)
            assert process.state is ProcessState.RUNNING
        is_over.set()
        for thread in threads:
            thread.join()

    with slots(monkeypatch, 64):
        recording(memory_path, act)


def test_recording_of_killed_process_with_fork_is_read(memory_path: Path) -> None:
    code = f"""
import asyncio, os, signal, pathlib, time
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
async def run():
    RECORDER.start(pathlib.Path({str(memory_path)!r}), namespace="dynamo", kind="decode", instance_id=0x6dba)
    RECORDER.record("{UNIQUE}", RecordedEvent.CALL_RECEIVED, 7, reason="decode")
    child = os.fork()  # as an engine's library may do
    if not child:
        RECORDER.record("{UNIQUE}", RecordedEvent.CALL_ENDED, 8)
        os.close(1)
        time.sleep(100)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(run())
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE)
    assert killed.returncode == -signal.SIGKILL
    try:
        found = Recordings.read(memory_path)
    finally:
        os.kill(int(killed.stdout), signal.SIGKILL)
    (process,) = found.processes
    assert (process.title, process.namespace, process.state) == (
        "decode 6dba",
        "dynamo",
        ProcessState.KILLED,
    )
    entry = process.entries[-1]
    assert (entry.event, entry.key, entry.a, entry.reason) == (
        RecordedEvent.CALL_RECEIVED,
        KEY,
        7,
        "decode",
    )


def test_forked_process_records_into_a_file_of_its_own(memory_path: Path) -> None:
    code = f"""
import asyncio, multiprocessing, pathlib
from dynamo_trtllm.observability.recorder import RECORDER
async def start(kind):
    RECORDER.start(pathlib.Path({str(memory_path)!r}), namespace="dynamo", kind=kind)
asyncio.run(start("decode"))
fork = multiprocessing.get_context("fork")
child = fork.Process(target=lambda: asyncio.run(start("prefill")))
child.start()
child.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    titles = [process.title for process in Recordings.read(memory_path).processes]
    assert sorted(title.split()[0] for title in titles) == ["decode", "prefill"]


def test_recording_shows_a_blocked_event_loop(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "BLOCKED_S", -TICK_S)

    def act(_: Recorder) -> None:  # on the event loop
        (path,) = memory_path.iterdir()
        assert read_process(path).state is ProcessState.BLOCKED

    recording(memory_path, act)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n" * 1000, module.MAGIC + b"\x63" * 5000])
def test_recordings_when_a_file_is_none_of_ours_then_it_is_named(
    memory_path: Path, content: bytes
) -> None:
    path = memory_path / "other.ring"
    if content:
        path.write_bytes(content)
    else:
        os.mkfifo(path)  # who opens it waits for a writer
    recording(memory_path, lambda _: None)
    found = Recordings.read(memory_path)
    assert len(found.processes) == 1
    (problem,) = found.problems
    assert problem.startswith(f"{path} can't be read: it")
    assert path.exists()  # a start removes only recordings


@pytest.mark.parametrize("limit", ["number", "size of the file system"])
def test_start_keeps_the_newest_recordings(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    with slots(monkeypatch, 16), monkeypatch.context() as patch:
        if limit == "number":
            patch.setattr(module, "KEPT_FILES", 3)
        else:
            size = 8 * 3 * (module.HEADER_BYTES + 16 * SLOT.size)
            small = os.statvfs_result((1, 1, size, 0, 0, 0, 0, 0, 0, 255))
            patch.setattr(os, "statvfs", lambda folder: small)
        for n in range(6):
            recording(memory_path, partial(receive, f"{n + 1:016x}"))
    # 3 and the one that has just ended
    assert list(Recordings.read(memory_path).requests) == [3, 4, 5, 6]


def test_start_removes_what_a_killed_process_has_begun(memory_path: Path) -> None:
    left = memory_path / "left.new"
    begun = memory_path / "begun.new"
    for path in (left, begun):
        path.touch()
    an_hour_ago = time.time() - 3600
    os.utime(left, (an_hour_ago, an_hour_ago))
    recording(memory_path, lambda _: None)
    assert not left.exists()
    assert begun.exists()


def test_start_in_unwritable_folder_warns_only(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = memory_path / "file"
    file.touch()
    recording(file / "folder", partial(receive, UNIQUE))
    assert "flight recorder is off" in caplog.text
    assert "--recorder-dir" in caplog.text


def test_start_in_folder_on_disk_warns_only(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "file_system", lambda folder: "ext4")
    recording(memory_path, partial(receive, UNIQUE))
    assert f"{memory_path} is on a file system of type ext4" in caplog.text
    assert "set --recorder-dir to a folder in memory (tmpfs)" in caplog.text
    assert not list(memory_path.iterdir())


def test_file_system_when_a_folder_is_given_then_its_type(memory_path: Path) -> None:
    assert file_system(memory_path) == "tmpfs"
    assert file_system(Path("/proc")) == "proc"


FILL = """
import asyncio, os, pathlib, sys
from dynamo_trtllm.observability.recorder import NUM_SLOTS, RECORDER, RecordedEvent
folder = pathlib.Path(sys.argv[1])
async def run():
    RECORDER.start(folder, namespace="dynamo", kind="decode")
    with open(folder / "other", "wb", buffering=0) as other:
        try:
            while True:
                other.write(bytes(4096))
        except OSError as exc:
            print(exc.strerror)
    for _ in range(NUM_SLOTS):  # which writes to every page of the file
        RECORDER.record("0123456789abcdef", RecordedEvent.RECEIVED)
    RECORDER.stop()
asyncio.run(run())
"""


@pytest.mark.parametrize(("size", "num_files"), [("5M", 1), ("3M", 0)])
def test_recording_on_full_file_system_spares_the_process(
    memory_path: Path, size: str, num_files: int
) -> None:
    private = ["unshare", "--map-root-user", "--mount"]  # only this process sees the mount
    script = f'mount -t tmpfs -o mode=700,size={size} tmpfs "$0" && "$@" && ls "$0"'
    if subprocess.run([*private, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine permits no private mounts")
    command = [
        *private,
        "sh",
        "-c",
        script,
        str(memory_path),
        sys.executable,
        "-c",
        FILL,
        str(memory_path),
    ]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0
    said, *files = ended.stdout.splitlines()
    assert said == "No space left on device"
    assert sum(name.endswith(".ring") for name in files) == num_files
    assert ("flight recorder is off" in ended.stderr) is (num_files == 0)


def test_stream_when_it_progresses_then_the_tick_records_it_once(memory_path: Path) -> None:
    class Stream:
        request_id = UNIQUE
        num_tokens = 0

    def act(recorder: Recorder) -> None:
        stream = Stream()
        recorder.follow(stream)
        for stream.num_tokens in (0, 5, 5, 9):
            recorder.record_progress()
        recorder.unfollow(stream)
        stream.num_tokens = 10
        recorder.record_progress()

    recording(memory_path, act)
    (request,) = Recordings.read(memory_path).requests.values()
    assert [(step.entry.event, step.entry.a) for step in request.steps] == [
        (RecordedEvent.PROGRESS, 5),
        (RecordedEvent.PROGRESS, 9),
    ]


def test_calls_that_no_client_asked_for_are_not_recorded(memory_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        recorder.record("probe-1", RecordedEvent.CALL_RECEIVED)
        recorder.record("warm-up-0", RecordedEvent.STARTED_IN_ENGINE)
        # A client's own id may begin with the same words.
        recorder.record(f"probe-7-{UNIQUE}", RecordedEvent.RECEIVED, id_hash("probe-7"))
        recorder.record("warm-up-1-" + "f" * 16, RecordedEvent.RECEIVED)

    recording(memory_path, act)
    found = Recordings.read(memory_path)
    assert sorted(found.requests) == [KEY, 0xFFFFFFFFFFFFFFFF]
    assert [request.key for request in found.find("probe-7")] == [KEY]


def test_find_when_any_of_its_ids_is_given_then_the_request(memory_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        recorder.record(f"job 7-{UNIQUE}", RecordedEvent.RECEIVED, id_hash("job 7"))
        recorder.record(f"{UNIQUE}-3", RecordedEvent.CALL_RECEIVED)
        recorder.record("f" * 16, RecordedEvent.RECEIVED)

    recording(memory_path, act)
    found = Recordings.read(memory_path)
    assert sorted(found.requests) == [KEY, 0xFFFFFFFFFFFFFFFF]
    ids = (
        f"chatcmpl-{UNIQUE}{'a' * 16}",
        f"resp_7f3a{UNIQUE}{'a' * 16}",
        "job 7",
        f"job 7-{UNIQUE}",
        f"{UNIQUE}-3",
    )
    for text in (*ids, UNIQUE, UNIQUE[:8]):
        assert [request.key for request in found.find(text)] == [KEY], text
    assert not found.find("chatcmpl-unknown")
    assert not found.find("")


@each_case(
    ("request_id", "key"),
    [
        (UNIQUE, (KEY, 0)),
        (f"a-b-{UNIQUE}-12", (KEY, 12)),
        (f"{UNIQUE}-99999999", (KEY, 0xFFFF)),
        ("", (id_hash(""), 0)),
        ("\ud800é-x", (id_hash("\ud800é-x"), 0)),
        ("-00000000000000f-1", (id_hash("-00000000000000f-1"), 0)),
        (f"{UNIQUE}-+1", (id_hash(f"{UNIQUE}-+1"), 0)),
    ],
)
def test_key_when_a_peer_sends_any_id_then_numbers_that_fit(
    request_id: str, key: tuple[int, int]
) -> None:
    assert request_key(request_id) == key


def test_recorded_prompt_has_lengths_and_hashes_only(memory_path: Path) -> None:
    ids = token_ids(range(1_000_000, 1_001_300))

    def act(recorder: Recorder) -> None:
        recorder.record_prompt(UNIQUE, ids, 5)
        recorder.record_prompt("f" * 16, ids[:1200], 5)

    recording(memory_path, act)
    found = Recordings.read(memory_path)
    (tokenized, hashes), (other_tokenized, other_hashes) = (
        [step.entry for step in request.steps] for request in found.requests.values()
    )
    assert (tokenized.a, other_tokenized.a) == (1300, 1200)
    # Two blocks are equal, and the third is not.
    assert (tokenized.c, hashes.a) == (other_tokenized.c, other_hashes.a)
    assert hashes.b != other_hashes.b
    assert hashes.c == 0  # there is no further block
    assert ids[100:104].tobytes() not in next(memory_path.iterdir()).read_bytes()


def test_folder_when_it_is_not_set_then_one_of_the_user(memory_path: Path) -> None:
    assert recorder_folder(None, {"XDG_RUNTIME_DIR": "/run/user/7"}) == Path(
        "/run/user/7/dynamo_trtllm"
    )
    assert recorder_folder(None, {}) == Path(f"/dev/shm/dynamo_trtllm-{os.geteuid()}")
    assert recorder_folder("off", {}) is None
    recording(memory_path / "a", lambda _: None)
    assert (memory_path / "a").stat().st_mode & 0o777 == 0o700
    (path,) = (memory_path / "a").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_recording_is_for_its_user_only(memory_path: Path, permissive_umask: None) -> None:
    folder = memory_path / "dynamo_trtllm-1"
    recording(folder, partial(receive, UNIQUE))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "kind",
    [
        "link of another user",
        "folder of another user",
        "folder in which others may write",
        "folder in which the group may write",
    ],
)
def test_folder_of_another_user_is_not_used(
    kind: str, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = memory_path / "dynamo_trtllm-1"
    target = memory_path / "target"
    target.mkdir(mode=0o700)
    if kind.startswith("link"):
        folder.symlink_to(target)
    else:
        folder.mkdir(mode=0o700)
    if kind.endswith("may write"):
        folder.chmod(0o702 if "others" in kind else 0o720)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(folder, 12345, -1, follow_symlinks=False)
    recorder = Recorder()
    recorder.start(folder, namespace="n", kind="frontend")
    recorder.stop()
    assert "flight recorder is off" in caplog.text
    assert not list(target.iterdir())
    assert not list(folder.iterdir())

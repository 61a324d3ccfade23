"""The outputs of a process whose reader, disk or terminal does not take them: lines are dropped,
and nothing waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from dynamo_trtllm.observability.output_relay import (
    BACKLOG_BYTES,
    FLUSH,
    FLUSHED,
    Relay,
    RelayedOutput,
    relay_line,
)
from tests.kit.waiting import SOON_S

# Two or more times what pipe and backlog hold together.
TOO_MANY = 4 * BACKLOG_BYTES // 100
LINE = b"%06d " + b"x" * 92 + b"\n"

PROGRAM = """
import ctypes, logging, os, subprocess, sys, warnings
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability import outputs
from dynamo_trtllm.observability.outputs import OUTPUTS
OUTPUTS.start("w", "text")
observe_logging.setup("info", "w")
log = logging.getLogger("dynamo_trtllm.x")
"""


def notice(count: int, reason: str) -> bytes:
    return b"%d dropped: %s\n" % (count, reason.encode())


@contextmanager
def program(code: str, **streams: int | IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM + code], **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running(output: RelayedOutput) -> Iterator[None]:
    """Run an output in a thread, which must end within SOON_S after the context."""
    thread = threading.Thread(target=output.run, daemon=True)
    thread.start()
    yield
    output.finish()
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_unread_output_drops_and_counts_lines() -> None:
    read_end, write_end = os.pipe()
    num_dropped: list[int] = []
    output = RelayedOutput(write_end, notice, num_dropped.append)
    sent = b"".join(LINE % number for number in range(TOO_MANY))
    with os.fdopen(read_end, "rb") as reader, running(output):
        for begin in range(0, len(sent), 1024):  # most chunks end within a line
            output.add(sent[begin : begin + 1024])
        count = sum(num_dropped)
        assert count > TOO_MANY // 4
        kept = b"".join(LINE % number for number in range(TOO_MANY - count))
        assert reader.read(len(kept)) == kept
        assert reader.readline() == b"%d dropped: \n" % count
        output.add(b"later\n")
        assert reader.readline() == b"later\n"
    os.close(write_end)


def test_output_drops_the_end_of_a_dropped_line() -> None:
    read_end, write_end = os.pipe()
    num_dropped: list[int] = []
    output = RelayedOutput(write_end, notice, num_dropped.append)
    output.add(b"a" * BACKLOG_BYTES)  # a line that has no end is cut
    output.add(b"b" * BACKLOG_BYTES)
    with os.fdopen(read_end, "rb") as reader, running(output):
        assert reader.read(BACKLOG_BYTES) == b"a" * BACKLOG_BYTES
        assert reader.readline() == b"\n"
        assert reader.readline() == b"1 dropped: \n"
        output.add(b"end of it\nnext\n")
        assert reader.readline() == b"next\n"
    assert sum(num_dropped) == 1
    os.close(write_end)


def test_output_full_at_the_end_of_a_line_drops_nothing() -> None:
    read_end, write_end = os.pipe()
    num_dropped: list[int] = []
    num_queued: list[int] = []
    output = RelayedOutput(write_end, notice, num_dropped.append, num_queued.append)
    output.add(b"a" * BACKLOG_BYTES)
    output.add(b"\n")  # the end of an accepted line
    with os.fdopen(read_end, "rb") as reader:
        with running(output):
            assert reader.readline() == b"a" * BACKLOG_BYTES + b"\n"
            output.add(b"later\n")
            assert reader.readline() == b"later\n"
    assert not num_dropped
    assert sum(num_queued) == 0
    os.close(write_end)


def test_output_reports_a_full_disk_once(tmp_path: Path) -> None:
    dropped = threading.Semaphore(0)
    failures: list[str] = []
    path = tmp_path / "log"
    with open("/dev/full", "wb", buffering=0) as full, path.open("wb", buffering=0) as free:
        output = RelayedOutput(
            full.fileno(), notice, lambda count: dropped.release(), on_failed=failures.append
        )
        with running(output):
            for _ in range(3):
                output.add(b"line\n")
                assert dropped.acquire(timeout=SOON_S)
            os.dup2(free.fileno(), full.fileno())  # there is space again
            output.add(b"later\n")
    assert failures == ["No space left on device"]
    assert path.read_bytes() == b"3 dropped: No space left on device\nlater\n"


def test_output_with_exited_reader_drops_all_lines() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    num_dropped: list[int] = []
    num_queued: list[int] = []
    output = RelayedOutput(write_end, notice, num_dropped.append, num_queued.append)
    output.add(b"line\n")
    output.add(b"two\nlines\n")
    assert sum(num_queued) == 3
    output.run()
    assert output.is_closed
    output.add(b"later\n")
    assert (sum(num_dropped), sum(num_queued)) == (4, 0)
    os.close(write_end)


def test_flush_waits_for_the_output_of_a_closed_pipe() -> None:
    process, control = socket.socketpair()
    out_pipe, out_end = os.pipe()
    err_pipe, err_end = os.pipe()
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    line = b"x" * 50_000 + b"\n"  # more than the pipe to the reader holds
    outputs: dict[int, RelayedOutput] = {}
    relay = Relay(outputs, control)
    for pipe in (out_pipe, err_pipe):
        outputs[pipe] = RelayedOutput(
            write_end, notice, lambda count: None, on_idle=relay.answer_flush
        )
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    os.write(out_end, line)
    os.close(out_end)
    process.settimeout(0.2)
    process.send(FLUSH)
    with pytest.raises(TimeoutError):
        process.recv(1)
    assert list(outputs) == [out_pipe, err_pipe]  # the writer threads may be reading it
    with os.fdopen(read_end, "rb") as reader:
        assert reader.readline() == line
    process.settimeout(SOON_S)
    assert process.recv(1) == FLUSHED
    os.close(err_end)
    thread.join(SOON_S)
    assert not thread.is_alive()
    for file in (out_pipe, err_pipe, write_end):
        os.close(file)
    process.close()
    control.close()


@pytest.mark.parametrize(
    "write",
    [
        pytest.param("log.info('x' * 3000)", id="log lines"),
        pytest.param("print('x' * 3000)", id="print"),
        pytest.param(
            "ctypes.PyDLL(None).write(2, b'x' * 3000 + b'\\n', 3001)",
            id="C code that holds the GIL",
        ),
        pytest.param("log.error('x', exc_info=ValueError('x' * 3000))", id="tracebacks"),
    ],
)
def test_process_does_not_wait_for_a_full_pipe(write: str) -> None:
    code = f"""
while not OUTPUTS.num_dropped_lines:
    {write}
"""
    read_end, write_end = os.pipe()
    with program(code, stdout=write_end, stderr=write_end) as process:
        assert process.wait(SOON_S) == 0
    os.close(write_end)
    os.close(read_end)


def test_process_output_read_again_is_in_order() -> None:
    code = """
number = 0
while not OUTPUTS.num_dropped_lines:
    number += 1
    log.info("%06d" + "x" * 3000, number)
print(number, flush=True)
sys.stdin.readline()
log.info("later")
"""
    with program(
        code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        number = int(process.stdout.readline())
        num_passed_on = 0
        while b"INFO w x: %06dx" % (num_passed_on + 1) in (line := process.stderr.readline()):
            num_passed_on += 1
        num_dropped = number - num_passed_on
        lines_were = "line of this output was" if num_dropped == 1 else "lines of this output were"
        assert f"observability.output_relay: {num_dropped} {lines_were} dropped" in line.decode()
        _, rest = process.communicate(b"\n", timeout=SOON_S)
    assert rest.endswith(b"INFO w x: later\n")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("os.abort()", -signal.SIGABRT, id="abort"),
        pytest.param("os.kill(os.getpid(), 9)", -signal.SIGKILL, id="SIGKILL"),
        pytest.param("os._exit(3)", 3, id="exit without cleaning up"),
        pytest.param("raise ValueError('last words')", 1, id="exception"),
    ],
)
def test_process_when_it_crashes_then_its_last_lines_come_out(end: str, status: int) -> None:
    with program(f"log.error('last words')\n{end}", stderr=subprocess.PIPE) as process:
        _, written = process.communicate(timeout=SOON_S)
        assert process.returncode == status
    assert b"ERROR w x: last words\n" in written
    assert (b"ValueError: last words" in written) is (status == 1)


def test_process_when_it_has_exited_then_its_lines_are_written() -> None:
    read_end, write_end = os.pipe()
    with program(
        "log.error('last words')\nprint('out')", stdout=write_end, stderr=write_end
    ) as process:
        assert process.wait(SOON_S) == 0
        fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_NONBLOCK)
        assert os.read(read_end, 1 << 16).endswith(b"ERROR w x: last words\nout\n")
    os.close(write_end)
    os.close(read_end)


def test_process_does_not_wait_for_an_unread_terminal() -> None:
    master, terminal = os.openpty()  # as after Ctrl-S
    code = """
assert sys.stdout.isatty() and sys.stderr.isatty()
while not OUTPUTS.num_dropped_lines:
    print("x" * 3000)
"""
    with program(code, stdout=terminal, stderr=terminal) as process:
        assert process.wait(SOON_S) == 0
    os.close(terminal)
    os.close(master)


def relay_of(pid: int) -> int:
    """Return the id of the output relay of a process."""
    (relay,) = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if f"\nPPid:\t{pid}\n" in read(folder / "status")
        and "output_relay.py" in read(folder / "cmdline")
    ]
    return relay


def read(path: Path) -> str:
    """Return the content of a file of /proc; "" if its process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


WRITER = """
outputs.RESTART_S = 0.0
child = subprocess.Popen(["sh", "-c", "read line; echo of a child >&2"], stdin=subprocess.PIPE)
print("started", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_process_with_dead_or_stopped_relay_restarts_it(sent: signal.Signals) -> None:
    code = f"{WRITER}\nlog.info('later')\nchild.communicate()"
    with program(
        code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        os.kill(relay_of(process.pid), sent)
        restarted = process.stderr.readline()
        _, rest = process.communicate(b"\n", timeout=SOON_S)
    assert (
        b"WARNING w observability.outputs: the output relay ended with status -9 and was started"
        b" again (restart 1)" in restarted
    )
    # The relay may have been stopped after it wrote a line and before it counted the line as written.
    assert re.search(rb"about [01] lines are lost", restarted)
    assert b"INFO w x: later\n" in rest
    assert b"of a child\n" in rest


def test_process_with_killed_relay_counts_unwritten_lines() -> None:
    code = f"""{WRITER}
for number in range(100):
    log.info("%06d" + "x" * 3000, number)
print("written", flush=True)
sys.stdin.readline()
print(OUTPUTS.num_dropped_lines, flush=True)
"""
    with program(
        code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        while process.stdout.readline() != b"written\n":
            pass
        os.kill(relay_of(process.pid), signal.SIGKILL)
        lines = iter(process.stderr.readline, b"")
        restarted = next(line for line in lines if b"started again" in line)
        num_dropped, _ = process.communicate(b"\n", timeout=SOON_S)
    match = re.search(rb"about (\d+) lines are lost", restarted)
    assert match is not None
    assert int(match[1]) == int(num_dropped) > 50


def test_process_does_not_wait_for_its_relay() -> None:
    code = f"""{WRITER.replace("0.0", "1000.0")}
while not OUTPUTS.num_dropped_lines:
    log.info("x" * 3000)
"""
    read_end, write_end = os.pipe()
    with program(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write_end) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(relay_of(process.pid), signal.SIGKILL)
        process.communicate(b"\n", timeout=SOON_S)
        assert process.returncode == 0
    os.close(write_end)
    os.close(read_end)


def test_process_continues_when_its_reader_exits() -> None:
    code = """
while not OUTPUTS.num_dropped_lines:
    print("x", flush=True)
log.info("closed")
"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with program(code, stdout=write_end, stderr=subprocess.PIPE) as process:
        os.close(write_end)
        _, written = process.communicate(timeout=SOON_S)
        assert process.returncode == 0
    assert written.endswith(b"INFO w x: closed\n")


def test_a_failed_start_can_be_repeated() -> None:
    code = """
from unittest import mock
failed = outputs.Outputs()
with mock.patch("mmap.mmap", side_effect=OSError("no memory")):
    failed.start("w", "text")
assert not failed.originals
failed.start("w", "text")
assert failed.originals
"""
    with program(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, written = process.communicate(timeout=SOON_S)
        assert process.returncode == 0, written
    assert b"no relay started: no memory" in written


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_dropped_line_notice_is_like_a_log_line(log_format: str) -> None:
    line = relay_line("w", log_format, "3 lines").decode()
    assert line.endswith("\n")
    if log_format == "json":
        entry = json.loads(line)
        assert (entry["level"], entry["process"], entry["message"]) == ("warning", "w", "3 lines")
    else:
        assert line.split(" ", 1)[1] == "WARNING w observability.output_relay: 3 lines\n"

"""`dynamo-trtllm stop` for launchers that end, drain for long, or do not react."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.cli import stop
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord, recorded
from tests.kit.waiting import SOON_S

# A launcher that drains until a second signal, as `Supervisor` does.
DRAINS = """
import signal, sys, time
signals = iter([None, sys.exit])
def on_signal(number, frame):
    end = next(signals)
    if end is not None:
        end(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, on_signal)
print("ready", flush=True)
while True:
    time.sleep(0.05)  # signal.pause() would miss a signal right before it
"""
ENDS = "import signal; print('ready', flush=True); signal.pause()"

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program with a deployment of which it is the launcher and the only process."""
    started = []

    def run(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pid = process.pid
        worker = ProcessRecord(name="decode", role="decode", host="h", port=1, pid=pid)
        context = recorded(LaunchRecord(pid=pid, namespace="n", processes=[worker]), pytest.fail)
        context.__enter__()
        started.append((process, context))
        return process

    yield run
    for process, context in started:
        context.__exit__(None, None, None)
        process.kill()
        process.communicate()


def stopped(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        stop.main([*words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_stop_waits_for_the_end_and_says_what_ended(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(ENDS)
    assert stopped() == 0
    assert process.wait() == -signal.SIGTERM
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"stopping n \(decode\); Ctrl-C kills all processes\n"
        r"decode ended after .* s\nn stopped after .* s\n",
        said,
    )


def test_stop_that_takes_too_long_names_what_runs(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(DRAINS)
    assert stopped("n", "--timeout-s", "0.3") == 1
    assert process.poll() is None
    assert "n still runs after 0.3 s (decode); dynamo-trtllm stop n --kill" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [["n"], ["--deployment-name", "n"]])
def test_name_is_an_argument_or_the_flag_of_other_commands(start: Start, words: list[str]) -> None:
    process = start(ENDS)
    assert stopped(*words) == 0
    assert process.wait() == -signal.SIGTERM


def test_two_names_that_differ_are_an_error(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(ENDS)
    assert stopped("n", "--deployment-name", "m") == 2
    assert process.poll() is None
    assert "DEPLOYMENT_NAME n and --deployment-name m set the same" in capsys.readouterr().err


def test_kill_ends_a_launcher_that_drains(start: Start) -> None:
    process = start(DRAINS)
    assert stopped("--kill") == 0
    process.wait(SOON_S)


def test_kill_ends_a_frozen_launcher(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_LAUNCHER_KILL_S", 0.2)
    process = start(DRAINS)
    process.send_signal(signal.SIGSTOP)
    assert stopped("--kill") == 0
    assert process.wait() == -signal.SIGKILL


def test_ctrl_c_while_waiting_kills(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(DRAINS)
    sleep = stop.time.sleep

    def interrupt(_: float) -> None:
        monkeypatch.setattr(stop.time, "sleep", sleep)
        raise KeyboardInterrupt

    monkeypatch.setattr(stop.time, "sleep", interrupt)
    assert stopped() == 0
    process.wait(SOON_S)


def test_nothing_to_stop_is_no_error_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped() == 0
    assert capsys.readouterr().out == "no deployment runs on this machine\n"
    assert stopped("n") == 2
    assert "no deployment named 'n' runs on this machine" in capsys.readouterr().err

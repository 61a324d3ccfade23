"""`dynamo-trtllm logs` for a deployment whose launcher is this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.cli import logs
from dynamo_trtllm.launch.log_file import log_file
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord, recorded

Logs = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Logs:
    """Run the command. Return its exit status, stdout and stderr."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            logs.main([*words])
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture
def record(show: Logs, tmp_path: Path) -> Iterator[LaunchRecord]:
    """A deployment with lines of two processes."""
    path = tmp_path / "lines.log"
    with log_file(path, "launch") as add:
        for name, text in (("decode", "a"), ("launch", "b"), ("decode", "c")):
            add(name, text)
    etcd = tmp_path / "etcd.log"
    etcd.write_text("elected\n")
    made = LaunchRecord(
        pid=os.getpid(),
        namespace="n",
        processes=[ProcessRecord(name="decode", role="decode", host="h", port=1, pid=1)],
        log_file=str(path),
        server_logs={"etcd": str(etcd)},
    )
    with recorded(made, pytest.fail):
        yield made


@pytest.mark.usefixtures("record")
def test_lines_of_all_processes_have_their_names(show: Logs) -> None:
    assert show() == (0, "decode | a\nlaunch | b\ndecode | c\n", "")


@pytest.mark.usefixtures("record")
def test_lines_of_one_process_are_as_it_wrote_them(show: Logs) -> None:
    assert show("decode") == (0, "a\nc\n", "")
    assert show("decode", "--tail", "1") == (0, "c\n", "")
    assert show("etcd", "-n", "5") == (0, "elected\n", "")


@pytest.mark.usefixtures("record")
def test_unknown_process_is_an_error_with_the_known_ones(show: Logs) -> None:
    status, _, said = show("prefill")
    assert status == 2
    assert "no process of n is named 'prefill'; these are: decode, launch, etcd" in said


def test_follow_ends_with_the_deployment(
    show: Logs, record: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_: float) -> None:
        with open(record.log_file, "a") as file:
            file.write("decode | last\n")
        monkeypatch.setattr(LaunchRecord, "is_running", property(lambda self: False))

    monkeypatch.setattr(logs.time, "sleep", end)
    assert show("decode", "-f", "--tail", "0") == (0, "last\n", "")


def test_nothing_to_show_is_said_with_status_1(show: Logs) -> None:
    status, _, said = show()
    assert status == 1
    assert "no deployment runs on this machine; the output of one that has ended" in said

"""The files of launchers, by which commands find the deployments that run on this machine."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.config.client_commands import DEFAULT_FRONTEND
from dynamo_trtllm.launch import running_deployments as running
from dynamo_trtllm.launch.running_deployments import (
    LaunchRecord,
    ProcessRecord,
    frontend_here,
    recorded,
    running_deployment,
    running_deployments,
)
from dynamo_trtllm.observability.recorder import start_ticks
from dynamo_trtllm.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the files of this test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "dynamo_trtllm" / "deployments"


@pytest.fixture
def other_pid() -> Iterator[int]:
    """The id of another process that runs."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def frontend(port: int, certificate: str = "") -> ProcessRecord:
    return ProcessRecord(
        name="frontend",
        role="frontend",
        host="127.0.0.1",
        port=port,
        pid=1,
        uses_tls=bool(certificate),
        certificate=certificate,
    )


@contextmanager
def launched(pid: int = os.getpid(), *processes: ProcessRecord) -> Iterator[LaunchRecord]:
    record = LaunchRecord(pid=pid, namespace="n", processes=[*processes])
    said = list[str]()
    with recorded(record, said.append):
        assert said == []
        yield record


def test_file_exists_while_the_launcher_runs(folder: Path) -> None:
    assert running_deployments() == []
    with launched() as record:
        (path,) = folder.glob("*.json")
        assert path.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        assert running_deployments() == [record]
    assert list(folder.glob("*.json")) == []


def test_changed_record_is_read_after_its_write() -> None:
    record = LaunchRecord(pid=os.getpid(), namespace="n")
    with recorded(record, pytest.fail) as write:
        record.etcd = "h:1"
        assert [other.etcd for other in running_deployments()] == [""]
        write()
        assert [other.etcd for other in running_deployments()] == ["h:1"]


def test_second_deployment_of_a_namespace_has_its_own_name(other_pid: int) -> None:
    with launched() as first, launched(other_pid) as second:
        assert (first.name, second.name) == ("n", "n-2")
        assert running_deployment("n-2", "") == second


def test_file_of_a_killed_launcher_is_ignored_and_removed(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    killed = LaunchRecord(pid=os.getpid(), start_ticks=1, namespace="n", name="n")
    path = folder / "7.json"
    path.write_bytes(msgspec.json.encode(killed))
    assert running_deployments() == []
    assert path.exists()
    with launched() as record:
        assert record.name == "n"
        assert not path.exists()


def test_unfinished_file_of_a_killed_launcher_is_removed(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    unfinished = folder / "7.new"
    unfinished.touch()
    with launched():
        assert not unfinished.exists()


def test_files_of_other_users_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launched():
        owner = folder.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(ConfigError, match=r"belongs to another user; set XDG_RUNTIME_DIR"):
            running_deployments()
        monkeypatch.undo()


@pytest.mark.parametrize("pid", ["0", "-1", str(1 << 63), "9" * 5000, "1e999", "1.5"])
def test_record_with_bad_process_id_is_ignored(folder: Path, pid: str) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / "7.json").write_text(f'{{"pid": {pid}, "namespace": "n"}}')
    assert running_deployments() == []


def test_command_without_address_needs_a_choice_of_two(other_pid: int) -> None:
    with launched(os.getpid(), frontend(8001)), launched(other_pid):
        with pytest.raises(ConfigError) as raised:
            running_deployment(None, "with --deployment-name")
    assert raised.value.message == (
        "2 deployments run on this machine: n (http://localhost:8001), n-2; choose one with"
        " --deployment-name"
    )


def test_unknown_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"named 'x' runs on this machine; no other one does"):
        running_deployment("x", "")
    with launched(), pytest.raises(ConfigError, match=r"these run: n$"):
        running_deployment("x", "")


def test_frontend_here_is_that_of_the_launched_deployment() -> None:
    assert frontend_here(None) == (DEFAULT_FRONTEND, "")
    with launched(os.getpid(), frontend(8001, "/c.pem")):
        assert frontend_here(None) == ("https://localhost:8001", "/c.pem")
    with launched(), pytest.raises(ConfigError, match=r"deployment n has no frontend, or none yet"):
        frontend_here(None)


def test_launcher_without_a_folder_runs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    record = LaunchRecord(pid=os.getpid(), namespace="n")
    said = list[str]()
    with recorded(record, said.append) as write:
        write()
    assert record.name == "n"
    assert len(said) == 1
    assert "do not know this deployment" in said[0]


def test_lock_that_another_launcher_holds_is_not_waited_for_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_MAX_LOCK_WAIT_S", 0.0)
    folder.mkdir(parents=True, mode=0o700)
    said = list[str]()
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with recorded(LaunchRecord(pid=os.getpid(), namespace="n"), said.append):
            assert running_deployments() == []
    assert "another launcher holds" in said[0]


def test_process_differs_from_a_later_one_with_its_id() -> None:
    ticks = start_ticks(os.getpid())
    assert running.has_process(os.getpid(), ticks)
    assert not running.has_process(os.getpid(), ticks + 1)
    assert not running.has_process(1 << 22, ticks)

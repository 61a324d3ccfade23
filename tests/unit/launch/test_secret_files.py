"""The files with secrets of a launcher outlive programs that clean /tmp."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from dynamo_trtllm.launch.secret_files import SecretFiles, write_private
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.fake_children import KILLED, latest_child, run_launcher, wait_for_start, worker

_NAME = "worker.credentials"


def test_removed_files_and_folder_are_restored(tmp_path: Path, permissive_umask: None) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    files = SecretFiles(folder)
    path = files.write(_NAME, "worker:secret\n")
    shutil.rmtree(folder)
    files.restore()
    assert path.read_text() == "worker:secret\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    files = SecretFiles(tmp_path)
    path = files.write(_NAME, "worker:secret\n")
    path.write_text("worker:changed\n")
    files.restore()
    assert path.read_text() == "worker:changed\n"


def test_no_secret_is_written_to_the_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SecretFiles(tmp_path)
    path = files.write(_NAME, "worker:secret\n")
    path.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user; start the deployment again"):
        files.restore()
    assert not path.exists()


def test_a_failed_write_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`roles` takes a file that exists as one with a password."""

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(ConfigError, match="No space left on device; free space"):
        write_private(tmp_path / _NAME, "worker:secret\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("scripted")
async def test_launcher_restores_the_files_before_a_restart() -> None:
    async with run_launcher(worker("w", "prefill_and_decode", [0])) as run:
        path = run.launcher._secret_files.write(_NAME, "worker:secret\n")
        path.unlink()
        latest_child("w").die(KILLED)
        (await wait_for_start("w", 2)).serve()
        assert path.exists()

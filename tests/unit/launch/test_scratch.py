"""The launcher's folder goes with the launcher, whatever ends it."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.subprocesses import scratch_folder
from tests.kit.waiting import SOON_S

_HOLDER = """
import sys
from dynamo_trtllm.support.subprocesses import scratch_folder
with scratch_folder("scratch-test-") as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folder_when_left_then_gone() -> None:
    with scratch_folder("scratch-test-") as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


def test_folder_is_for_its_user_only(permissive_umask: None) -> None:
    """It has keys, and the data and logs of etcd and NATS."""
    with scratch_folder("scratch-test-") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_is_locked_so_that_systemd_tmpfiles_keeps_it() -> None:
    with scratch_folder("scratch-test-") as folder:
        cleaner = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(cleaner)


def test_folder_that_cannot_be_created_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(
        ConfigError, match=r"^no temporary folder can be created: .*; free space, or set TMPDIR"
    ):
        scratch_folder("scratch-test-").__enter__()


def test_folder_when_its_process_is_killed_then_gone() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    folder = Path(holder.stdout.readline().decode().strip())
    assert (folder / "deep" / "file").exists()
    holder.kill()
    holder.communicate()
    until = time.monotonic() + SOON_S
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not folder.exists()

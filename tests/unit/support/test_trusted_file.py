"""Files that must be trusted: which are read, and what is said of the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_trtllm.support import trusted_file
from dynamo_trtllm.support.trusted_file import UntrustedFile, read_trusted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "secret"
    made.write_bytes(b"12345")
    made.chmod(0o600)
    return made


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_file_that_others_can_not_write_is_read(path: Path, mode: int) -> None:
    path.chmod(mode)
    link = path.with_name("link")
    link.symlink_to(path)
    assert read_trusted(link, 5) == b"12345"


def test_byte_order_mark_at_the_beginning_is_left_out(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbfuser:\xef\xbb\xbf")
    assert read_trusted(path, 20) == b"user:\xef\xbb\xbf"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_can_write_is_rejected(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(UntrustedFile, match=f"{mode:04o}.*chmod go-w {path}"):
        read_trusted(path, 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_user_is_rejected(path: Path) -> None:
    os.chown(path, 12345, 12345)
    with pytest.raises(UntrustedFile, match="belongs to user 12345"):
        read_trusted(path, 5)


@pytest.mark.timeout(10)
def test_pipe_and_folder_are_rejected_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "."):
        with pytest.raises(UntrustedFile, match="is not a regular file"):
            read_trusted(tmp_path / name, 5)


def test_file_that_is_too_long_is_rejected(path: Path) -> None:
    with pytest.raises(UntrustedFile, match="has more than 4 bytes"):
        read_trusted(path, 4)


def test_file_that_is_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trusted(tmp_path / "missing", 5)


def test_file_when_replaced_after_check_then_checked_one_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")

    def replace(status: os.stat_result, checked: Path) -> None:
        os.replace(other, checked)

    monkeypatch.setattr(trusted_file, "_check", replace)
    assert read_trusted(path, 5) == b"12345"


@pytest.mark.parametrize(("owner", "mode"), [(12345, 0o600), (0, 0o640), (0, 0o400)])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_secret_that_others_can_not_read_is_read(
    path: Path, owner: int, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(mode)
    os.chown(path, owner, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_trusted(path, 5, is_secret=True) == b"12345"


@pytest.mark.parametrize("mode", [0o444, 0o644])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to root")
def test_secret_as_kubernetes_mounts_it_is_read_and_logged_once(
    path: Path, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.chmod(mode)
    link = path.with_name("link")
    link.symlink_to(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for _ in range(2):
        assert read_trusted(link, 5, is_secret=True) == b"12345"
    assert caplog.text.count("can be read by all users of this machine") == 1


@pytest.mark.parametrize(("owner", "mode"), [(12345, 0o640), (12345, 0o604), (12345, 0o444)])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_secret_that_others_can_read_is_rejected(
    path: Path, owner: int, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(mode)
    os.chown(path, owner, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UntrustedFile, match=f"{mode:04o}.*chmod 600 {path}"):
        read_trusted(path, 5, is_secret=True)

"""Credentials for etcd and NATS come from a file that is read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_trtllm.cluster.credentials import Credentials, CredentialsFile
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import trusted_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "credentials"
    file.write_text("worker:a:b\n")
    file.chmod(0o600)
    return file


def test_changed_credentials_are_read(path: Path) -> None:
    file = CredentialsFile(path, "nats_credentials_file")
    assert file.current() == Credentials("worker", "a:b")
    path.write_text("worker-2:c")
    assert file.current() == Credentials("worker-2", "c")


def test_byte_order_mark_is_no_part_of_the_user(path: Path) -> None:
    path.write_text("\ufeffworker:c", encoding="utf-8")
    assert CredentialsFile(path, "nats_credentials_file").current() == Credentials("worker", "c")


def test_former_credentials_stay_while_the_file_is_wrong(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = CredentialsFile(path, "nats_credentials_file")
    path.write_text("")
    assert file.current() == Credentials("worker", "a:b")
    assert file.current() == Credentials("worker", "a:b")
    assert caplog.text.count("still using the former credentials") == 1
    assert "a:b" not in caplog.text


@pytest.mark.parametrize(
    ("content", "mode", "match"),
    [
        ("", 0o600, "one line of the form USER:PASSWORD"),
        ("worker", 0o600, "one line of the form USER:PASSWORD"),
        (":a", 0o600, "one line of the form USER:PASSWORD"),
        ("worker:", 0o600, "one line of the form USER:PASSWORD"),
        ("worker:a\nworker:b", 0o600, "one line of the form USER:PASSWORD"),
        ("\udcff", 0o600, "not UTF-8"),
        ("worker:secret", 0o622, "can be written by its group or by others"),
        ("worker:secret", 0o644, r"can be read by other users \(mode 0644\)"),
    ],
)
def test_wrong_file_is_an_error_that_names_the_flag(
    path: Path, content: str, mode: int, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_file, "_ROOT", -1)  # this test may run as root
    path.write_text(content, errors="surrogateescape")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=match) as error:
        CredentialsFile(path, "etcd_credentials_file")
    assert error.value.message.startswith(f"--etcd-credentials-file {path} ")
    assert error.value.field == "etcd_credentials_file"
    assert "worker:secret" not in error.value.message


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        CredentialsFile(tmp_path / "none", "etcd_credentials_file")

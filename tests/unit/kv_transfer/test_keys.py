"""The file of KV transfer keys: what is rejected, and what a change does to running workers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_trtllm.kv_transfer.keys import TransferKeys, read_keys
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import trusted_file
from tests.kit.transfer_keys import FIRST_KEY, SECOND_KEY, Clock, write_keys

THIRD_KEY = "third-key" * 4


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys", FIRST_KEY)


def opened(key_file: Path, clock: Clock, failures: list[str]) -> TransferKeys:
    def on_failure() -> None:
        failures.append("failed")

    return TransferKeys(key_file, on_failure, clock=clock)


def test_read_keys_skips_comments_and_empty_lines(key_file: Path) -> None:
    key_file.write_text(f"# new\n\n  {SECOND_KEY}\n{FIRST_KEY}\n")
    assert [key.secret.decode() for key in read_keys(key_file)] == [SECOND_KEY, FIRST_KEY]


def test_key_id_does_not_show_the_key(key_file: Path) -> None:
    (key,) = read_keys(key_file)
    assert len(key.key_id) == 16
    assert key.key_id not in FIRST_KEY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "can't be read: No such file"),
        (lambda path: path.write_bytes(b"\xff" * 40), "is not ASCII text at byte 0"),
        (lambda path: path.write_bytes(bytes(64)), "line 1: the key has a character that is no"),
        (lambda path: path.chmod(0o620), "can be written by its group"),
        (lambda path: path.chmod(0o604), r"can be read by other users \(mode 0604\)"),
        (lambda path: path.write_text("#" * (64 << 10) + "#"), "has more than 65536 bytes"),
        (lambda path: path.write_text(f"{FIRST_KEY}\nshort\n"), "line 2: the key has 5 characters"),
        (lambda path: path.write_text("# no key\n"), "has 0 keys"),
        (lambda path: path.write_text(f"{FIRST_KEY}\n" * 5), "has 5 keys"),
    ],
)
def test_keys_when_file_is_wrong_then_config_error_says_why(
    key_file: Path,
    change: Callable[[Path], object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trusted_file, "_ROOT", -1)  # this test may run as root
    change(key_file)
    with pytest.raises(ConfigError, match=message) as caught:
        TransferKeys(key_file)
    assert caught.value.field == "kv_transfer_key_file"
    assert caught.value.message.startswith(f"--kv-transfer-key-file {key_file}")
    assert FIRST_KEY not in caught.value.message


def test_keys_when_file_changes_then_it_is_read_again(key_file: Path) -> None:
    clock = Clock()
    keys = opened(key_file, clock, [])
    first = keys.signing()
    replaced = write_keys(key_file.with_suffix(".new"), SECOND_KEY, FIRST_KEY)
    os.replace(replaced, key_file)
    assert keys.signing() == first  # the file is looked at once a second
    clock.now += 1.0
    second = keys.signing()
    assert second.secret == SECOND_KEY.encode()
    assert keys.find(first.key_id) == first  # the former key verifies until it is removed


def test_find_when_key_is_new_then_the_file_is_read_at_once(key_file: Path) -> None:
    keys = opened(key_file, Clock(), [])
    write_keys(key_file, FIRST_KEY, SECOND_KEY)
    new = read_keys(key_file)[1]
    assert keys.find(new.key_id) == new


def test_keys_when_changed_file_is_wrong_then_former_ones_stay(key_file: Path) -> None:
    clock = Clock()
    failures: list[str] = []
    keys = opened(key_file, clock, failures)
    first = keys.signing()
    key_file.write_text("short\n")
    for _ in range(3):
        clock.now += 1.0
        assert keys.signing() == first
    assert failures == ["failed"]
    write_keys(key_file, THIRD_KEY)
    key_file.chmod(0o666)
    clock.now += 1.0
    assert keys.signing() == first
    key_file.chmod(0o600)  # as the log line of the rejected file says
    clock.now += 1.0
    assert keys.signing().secret == THIRD_KEY.encode()


def test_file_is_read_again_when_its_problem_has_passed(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    failures: list[str] = []
    keys = opened(key_file, clock, failures)
    write_keys(key_file, THIRD_KEY)

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as few_files:
        few_files.setattr("dynamo_trtllm.kv_transfer.keys.read_trusted", fail)
        for _ in range(3):
            clock.now += 1.0
            assert keys.signing().secret == FIRST_KEY.encode()
    assert failures == ["failed"]
    # Looks for unknown keys do not delay the next read.
    for _ in range(2):
        clock.now += 0.5
        keys.find("unknown")
    assert keys.signing().secret == THIRD_KEY.encode()


def test_reader_proof_needs_key_token_and_transfer(key_file: Path, tmp_path: Path) -> None:
    keys = TransferKeys(key_file)
    rotating = TransferKeys(write_keys(tmp_path / "rotating", SECOND_KEY, FIRST_KEY))
    others = TransferKeys(write_keys(tmp_path / "others", THIRD_KEY))
    token = b"t" * 32
    proof = keys.reader_proof("1-a", token)
    assert keys.is_reader_proof(proof, "1-a", token)
    assert rotating.is_reader_proof(proof, "1-a", token)
    assert not keys.is_reader_proof(token, "1-a", token)
    assert not keys.is_reader_proof(proof, "1-b", token)
    assert not keys.is_reader_proof(proof, "1-a", b"u" * 32)
    assert not others.is_reader_proof(proof, "1-a", token)

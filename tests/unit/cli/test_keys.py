"""`dynamo-trtllm keys`: add, list and revoke."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dynamo_trtllm.access.api_keys import ApiKey, digest_of
from dynamo_trtllm.access.keys_file import add_key, read_keys
from dynamo_trtllm.cli.keys import main


def keys(words: str, path: Path) -> int | str | None:
    """Run the command. Return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--file", str(path)])
    return ended.value.code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def test_add_prints_the_key_once_and_writes_its_hash(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = "--models a,b --model c --requests-per-minute 60 --expires 2030-01-31 --priority 2"
    limits += " --weight 2.5"
    assert keys(f"add --name alice {limits}", path) == 0
    shown = capsys.readouterr()
    key = shown.out.strip()
    assert key not in shown.err
    assert key not in path.read_text(encoding="utf-8")
    (written,) = read_keys(path).keys
    assert written.sha256 == digest_of(key).hex()
    assert (written.name, written.models, written.priority) == ("alice", ("a", "b", "c"), 2)
    assert written.weight == 2.5
    assert str(written.expires) == "2030-01-31 00:00:00+00:00"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_list_shows_names_and_limits_and_no_hash(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expired = datetime(2020, 1, 31, tzinfo=UTC)
    add_key(path, ApiKey(name="alice", sha256="a" * 64, tokens_per_minute=900, expires=expired))
    assert keys("add --name bob --scope all", path) == 0
    capsys.readouterr()
    assert keys("list", path) == 0
    head, alice, bob = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "name"
    assert "900" in alice
    assert alice.endswith("(expired)")
    assert bob.split() == ["bob", "all", "all", "0", "1", "-", "-", "-", "-"]
    assert read_keys(path).keys[0].sha256 not in alice


def test_revoke_removes_the_key_of_a_name(path: Path) -> None:
    assert keys("add --name alice", path) == 0
    assert keys("add --name bob", path) == 0
    assert keys("revoke --name alice", path) == 0
    assert [key.name for key in read_keys(path).keys] == ["bob"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("add", "--name"),
        ("revoke", "--name"),
        ("revoke --name unknown", "no key"),
        ("list --name alice", "--name has no effect with list"),
        ("revoke --name alice --scope all", "--scope has no effect with revoke"),
        ("add --name a/b", "letters"),
        ("add --name alice --expires 2020-01-31", "--expires 2020-01-31T00:00:00+00:00 is in the"),
        ("remove --name alice", "'add', 'list' or 'revoke'"),
    ],
)
def test_wrong_command_then_one_line_says_what(
    path: Path, capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    path.touch(0o600)
    assert keys(words, path) == 2
    assert named in capsys.readouterr().err
    assert path.read_bytes() == b""

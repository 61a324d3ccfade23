"""The file of API keys: what is accepted, what an error names, and how it is changed."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.access import keys_file
from dynamo_trtllm.access.api_keys import ApiKey, digest_of, new_key
from dynamo_trtllm.access.keys_file import add_key, read_keys, remove_key
from dynamo_trtllm.protocol.errors import ConfigError

HASH = digest_of("a").hex()
OTHER_HASH = digest_of("b").hex()


def line(name: str = "alice", sha256: str = HASH, more: str = "") -> str:
    return f'{{"name": "{name}", "sha256": "{sha256}"{more}}}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def problem_of(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert caught.value.field == "api_keys_file"
    return caught.value.message


def test_all_fields_when_written_then_they_are_read_again(path: Path) -> None:
    key = ApiKey(
        name="alice",
        sha256=HASH,
        scope="all",
        models=("m",),
        priority=-3,
        weight=2.5,
        requests_per_minute=1,
        tokens_per_minute=2,
        concurrent_generations=3,
        expires=datetime(2030, 1, 1, tzinfo=UTC),
    )
    add_key(path, key)
    assert read_keys(path).keys == [key]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_byte_order_mark_before_the_first_key_is_left_out(path: Path) -> None:
    path.write_text(f"\ufeff{line()}\n", encoding="utf-8")
    assert [key.name for key in read_keys(path).keys] == ["alice"]


def test_change_keeps_comments_mode_and_a_link(path: Path, tmp_path: Path) -> None:
    path.write_text(f"# ours\n\n{line()}\n{line('bob', OTHER_HASH)}\n", encoding="utf-8")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    add_key(link, ApiKey(name="eve", sha256=digest_of("c").hex()))
    remove_key(link, "alice")
    assert link.is_symlink()
    assert path.read_text(encoding="utf-8").startswith("# ours\n\n")
    assert [key.name for key in read_keys(path).keys] == ["bob", "eve"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [path, link]  # no temporary file is left


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ('{"name": "bob"}', "sha256"),
        (line("bob", "aa"), "64 lowercase hexadecimal digits"),
        (line("b/b", OTHER_HASH), "name"),
        (line("bob", OTHER_HASH, ', "requests_per_minute": "5"'), "requests_per_minute"),
        (line("bob", OTHER_HASH, ', "requests_per_minute": 0'), "requests_per_minute"),
        (line("bob", OTHER_HASH, ', "tokens_per_minute": 1.5'), "tokens_per_minute"),
        (line("bob", OTHER_HASH, ', "weight": 0'), "weight"),
        (line("bob", OTHER_HASH, ', "expires": "2030-01-01T00:00:00"'), "expires"),
        (line("bob", OTHER_HASH, ', "models": "m"'), "models"),
        (line("bob", OTHER_HASH, ', "admin": true'), "admin"),
        (line("bob", OTHER_HASH, ', "scope": "root"'), "scope"),
        (line("alice", OTHER_HASH), "name"),
        (line("bob"), "sha256"),
        ("sk-secret-key", "not a JSON object"),
        (line("bob", OTHER_HASH, ', "scope": "sk-secret-key"'), "scope"),
        (line("bob", OTHER_HASH, ', "sk-secret-key": "scope"'), "an unknown field"),
        (line("bob", OTHER_HASH, ', "scope`sk-secret-key": ""'), "an unknown field"),
        ("[" * 100_000, "object"),
    ],
)
def test_wrong_line_then_the_error_names_line_and_field(
    path: Path, second: str, named: str
) -> None:
    problem = problem_of(path, line(), second)
    assert f"{path} line 2" in problem
    assert named in problem
    assert "secret" not in problem


@pytest.mark.parametrize("name", ["writable", "missing"])
def test_file_that_is_not_read_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "writable"
    path.write_text(line(), encoding="utf-8")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match=f"file of API keys .*/{name} ca.*; ") as caught:
        read_keys(tmp_path / name)
    assert caught.value.field == "api_keys_file"


def test_unknown_and_repeated_names_are_rejected(path: Path) -> None:
    add_key(path, ApiKey(name="alice", sha256=HASH))
    with pytest.raises(ConfigError, match="alice"):
        add_key(path, ApiKey(name="alice", sha256=OTHER_HASH))
    with pytest.raises(ConfigError, match="bob"):
        remove_key(path, "bob")


@pytest.mark.parametrize(
    "model", ["a\u2028b", "a\u2029b", "a\x85b", "a\nb", "a\rb", "a\x0bb", "a\x1cb"]
)
def test_name_with_end_of_line_when_added_then_it_is_read_again(path: Path, model: str) -> None:
    first = ApiKey(name="alice", sha256=HASH, models=(model,))
    second = ApiKey(name="bob", sha256=OTHER_HASH)
    add_key(path, first)
    add_key(path, second)
    assert read_keys(path).keys == [first, second]
    remove_key(path, "alice")
    assert path.read_bytes().count(b"\n") == 1
    assert read_keys(path).keys == [second]


def test_file_of_another_system_is_read(path: Path) -> None:
    path.write_bytes(f"# ours\r\n\r\n{line()}\r\n".encode())
    assert [key.name for key in read_keys(path).keys] == ["alice"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"models": ("",)}, "models"),
        ({"models": ("m" * 257,)}, "models"),
        ({"models": ("\udcff",)}, "UTF-8"),
        ({"tokens_per_minute": 10**12 + 1}, "tokens_per_minute"),
        ({"sha256": HASH}, "sha256"),
    ],
)
def test_key_that_could_not_be_read_again_then_the_file_stays(
    path: Path, fields: dict[str, Any], named: str
) -> None:
    path.write_text(line(), encoding="utf-8")
    with pytest.raises(ConfigError, match=named):
        add_key(path, ApiKey(**{"name": "bob", "sha256": OTHER_HASH, **fields}))
    assert path.read_text(encoding="utf-8") == line()


@pytest.mark.parametrize(("limit", "value"), [("MAX_KEYS", 1), ("_MAX_BYTES", 120)])
def test_key_too_many_then_the_file_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    path.write_text(line(), encoding="utf-8")
    monkeypatch.setattr(keys_file, limit, value)
    with pytest.raises(ConfigError, match=str(value)):
        add_key(path, ApiKey(name="bob", sha256=OTHER_HASH))
    assert path.read_text(encoding="utf-8") == line()


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) > 40

"""Fuzz the files of API keys and of KV transfer keys, which users edit."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dynamo_trtllm.access import keys_file
from dynamo_trtllm.access.api_keys import ApiKey, by_digest
from dynamo_trtllm.kv_transfer import keys as transfer_keys
from dynamo_trtllm.protocol.errors import ConfigError
from tests.fuzz.target import Target, check_hides, secret_for
from tests.kit.transfer_keys import FIRST_KEY, SECOND_KEY

_SHA256 = "5d41402abc4b2a76b9719d911017c592ae3f0c6a2b1d7e8f9a0b1c2d3e4f5a6b"
# A key that a user has put into the file instead of its hash, or in another place.
_CLIENT_KEY = re.compile(rb"sk-[0-9a-z]{12,}")


@functools.cache
def _path() -> Path:
    """Return the path of a file that belongs to this process alone."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-keys-")
    _folders.append(folder)
    path = Path(folder.name) / "keys"
    path.touch(mode=0o600)
    return path


_folders: list[tempfile.TemporaryDirectory[str]] = []


def check_api_keys(data: bytes) -> None:
    """Read a file of API keys, remove one and add it again."""
    path = _path()
    secret = secret_for(data)
    path.write_bytes(_CLIENT_KEY.sub(secret.encode(), data))
    try:
        content = keys_file.read_keys(path)
    except ConfigError as exc:
        assert len(exc.message) < 2_000
        check_hides(secret, exc.message)
        return
    assert len(by_digest(content.keys)) == len(content.keys)
    if not content.keys:
        return
    first = content.keys[0]
    keys_file.remove_key(path, first.name)
    assert keys_file.read_keys(path).keys == content.keys[1:]
    keys_file.add_key(path, first)
    assert keys_file.read_keys(path).keys == [*content.keys[1:], first]


def _key_lines() -> Iterator[bytes]:
    plain = ApiKey(name="a", sha256=_SHA256)
    yield msgspec.json.encode(plain) + b"\n"
    full = (
        b'{"name":"b","sha256":"%b","scope":"all","models":["m"],"priority":-5,'
        b'"requests_per_minute":1,"tokens_per_minute":2,"concurrent_generations":3,'
        b'"expires":"2030-01-01T00:00:00Z"}' % _SHA256[::-1].encode()
    )
    yield b"# comment\n\n" + full + b"\n" + msgspec.json.encode(plain)
    yield b'{"name":"c","sha256":"sk-0123456789abcdefghij"}\n'
    yield b"sk-0123456789abcdefghij\n"
    yield b'{"name":"c","sk-0123456789abcdefghij":1}\n'


def check_transfer_keys(data: bytes) -> None:
    """Read a file of KV transfer keys. No error shows a key."""
    path = _path()
    path.write_bytes(data)
    try:
        found = transfer_keys.read_keys(path)
    except ConfigError as exc:
        for line in data.decode("latin-1").splitlines():
            check_hides(line.strip(), exc.message)
        return
    assert 0 < len(found) <= transfer_keys.MAX_KEYS
    for key in found:
        assert len(key.secret) >= transfer_keys.MIN_KEY_CHARACTERS
        assert key.secret in data
        check_hides(key.secret.decode(), key.key_id)


def _transfer_key_lines() -> Iterator[bytes]:
    yield f"{FIRST_KEY}\n{SECOND_KEY}\n".encode()
    yield f"# comment\n\n  {FIRST_KEY}  \n".encode()
    yield b"short\n"
    yield b"\0" * 40


TARGETS = {
    "api-keys": Target(
        summary="files of API keys",
        check=check_api_keys,
        files=("access/keys_file.py", "access/api_keys.py"),
        seeds=_key_lines,
        words=(
            *(b'"name"', b'"sha256"', b'"scope"', b'"models"', b'"expires"', b'"priority"', b"all"),
            *(b'"requests_per_minute"', b"2030-01-01T00:00:00Z", b"#", b"\n", b"\xe2\x80\xa8"),
            *(b"status", _SHA256.encode(), b"sk-0123456789abcdef"),
        ),
    ),
    "transfer-keys": Target(
        summary="files of KV transfer keys",
        check=check_transfer_keys,
        files=("kv_transfer/keys.py", "support/trusted_file.py"),
        seeds=_transfer_key_lines,
        words=(FIRST_KEY.encode(), SECOND_KEY.encode(), b"\n", b"#", b"\r", b"\x85", b"\x1c"),
    ),
}

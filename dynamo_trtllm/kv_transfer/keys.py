"""Read the keys with which the workers of a deployment sign KV transfer parameters.

A key file has one key per line. The first key signs, and all keys verify. So a deployment can
change its key without an outage: add the new key as the second line of every file, then make it the
first line, then remove the former key.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.file_watch import version_of
from dynamo_trtllm.support.trusted_file import UntrustedFile, read_trusted

log = logging.getLogger(__name__)

MIN_KEY_CHARACTERS: Final = 32
MAX_KEYS: Final = 4
_MAX_BYTES: Final = 64 << 10
_FIELD: Final = "kv_transfer_key_file"
_ID_PURPOSE: Final = b"dynamo_trtllm: id of a KV transfer key"
_READER_PURPOSE: Final = b"dynamo_trtllm: reader of KV"
_ID_BYTES: Final = 8
# The file may be on a slow file system. So this is the shortest time between two checks whether it
# has changed.
_LOOK_EVERY_S: Final = 1.0
_HINT: Final = "write keys with: (umask 077; openssl rand -hex 32 > FILE)"


class TransferKey(NamedTuple):
    """One key. Its id reveals nothing about its secret."""

    key_id: str
    secret: bytes


class TransferKeys:
    """The keys of one file, which are read again after the file has changed.

    If the changed file can't be read, the former keys stay valid, and it is read again until it is
    right. The problem may pass without a change of the file.

    Args:
        path: the key file.
        on_failed_reload: called once for each problem of a changed file.
        clock: returns seconds of a monotonic clock.

    Raises:
        ConfigError: the file can't be read, other users have access to it, or a key is too short.
    """

    def __init__(
        self,
        path: Path,
        on_failed_reload: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._on_failed_reload = on_failed_reload
        self._clock = clock
        self._looked_at = clock()
        self._read_at = self._looked_at
        self._version = version_of(path)
        self._problem = ""  # why the file could not be read; "": its keys are in use
        self._use(read_keys(path))

    def signing(self) -> TransferKey:
        """Return the key that signs."""
        self._reload_if_changed(_LOOK_EVERY_S)
        return self._signing

    def find(self, key_id: str) -> TransferKey | None:
        """Return the key with this id, or None if the file has no such key."""
        self._reload_if_changed(_LOOK_EVERY_S)
        found = self._by_id.get(key_id)
        if found is None:
            # Another worker may have just read a new file, so look at the file now.
            self._reload_if_changed(0.0)
            found = self._by_id.get(key_id)
        return found

    def ids(self) -> str:
        """Return the ids of all keys, for messages."""
        return ", ".join(self._by_id)

    def reader_proof(self, transfer_id: str, token: bytes) -> bytes:
        """Return the proof that a reader of KV sends instead of the token of a transfer.

        A stranger that overhears the token has no key, so it can't compute the proof.
        """
        return _reader_proof(self.signing(), transfer_id, token)

    def is_reader_proof(self, proof: bytes, transfer_id: str, token: bytes) -> bool:
        """Return whether a reader of KV has the token and one of the keys."""
        self._reload_if_changed(_LOOK_EVERY_S)
        return any(
            hmac.compare_digest(proof, _reader_proof(key, transfer_id, token))
            for key in self._by_id.values()
        )

    def _use(self, keys: tuple[TransferKey, ...]) -> None:
        self._signing = keys[0]
        self._by_id = {key.key_id: key for key in keys}

    def _reload_if_changed(self, interval_s: float) -> None:
        """Read the file if it has changed, unless it was looked at within `interval_s` seconds."""
        now = self._clock()
        if now - self._looked_at < interval_s:
            return
        self._looked_at = now
        version = version_of(self._path)
        # Strangers can cause looks without an interval. So a wrong file has an interval of its own.
        is_due = bool(self._problem) and now - self._read_at >= _LOOK_EVERY_S
        if version == self._version and not is_due:
            return
        self._read_at = now
        self._version = version
        try:
            self._use(read_keys(self._path))
        except ConfigError as exc:
            if exc.message != self._problem:
                self._problem = exc.message
                self._on_failed_reload()
                log.error("the KV transfer keys so far stay valid: %s", exc.message)
            return
        self._problem = ""
        log.info("KV transfer keys were read again: %s", self.ids())


def read_keys(path: Path) -> tuple[TransferKey, ...]:
    """Read a key file. Empty lines and lines that begin with `#` are skipped.

    Raises:
        ConfigError: the file can't be read, other users have access to it, or a key is too short or
            not printable.
    """
    try:
        lines = read_trusted(path, _MAX_BYTES, is_secret=True).decode("ascii").splitlines()
    except OSError as exc:
        raise _error(f"{path} can't be read: {exc.strerror}; {_HINT}") from exc
    except UnicodeDecodeError as exc:
        raise _error(f"{path} is not ASCII text at byte {exc.start}; {_HINT}") from exc
    except UntrustedFile as exc:
        raise _error(f"{path} {exc.problem}") from exc
    keys: list[TransferKey] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if len(text) < MIN_KEY_CHARACTERS:
            raise _error(
                f"{path}, line {number}: the key has {len(text)} characters and needs at least"
                f" {MIN_KEY_CHARACTERS}; {_HINT}"
            )
        # After a crash, a file may end with zeros, which anyone could guess.
        if not text.isprintable() or " " in text:
            raise _error(
                f"{path}, line {number}: the key has a character that is no letter, digit or sign;"
                f" {_HINT}"
            )
        keys.append(_key_of(text))
    if not 0 < len(keys) <= MAX_KEYS:
        raise _error(
            f"{path} has {len(keys)} keys; it needs 1 to {MAX_KEYS}, one per line; {_HINT}"
        )
    return tuple(keys)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"--kv-transfer-key-file {problem}", field=_FIELD)


def _key_of(text: str) -> TransferKey:
    secret = text.encode()
    key_id = hmac.digest(secret, _ID_PURPOSE, "sha256")[:_ID_BYTES].hex()
    return TransferKey(key_id, secret)


def _reader_proof(key: TransferKey, transfer_id: str, token: bytes) -> bytes:
    # The token has a fixed length. So two different inputs never give the same text.
    return hmac.digest(key.secret, _READER_PURPOSE + token + transfer_id.encode(), "sha256")

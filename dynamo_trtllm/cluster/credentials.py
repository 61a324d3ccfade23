"""Read the file with a user and a password for etcd or NATS."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, NamedTuple

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.trusted_file import UntrustedFile, read_trusted

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 4096


class Credentials(NamedTuple):
    """A user of etcd or NATS, and its password."""

    user: str
    password: str


class CredentialsFile:
    """Credentials in a file, which is read again so that a password can change.

    Args:
        path: the file, with one line USER:PASSWORD.
        field: setting that names the file, for errors.

    Raises:
        ConfigError: the file can't be read or has another form, or other users have access to it.
    """

    def __init__(self, path: Path, field: str) -> None:
        self._path = path
        self._field = field
        self._latest = _read(path, field)
        self._problem = ""  # what was wrong when the file was read last, or "" if nothing was

    def identity(self) -> str:
        """Return, as text for users, the file and the user that was read last."""
        return f"user {self._latest.user!r} of {self._path}"

    def current(self) -> Credentials:
        """Read the file and return its credentials.

        If the file can't be read now, return the credentials that were read before.
        """
        problem = ""
        try:
            self._latest = _read(self._path, self._field)
        except ConfigError as exc:
            problem = exc.message
        # A client that can't connect reads the file at each attempt, so each problem is logged only
        # once.
        if problem and problem != self._problem:
            log.error("%s; still using the former credentials", problem)
        self._problem = problem
        return self._latest


def _read(path: Path, field: str) -> Credentials:
    shown = f"--{field.replace('_', '-')} {path}"
    hint = "write it with: (umask 077; echo USER:PASSWORD > FILE)"
    try:
        text = read_trusted(path, _MAX_BYTES, is_secret=True).decode()
    except OSError as exc:
        raise ConfigError(f"{shown} can't be read: {exc.strerror}; {hint}", field=field) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{shown} is not UTF-8 text; {hint}", field=field) from exc
    except UntrustedFile as exc:
        raise ConfigError(f"{shown} {exc.problem}", field=field) from exc
    lines = text.splitlines()
    # An empty file and a file with several lines are rejected.
    line = lines[0] if len(lines) == 1 else ""
    user, _, password = line.partition(":")
    if not (user and password):
        raise ConfigError(
            f"{shown} must have one line of the form USER:PASSWORD; {hint}", field=field
        )
    return Credentials(user, password)

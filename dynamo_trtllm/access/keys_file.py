"""Read and change the file of API keys.

Each line is a JSON object with the fields of one `ApiKey`. Empty lines and lines that begin with
`#` are skipped. Keys are added and removed line by line, so that comments stay.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.access.api_keys import ApiKey
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.trusted_file import UntrustedFile, read_trusted

MAX_KEYS: Final = 10_000
_MAX_BYTES = 16 << 20
_decoder = msgspec.json.Decoder(ApiKey)
# Texts that msgspec quotes in its errors, and that may be a key: a value, and the name of an
# unknown field that does not look like a name.
_VALUE: Final = re.compile(r" '.*'(?= - at `)", re.DOTALL)
_ODD_FIELD: Final = re.compile(r" unknown field `(?![a-z_]{1,40}`\Z).*`", re.DOTALL)


class KeysFile(NamedTuple):
    """The content of a file of API keys."""

    lines: list[str]
    keys: list[ApiKey]


def read_keys(path: Path, from_settings: Iterable[ApiKey] = ()) -> KeysFile:
    """Read and check a file of API keys.

    Args:
        path: the file.
        from_settings: keys of the settings, which are valid, too. A key of the file must not have
            the name or the hash of such a key.

    Raises:
        ConfigError: the file can't be read, other users have write access to it, or a line is
            wrong. The message names the file, the line and the field.
    """
    try:
        data = read_trusted(path, _MAX_BYTES)
    except OSError as exc:
        raise _not_read(path, exc) from exc
    except UntrustedFile as exc:
        raise _error(f"the file of API keys {path} {exc.problem}") from exc
    try:
        lines = _lines(data.decode())
    except UnicodeDecodeError as exc:
        raise _error(
            f"the file of API keys {path} is not UTF-8 text at byte {exc.start}; correct it"
        ) from exc
    return KeysFile(lines, _parsed(path, lines, from_settings))


def _lines(text: str) -> list[str]:
    """Return the lines of a file.

    Only "\\n" ends a line. `splitlines` would also split at characters like U+2028, which JSON
    strings may contain.
    """
    lines = text.split("\n")
    # A "\n" at the end of the text is not followed by another line.
    if not lines[-1]:
        lines.pop()
    return lines


def _parsed(path: Path, lines: list[str], from_settings: Iterable[ApiKey] = ()) -> list[ApiKey]:
    """Return the keys of the lines of a file. Raises ConfigError, see `read_keys`."""
    keys: list[ApiKey] = []
    place_of: dict[str, str] = {}  # where a key stands, by its name and by its hash
    in_settings = f"--api-key or {ENV_PREFIX}API_KEY"
    for key in from_settings:
        place_of[key.name] = in_settings
        place_of[key.sha256] = in_settings
    for number, line in enumerate(lines, start=1):
        if _is_comment(line):
            continue
        place = f"{path} line {number}"
        try:
            key = _decoder.decode(line)
        except msgspec.ValidationError as exc:
            raise _error(f"{place}: {_problem(exc)}; correct the line") from exc
        except (msgspec.DecodeError, RecursionError) as exc:
            raise _error(f"{place} is not a JSON object: {exc}; correct the line") from exc
        for field, value in (("name", key.name), ("sha256", key.sha256)):
            if value in place_of:
                raise _error(
                    f"{place}: {field} is that of a key in {place_of[value]}; remove one of them"
                )
            place_of[value] = f"line {number}"
        keys.append(key)
    if len(keys) > MAX_KEYS:
        raise _error(f"{path} has {len(keys)} API keys; at most {MAX_KEYS} are supported")
    return keys


def _problem(exc: msgspec.ValidationError) -> str:
    """Return what is wrong with a line, without any text that may be a key."""
    problem = _VALUE.sub("", str(exc).replace("`$.", "`"))
    if problem.endswith("`sha256`"):
        return "`sha256` must be the SHA-256 hash of a key, in 64 lowercase hexadecimal digits"
    return _ODD_FIELD.sub(" an unknown field", problem)


def _is_comment(line: str) -> bool:
    text = line.strip()
    return not text or text.startswith("#")


def add_key(path: Path, key: ApiKey) -> None:
    """Add a key to a file. If the file does not exist, it is created.

    Raises:
        ConfigError: the file can't be read or written, it has a key of this name or too many keys,
            or the key is wrong.
    """
    line = _encoded(key)
    with _locked(path):
        lines: list[str] = []
        if path.exists():
            content = read_keys(path)
            lines = content.lines
            if any(other.name == key.name for other in content.keys):
                raise _error(
                    f"{path} has a key with the name {key.name}; choose another name, or revoke"
                    " that one"
                )
        lines = [*lines, line]
        _parsed(path, lines)
        _write(path, lines)


def _encoded(key: ApiKey) -> str:
    """Return the line of a key. Raises ConfigError if the line could not be read again."""
    try:
        line = msgspec.json.encode(key).decode()
        _decoder.decode(line)
    except UnicodeEncodeError as exc:
        raise _error(
            f"the key {key.name} has a model name that is not UTF-8 text; correct it"
        ) from exc
    except msgspec.ValidationError as exc:
        raise _error(
            f"the key {key.name} can't be added: {_problem(exc)}; correct the value"
        ) from exc
    return line


def remove_key(path: Path, name: str) -> None:
    """Remove the key of this name from a file.

    Raises:
        ConfigError: the file can't be read or written, or has no such key.
    """
    with _locked(path):
        content = read_keys(path)
        if all(key.name != name for key in content.keys):
            raise _error(f"{path} has no key with the name {name}; list its keys to see the names")
        kept = [line for line in content.lines if not _is_of(line, name)]
        _write(path, kept)


def _is_of(line: str, name: str) -> bool:
    """Return whether a line has the key of this name. The line must be valid."""
    return not _is_comment(line) and _decoder.decode(line).name == name


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Prevent other commands from changing a file of this folder during a `with` block."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise _not_written(path, exc) from exc
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as exc:
        raise _error(
            f"another command is changing a file of API keys in {path.absolute().parent}; try again"
        ) from exc
    finally:
        os.close(folder)


def _write(path: Path, lines: list[str]) -> None:
    """Replace the file in one step, so that a reader gets the former or the new content.

    A new file is private to this user. An existing file keeps its owner and mode.

    Raises:
        ConfigError: the file can't be written, or would be too long to be read again.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    if len(data) > _MAX_BYTES:
        raise _error(
            f"the file of API keys {path} would have more than {_MAX_BYTES} bytes; revoke a key"
        )
    target = Path(os.path.realpath(path))  # if the path is a link, the link stays
    temporary = ""
    try:
        file, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with open(file, "wb") as opened:
            if target.exists():
                status = target.stat()
                os.fchmod(file, stat.S_IMODE(status.st_mode))
                if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file, status.st_uid, status.st_gid)
            opened.write(data)
            opened.flush()
            os.fsync(file)
        os.replace(temporary, target)
    except OSError as exc:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise _not_written(path, exc) from exc


def _not_read(path: Path, exc: OSError) -> ConfigError:
    return _error(
        f"the file of API keys {path} can't be read: {exc.strerror}; create it with dynamo-trtllm"
        " keys add, or change its permissions"
    )


def _not_written(path: Path, exc: OSError) -> ConfigError:
    return _error(
        f"the file of API keys {path} can't be written: {exc.strerror}; change the permissions of"
        " its folder, or choose another file"
    )


def _error(message: str) -> ConfigError:
    return ConfigError(message, field="api_keys_file")

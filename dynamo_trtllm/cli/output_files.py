"""Check and write the files in which a command writes the result of long work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dynamo_trtllm.protocol.errors import ConfigError


def check_writable(path: Path, field: str) -> None:
    """Check that a file can be written, before the long work for it. The file stays unchanged.

    Args:
        path: the file. A missing file is created and removed again.
        field: the setting that names the file.

    Raises:
        ConfigError: the file can't be written.
    """
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as exc:
        raise _not_written(path, field, exc) from exc
    if is_new:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str, field: str) -> None:
    """Write a file.

    Args:
        path: the file.
        text: the content of the file.
        field: the setting that names the file.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise _not_written(path, field, exc) from exc


def make_folder(path: Path, field: str) -> None:
    """Create a folder if it is missing, and check that files can be created in it.

    Args:
        path: the folder.
        field: the setting that names the folder.

    Raises:
        ConfigError: the folder can't be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as exc:
        raise _not_written(path, field, exc) from exc


def _not_written(path: Path, field: str, exc: OSError) -> ConfigError:
    """Return the error of a path that can't be written.

    Args:
        path: a file or folder.
        field: the setting that names the path.
        exc: the error of the system, which has the reason.
    """
    return ConfigError(
        f"{path} can't be written: {exc.strerror or exc}; pass another path", field=field
    )

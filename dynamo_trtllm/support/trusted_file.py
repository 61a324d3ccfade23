"""Read files that decide who is trusted: only this user and root may write them.

All files with secrets have one rule: private keys, keys of KV transfers and credentials. A file of
this user is rejected if others may read it. A file of root may be readable for its group. If it is
readable for all users, it is accepted, too, and a log line says so once: Kubernetes mounts a Secret
so by default, into a folder that no other user sees.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_READABLE_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH
_ROOT: Final = 0
_warned_of: Final[set[Path]] = set()  # files are read again and again


class UntrustedFile(Exception):
    """A file that is not read.

    Attributes:
        problem: what is wrong and what to do, to be put after the name of the file.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


def read_trusted(path: Path, max_bytes: int, *, is_secret: bool = False) -> bytes:
    """Return the content of a file that only this user and root can write.

    The file is checked after it was opened, so it can't be replaced between the check and the
    read. A pipe is rejected without a wait for its writer.

    Args:
        path: the path of the file, or of a link to it.
        max_bytes: longest content.
        is_secret: others may not read it, either, as the module says.

    Raises:
        OSError: the file can't be opened or read.
        UntrustedFile: it is not a regular file, others can write it or read the secret in it, it
            belongs to another user, or it is too long.
    """
    # With O_NONBLOCK, a pipe is opened at once.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check(status, path)
        if is_secret:
            _check_secret(status, path)
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise UntrustedFile(f"has more than {max_bytes} bytes; shorten it")
    return data


def _check(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedFile("is not a regular file; pass the path of one")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise UntrustedFile(
            f"can be written by its group or by others (mode {mode:04o}), so its content can't"
            f" be trusted; run chmod go-w {path}"
        )
    user = os.geteuid()
    if status.st_uid not in (_ROOT, user):
        raise UntrustedFile(
            f"belongs to user {status.st_uid}, who could change it; give it to user {user}, who"
            " runs this process, or to root"
        )


def _check_secret(status: os.stat_result, path: Path) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != _ROOT and mode & _READABLE_BY_OTHERS:
        raise UntrustedFile(
            f"can be read by other users (mode {mode:04o}), but has a secret; run chmod 600 {path}"
        )
    if mode & stat.S_IROTH and path not in _warned_of:
        _warned_of.add(path)
        text = (
            "%s can be read by all users of this machine (mode %04o), but has a secret; run chmod"
            " o= %s, or set defaultMode: 0440 for a Secret of Kubernetes"
        )
        log.warning(text, path, mode, path)

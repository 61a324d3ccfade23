"""Read files that decide who is trusted. Only this user and root may have write access to them.

The same rule holds for all files with secrets: private keys, keys of KV transfers and credentials.
If such a file belongs to this user, other users must not have read access. If it belongs to root,
its group may have read access. If all users have read access to a file of root, it is accepted,
too, but logged once. This is how Kubernetes mounts a Secret by default, in a folder that no other
user can see.
"""

from __future__ import annotations

import codecs
import logging
import os
import stat
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_READABLE_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH
_ROOT: Final = 0
_warned_of: Final[set[Path]] = set()  # the files that were logged; each is read again and again


class UntrustedFile(Exception):
    """A file is rejected.

    Attributes:
        problem: the words after the name of the file, which say what is wrong and what to do.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


def read_trusted(path: Path, max_bytes: int, *, is_secret: bool = False) -> bytes:
    """Return the content of a file that only this user and root can write.

    The file is opened first and then checked. So it can't be replaced between the check and the
    read. A pipe is rejected at once, without a wait for its writer. A byte order mark, with which
    some editors begin a text, is left out: it would become a part of the first key or user.

    Args:
        path: the path of the file, or of a link to it.
        max_bytes: longest content.
        is_secret: the file has a secret, so other users must not have read access, see the module.

    Raises:
        OSError: the file can't be opened or read.
        UntrustedFile: the file is not a regular file, is too long, or belongs to another user, or
            other users have write access to it or read access to the secret in it.
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
    return data.removeprefix(codecs.BOM_UTF8)


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

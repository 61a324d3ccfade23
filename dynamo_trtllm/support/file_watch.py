"""Read files again when they have changed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

RELOAD_S: Final = 1.0  # between two looks at the files
T = TypeVar("T")


class FileVersion(NamedTuple):
    """The values of which one changes when a file is written or replaced."""

    device: int
    inode: int
    modified_ns: int
    changed_ns: int  # changes with the owner and the permissions, too
    size: int


class FileWatch(Generic[T]):
    """Files whose content is in use, and is replaced when one of them has changed.

    If the changed files can't be read, the content before stays in use. The problem is logged and
    counted once, and they are read again until they are right.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        use: Callable[[T], None],
        count: Callable[[str], None],
    ) -> None:
        """Read the files, and use their content.

        Args:
            what: name of the content in log lines, such as "TLS certificate".
            paths: the files.
            read: returns the content, or raises ConfigError or OSError. Reloads run it in a
                thread.
            use: is called with the content, and raises ConfigError if it is wrong.
            count: is called with the outcome of each change: `ok` or `failed`.

        Raises:
            ConfigError: the files can't be read, or their content is wrong.
        """
        self._what = what
        self._paths = paths
        self._read = read
        self._use = use
        self._count = count
        self._problem = ""  # what is wrong with the files; "": their content is in use
        self._seen = self._versions()
        use(read())

    async def follow(self, wait_s: float = RELOAD_S) -> None:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(wait_s)
            await self.reload()

    async def reload(self) -> None:
        """Read the files again if one of them has changed.

        A slow file system delays no request: the files are read in a thread.
        """
        try:
            if not await asyncio.to_thread(self._has_changed):
                return
            self._use(await asyncio.to_thread(self._read))
        except ConfigError as exc:
            self._failed(exc.message)
            return
        except OSError as exc:
            # The process may lack files or memory for a while. That must not end the process.
            self._failed(f"the {self._what} can't be read: {exc.strerror or exc}")
            return
        self._problem = ""
        log.info("read the %s again from %s", self._what, ", ".join(map(str, self._paths)))
        self._count("ok")

    def _failed(self, problem: str) -> None:
        """Keep the former content. Log and count the problem, unless the last read had it, too."""
        if problem != self._problem:
            self._problem = problem
            log.error("%s; still using the former %s", problem, self._what)
            self._count("failed")

    def _has_changed(self) -> bool:
        """Return whether the files have changed, or were wrong when they were read last."""
        versions = self._versions()
        has_changed = versions != self._seen or bool(self._problem)
        # The files are read after this. The next call finds a change in between.
        self._seen = versions
        return has_changed

    def _versions(self) -> list[FileVersion | None]:
        return [version_of(path) for path in self._paths]


def version_of(path: Path) -> FileVersion | None:
    """Return the version of a file; None if it can't be found, which reading it reports."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileVersion(
        status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
    )

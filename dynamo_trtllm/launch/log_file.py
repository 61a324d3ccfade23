"""Keep the lines of all processes of a deployment in two files of bounded size.

A thread writes them, so that a slow disk delays neither the launcher nor the pipes of the
processes. `dynamo-trtllm logs` reads the files.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from dynamo_trtllm.observability.output_relay import RelayedOutput, relay_line
from dynamo_trtllm.protocol.counted import counted_are

MAX_BYTES: Final = 8 << 20  # the size at which a file is full
_LAST_LINES_S: Final = 1.0  # the longest wait for the writer at the end
_SEPARATOR: Final = " | "


@contextmanager
def log_file(path: Path, name: str) -> Iterator[Callable[[str, str], None]]:
    """Write lines to a file while the context lasts.

    When the file has MAX_BYTES, it is moved to `older`, in place of the older file there, and a new
    file begins. While more than a megabyte waits for the disk, lines are dropped. A line in the
    file then says how many.

    Args:
        path: the file. It is created.
        name: process name on the lines about dropped lines.

    Yields:
        A function that adds a line: the name of its process and the text. It never waits.

    Raises:
        OSError: the file can't be created.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    num_bytes = 0  # bytes that were written to the current file

    def notice(count: int, reason: str) -> bytes:
        why = f" ({reason})" if reason else ""
        text = f"{counted_are(count, 'line')} not in this file: the disk was too slow or full{why}"
        return _line(name, relay_line(name, "text", text).decode().rstrip())

    def rotate(written: int) -> None:
        nonlocal num_bytes
        num_bytes += written
        if num_bytes < MAX_BYTES:
            return
        num_bytes = 0
        try:
            os.replace(path, older(path))
            new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            # Empty the file: the latest lines matter more than the older ones.
            os.ftruncate(file, 0)
            return
        # The writer goes on with the same descriptor.
        os.dup2(new, file)
        os.close(new)

    output = RelayedOutput(file, notice, on_dropped=lambda count: None, on_written=rotate)
    writer = threading.Thread(target=output.run, name="log file", daemon=True)
    writer.start()
    try:
        yield lambda process, text: output.add(_line(process, text))
    finally:
        output.finish()
        writer.join(_LAST_LINES_S)
        # A writer that still waits for the disk needs the descriptor. This process ends anyway.
        if not writer.is_alive():
            os.close(file)


def older(path: Path) -> Path:
    """Return the path to which a full file is moved."""
    return path.with_name(f"{path.name}.1")


def _line(name: str, text: str) -> bytes:
    return f"{name}{_SEPARATOR}{text}\n".encode(errors="replace")


def split_line(line: bytes) -> tuple[str, str]:
    """Return the process name and the text of a line."""
    name, _, text = line.decode(errors="replace").partition(_SEPARATOR)
    return name, text


class LogReader:
    """A reader of the lines in a log file and the file before it, while lines are written.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""  # the beginning of a line whose end was not written yet
        # The files that were not read to their end, the oldest first. The last file is being
        # written.
        self._files: deque[BinaryIO] = deque()
        while True:
            self._close()
            current = path.open("rb")
            try:
                self._files.append(older(path).open("rb"))
            except FileNotFoundError:
                self._files.append(current)
                return
            self._files.append(current)
            older_inode, current_inode = (os.fstat(file.fileno()).st_ino for file in self._files)
            # If both are the same file, the writer has moved it between the two calls of `open`.
            if older_inode != current_inode:
                return

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that were not read yet, without their line ends."""
        while True:
            for line in self._files[0]:
                whole = self._rest + line
                if whole.endswith(b"\n"):
                    self._rest = b""
                    yield whole[:-1]
                else:
                    self._rest = whole
            if len(self._files) > 1:
                self._files.popleft().close()
            elif not self._has_new_file():
                return
            # If there is a new file, the writer may have added lines to this file before it began
            # the new one. The next turn of the loop reads them.

    def _has_new_file(self) -> bool:
        """Open the file that the writer has begun after the current one, if there is one."""
        try:
            new = self._path.open("rb")
        except FileNotFoundError:  # the writer begins it just now, or the deployment has ended
            return False
        if os.fstat(new.fileno()).st_ino == os.fstat(self._files[0].fileno()).st_ino:
            new.close()
            return False
        self._files.append(new)
        return True

    def _close(self) -> None:
        while self._files:
            self._files.popleft().close()

"""Pass on the output of a process, and drop lines instead of letting the process wait.

The module `outputs` runs this file as a program, with one pipe for each output. If the program is
killed, `outputs` starts it again. This file must not import this package.

The relay must be a process of its own. A thread of the served process would need the GIL, which a
library may hold while it prints. Also, a crash would end the thread, although the last lines before
a crash matter most.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

BACKLOG_BYTES = 1 << 20  # most bytes of one output that wait to be written
FLUSH_S = 1.0  # at the end of the process, the longest wait until the backlog is written
# The number of dropped lines and the number of queued lines, in memory that both processes share.
# If this process is killed, the queued lines are lost.
COUNTERS = struct.Struct("<QQ")
# Messages on the control socket: the request to flush, and the answer.
FLUSH = b"f"
FLUSHED = b"."
_LOGGER = "observability.output_relay"
_READ_BYTES = 1 << 16
# A flush reads a pipe at most this many times. One read can empty a pipe of the default size. The
# limit is for a process that keeps writing.
_READS_PER_FLUSH = 64
# The relay ignores these signals, which may reach it together with the served process. A process
# that they end still writes its last lines, and a stopped relay would not read what is written.
_IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTTOU,
    signal.SIGTSTP,
)


class RelayedOutput:
    """One output with its backlog. `add` never waits. `run` writes, and may wait without limit.

    When the backlog is full, lines are dropped until the whole backlog is written. Then one line
    reports how many lines were dropped.

    Args:
        file: the file descriptor of the output.
        notice: returns the line that reports dropped lines. The arguments are their number and the
            reason, which is "" if it is unknown.
        on_dropped: called with a number of lines that were dropped now.
        on_queued: called with the change in the number of queued lines.
        on_failed: called with the reason when a write fails, but not again for failures that
            directly follow.
        on_idle: called when everything is written.
        on_written: called with the number of bytes after each chunk that is written.
    """

    def __init__(
        self,
        file: int,
        notice: Callable[[int, str], bytes],
        on_dropped: Callable[[int], None],
        on_queued: Callable[[int], None] = lambda count: None,
        on_failed: Callable[[str], None] = lambda reason: None,
        on_idle: Callable[[], None] = lambda: None,
        on_written: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._file = file
        self._notice = notice
        self._on_dropped = on_dropped
        self._on_queued = on_queued
        self._on_failed = on_failed
        self._on_idle = on_idle
        self._on_written = on_written
        self._changed = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._num_bytes = 0  # size of the chunks, including the chunk that is being written
        self._num_unreported = 0  # number of dropped lines that are not reported yet
        self._failure = ""  # why the last write failed, or "" if it succeeded
        self._is_dropping = False  # the backlog was full and is not written yet
        self._skips_line = False  # the beginning of a line was dropped, so its end is dropped, too
        # The accepted data ends within a line, and no data was dropped since. So the end of this
        # line can be accepted, too.
        self._may_finish_line = False
        self._written_mid_line = False  # the written data ends within a line
        self._is_finished = False
        self.is_closed = False  # the reader of the output has exited

    @property
    def is_idle(self) -> bool:
        """True if the backlog is written."""
        return not self._num_bytes

    def add(self, data: bytes) -> None:
        """Queue data that the process has written, or drop it if the output has no reader."""
        with self._changed:
            if self.is_closed:
                self._drop(data)
                return
            if self._skips_line:
                data = self._drop_first_line(data)
            if not self._is_dropping and self._num_bytes + len(data) > BACKLOG_BYTES:
                data = self._finish_line(data)
                # If the data was only the end of an accepted line, nothing is left to drop.
                if data:
                    self._is_dropping = True
            if self._is_dropping:
                self._drop(data)
            elif data:
                self._append(data)

    def finish(self) -> None:
        """Make `run` return once everything is written."""
        with self._changed:
            self._is_finished = True
            self._changed.notify()

    def run(self) -> None:
        """Write what is queued, until `finish` or until the reader of the output has exited."""
        while not self.is_closed:
            chunk = self._next()
            if chunk is None:
                break
            data, num_reported = chunk
            is_notice = num_reported > 0
            had_failed = bool(self._failure)
            left = self._write(data)
            is_written = not left
            with self._changed:
                self._num_bytes -= len(data)
                if not is_notice:
                    self._on_queued(-data.count(b"\n"))
                if is_written:
                    self._num_unreported -= num_reported
                elif not is_notice:
                    # A notice is not counted, because it is not a line of the process.
                    self._count_dropped(left.count(b"\n"))
                if self.is_closed:
                    self._drop_queued()
            if is_written:
                self._on_written(len(data))
            elif not had_failed and not self.is_closed:
                self._on_failed(self._failure)
        self._on_idle()

    def _next(self) -> tuple[bytes, int] | None:
        """Wait for data to write. Return None after `finish`.

        Returns:
            The data, and the number of dropped lines that the data reports. The number is 0 if the
            data is not a notice.
        """
        with self._changed:
            # The notice about dropped lines comes when the backlog is written.
            if not self._chunks and self._is_dropping:
                self._is_dropping = False
                return self._report()
            while not self._chunks:
                if self._is_finished:
                    return None
                self._on_idle()
                self._changed.wait()
                # The queue was empty. Lines that a failed write has lost are reported now, before
                # the new data. Lines that did not fit the backlog are reported above.
                has_lost_lines = self._num_unreported > 0 and not self._is_dropping
                if has_lost_lines and self._chunks:
                    return self._report()
            return self._chunks.popleft(), 0

    def _report(self) -> tuple[bytes, int]:
        """Return the line about all dropped lines that are not reported yet, and their number.

        The line counts as data that is being written.
        """
        line = self._notice(self._num_unreported, self._failure)
        if self._written_mid_line:
            line = b"\n" + line
        self._num_bytes += len(line)
        return line, self._num_unreported

    def _append(self, data: bytes) -> None:
        """Accept data."""
        self._chunks.append(data)
        self._on_queued(data.count(b"\n"))
        self._num_bytes += len(data)
        self._may_finish_line = not data.endswith(b"\n")
        self._changed.notify()

    def _finish_line(self, data: bytes) -> bytes:
        """Accept the end of a line whose beginning was accepted. Return the rest of the data.

        If the data does not contain the end of the line, nothing is accepted.
        """
        if not self._may_finish_line or b"\n" not in data:
            return data
        end, _, rest = data.partition(b"\n")
        self._append(end + b"\n")
        return rest

    def _drop(self, data: bytes) -> None:
        """Drop data, and count each of its lines once."""
        if not data:
            return
        ends_mid_line = not data.endswith(b"\n")
        num_lines = data.count(b"\n")
        if ends_mid_line:
            # The last line counts now, although its end is missing.
            num_lines += 1
        if self._skips_line:
            # The data begins within a line that was counted before.
            num_lines -= 1
        self._skips_line = ends_mid_line
        self._may_finish_line = False
        self._count_dropped(num_lines)

    def _drop_queued(self) -> None:
        """Drop all queued data, because the reader of the output has exited."""
        num_lines = sum(chunk.count(b"\n") for chunk in self._chunks)
        self._chunks.clear()
        self._num_bytes = 0
        self._on_queued(-num_lines)
        self._count_dropped(num_lines)

    def _count_dropped(self, num_lines: int) -> None:
        self._num_unreported += num_lines
        self._on_dropped(num_lines)

    def _drop_first_line(self, data: bytes) -> bytes:
        """Drop the end of a line whose beginning was dropped. Return the rest."""
        first, newline, rest = data.partition(b"\n")
        self._drop(first + newline)
        return rest

    def _write(self, data: bytes) -> bytes:
        """Write data. Return the part that could not be written."""
        left = memoryview(data)
        while left:
            try:
                written = os.write(self._file, left)
            except BlockingIOError:  # another process has set the file to be non-blocking
                select.select([], [self._file], [])
                continue
            except OSError as exc:
                self._failure = exc.strerror or str(exc)
                self.is_closed = exc.errno in (errno.EPIPE, errno.EBADF)
                return bytes(left)
            self._written_mid_line = left[written - 1] != ord("\n")
            left = left[written:]
        self._failure = ""
        return b""


class Relay:
    """Passes the data of pipes to the outputs, until all pipes have ended.

    Args:
        pipes: the outputs, by the file descriptor of their pipe.
        control: a socket on which the process requests to flush its output, and gets the answer.
    """

    def __init__(self, pipes: dict[int, RelayedOutput], control: socket.socket) -> None:
        # Writer threads read this dict, too, so it must not change from `run` on.
        self._pipes = pipes
        self._open_pipes: set[int] = set()
        self._control = control
        self._control_files = [control.fileno()]
        self._lock = threading.Lock()
        self._is_flushing = False

    def run(self) -> None:
        """Run until the process and its children have closed the pipes, and all data is written.

        The wait for the last data takes at most FLUSH_S.
        """
        outputs = list(self._pipes.values())
        self._open_pipes.update(self._pipes)
        writers = [threading.Thread(target=output.run, daemon=True) for output in outputs]
        for writer in writers:
            writer.start()
        while self._open_pipes:
            files = [*self._open_pipes, *self._control_files]
            ready, _, _ = select.select(files, [], [])
            for file in ready:
                if file in self._open_pipes:
                    self._read(file)
                else:
                    self._receive()
        deadline_s = time.monotonic() + FLUSH_S
        for output in outputs:
            output.finish()
        for writer in writers:
            writer.join(max(0.0, deadline_s - time.monotonic()))

    def answer_flush(self) -> None:
        """Answer a request to flush, if there is one and all output is written.

        This includes the outputs of pipes that have ended.
        """
        outputs = self._pipes.values()
        with self._lock:
            is_written = all(output.is_idle or output.is_closed for output in outputs)
            if self._is_flushing and is_written:
                self._is_flushing = False
                with suppress(OSError):  # the process has ended
                    self._control.send(FLUSHED)

    def _read(self, file: int) -> None:
        """Read a pipe once."""
        data = os.read(file, _READ_BYTES)
        if data:
            self._pipes[file].add(data)
        else:
            self._open_pipes.remove(file)

    def _receive(self) -> None:
        """Receive a request to flush.

        Read the data that the process has written before the request. The answer follows when this
        data is written.
        """
        request = b""
        with suppress(ConnectionError):  # the process has ended
            request = self._control.recv(len(FLUSH))
        if not request:
            self._control_files.clear()
            return
        for _ in range(_READS_PER_FLUSH):
            ready, _, _ = select.select(list(self._open_pipes), [], [], 0)
            for file in ready:
                self._read(file)
            if not ready:
                break
        with self._lock:
            self._is_flushing = True
        self.answer_flush()


def relay_line(process_name: str, log_format: str, text: str) -> bytes:
    """Return a log line of this relay in the format of the process's other lines.

    Args:
        process_name: name of the process on the line.
        log_format: "text" or "json".
        text: the message.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if log_format == "json":
        entry = {
            "time": now,
            "level": "warning",
            "process": process_name,
            "logger": _LOGGER,
            "message": text,
        }
        return json.dumps(entry).encode() + b"\n"
    return f"{now} WARNING {process_name} {_LOGGER}: {text}\n".encode()


def main(argv: Sequence[str]) -> None:
    """Run the relay.

    Args:
        argv: the name of the process, the format of its log, the file descriptor of the control
            socket, the file descriptor of the memory of the counters, and for each output two file
            descriptors in the form PIPE:OUTPUT.
    """
    process_name, log_format, control, memory = argv[:4]
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    counters = mmap.mmap(int(memory), COUNTERS.size)
    counting = threading.Lock()
    pipes: dict[int, RelayedOutput] = {}

    def count(*, dropped: int = 0, queued: int = 0) -> None:
        with counting:
            dropped_before, queued_before = COUNTERS.unpack_from(counters)
            COUNTERS.pack_into(counters, 0, dropped_before + dropped, queued_before + queued)

    def notice(num_lines: int, reason: str) -> bytes:
        why = f"it can't be written: {reason}" if reason else "its reader was too slow"
        lines_were = "line of this output was" if num_lines == 1 else "lines of this output were"
        text = f"{num_lines} {lines_were} dropped: {why}"
        return relay_line(process_name, log_format, text)

    def report_failure(failed_pipe: int, reason: str) -> None:
        text = f"an output can't be written: {reason}; its lines are dropped"
        line = relay_line(process_name, log_format, text)
        for output in pipes.values():
            if output is not pipes[failed_pipe]:
                output.add(line)

    relay = Relay(pipes, socket.socket(fileno=int(control)))
    for pair in argv[4:]:
        pipe, file = map(int, pair.split(":"))
        pipes[pipe] = RelayedOutput(
            file,
            notice,
            on_dropped=lambda number: count(dropped=number),
            on_queued=lambda number: count(queued=number),
            on_failed=partial(report_failure, pipe),
            on_idle=relay.answer_flush,
        )
    relay.run()


if __name__ == "__main__":
    main(sys.argv[1:])

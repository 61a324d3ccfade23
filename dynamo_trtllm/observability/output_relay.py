"""Pass on the output of a process, and drop lines instead of letting the process wait.

`outputs` runs this file as a program, with one pipe for each output. It must not import this package. A thread of the
served process could not do this: it would need the GIL, which a library may hold while it prints, and it would not
outlive a crash, whose last lines matter most.
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

BACKLOG_BYTES = 1 << 20  # of one output
FLUSH_S = 1.0  # how long the end of the process may wait for the backlog
COUNTER = struct.Struct("<Q")  # dropped lines, in memory that both processes share
FLUSH = b"f"  # on the control socket
FLUSHED = b"."
_LOGGER = "observability.output_relay"
_READ_BYTES = 1 << 16
_READS_PER_FLUSH = 64  # more than a pipe holds by default
# A terminal that closes, Ctrl-C, and a stop of the whole service end the served process, whose last lines come then.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU, signal.SIGTSTP)


class RelayedOutput:
    """One output with its backlog. `add` never waits; `run` writes, and may wait for ever.

    When the backlog is full, lines are dropped until all of it is written. Then one line says how many were dropped.

    Args:
        file: file descriptor to write to.
        notice: returns the line that says how many lines were dropped, and why if it is known.
        on_dropped: called with a number of dropped lines.
        on_failed: called with the reason when a write fails, once until a write succeeds again.
        on_idle: called when everything is written.
    """

    def __init__(
        self,
        file: int,
        notice: Callable[[int, str], bytes],
        on_dropped: Callable[[int], None],
        on_failed: Callable[[str], None] = lambda reason: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = file
        self._notice = notice
        self._on_dropped = on_dropped
        self._on_failed = on_failed
        self._on_idle = on_idle
        self._changed = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._num_bytes = 0  # of the chunks, and of the one that is being written
        self._num_unreported = 0  # dropped lines that no line has reported
        self._failure = ""  # of the last write; "" if it succeeded
        self._is_dropping = False
        self._skips_line = False  # the beginning of the next line was dropped
        self._is_mid_line = False  # of what `add` has accepted
        self._has_torn_line = False  # of what is written
        self._is_finished = False
        self.is_closed = False  # its reader has exited

    @property
    def is_idle(self) -> bool:
        """Return True if everything is written that is not dropped."""
        return not self._num_bytes

    def add(self, data: bytes) -> None:
        """Queue data that the process has written."""
        with self._changed:
            if self._skips_line:
                data = self._drop_first_line(data)
            if not self._is_dropping and self._num_bytes + len(data) > BACKLOG_BYTES:
                self._is_dropping = True
                data = self._finish_line(data)
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
        while (chunk := self._next()) is not None:
            data, num_reported = chunk
            had_failed = bool(self._failure)
            left = self._write(data)
            is_written = not left
            with self._changed:
                self._num_bytes -= len(data)
                if is_written:
                    self._num_unreported -= num_reported
                elif not num_reported:
                    self._count(left.count(b"\n"))
            if self.is_closed:
                break
            if not is_written and not had_failed:
                self._on_failed(self._failure)
        self._on_idle()

    def _next(self) -> tuple[bytes, int] | None:
        """Wait for what to write next. Return None after `finish`.

        Returns:
            The data, and how many dropped lines it reports: 0, or all if it is the line about them.
        """
        with self._changed:
            if not self._chunks and self._is_dropping:
                self._is_dropping = False
                return self._report()
            while not self._chunks:
                if self._is_finished:
                    return None
                self._on_idle()
                self._changed.wait()
                if self._num_unreported and not self._is_dropping and self._chunks:  # of failed writes
                    return self._report()
            return self._chunks.popleft(), 0

    def _report(self) -> tuple[bytes, int]:
        line = self._notice(self._num_unreported, self._failure)
        if self._has_torn_line:
            line = b"\n" + line
        self._num_bytes += len(line)
        return line, self._num_unreported

    def _append(self, data: bytes) -> None:
        self._chunks.append(data)
        self._num_bytes += len(data)
        self._is_mid_line = not data.endswith(b"\n")
        self._changed.notify()

    def _finish_line(self, data: bytes) -> bytes:
        """Accept the end of the line that was accepted before, if it is here. Return the rest."""
        if not self._is_mid_line or b"\n" not in data:
            return data
        end, _, rest = data.partition(b"\n")
        self._append(end + b"\n")
        return rest

    def _drop(self, data: bytes) -> None:
        """Count the lines that begin here, and the rest of one that was accepted in part."""
        if not data:
            return
        ends_mid_line = not data.endswith(b"\n")
        num_lines = data.count(b"\n") + ends_mid_line - self._skips_line
        self._skips_line = ends_mid_line
        self._is_mid_line = False
        self._count(num_lines)

    def _count(self, num_lines: int) -> None:
        self._num_unreported += num_lines
        self._on_dropped(num_lines)

    def _drop_first_line(self, data: bytes) -> bytes:
        """Drop the end of a line whose beginning was dropped. Return the rest."""
        first, newline, rest = data.partition(b"\n")
        self._drop(first + newline)
        return rest

    def _write(self, data: bytes) -> bytes:
        """Write data. Return what could not be written."""
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
            self._has_torn_line = left[written - 1] != ord("\n")
            left = left[written:]
        self._failure = ""
        return b""


class Relay:
    """Reads pipes, and passes what comes to their outputs, until all pipes have ended.

    Args:
        pipes: the outputs, by the file descriptor of their pipe.
        control: socket on which the process asks for an answer once its output is written.
    """

    def __init__(self, pipes: dict[int, RelayedOutput], control: socket.socket) -> None:
        self._pipes = pipes
        self._control = control
        self._control_files = [control.fileno()]
        self._lock = threading.Lock()
        self._is_flushing = False

    def run(self) -> None:
        """Run until the process and its children have closed the pipes, and at most FLUSH_S longer."""
        outputs = list(self._pipes.values())
        writers = [threading.Thread(target=output.run, daemon=True) for output in outputs]
        for writer in writers:
            writer.start()
        while self._pipes:
            files = [*self._pipes, *self._control_files]
            ready, _, _ = select.select(files, [], [])
            for file in ready:
                if file in self._pipes:
                    self._read(file)
                else:
                    self._receive()
        deadline_s = time.monotonic() + FLUSH_S
        for output in outputs:
            output.finish()
        for writer in writers:
            writer.join(max(0.0, deadline_s - time.monotonic()))

    def answer_flush(self) -> None:
        """Tell the process that its output is written, if it waits for that and if that is so."""
        outputs = list(self._pipes.values())
        with self._lock:
            if self._is_flushing and all(output.is_idle or output.is_closed for output in outputs):
                self._is_flushing = False
                with suppress(OSError):  # the process has ended
                    self._control.send(FLUSHED)

    def _read(self, file: int) -> None:
        """Read a pipe once."""
        data = os.read(file, _READ_BYTES)
        output = self._pipes[file]
        if data and not output.is_closed:
            output.add(data)
            return
        del self._pipes[file]
        os.close(file)  # writers to an output whose reader has exited get EPIPE, as without this relay

    def _receive(self) -> None:
        """Receive a request to flush."""
        request = b""
        with suppress(ConnectionError):  # the process has ended
            request = self._control.recv(len(FLUSH))
        if not request:
            self._control_files.clear()
            return
        for _ in range(_READS_PER_FLUSH):
            ready, _, _ = select.select(list(self._pipes), [], [], 0)
            for file in ready:
                self._read(file)
            if not ready:
                break
        with self._lock:
            self._is_flushing = True
        self.answer_flush()


def dropped_line(process_name: str, log_format: str, text: str) -> bytes:
    """Return a log line of this relay, like those that `logging` formats.

    Args:
        process_name: name of the process on every line.
        log_format: "text" or "json".
        text: the message.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if log_format == "json":
        entry = {"time": now, "level": "warning", "process": process_name, "logger": _LOGGER, "message": text}
        return json.dumps(entry).encode() + b"\n"
    return f"{now} WARNING {process_name} {_LOGGER}: {text}\n".encode()


def main(argv: Sequence[str]) -> None:
    """Run the relay.

    Args:
        argv: name of the process, format of its log, file descriptors of the control socket and of the counter's
            memory, and PIPE:OUTPUT for each output.
    """
    process_name, log_format, control, memory = argv[:4]
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    counter = mmap.mmap(int(memory), COUNTER.size)
    counting = threading.Lock()

    def count(num_lines: int) -> None:
        with counting:
            (before,) = COUNTER.unpack_from(counter)
            COUNTER.pack_into(counter, 0, before + num_lines)

    def notice(num_lines: int, reason: str) -> bytes:
        why = f"it can't be written: {reason}" if reason else "its reader was too slow"
        return dropped_line(process_name, log_format, f"{num_lines} lines of this output were dropped: {why}")

    def report_failure(failed: int, reason: str) -> None:
        line = dropped_line(process_name, log_format, f"an output can't be written: {reason}; its lines are dropped")
        for output in pipes.values():
            if output is not pipes.get(failed):
                output.add(line)

    pipes: dict[int, RelayedOutput] = {}
    relay = Relay(pipes, socket.socket(fileno=int(control)))
    for pair in argv[4:]:
        pipe, file = map(int, pair.split(":"))
        pipes[pipe] = RelayedOutput(file, notice, count, partial(report_failure, pipe), relay.answer_flush)
    relay.run()


if __name__ == "__main__":
    main(sys.argv[1:])

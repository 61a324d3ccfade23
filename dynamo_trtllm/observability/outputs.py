"""Keep a process from waiting for its own output: log lines, prints of libraries, and what its children write.

After `Outputs.start`, stdout and stderr lead to a small process, `output_relay`. It always reads, and drops lines when
the real output is full. The file descriptors themselves are replaced, so this holds for C code, for warnings and
tracebacks, and for the processes of an engine.
"""

from __future__ import annotations

import atexit
import io
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Final, TextIO

from dynamo_trtllm.observability import output_relay

log = logging.getLogger(__name__)

_STREAMS: Final = {"stdout": 1, "stderr": 2}  # and their file descriptors


class Outputs:
    """The outputs of this process. Before `start`, and on systems other than Linux, they are written directly."""

    def __init__(self) -> None:
        self._counter: mmap.mmap | None = None
        self._control: socket.socket | None = None
        self._relay: subprocess.Popen[bytes] | None = None  # it outlives this process
        self._pid = 0  # of the process that called `start`
        self.originals: dict[str, int] = {}
        """Copies of the original stdout and stderr, by name, for children that have a relay of their own."""

    @property
    def num_dropped_lines(self) -> int:
        """The number of lines that were dropped since the start."""
        if self._counter is None:
            return 0
        (number,) = output_relay.COUNTER.unpack_from(self._counter)
        return int(number)

    def start(self, process_name: str, log_format: str) -> None:
        """Start the relay. From now on, no write to stdout or stderr waits for a reader, a disk or a terminal.

        If the relay can't be started, a warning is logged, and the outputs stay as they are.

        Args:
            process_name: name of the process on the line that says how many lines were dropped.
            log_format: format of that line: "text" or "json".
        """
        if self._control is not None or sys.platform != "linux":
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            self._start(process_name, log_format)
        except OSError as exc:
            log.warning("requests will wait when the output of this process is not read: no relay started: %s", exc)
            return
        atexit.register(self.flush)

    def flush(self) -> None:
        """Wait, at most a second, until the relay has written all output so far."""
        if self._control is None or os.getpid() != self._pid:
            return
        with suppress(OSError, ValueError):  # the reader has exited, the time is over, or a stream is closed
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._control.send(output_relay.FLUSH)
            self._control.recv(len(output_relay.FLUSHED))

    def _start(self, process_name: str, log_format: str) -> None:
        with ExitStack() as stack:
            originals = {name: os.dup(file) for name, file in _STREAMS.items()}
            failed = stack.enter_context(ExitStack())  # closes, after a failure, what a successful start keeps
            for original in originals.values():
                failed.callback(os.close, original)
            own_end, relay_end = socket.socketpair()
            failed.callback(own_end.close)
            stack.callback(relay_end.close)
            memory = os.memfd_create("dropped-lines")
            stack.callback(os.close, memory)
            os.truncate(memory, output_relay.COUNTER.size)
            pipes: dict[tuple[int, int], tuple[int, int]] = {}  # by the file to which an output leads
            for original in originals.values():
                identity = _identity(original)
                if identity not in pipes:  # both outputs may lead to one file, which keeps the order of lines
                    pipes[identity] = os.pipe()
                    for end in pipes[identity]:
                        stack.callback(os.close, end)
            read_ends = {pipes[_identity(original)][0]: original for original in originals.values()}
            self._relay = _start_relay(process_name, log_format, relay_end.fileno(), memory, read_ends)
            self._counter = mmap.mmap(memory, output_relay.COUNTER.size)
            for name, file in _STREAMS.items():
                os.dup2(pipes[_identity(originals[name])][1], file)
                if os.isatty(originals[name]):
                    setattr(sys, name, _terminal(getattr(sys, name), file))
            failed.pop_all()
        own_end.settimeout(output_relay.FLUSH_S)
        self._control = own_end
        self._pid = os.getpid()
        self.originals = originals


def _identity(file: int) -> tuple[int, int]:
    """Return device and number of the file, pipe or terminal of a file descriptor."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _start_relay(
    process_name: str, log_format: str, control: int, memory: int, read_ends: Mapping[int, int]
) -> subprocess.Popen[bytes]:
    """Start `output_relay`.

    Args:
        process_name: name of the process.
        log_format: "text" or "json".
        control: file descriptor of the relay's end of the control socket.
        memory: file descriptor of the counter's memory.
        read_ends: the file descriptor of each output, by that of the pipe from which its data is read.
    """
    pairs = [f"{pipe}:{output}" for pipe, output in read_ends.items()]
    return subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            output_relay.__file__,
            process_name,
            log_format,
            str(control),
            str(memory),
            *pairs,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[control, memory, *read_ends, *read_ends.values()],
        process_group=0,  # so that a Ctrl-C or a kill of this process's group does not reach it
    )


class _TerminalStream(io.TextIOWrapper):
    """A stream that a relay passes on to a terminal."""

    def isatty(self) -> bool:
        return True


def _terminal(stream: TextIO, file: int) -> TextIO:
    """Return a stream like this one, for a file descriptor that leads to a terminal through a relay."""
    binary = io.BufferedWriter(io.FileIO(file, "w", closefd=False))
    return _TerminalStream(binary, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


OUTPUTS: Final = Outputs()  # of this process

"""Prevent a process from waiting for its output: log lines, prints, and output of its children.

After `Outputs.start`, stdout and stderr lead to a small process, `output_relay`. The relay always
reads, and drops lines when the real output is full. The file descriptors themselves are replaced.
So this also holds for C code, for warnings and tracebacks, and for the processes of an engine.
"""

from __future__ import annotations

import atexit
import io
import itertools
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final, NamedTuple, TextIO

from dynamo_trtllm.observability import output_relay

log = logging.getLogger(__name__)

RESTART_S: Final = 1.0  # the shortest time from a start of the relay to the next one
_READ_BYTES: Final = 1 << 16
_STREAMS: Final = {"stdout": 1, "stderr": 2}  # the file descriptors, by name of the stream


class _Pipe(NamedTuple):
    read_end: int
    write_end: int


class Outputs:
    """The outputs of this process.

    Before `start`, and on systems other than Linux, they are written directly.
    """

    def __init__(self) -> None:
        self._counters: mmap.mmap | None = None
        self._control: socket.socket | None = None
        self._pid = 0  # the id of the process that called `start`
        self.originals: dict[str, int] = {}
        """Copies of the original stdout and stderr, by name, for children that have a relay of
        their own.
        """

    @property
    def num_dropped_lines(self) -> int:
        """The number of lines that were dropped since the start."""
        return 0 if self._counters is None else _numbers_of_lines(self._counters)[0]

    def start(self, process_name: str, log_format: str) -> None:
        """Start the relay.

        From now on, no write to stdout or stderr waits for a reader, a disk or a terminal.

        If the relay is killed or stopped, it is started again. If it can't be started by this call,
        a warning is logged, and the outputs stay as they are.

        Args:
            process_name: name of the process. It is on the line that reports dropped lines.
            log_format: format of the line that reports dropped lines: "text" or "json".
        """
        if self._control is not None or sys.platform != "linux":
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            self._start(process_name, log_format)
        except OSError as exc:
            log.warning(
                "requests will wait when the output of this process is not read: no relay"
                " started: %s",
                exc,
            )
            return
        atexit.register(self.flush)

    def flush(self) -> None:
        """Wait, at most a second, until the relay has written all output so far."""
        control = self._control
        if control is None or os.getpid() != self._pid:
            return
        # A flush fails if the reader has exited, if it takes too long, or if a stream is closed.
        with suppress(OSError, ValueError):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            control.send(output_relay.FLUSH)
            control.recv(len(output_relay.FLUSHED))

    def _start(self, process_name: str, log_format: str) -> None:
        """Start the relay, and let stdout and stderr lead to it. Raises OSError."""
        with ExitStack() as stack:
            # If the start fails, this closes the files that otherwise stay open.
            on_failure = stack.enter_context(ExitStack())
            originals = {name: os.dup(file) for name, file in _STREAMS.items()}
            for original in originals.values():
                on_failure.callback(os.close, original)
            memory = os.memfd_create("lines")
            on_failure.callback(os.close, memory)
            os.truncate(memory, output_relay.COUNTERS.size)
            # The pipes, by the file to which an output leads.
            pipes: dict[tuple[int, int], _Pipe] = {}
            for original in originals.values():
                identity = _identity(original)
                # If both outputs lead to the same file, they share a pipe, so that their lines stay
                # in order.
                if identity not in pipes:
                    pipe = _Pipe(*os.pipe())
                    pipes[identity] = pipe
                    on_failure.callback(os.close, pipe.read_end)
                    stack.callback(os.close, pipe.write_end)
            output_of_pipe = {
                pipes[_identity(original)].read_end: original for original in originals.values()
            }
            start_relay = partial(_start_relay, process_name, log_format, memory, output_of_pipe)
            # The relay needs no clean-up after a failure: it ends when its pipes are closed.
            relay, control = start_relay()
            on_failure.callback(control.close)
            counters = mmap.mmap(memory, output_relay.COUNTERS.size)
            for name, file in _STREAMS.items():
                os.dup2(pipes[_identity(originals[name])].write_end, file)
                if os.isatty(originals[name]):
                    setattr(sys, name, _terminal(getattr(sys, name), file))
            on_failure.pop_all()
        self._control = control
        self._counters = counters
        self._pid = os.getpid()
        self.originals = originals
        # This runs on a thread, because the event loop may wait for the pipe of a relay that was
        # killed.
        read_ends = list(output_of_pipe)
        keep = partial(self._keep_relay, relay, start_relay, counters, read_ends)
        threading.Thread(target=keep, name="output relay", daemon=True).start()

    def _keep_relay(
        self,
        relay: subprocess.Popen[bytes],
        start_relay: Callable[[], tuple[subprocess.Popen[bytes], socket.socket]],
        counters: mmap.mmap,
        read_ends: Sequence[int],
    ) -> None:
        """Start the relay again whenever it is killed or stopped, at most once in RESTART_S.

        Until the relay runs again, all output is dropped.

        Args:
            relay: the relay, which outlives this process. It ends with status 0 when all pipes have
                ended.
            start_relay: starts another relay.
            counters: the memory of the numbers of lines. A running relay changes them.
            read_ends: the read ends of the pipes. This process has them open, too, so that writers
                get no error while there is no relay.
        """
        for number in itertools.count(1):
            begun_s = time.monotonic()
            status = _end_of(relay)
            if status == 0:
                return
            dropped_before, queued = _numbers_of_lines(counters)
            # The lines that the relay had queued are lost.
            _set_numbers_of_lines(counters, dropped=dropped_before + queued, queued=0)
            is_started = False
            while not is_started:
                _drop_lines(read_ends, begun_s + RESTART_S, counters)
                begun_s = time.monotonic()
                # A start fails if no memory or no process id is free. A later attempt may succeed.
                with suppress(OSError):
                    relay, self._control = start_relay()
                    is_started = True
            num_lost = _numbers_of_lines(counters)[0] - dropped_before
            text = (
                "the output relay ended with status %d and was started again (restart %d); about %d"
                " lines are lost"
            )
            log.warning(text, status, number, num_lost)


def _end_of(relay: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the relay, and return its status. A stopped relay is killed.

    Writers would wait for a stopped relay (SIGSTOP) as soon as its pipe is full.
    """
    change = os.waitid(os.P_PID, relay.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    if change is not None and change.si_code == os.CLD_STOPPED:
        relay.kill()
    return relay.wait()


def _numbers_of_lines(counters: mmap.mmap) -> tuple[int, int]:
    """Return the numbers of dropped and of queued lines."""
    dropped, queued = output_relay.COUNTERS.unpack_from(counters)
    return int(dropped), int(queued)


def _set_numbers_of_lines(counters: mmap.mmap, *, dropped: int, queued: int) -> None:
    offset = 0
    output_relay.COUNTERS.pack_into(counters, offset, dropped, queued)


def _drop_lines(read_ends: Sequence[int], until_s: float, counters: mmap.mmap) -> None:
    """Read pipes until a time of `time.monotonic`, and count the lines as dropped.

    Without this, writers would wait as soon as a pipe is full.
    """
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        ready, _, _ = select.select(read_ends, [], [], left_s)
        for read_end in ready:
            num_lines = os.read(read_end, _READ_BYTES).count(b"\n")
            dropped, queued = _numbers_of_lines(counters)
            _set_numbers_of_lines(counters, dropped=dropped + num_lines, queued=queued)


def _identity(file: int) -> tuple[int, int]:
    """Return device and number of the file, pipe or terminal of a file descriptor."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _start_relay(
    process_name: str, log_format: str, memory: int, output_of_pipe: Mapping[int, int]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `output_relay`. Return its process and this process's end of its control socket.

    Args:
        process_name: name of the process.
        log_format: "text" or "json".
        memory: file descriptor of the memory of the counters.
        output_of_pipe: the outputs, by the read end of their pipe. Both are file descriptors.
    """
    own_end, relay_end = socket.socketpair()
    own_end.settimeout(output_relay.FLUSH_S)
    pairs = [f"{pipe}:{output}" for pipe, output in output_of_pipe.items()]
    files = [*output_of_pipe, *output_of_pipe.values()]
    with relay_end:
        program = [sys.executable, "-I", "-S", output_relay.__file__]
        arguments = [process_name, log_format, str(relay_end.fileno()), str(memory), *pairs]
        try:
            relay = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[relay_end.fileno(), memory, *files],
                # A Ctrl-C, or a kill of this process's group, must not reach the relay.
                process_group=0,
            )
        except OSError:
            own_end.close()
            raise
    return relay, own_end


class _TerminalStream(io.TextIOWrapper):
    """A stream whose data a relay passes on to a terminal."""

    def isatty(self) -> bool:
        return True


def _terminal(stream: TextIO, file: int) -> TextIO:
    """Return a stream like this one, for a file descriptor that a relay passes to a terminal."""
    binary = io.BufferedWriter(io.FileIO(file, "w", closefd=False))
    return _TerminalStream(
        binary, encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )


OUTPUTS: Final = Outputs()  # the outputs of this process

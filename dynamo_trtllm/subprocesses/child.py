"""Start and stop child processes that end with this process, and create scratch folders."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dynamo_trtllm.errors import ConfigError

log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0  # a process that is stuck in a driver does not end before the driver returns

# A separate interpreter runs this and then becomes the child. So no Python code runs between fork and exec, which would
# be unsafe in a process with threads. The check of getppid is needed because the parent may die before prctl.
_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

Output = int | IO[bytes] | None


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: Output = None,
    stderr: Output = None,
) -> subprocess.Popen[bytes]:
    """Start a program in its own process group, so that a Ctrl-C reaches only this process, which then stops the child.

    On Linux, the child gets SIGKILL when the *thread* that called `spawn` ends (PR_SET_PDEATHSIG). So call it from the
    main thread, or from a thread that lives as long as the process. On other systems a child may outlive its parent,
    and grandchildren may on all systems.

    Args:
        argv: program and arguments.
        env: environment of the child; None: that of this process.
        stdin: as in subprocess.Popen.
        stdout: as in subprocess.Popen.
        stderr: as in subprocess.Popen.

    Raises:
        ConfigError: the program does not exist or is not executable.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(f"program {argv[0]!r} is not installed or not executable; install it or add it to PATH")
    command = [os.path.abspath(program), *argv[1:]]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *command]
    return subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        process_group=0,
    )


# It retries because processes that write into the folder end at the same time and may still write for a moment.
_CLEAR_UP = 'read -r _; for _ in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$0" 2>/dev/null && exit; sleep 0.1; done'


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder. It is deleted at the end of the context, or when this process ends or is killed.

    Needs a POSIX shell.

    Raises:
        ConfigError: The folder can't be created.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as exc:
        raise ConfigError(
            f"no temporary folder can be created: {exc}; free space, or set TMPDIR to another folder"
        ) from exc
    with temporary as folder:
        # in its own process group, so that a Ctrl-C or a kill of this process's group does not reach it
        janitor = subprocess.Popen(["sh", "-c", _CLEAR_UP, folder], stdin=subprocess.PIPE, process_group=0)
        try:
            yield Path(folder)
        finally:
            janitor.communicate()


class Child:
    """One process of `spawn` on an event loop. Create it on the loop.

    Args:
        process: the process.
        stop_timeout_s: seconds between SIGTERM and SIGKILL in `stop`.
    """

    stop_rank = 0  # a supervisor stops children of a lower rank first
    is_status_2_final = True  # exit status 2 means an invalid configuration, so that a restart can't help
    is_ready = False  # has answered that it is ready; the owner sets this
    last_line = ""  # of its output, if this process reads it

    def __init__(self, process: subprocess.Popen[bytes], stop_timeout_s: float) -> None:
        self._process = process
        self._stop_timeout_s = stop_timeout_s
        self._exit_status = wait_for_exit(process)
        self._is_terminating = False
        self.pid = process.pid

    @property
    def is_terminating(self) -> bool:
        """Return True if `terminate` was called, so that an end of the process is expected."""
        return self._is_terminating

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self._exit_status.done()

    async def ended(self) -> int:
        """Wait for the end of the process and return its exit status. Several tasks may wait."""
        return await asyncio.shield(self._exit_status)

    def terminate(self) -> None:
        """Send SIGTERM, once only, because a second one would abort a drain."""
        if not self._is_terminating and not self.has_ended:
            self._is_terminating = True
            self._process.terminate()

    async def stop(self) -> None:
        """Send SIGTERM, then `kill` after the stop time-out. Return when the process has ended. Idempotent."""
        self.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """Send SIGKILL to the process group. A process that survives it for KILL_TIMEOUT_S counts as ended."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()  # it has not created its process group yet
            self._exit_status.get_loop().call_later(KILL_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if not self.has_ended:
            text = "process %d still runs %g s after SIGKILL, probably stuck in a driver; no longer waiting for it"
            log.error(text, self.pid, KILL_TIMEOUT_S)
            self._exit_status.set_result(-signal.SIGKILL)


def wait_for_exit(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Return a future of the exit status. Before it is set, the rest of the child's process group is killed.

    Remaining processes of an engine would hold the GPU that the next child needs. A thread waits for the process,
    because this works on every system without a child watcher.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def set_status(status: int) -> None:
        if not future.done():
            future.set_result(status)

    def wait() -> None:
        with suppress(ChildProcessError):  # other code has reaped the process
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, so that its group id is not reused
        with suppress(ProcessLookupError, PermissionError):  # the group is empty (PermissionError on macOS)
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        try:
            loop.call_soon_threadsafe(set_status, status)
        except RuntimeError:
            return  # the event loop has ended, so no task waits for the status

    threading.Thread(target=wait, name=f"wait-{process.pid}", daemon=True).start()
    return future


def describe(status: int) -> str:
    """Return an exit status of subprocess in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"

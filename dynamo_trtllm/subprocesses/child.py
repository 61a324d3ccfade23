"""One run of one child process on an event loop: its end and its stop. Decides nothing, reads no output."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dynamo_trtllm.config.deployment import RestartConfig
from dynamo_trtllm.errors import ConfigError

# Run by a short-lived interpreter that then becomes the child: no Python code runs between fork and exec, so spawning
# is safe in a process with threads. The parent may die before prctl is reached: hence the look at getppid.
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
    """Starts `argv` in a process group of its own (a Ctrl-C reaches this process only, which stops it in order).

    On Linux the child gets SIGKILL when the *thread* that called spawn ends (that is how PR_SET_PDEATHSIG counts), so
    call it from the main thread, or from one that lives as long as the process. On other systems a child may outlive
    its parent. Grandchildren always may. Raises ConfigError when the program is not there.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(f"program {argv[0]!r} is not installed or not executable")
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


# What writes into the folder dies with this process too, and may still write for a moment.
_CLEAR_UP = 'read -r _; for _ in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$0" 2>/dev/null && exit; sleep 0.1; done'


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Gone when left, or when this process ends in whatever way. POSIX shells only."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        # its own group: a Ctrl-C or a kill of ours is not meant for it
        janitor = subprocess.Popen(["sh", "-c", _CLEAR_UP, folder], stdin=subprocess.PIPE, process_group=0)
        try:
            yield Path(folder)
        finally:
            janitor.communicate()


class Child:
    """Around a process of `spawn`. Made on the loop."""

    def __init__(self, process: subprocess.Popen[bytes], stop_timeout_s: float) -> None:
        self._process = process
        self._stop_timeout_s = stop_timeout_s
        self._exit_status = wait_for_exit(process)
        self._is_terminating = False
        self.pid = process.pid

    @property
    def is_terminating(self) -> bool:
        """Whether its end, if it comes, is what was asked of it here."""
        return self._is_terminating

    @property
    def has_ended(self) -> bool:
        return self._exit_status.done()

    async def ended(self) -> int:
        """Its exit status. May be awaited by several."""
        return await asyncio.shield(self._exit_status)

    def terminate(self) -> None:
        """SIGTERM, once: a second one would end a drain at once."""
        if not self._is_terminating and not self.has_ended:
            self._is_terminating = True
            self._process.terminate()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the time it was given. Returns when it is gone. Idempotent."""
        self.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """SIGKILL to it and what it has started."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()  # not a group of its own yet


def wait_for_exit(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """The exit status to come; what the child had started and left behind is killed by then: an engine's processes hold
    the GPU that the next child needs. A thread waits: that works on each system and needs no child watcher."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def set_status(status: int) -> None:
        if not future.done():
            future.set_result(status)

    def wait() -> None:
        with suppress(ChildProcessError):  # somebody was quicker to ask
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its group can't be another's yet
        with suppress(ProcessLookupError, PermissionError):  # no other process in it; on macOS the latter
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        try:
            loop.call_soon_threadsafe(set_status, status)
        except RuntimeError:
            return  # the loop has ended, and nothing waits for the status

    threading.Thread(target=wait, name=f"wait-{process.pid}", daemon=True).start()
    return future


BAD_CONFIG = 2  # the status of a process whose configuration is refused; starting it again changes nothing
_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """`is_restart`, after `pause_s`, or else the exit status with which the deployment is given up; `text` says why."""

    is_restart: bool
    exit_status: int
    text: str
    pause_s: float = 0.0


def decide(
    config: RestartConfig, status: int, restarts: Sequence[float], now: float, *, is_ours: bool = True
) -> RestartDecision:
    """`restarts` are the times at which this process was started again, on the clock of `now`, in seconds. Only of our
    own programs is it known that BAD_CONFIG means a bad configuration."""
    ended = describe(status)
    if status == BAD_CONFIG and is_ours:
        return RestartDecision(is_restart=False, exit_status=BAD_CONFIG, text=ended)
    recent = len([time for time in restarts if now - time < config.window_s])
    if recent >= config.max_restarts:
        text = f"{ended}; it was restarted {recent} times in {config.window_s:g} s, which is the limit"
        return RestartDecision(is_restart=False, exit_status=_FAILED, text=text)
    pause_s = config.pause_s * 2 ** (recent - 1) if recent else 0.0
    when = f" in {pause_s:g} s" if pause_s else ""
    text = f"{ended}; starting it again{when} ({recent + 1} of {config.max_restarts} in {config.window_s:g} s)"
    return RestartDecision(is_restart=True, exit_status=0, text=text, pause_s=pause_s)


def describe(status: int) -> str:
    """An exit status of subprocess in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"

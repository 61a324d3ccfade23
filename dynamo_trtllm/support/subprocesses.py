"""Run child processes that end with this process: start, restart and stop them in order.

The module also creates scratch folders, which are deleted even if this process is killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0  # a process that is stuck in a driver does not end before the driver returns

# A separate interpreter runs this and then becomes the child. So no Python code runs between fork
# and exec, which would be unsafe in a process with threads. The check of getppid is needed because
# the parent may die before prctl.
_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def module_command(module: str, *argv: str) -> list[str]:
    """Return the command line that runs a Python module in another process.

    `python -m` searches the working folder before the libraries. So a file such as `token.py`
    there, which may belong to another user, would run in place of the module of that name. The
    other process searches the working folder only if this process does.
    """
    options = [] if _searches_working_folder() else ["-P"]
    return [sys.executable, *options, "-m", module, *argv]


def _searches_working_folder() -> bool:
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        # The folder was deleted.
        return False
    return folder in (os.path.abspath(path) for path in sys.path)


def spawn(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, **streams: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a program in its own process group.

    So a Ctrl-C reaches only this process, which then stops the child.

    On Linux, the child gets SIGKILL when the *thread* that called `spawn` ends (PR_SET_PDEATHSIG).
    So call it from the main thread, or from a thread that lives as long as the process. On other
    systems a child may outlive its parent, and grandchildren may on all systems.

    Args:
        argv: program and arguments.
        env: environment of the child; None: that of this process.
        streams: stdin, stdout and stderr as in subprocess.Popen. Default of stdin: the null device.

    Raises:
        ConfigError: the program does not exist or is not executable.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(
            f"program {argv[0]!r} is not installed or not executable; install it or add it to PATH"
        )
    command = [os.path.abspath(program), *argv[1:]]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *command]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, **streams}
    return subprocess.Popen(command, env=env, process_group=0, **options)


# A shell runs this with the path of the folder as $0. `read` returns when this process has ended.
# The removal is repeated, because processes that end at the same time may still write there.
_REMOVE_AT_END = """
read -r _
for _ in 1 2 3 4 5 6 7 8 9; do
    rm -rf -- "$0" 2>/dev/null && exit
    sleep 0.1
done
"""


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder.

    It is deleted at the end of the context, or when this process ends or is killed.

    Needs a POSIX shell.

    Raises:
        ConfigError: the folder can't be created.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as exc:
        raise ConfigError(
            f"no temporary folder can be created: {exc}; free space, or set TMPDIR to another"
            " folder"
        ) from exc
    with temporary as folder, _locked(folder):
        # The remover has its own process group, so that a Ctrl-C or a kill of the group of this
        # process does not end it.
        remover = subprocess.Popen(
            ["sh", "-c", _REMOVE_AT_END, folder], stdin=subprocess.PIPE, process_group=0
        )
        try:
            yield Path(folder)
        finally:
            # This closes the input of the remover and waits for its end.
            remover.communicate()


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold a lock on a folder. With it, systemd-tmpfiles keeps the folder, however old it is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some file systems have no locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


class Child:
    """One process of `spawn` on an event loop. Create it on the loop.

    Args:
        process: the process.
        stop_timeout_s: seconds between SIGTERM and SIGKILL in `stop`.
        kill_timeout_s: seconds after SIGKILL for which the process is waited for.
    """

    stop_rank = 0  # a supervisor stops children of a lower rank first
    # Exit status 2 means an invalid configuration, so that a restart can't help.
    is_status_2_final = True
    is_ready = False  # the process has answered that it is ready; the owner sets this
    last_line = ""  # the last line of its output, if the owner reads the output

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stop_timeout_s: float,
        kill_timeout_s: float = KILL_TIMEOUT_S,
    ) -> None:
        self._process = process
        self.stop_timeout_s = stop_timeout_s
        self._kill_timeout_s = kill_timeout_s
        self._exit_status = wait_for_exit(process)
        self.is_overdue = False  # it did not end within `stop_timeout_s` of SIGTERM, and was killed
        self._is_kill_sent = False
        self.is_terminating = False  # `terminate` was called: an end of the process is expected
        self.pid = process.pid

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self._exit_status.done()

    async def ended(self) -> int:
        """Wait for the end of the process and return its exit status. Several tasks may wait."""
        return await asyncio.shield(self._exit_status)

    def announce_stop(self) -> None:
        """Note that the supervisor stops all children, in the order of their ranks. Idempotent."""

    def terminate(self) -> None:
        """Send SIGTERM, once only, because a second one would abort a drain."""
        if not self.is_terminating and not self.has_ended:
            self.is_terminating = True
            self._process.terminate()

    async def stop(self) -> None:
        """Send SIGTERM, then `kill` after the stop time-out.

        Return when the process has ended. Idempotent.
        """
        self.terminate()
        try:
            async with asyncio.timeout(self.stop_timeout_s):
                await self.ended()
        except TimeoutError:
            self.is_overdue = not self._is_kill_sent
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """Send SIGKILL to the process group.

        A process that survives it for `kill_timeout_s` counts as ended.
        """
        if self._process.returncode is None:
            self._is_kill_sent = True
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                # The child has not created its process group yet.
                self._process.kill()
            self._exit_status.get_loop().call_later(self._kill_timeout_s, self._give_up)

    def _give_up(self) -> None:
        if not self.has_ended:
            log.error(
                "process %d still runs %g s after SIGKILL, probably stuck in a driver; no longer"
                " waiting for it",
                self.pid,
                self._kill_timeout_s,
            )
            self._exit_status.set_result(-signal.SIGKILL)


def wait_for_exit(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Return a future of the exit status.

    Before the status is set, the rest of the child's process group is killed, because remaining
    processes of an engine would hold the GPU that the next child needs. A thread waits for the
    process, because this works on every system without a child watcher.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def set_status(status: int) -> None:
        if not future.done():
            future.set_result(status)

    def wait() -> None:
        # The error means that other code has reaped the process.
        with suppress(ChildProcessError):
            # WNOWAIT leaves the process a zombie, so that the id of its group is not reused.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # The errors mean that the group is empty (PermissionError on macOS).
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        try:
            loop.call_soon_threadsafe(set_status, status)
        except RuntimeError:
            # The event loop has ended, so no task waits for the status.
            return

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


BAD_CONFIG = 2  # exit status for an invalid configuration, after which a restart can't help
_FAILED = 1

C = TypeVar("C", bound=Child)
RunContext: TypeAlias = Callable[[], AbstractAsyncContextManager[C]]
BeforeRestart: TypeAlias = Callable[[C, int], Awaitable[None]]


class RunFailed(Exception):
    """The supervised programs can't go on. `exit_status` is that of this process."""

    def __init__(self, text: str, exit_status: int = _FAILED) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class RestartLimits(Protocol):
    """How often a program is started again. `RestartConfig` of a deployment file is one."""

    @property
    def max_restarts(self) -> int:
        """Maximum restarts of one program per window."""

    @property
    def window_s(self) -> float:
        """Window in seconds. Earlier restarts are not counted."""

    @property
    def pause_s(self) -> float:
        """Seconds before the second restart within the window, doubled with each further one."""


class Restart(NamedTuple):
    """How a program is started again."""

    text: str  # says in the log why and when
    pause_s: float  # the pause before the start


def decide(
    limits: RestartLimits,
    status: int,
    restarts: Sequence[float],
    now: float,
    *,
    is_status_2_final: bool = True,
) -> Restart:
    """Decide whether to restart a process that has ended.

    Args:
        limits: limits of restarts.
        status: exit status of the process, as in subprocess.
        restarts: times of the process's earlier restarts, in seconds on the clock of `now`.
        now: current time in seconds.
        is_status_2_final: exit status 2 means an invalid configuration, as it does for programs of
            this package.

    Raises:
        RunFailed: the process must not be restarted, so all processes must be stopped.
    """
    ended = describe(status)
    if status == BAD_CONFIG and is_status_2_final:
        raise RunFailed(ended, BAD_CONFIG)
    return decide_after(limits, ended, restarts, now)


def decide_after(
    limits: RestartLimits, ended: str, restarts: Sequence[float], now: float
) -> Restart:
    """Decide whether to start a program again, as `decide` does, after any end or failed start.

    Args:
        limits: limits of restarts.
        ended: how the last run ended, in words.
        restarts: times of the program's earlier restarts, in seconds on the clock of `now`.
        now: current time in seconds.

    Raises:
        RunFailed: the limit is reached.
    """
    num_recent = len([restart_s for restart_s in restarts if now - restart_s < limits.window_s])
    if num_recent >= limits.max_restarts:
        raise RunFailed(
            f"{ended}; it was restarted {counted(num_recent, 'time')} in {limits.window_s:g} s,"
            " which is the limit"
        )
    # The first restart has no pause; after that the pause doubles each time.
    pause_s = limits.pause_s * 2 ** (num_recent - 1) if num_recent else 0.0
    when = f" in {pause_s:g} s" if pause_s else ""
    text = (
        f"{ended}; starting it again{when} ({num_recent + 1} of {limits.max_restarts} in"
        f" {limits.window_s:g} s)"
    )
    return Restart(text, pause_s)


class _Stopped(Exception):
    """`stop` was called, and all children have ended."""


class Supervisor:
    """Supervisor of the children of this process.

    Create it on the event loop and run it once, in the main thread.

    Args:
        limits: limits of restarts.
        say: writes a line of the log about a failure.
        say_requested: writes a line about what a user has requested. Default: `say`.
    """

    def __init__(
        self,
        limits: RestartLimits,
        say: Callable[[str], None],
        say_requested: Callable[[str], None] | None = None,
    ) -> None:
        self._limits = limits
        self._say = say
        self._say_requested = say_requested or say
        self._stopping = asyncio.Event()
        self._children: dict[str, Child] = {}  # current or last run of each program

    @property
    def is_stopping(self) -> bool:
        """Return True once `stop` was called or a signal has arrived."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Stop all programs in order. Idempotent."""
        self._stopping.set()

    async def until_stopping(self) -> None:
        """Return once `stop` was called or a signal has arrived."""
        await self._stopping.wait()

    async def run(self, work: Coroutine[Any, Any, None]) -> dict[str, int]:
        """Run until `stop` is called, a SIGINT, SIGTERM or SIGHUP arrives, or a program fails for
        good.

        At the return, all children have ended. A second SIGINT or SIGTERM kills them at once.
        SIGHUP, which says that the terminal was closed, stays ignored under nohup.

        Args:
            work: calls `keep` for each program. It may return before the end.

        Returns:
            The exit status of each program's last run.

        Raises:
            RunFailed: a program can't be restarted. Or the context of a run raised it, or `work`
                before a stop.
            ConfigError: the context of a program's first run raised it, or `work` before a stop.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        failure: RunFailed | ConfigError | None = None
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._start(work), name="start of programs")
                await self._stopping.wait()
                # The tasks still run, because children need them while they drain.
                await self._stop_children()
                # This ends the other tasks of the group.
                raise _Stopped
        except* (RunFailed, ConfigError) as group:
            failure = _first(group)
            # Say it now: the caller shows the failure only after the stop, which may take long.
            if isinstance(failure, RunFailed):
                self._say(f"stopping all processes: {failure}")
        except* _Stopped:
            pass
        finally:
            await self._stop_children()
        if failure is not None:
            raise failure
        return {name: await child.ended() for name, child in self._children.items()}

    async def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`. Ignore its errors after `stop`, because programs that it needs then end."""
        try:
            await work
        except (RunFailed, ConfigError):
            if not self.is_stopping:
                raise

    def keep(
        self, name: str, running: RunContext[C], before_restart: BeforeRestart[C] | None = None
    ) -> None:
        """Start a program, and restart it whenever it ends. Call this during `run`.

        Args:
            name: name of the program, for log lines.
            running: returns the context of one run. It starts a child, does what the child needs
                while it runs, and cleans up when the child has ended. If it is cancelled during the
                start, it leaves no child behind. If it raises ConfigError or OSError at a restart,
                the program is started again later, within the limits of restarts.
            before_restart: prepares each restart; it gets the last child and its exit status.
        """
        supervision = self._keep(name, running, before_restart)
        self._group.create_task(supervision, name=f"supervisor of {name}")

    async def _keep(
        self, name: str, running: RunContext[C], before_restart: BeforeRestart[C] | None
    ) -> None:
        """Run a program again and again, until `stop` or the limit of restarts."""
        restarts: list[float] = []
        while not self.is_stopping:
            try:
                async with running() as child:
                    self._children[name] = child
                    status = await child.ended()
            except (ConfigError, OSError) as exc:
                is_first_start = name not in self._children
                if is_first_start:
                    raise
                if self.is_stopping:
                    return
                # A restart failed. The other programs are in use, so they keep running.
                decide_restart = partial(decide_after, self._limits, f"could not be started: {exc}")
                await self._pause(self._note_restart(name, restarts, decide_restart))
                continue
            if self.is_stopping:
                return
            if child.is_terminating:
                self._say_requested(f"{name} {describe(status)} as requested; restarting")
                continue
            decide_restart = partial(
                decide, self._limits, status, is_status_2_final=child.is_status_2_final
            )
            pause_s = self._note_restart(name, restarts, decide_restart, child.last_line)
            if before_restart is not None:
                await before_restart(child, status)
            await self._pause(pause_s)

    def _note_restart(
        self,
        name: str,
        restarts: list[float],
        decide_restart: Callable[[Sequence[float], float], Restart],
        last_line: str = "",
    ) -> float:
        """Add a restart to those of a program. Return the pause before it, in seconds.

        `decide_restart` gets the times of the earlier restarts, and the current time.

        Raises:
            RunFailed: the program must not be restarted.
        """
        now = time.monotonic()
        try:
            restart = decide_restart(restarts, now)
        except RunFailed as exc:
            hint = f"; last line: {last_line}" if last_line else ""
            raise RunFailed(f"{name} {exc}{hint}", exc.exit_status) from None
        self._say(f"{name} {restart.text}")
        restarts.append(now)
        return restart.pause_s

    async def _pause(self, pause_s: float) -> None:
        """Wait `pause_s` seconds, or until `stop` is called."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    def _on_signal(self) -> None:
        if self.is_stopping:
            for child in self._children.values():
                child.kill()
        else:
            self._say_requested("stopping all processes; a second Ctrl-C or SIGTERM kills them")
        self.stop()

    def _on_hangup(self) -> None:
        # The shell and the kernel may both send one, so a second one does not kill.
        if not self.is_stopping:
            self._say_requested("stopping all processes, because the terminal was closed (SIGHUP)")
        self.stop()

    async def _stop_children(self) -> None:
        """Stop all children, those of a lower rank first."""
        for child in self._children.values():
            child.announce_stop()
        errors: list[BaseException] = []
        ranks = {child.stop_rank for child in self._children.values()}
        for rank in sorted(ranks):
            stops = [
                self._stop(name, child)
                for name, child in self._children.items()
                if child.stop_rank == rank
            ]
            ends = await asyncio.gather(*stops, return_exceptions=True)
            errors += [end for end in ends if isinstance(end, BaseException)]
        # An error is raised only now, when all children have ended.
        if errors:
            raise errors[0]

    async def _stop(self, name: str, child: Child) -> None:
        if child.has_ended:
            return
        await child.stop()
        if child.is_overdue:
            self._say(
                f"{name} did not end within {child.stop_timeout_s:g} s of SIGTERM, and was killed"
            )


def _first(group: BaseExceptionGroup[RunFailed | ConfigError]) -> RunFailed | ConfigError:
    """Return the first failure of a possibly nested group."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

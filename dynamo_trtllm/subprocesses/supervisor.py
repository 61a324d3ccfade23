"""Keep programs running: start them, restart those that end, and stop all in order."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeAlias, TypeVar

from dynamo_trtllm.config.deployment import RestartConfig
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.subprocesses.child import Child, describe

BAD_CONFIG = 2  # exit status for an invalid configuration, after which a restart can't help
_FAILED = 1

C = TypeVar("C", bound=Child)
Running: TypeAlias = Callable[[], AbstractAsyncContextManager[C]]
BeforeRestart: TypeAlias = Callable[[C, int], Awaitable[None]]


class RunFailed(Exception):
    """The supervised programs can't go on. `exit_status` is that of this process."""

    def __init__(self, text: str, exit_status: int = _FAILED) -> None:
        super().__init__(text)
        self.exit_status = exit_status


def decide(
    config: RestartConfig, status: int, restarts: Sequence[float], now: float, *, is_status_2_final: bool = True
) -> tuple[str, float]:
    """Decide whether to restart a process that has ended. Return the text for the log and the pause before, in seconds.

    Args:
        config: limits of restarts.
        status: exit status of the process, as in subprocess.
        restarts: times of the process's earlier restarts, in seconds on the clock of `now`.
        now: current time in seconds.
        is_status_2_final: Exit status 2 means an invalid configuration, as it does for programs of this package.

    Raises:
        RunFailed: the process must not be restarted, so all processes must be stopped.
    """
    ended = describe(status)
    if status == BAD_CONFIG and is_status_2_final:
        raise RunFailed(ended, BAD_CONFIG)
    recent = len([time for time in restarts if now - time < config.window_s])
    if recent >= config.max_restarts:
        raise RunFailed(f"{ended}; it was restarted {recent} times in {config.window_s:g} s, which is the limit")
    pause_s = config.pause_s * 2 ** (recent - 1) if recent else 0.0
    when = f" in {pause_s:g} s" if pause_s else ""
    return f"{ended}; starting it again{when} ({recent + 1} of {config.max_restarts} in {config.window_s:g} s)", pause_s


class _Stopped(Exception):
    """`stop` was called, and all children have ended."""


class Supervisor:
    """Supervisor of the children of this process. Create it on the event loop and run it once, in the main thread.

    Args:
        config: limits of restarts.
        say: writes a line of the log.
    """

    def __init__(self, config: RestartConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._stopping = asyncio.Event()
        self._children: dict[str, Child] = {}  # current or last run of each program

    @property
    def is_stopping(self) -> bool:
        """Return True once `stop` was called or a signal has arrived."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Stop all programs in order. Idempotent."""
        self._stopping.set()

    async def run(self, work: Coroutine[Any, Any, None]) -> dict[str, int]:
        """Run until `stop` is called, or SIGINT or SIGTERM arrives, or a failure. Then no child is left.

        A second signal kills the children at once.

        Args:
            work: calls `keep` for each program. It may return before the end.

        Returns:
            The exit status of each program's last run.

        Raises:
            RunFailed: a program can't be restarted, or `work` or the context of a run raised it.
            ConfigError: `work` or the context of a run raised it.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        failure: RunFailed | ConfigError | None = None
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(work, name="start of programs")
                await self._stopping.wait()
                await self._stop_children()  # the tasks still run, because children need them while they drain
                raise _Stopped  # ends the rest of the group
        except* (RunFailed, ConfigError) as group:
            failure = _first(group)
            if isinstance(failure, RunFailed):  # the caller shows it only after the stop, which may take long
                self._say(f"stopping all processes: {failure}")
        except* _Stopped:
            pass
        finally:
            await self._stop_children()
        if failure is not None:
            raise failure
        return {name: await child.ended() for name, child in self._children.items()}

    def keep(self, name: str, running: Running[C], before_restart: BeforeRestart[C] | None = None) -> None:
        """Start a program, and restart it whenever it ends. Call this during `run`.

        Args:
            name: name of the program, for log lines.
            running: returns the context of one run. It starts a child, does what the child needs while it runs, and
                cleans up when the child has ended. If it is cancelled during the start, it leaves no child behind.
            before_restart: prepares each restart; it gets the last child and its exit status.
        """
        self._group.create_task(self._keep(name, running, before_restart), name=f"supervisor of {name}")

    async def _keep(self, name: str, running: Running[C], before_restart: BeforeRestart[C] | None) -> None:
        restarts: list[float] = []
        while not self.is_stopping:
            async with running() as child:
                self._children[name] = child
                status = await child.ended()
            if self.is_stopping:
                return
            if child.is_terminating:
                self._say(f"{name} {describe(status)} as requested; restarting")
                continue
            now, is_final = time.monotonic(), child.is_status_2_final
            try:
                text, pause_s = decide(self._config, status, restarts, now, is_status_2_final=is_final)
            except RunFailed as exc:
                hint = f"; last line: {child.last_line}" if child.last_line else ""
                raise RunFailed(f"{name} {exc}{hint}", exc.exit_status) from None
            self._say(f"{name} {text}")
            restarts.append(time.monotonic())
            if before_restart is not None:
                await before_restart(child, status)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    def _on_signal(self) -> None:
        if self.is_stopping:
            for child in self._children.values():
                child.kill()
        else:
            self._say("stopping all processes; a second Ctrl-C or SIGTERM kills them")
        self.stop()

    async def _stop_children(self) -> None:
        errors: list[BaseException] = []
        for rank in sorted({child.stop_rank for child in self._children.values()}):
            group = [child for child in self._children.values() if child.stop_rank == rank]
            ends = await asyncio.gather(*(child.stop() for child in group), return_exceptions=True)
            errors += [end for end in ends if isinstance(end, BaseException)]
        if errors:
            raise errors[0]  # after the last child has ended


def _first(group: BaseExceptionGroup[RunFailed | ConfigError]) -> RunFailed | ConfigError:
    """Return the first failure of a possibly nested group."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

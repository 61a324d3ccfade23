"""Stop a deployment that was launched on this machine (`dynamo-trtllm stop`).

The command sends a signal to the launcher, which ends its processes in order.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Final

from dynamo_trtllm.config.client_commands import StopConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.launch.running_deployments import (
    LaunchRecord,
    has_process,
    running_deployment,
)
from dynamo_trtllm.observability.recorder import start_ticks

_PAUSE_S: Final = 0.1  # between two looks at the processes
_NOTICE_S: Final = 5.0  # between two lines that say which processes have not ended
_LAUNCHER_KILL_S: Final = 15.0  # a launcher that takes longer to kill its processes is frozen
_KILLED_S: Final = 5.0  # the longest wait for the end of a killed launcher


class StillRuns(Exception):
    """The deployment has not ended in time. The message says what runs, and what to do."""


@command(StopConfig, f"{COMMAND_NAME} stop", StillRuns)
def main(config: StopConfig) -> None:
    """Run the command.

    Exit with status 0 if the deployment has ended, or if no deployment runs; 1 if it still runs; 2
    for a bad command line, or for a name that no running deployment has.
    """
    record = running_deployment(config.deployment_name, "with --deployment-name")
    if record is None:
        _say("no deployment runs on this machine")
        return
    stopping = _Stopping(record)
    if config.kill:
        stopping.kill()
        return
    stopping.ask(signal.SIGTERM)
    try:
        stopping.wait(config.timeout_s)
    except KeyboardInterrupt:
        stopping.kill()
        return
    if record.is_running:
        raise StillRuns(
            f"{record.name} still runs after {config.timeout_s:g} s ({stopping.running()});"
            f" {COMMAND_NAME} stop {record.name} --kill ends it at once"
        )


class _Stopping:
    """The end of one deployment."""

    def __init__(self, record: LaunchRecord) -> None:
        self._record = record
        self._began_s = time.monotonic()
        # The process id and the start time of each process that has not ended, by its name.
        self._processes: dict[str, tuple[int, int]] = {}
        for process in record.processes:
            with suppress(OSError):  # it has ended, and is not restarted yet
                self._processes[process.name] = process.pid, start_ticks(process.pid)
        names = ", ".join(self._processes) or "no processes yet"
        _say(f"stopping {record.name} ({names}); Ctrl-C kills all processes")

    def ask(self, number: signal.Signals) -> None:
        """Send a signal to the launcher, if it still runs."""
        if self._record.is_running:
            with suppress(ProcessLookupError):
                os.kill(self._record.pid, number)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the launcher, at most for this time. Print which processes end."""
        begun_s = time.monotonic()
        notice_s = begun_s + _NOTICE_S
        while self._record.is_running and time.monotonic() < begun_s + timeout_s:
            self._report_ended()
            if time.monotonic() >= notice_s:
                notice_s += _NOTICE_S
                _say(f"waiting for {self.running()}: {self._since():.0f} s; Ctrl-C kills them")
            time.sleep(_PAUSE_S)
        self._report_ended()
        if not self._record.is_running:
            _say(f"{self._record.name} stopped after {self._since():.1f} s")

    def kill(self) -> None:
        """End all processes at once.

        The second signal makes the launcher kill them. The end of a frozen launcher ends them, too.

        Raises:
            StillRuns: the launcher does not end.
        """
        self.ask(signal.SIGTERM)
        # Not SIGTERM again: two equal signals that arrive together count as one.
        self.ask(signal.SIGINT)
        self.wait(_LAUNCHER_KILL_S)
        if self._record.is_running:
            _say(f"the launcher (process {self._record.pid}) does not react, and is killed")
            self.ask(signal.SIGKILL)
            self.wait(_KILLED_S)
        if self._record.is_running:
            raise StillRuns(
                f"{self._record.name} still runs: its launcher, process {self._record.pid}, is"
                " stuck in the kernel"
            )

    def running(self) -> str:
        """Return the names of the processes that have not ended."""
        return ", ".join(self._processes) or "the servers"

    def _report_ended(self) -> None:
        ended = [name for name, known in self._processes.items() if not has_process(*known)]
        for name in ended:
            del self._processes[name]
            _say(f"{name} ended after {self._since():.1f} s")

    def _since(self) -> float:
        return time.monotonic() - self._began_s


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

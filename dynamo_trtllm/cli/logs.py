"""Show the output of the processes of a deployment (`dynamo-trtllm logs`)."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from dynamo_trtllm.config.client_commands import LogsConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.launch.log_file import LogReader, split_line
from dynamo_trtllm.launch.process_output import LAUNCHER
from dynamo_trtllm.launch.running_deployments import LaunchRecord, running_deployment
from dynamo_trtllm.protocol.errors import ConfigError

_PAUSE_S: Final = 0.2  # between two reads of --follow


class NoLogs(Exception):
    """There are no lines to show. The message says why."""


@command(LogsConfig, f"{COMMAND_NAME} logs", NoLogs)
def main(config: LogsConfig) -> None:
    """Run the command.

    Exit with status 0; 1 if no deployment runs or it keeps no lines, 2 for a bad command line.
    """
    record = running_deployment(config.deployment_name, "with --deployment-name")
    if record is None:
        raise NoLogs(
            "no deployment runs on this machine; the output of one that has ended is not kept"
        )
    path, shown = _source(record, config.process)
    try:
        with LogReader(path) as reader:
            lines = deque(filter(None, map(shown, reader.lines())), maxlen=config.tail)
            _print(lines)
            while config.follow:
                # Ask first whether the launcher has ended: it may write lines until its end.
                is_over = not record.is_running
                _print(filter(None, map(shown, reader.lines())))
                if is_over:
                    return
                time.sleep(_PAUSE_S)
    except OSError as exc:
        # An error of the output has no file name.
        if exc.filename is None:
            raise
        raise NoLogs(f"the lines of {record.name} can't be read: {exc}") from exc


def _source(record: LaunchRecord, process: str | None) -> tuple[Path, Callable[[bytes], str]]:
    """Return the file to read, and a function that formats its lines.

    The function returns "" for a line that is left out.

    Raises:
        ConfigError: there is no such process.
        NoLogs: the launcher keeps no lines.
    """
    if process in record.server_logs:
        return Path(record.server_logs[process]), _text
    names = [*(each.name for each in record.processes), LAUNCHER]
    if process is not None and process not in names:
        known = ", ".join([*names, *record.server_logs])
        raise ConfigError(f"no process of {record.name} is named {process!r}; these are: {known}")
    if not record.log_file:
        raise NoLogs(f"{record.name} keeps no lines; its launcher has said why")
    width = max(map(len, names))

    def named(line: bytes) -> str:
        name, text = split_line(line)
        return f"{name:<{width}} | {text}\n"

    def of_process(line: bytes) -> str:
        name, text = split_line(line)
        return f"{text}\n" if name == process else ""

    return Path(record.log_file), named if process is None else of_process


def _text(line: bytes) -> str:
    return f"{line.decode(errors='replace')}\n"


def _print(lines: Iterable[str]) -> None:
    sys.stdout.writelines(lines)
    sys.stdout.flush()

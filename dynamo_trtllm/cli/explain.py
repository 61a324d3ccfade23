"""Explain where requests spent their time, and where they are stuck (`dynamo-trtllm explain`).

The command reads the files that the flight recorders of this machine's processes write, so it also
explains requests of frozen and ended processes. It asks the running processes of other machines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from dynamo_trtllm.cli.launched_servers import names_servers
from dynamo_trtllm.cli.stuck_requests import StuckReport
from dynamo_trtllm.cli.trace_formats import mooncake, perfetto
from dynamo_trtllm.config.commands import ExplainConfig
from dynamo_trtllm.config.load import command, process_environment
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.launch.running_deployments import (
    LaunchRecord,
    running_deployment,
    running_deployments,
)
from dynamo_trtllm.observability.recorder import boot_id, check_owner, recorder_folder
from dynamo_trtllm.observability.recordings import ProcessRecording, Recordings, RequestRecording
from dynamo_trtllm.observability.request_timeline import (
    longest_intervals,
    outcome,
    timeline_notes,
    timeline_rows,
)
from dynamo_trtllm.protocol.counted import counted_are
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.sanitize import escape_controls

PROG = f"{COMMAND_NAME} explain"
_MAX_SHOWN = 20  # requests
_MAX_PROBLEMS = 3  # notes about recordings


class NotExplained(Exception):
    """There is nothing to show. The message says why, and what to do."""


@command(ExplainConfig, PROG, NotExplained)
def main(config: ExplainConfig) -> int:
    """Run the command.

    Exit with status 0; 1 if the request is unknown, nothing is recorded, or `--stuck` has found
    something; 2 for a bad command line.
    """
    recordings = _read(config)
    for problem in recordings.problems[:_MAX_PROBLEMS]:
        sys.stderr.write(f"note: {escape_controls(problem)}\n")
    num_more = len(recordings.problems) - _MAX_PROBLEMS
    if num_more > 0:
        sys.stderr.write(f"note: {counted_are(num_more, 'more note')} left out\n")
    requests = list(recordings.requests.values())
    if config.request is not None:
        requests = recordings.find(config.request)
        if not requests:
            raise NotExplained(
                f"no process of {len(recordings.processes)} has recorded a request"
                f" {config.request!r}; check the id, or list the latest requests with '{PROG}'"
            )
    if config.perfetto is not None:
        _write(config.perfetto, perfetto(requests))
    if config.trace is not None:
        _write(config.trace, mooncake(requests))
    if config.perfetto is not None or config.trace is not None:
        return 0
    if config.stuck:
        report = StuckReport.of(recordings, config.older_than_s)
        sys.stdout.write(report.json() if config.json_output else report.text())
        return report.exit_status
    if config.request is not None:
        sys.stdout.write("\n".join(map(timeline, requests)))
    else:
        sys.stdout.write(_latest(requests))
    return 0


def _deployment(config: ExplainConfig) -> LaunchRecord | None:
    """Return the deployment that was launched here, unless the settings name another one.

    Raises:
        ConfigError: several deployments run, and none is chosen; or flags name a deployment and
            servers.
    """
    addresses = ("namespace", "etcd_endpoints", "nats_server", "recorder_dir")
    if names_servers(config, addresses):
        return None
    record = running_deployment(config.deployment_name, "with --deployment-name")
    # While the servers of the deployment start, it has no address yet.
    return record if record is not None and record.nats else None


def of_deployment(
    recordings: Recordings, record: LaunchRecord, others: Sequence[LaunchRecord]
) -> Recordings:
    """Return the recordings of one deployment.

    Args:
        recordings: the recordings of all deployments of this machine, and of other machines.
        record: the deployment.
        others: other deployments that run here, which may have the same namespace.
    """
    pids_of_others = {process.pid for other in others for process in other.processes}

    def belongs(process: ProcessRecording) -> bool:
        if process.host:
            return True  # on other machines, only the processes of the deployment were asked
        header = process.header
        if process.namespace != record.namespace or header.boot_id != boot_id():
            return False
        # Processes start after their launcher. Earlier processes belong to a deployment that has
        # ended.
        is_later = header.start_ticks >= record.start_ticks
        return is_later and header.pid not in pids_of_others

    return replace(recordings, processes=list(filter(belongs, recordings.processes)))


def _read(config: ExplainConfig) -> Recordings:
    """Read the files of this machine, and ask the processes of other machines.

    Raises:
        NotExplained: nothing is recorded.
    """
    folder = recorder_folder(config.recorder_dir, process_environment())
    if folder is None:
        raise ConfigError("--recorder-dir off records nothing; pass the folder of the processes")
    reason = f"{folder} has no recording"
    try:
        if config.recorder_dir is None:
            check_owner(folder)
        local = Recordings.read(folder)
    except OSError as exc:
        local = Recordings([])
        reason = f"{folder} can't be read ({exc.strerror or exc})"
    recordings = local
    record = _deployment(config)
    if not config.local:
        # Imported here, because it loads the clients of etcd and NATS.
        from dynamo_trtllm.cli.remote_recordings import with_other_machines

        recordings = with_other_machines(config, record, local)
    # A request whose id is given may belong to a deployment that has ended, so all recordings stay.
    if record is not None and config.request is None:
        neighbors = [other for other in running_deployments() if other.pid != record.pid]
        recordings = of_deployment(recordings, record, neighbors)
    # If files of this machine can't be read, `main` names them, and this is no error.
    if not recordings.processes and not recordings.unanswered and not local.problems:
        others = "".join(f"; {problem}" for problem in recordings.problems)
        raise NotExplained(
            f"{reason}; start a worker or a frontend, or pass the --recorder-dir of the"
            f" processes{others}"
        )
    return recordings


def _write(path: Path, lines: Iterator[str]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as exc:
        raise ConfigError(
            f"{path} can't be written: {exc.strerror or exc}; pass another path"
        ) from exc


def timeline(request: RequestRecording) -> str:
    """Return the life of a request as text."""
    first = request.steps[0]
    began = datetime.fromtimestamp(first.process.epoch_s(first.entry.ns)).astimezone()
    lines = [
        f"request {request.id}: {outcome(request)}",
        f"began {began.isoformat(timespec='milliseconds')}",
    ]
    shown = [(f"{row.since_ms:.3f}", row.process, row.event) for row in timeline_rows(request)]
    rows = [("ms", "process", "event"), *shown]
    width = max(len(ms) for ms, _, _ in rows)
    table = format_table([(ms.rjust(width), process, event) for ms, process, event in rows])
    lines += table.splitlines()
    lines += [f"longest: {interval}" for interval in longest_intervals(request)]
    lines += [f"note: {note}" for note in timeline_notes(request)]
    return "\n".join(lines) + "\n"


def _latest(requests: Sequence[RequestRecording]) -> str:
    """Return a table of the latest requests, or that there are none."""
    if not requests:
        return f"no request was recorded yet; send one, for example with '{COMMAND_NAME} chat'\n"
    latest = sorted(requests, key=lambda request: request.began_epoch_ns)[-_MAX_SHOWN:]
    rows = [("request", "began", "processes", "outcome")]
    for request in latest:
        ago_s = time.time() - request.began_epoch_ns / 1e9
        titles = ", ".join(process.title for process in request.processes())
        rows.append((request.id, f"{ago_s:.1f} s ago", titles, outcome(request)))
    return format_table(rows)

"""Show the processes of running deployments, their health and their load (`dynamo-trtllm status`).

It finds the deployments that were launched on this machine by the record of their launcher, and
otherwise asks a frontend, or etcd. It asks all processes at once, and ends when all have answered
or the time is over.
"""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Set
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import msgspec

from dynamo_trtllm.config.base import DEFAULT_SOURCE, format_table
from dynamo_trtllm.config.commands import StatusConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import CONSOLE
from dynamo_trtllm.errors import ConfigError, Unreachable
from dynamo_trtllm.launch.launcher import LaunchRecord, ProcessRecord, launch_records
from dynamo_trtllm.launch.plan import FRONTEND
from dynamo_trtllm.launch.servers import NotYet, ReadyAnswer, check_etcd, check_nats, request
from dynamo_trtllm.observability.metrics import PREFIX
from dynamo_trtllm.observability.metrics_aggregator import sum_samples
from dynamo_trtllm.sanitize import escape_controls, mask_address

if TYPE_CHECKING:
    from rich.console import Group

_DEFAULT_URL = "http://localhost:8000"
_METRICS_BYTES = 8 << 20
_MOST_WORKERS = 10_000
_READY, _REGISTERED, _STARTING, _UNREACHABLE = "ready", "registered", "starting", "unreachable"
_HEAD = ("process", "role", "state", "address", "load")
_COLORS = {_READY: "green", _REGISTERED: "green", _UNREACHABLE: "red"}


class NothingRuns(Exception):
    """No deployment was found. The message says where it was looked for, and what to do."""


class ProcessStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One process of a deployment, or an instance of which only the registration is known."""

    name: str
    role: str
    # ready, registered, starting, unreachable, or the phase of a process that is not ready
    state: str = ""
    reason: str = ""
    address: str = ""
    instance_id: str = ""
    model: str = ""
    engine: str = ""
    # metrics by name, summed over labels
    load: dict[str, float] = msgspec.field(default_factory=dict)


class DeploymentReport(msgspec.Struct, kw_only=True):
    """The processes of one deployment."""

    namespace: str
    url: str = ""  # of its first frontend
    processes: list[ProcessStatus]
    problems: list[str] = msgspec.field(default_factory=list)  # reported by the frontend

    @property
    def is_ready(self) -> bool:
        return not self.problems and all(
            each.state in (_READY, _REGISTERED) for each in self.processes
        )


class _Health(msgspec.Struct):
    """The part of a frontend's `/health` that is shown.

    The lists are required: other servers do not send them.
    """

    instances: list[_HealthInstance]
    mismatched: list[object]
    message: str = ""


class _HealthInstance(msgspec.Struct):
    id: str
    namespace: str
    role: str
    model: str
    engine: str


@command(StatusConfig, f"{CONSOLE} status", NothingRuns)
def main(config: StatusConfig) -> int:
    """Run the command.

    Exit with status 0 if all processes are ready, 1 if one is not or nothing runs, and 2 for a bad
    command line.
    """
    reports = asyncio.run(_show(config))
    return 0 if all(report.is_ready for report in reports) else 1


async def _show(config: StatusConfig) -> list[DeploymentReport]:
    """Show the status; with --watch until a Ctrl-C, in place on a terminal, otherwise one after the
    other.
    """
    is_on_terminal = sys.stdout.isatty() and not config.json_output
    if is_on_terminal and config.watch:
        from rich.live import Live

        with Live(_colored(await collect(config)), auto_refresh=False) as live:
            while True:
                live.update(_colored(await collect(config)), refresh=True)
                await asyncio.sleep(config.interval_s)
    while True:
        reports = await collect(config)
        if is_on_terminal:
            from rich.console import Console

            Console().print(_colored(reports))
        elif config.json_output:
            shown = msgspec.json.encode(reports)
            sys.stdout.write(
                f"{(shown if config.watch else msgspec.json.format(shown)).decode()}\n"
            )
        else:
            sys.stdout.write(as_text(reports) + ("\n" if config.watch else ""))
        if not config.watch:
            return reports
        sys.stdout.flush()
        await asyncio.sleep(config.interval_s)


async def collect(config: StatusConfig) -> list[DeploymentReport]:
    """Return the deployments that run.

    Raises:
        ConfigError: A setting can't be used.
        NothingRuns: There is none.
    """
    now = asyncio.get_running_loop().time()
    deadline = now + config.timeout_s
    if config.url is not None:
        try:
            return [await _of_frontend(config.url, deadline)]
        except OSError as exc:
            raise NothingRuns(
                f"no frontend answers at {config.url} ({_text(exc)}); start one, or change --url"
            ) from exc
    is_chosen = {
        name: config.source_of(name) != DEFAULT_SOURCE for name in ("namespace", "etcd_endpoints")
    }
    launched = launch_records()
    records = [
        each
        for each in launched
        if not is_chosen["namespace"] or each.namespace == config.namespace
    ]
    if records and not is_chosen["etcd_endpoints"]:
        return list(await asyncio.gather(*(_of_launcher(record, deadline) for record in records)))
    others = ", ".join(sorted({each.namespace for each in launched} - {config.namespace}))
    looked = [
        f"only {others} was launched on this machine"
        if others
        else "no deployment was launched on this machine"
    ]
    if not any(is_chosen.values()):
        try:
            # the other half is for etcd
            return [await _of_frontend(_DEFAULT_URL, now + config.timeout_s / 2)]
        except OSError as exc:
            looked.append(f"no frontend answers at {_DEFAULT_URL} ({_text(exc)})")
    try:
        async with asyncio.timeout_at(deadline):
            report, namespaces = await _of_etcd(config)
        if report.processes or report.problems:
            return [report]
        found = (
            f"it has workers in {', '.join(sorted(namespaces))}"
            if namespaces
            else "nor in another one"
        )
        looked.append(f"etcd has no worker in namespace {config.namespace} ({found})")
    except (Unreachable, TimeoutError):
        looked.append(f"no etcd answers at {mask_address(config.etcd_endpoints)}")
    raise NothingRuns(
        f"{', '.join(looked)}; start one with '{CONSOLE} demo', or pass --url or --etcd-endpoints"
    )


async def _of_launcher(record: LaunchRecord, deadline: float) -> DeploymentReport:
    """Ask the processes that a launcher of this machine has started."""
    asked: list[Awaitable[ProcessStatus]] = [
        _of_server("etcd", record.etcd, check_etcd, deadline),
        _of_server("nats", record.nats, check_nats, deadline),
        *(_of_process(process, deadline) for process in record.processes),
    ]
    report = DeploymentReport(namespace=record.namespace, processes=[])
    health = None
    if (frontend := record.frontend) is not None:
        report.url = f"http://{frontend.address}"
        health = asyncio.create_task(_health(frontend.host, frontend.port, deadline))
    report.processes += await asyncio.gather(*asked)
    if health is not None:
        with suppress(OSError):  # it does not answer, which its row shows
            _add_health(report, await health, ended=set(record.ended_instances))
    return report


async def _of_frontend(url: str, deadline: float) -> DeploymentReport:
    """Ask a frontend for itself and the workers that it knows.

    Raise OSError if it does not answer.
    """
    parts = urllib.parse.urlsplit(url)
    shown = mask_address(url)
    if parts.scheme != "http" or "@" in parts.netloc or parts.path or parts.query:
        raise ConfigError(
            f"--url is {shown!r}: status needs http://HOST:PORT, without TLS, password or path"
        )
    host, port = parts.hostname or "", parts.port or 80
    record = ProcessRecord(name=FRONTEND, role=FRONTEND, host=host, port=port, pid=0)
    health, process = await asyncio.gather(
        _health(host, port, deadline), _of_process(record, deadline)
    )
    namespaces = sorted({instance.namespace for instance in health.instances})
    report = DeploymentReport(namespace=", ".join(namespaces), url=url, processes=[process])
    _add_health(report, health)
    return report


async def _of_etcd(config: StatusConfig) -> tuple[DeploymentReport, Set[str]]:
    """Return the workers that are registered in etcd; if there is none, the namespaces that have
    workers instead.

    Raises:
        Unreachable: etcd does not answer.
    """
    from dynamo_trtllm.discovery.etcd_store import EtcdStore
    from dynamo_trtllm.discovery.records import (
        PREFIX,
        BadRecord,
        namespace_prefix,
        read_instance,
        shown_key,
    )

    report = DeploymentReport(namespace=config.namespace, processes=[])
    async with aclosing(EtcdStore(config)) as store:
        snapshot = await store.read_all(namespace_prefix(config.namespace))
        if not snapshot.records:
            everything = await store.read_all(f"{PREFIX}/")
            return report, {
                key.removeprefix(f"{PREFIX}/").partition("/")[0] for key in everything.records
            }
    for key, record in sorted(snapshot.records.items()):
        try:
            instance = read_instance(key, record)
        except BadRecord as exc:
            report.problems.append(f"record {shown_key(key)}: {exc}")
            continue
        model = instance.card.name
        report.processes.append(
            _registered(f"{instance.id:x}", str(instance.role), model, instance.engine)
        )
    return report, set()


def _registered(instance_id: str, role: str, model: str, engine: str) -> ProcessStatus:
    return ProcessStatus(
        name=instance_id,
        role=role,
        state=_REGISTERED,
        instance_id=instance_id,
        model=model,
        engine=engine,
    )


def _add_health(report: DeploymentReport, health: _Health, ended: Set[str] = frozenset()) -> None:
    """Add the workers that only the frontend knows, without the `ended` ones, and its problems."""
    known = ended | {process.instance_id for process in report.processes}
    for each in health.instances:
        if each.id not in known:
            report.processes.append(_registered(each.id, each.role, each.model, each.engine))
    report.problems += [health.message] if health.message else []
    report.problems += [str(line) for line in health.mismatched]


async def _of_process(process: ProcessRecord, deadline: float) -> ProcessStatus:
    """Ask a process whether it is ready, and for its load."""
    status = msgspec.convert(process, ProcessStatus, from_attributes=True)
    try:
        code, body = await _get(process.host, process.port, "/ready", deadline)
        answer = msgspec.json.decode(body, type=ReadyAnswer)
        status.state = _READY if code == 200 else answer.status
        status.reason, status.instance_id = answer.reason, answer.instance_id
        if code == 200:  # a frontend that starts answers no other request yet
            _, body = await _get(process.host, process.port, "/metrics", deadline)
            status.load = sum_samples(body.decode(), PREFIX)
    except ConnectionRefusedError as exc:
        status.state, status.reason = (
            (_STARTING, "") if _runs(process.pid) else (_UNREACHABLE, _text(exc))
        )
    except (OSError, ValueError) as exc:  # ValueError: the answer of another program
        status.state, status.reason = _UNREACHABLE, _text(exc)
    return status


def _runs(pid: int) -> bool:
    """Return True if a process with this id runs; 0 stands for an unknown one."""
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


async def _of_server(
    name: str, addresses: str, check: Callable[[str, int], Awaitable[None]], deadline: float
) -> ProcessStatus:
    """Check the first address of etcd or NATS. One with TLS or without a port is not checked."""
    status = ProcessStatus(name=name, role=name, state=_REGISTERED, address=mask_address(addresses))
    first = addresses.split(",")[0].strip()
    parts = urllib.parse.urlsplit(first if "://" in first else f"//{first}")
    if parts.scheme in ("https", "tls") or parts.hostname is None or parts.port is None:
        return status
    try:
        async with asyncio.timeout_at(deadline):
            await check(parts.hostname, parts.port)
        status.state = _READY
    except (NotYet, OSError) as exc:
        status.state, status.reason = _UNREACHABLE, _text(exc)
    return status


async def _health(host: str, port: int, deadline: float) -> _Health:
    """Return a frontend's `/health`. Raise OSError if there is none."""
    _, body = await _get(host, port, f"/health?limit={_MOST_WORKERS}", deadline)
    try:
        return msgspec.json.decode(body, type=_Health)
    except msgspec.DecodeError as exc:
        raise OSError(f"the answer is not that of a frontend: {exc}") from exc


async def _get(host: str, port: int, path: str, deadline: float) -> tuple[int, bytes]:
    async with asyncio.timeout_at(deadline):
        return await request(host, port, "GET", path, max_bytes=_METRICS_BYTES)


def _text(error: Exception) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error) or "no answer in time"


def as_text(reports: Iterable[DeploymentReport]) -> str:
    """Return the reports as plain lines."""
    return "\n".join(
        _title(each) + format_table([_HEAD, *_rows(each)]) + _problems(each) for each in reports
    )


def _title(report: DeploymentReport) -> str:
    state = "ready" if report.is_ready else "NOT READY"
    lines = [
        f"deployment {report.namespace or '-'}: {state}" + (f", {report.url}" if report.url else "")
    ]
    models: dict[tuple[str, str], list[str]] = {}
    for process in report.processes:
        if process.model:
            models.setdefault((process.model, process.engine), []).append(process.role)
    for (model, engine), roles in sorted(models.items()):
        workers = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        lines.append(f"model {model}: {workers}" + (f" (engine {engine})" if engine else ""))
    return "".join(f"{escape_controls(line)}\n" for line in lines)


def _problems(report: DeploymentReport) -> str:
    return "".join(f"problem: {escape_controls(line)}\n" for line in report.problems)


def _rows(report: DeploymentReport) -> Iterator[tuple[str, ...]]:
    for process in report.processes:
        state = f"{process.state}: {process.reason}" if process.reason else process.state
        cells = (
            process.name,
            process.role,
            state,
            process.address or "-",
            _load(process.role, process.load),
        )
        yield tuple(map(escape_controls, cells))


def _load(role: str, load: Mapping[str, float]) -> str:
    """Return the load in a few words."""
    if not load:
        return "-"
    if role == FRONTEND:
        words = [f"{load.get('inflight', 0):.0f} in flight", f"{load.get('queued', 0):.0f} queued"]
        words.append(f"{load.get('requests_total', 0):,.0f} requests")
        words.append(f"{load.get('output_tokens_total', 0):,.0f} tokens")
        if count := load.get("ttft_seconds_count"):
            words.append(f"mean TTFT {load['ttft_seconds_sum'] / count * 1e3:.0f} ms")
        return ", ".join(words)
    words = [f"{load.get('running', 0):.0f} running", f"{load.get('waiting', 0):.0f} waiting"]
    if total := load.get("kv_blocks_total"):
        words.append(f"KV {load.get('kv_blocks_used', 0) / total:.0%}")
    return ", ".join([*words, f"{load.get('output_tokens_total', 0):,.0f} tokens"])


def _colored(reports: Iterable[DeploymentReport]) -> Group:
    """Return the reports for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Text | Table] = []
    for report in reports:
        shown.append(Text(_title(report).rstrip(), style="bold" if report.is_ready else "bold red"))
        table = Table(*_HEAD, box=None, pad_edge=False)
        for process, row in zip(report.processes, _rows(report), strict=True):
            name, role, state, *others = row
            color = _COLORS.get(process.state, "yellow")
            table.add_row(Text(name), Text(role), Text(state, style=color), *map(Text, others))
        shown.append(table)
        shown.append(Text(_problems(report), style="red"))
    return Group(*shown)

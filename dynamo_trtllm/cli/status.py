"""Show the processes of running deployments, their health and their load (`dynamo-trtllm status`).

The command shows all deployments that were launched on this machine (`running_deployments`). If
there is none, it asks a frontend, or etcd. It asks all processes at once, and ends when all have
answered or the time is over.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Set
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamo_trtllm.cli.status_keys import keys_of
from dynamo_trtllm.cli.status_rates import RateMeter, ttft_buckets
from dynamo_trtllm.cli.status_view import (
    READY,
    REGISTERED,
    UNREACHABLE,
    DeploymentReport,
    ProcessStatus,
    as_text,
    colored,
)
from dynamo_trtllm.config.client_commands import DEFAULT_FRONTEND, StatusConfig
from dynamo_trtllm.config.config_base import DEFAULT_SOURCE
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME, is_installed
from dynamo_trtllm.launch.process_specs import FRONTEND
from dynamo_trtllm.launch.readiness import NotYet, ReadyAnswer, check_etcd, check_nats
from dynamo_trtllm.launch.running_deployments import (
    LaunchRecord,
    ProcessRecord,
    running_deployment,
    running_deployments,
)
from dynamo_trtllm.observability.metrics import PREFIX
from dynamo_trtllm.observability.metrics_aggregator import sum_samples
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable, UserRejected
from dynamo_trtllm.protocol.sanitize import mask_address, shorten
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.network.addresses import http_url
from dynamo_trtllm.support.tls import client_context, own_server_context
from dynamo_trtllm.support.tls_files import ClientTlsFiles

_PORTS = {"http": 80, "https": 443}
_UNKNOWN_PID = 0
_METRICS_BYTES = 8 << 20  # longest response of a process
_MAX_WORKERS = 10_000  # most workers that a frontend is asked for
_MAX_REASON_CHARS = 300
_STARTING = "starting"
_QUARANTINED = "quarantined"


class _RequestRejected(OSError):
    """A process rejected a request of this client. The message says why, and what to do."""


class NothingRuns(Exception):
    """No deployment was found. The message says where it was looked for, and what to do."""


class _Health(msgspec.Struct):
    """The part of a frontend's `/health` that is shown.

    The lists are required: other servers do not send them.
    """

    instances: list[_HealthInstance]
    mismatched: list[object]
    message: str = ""
    discovery_problem: str = ""
    pairs: list[_HealthPair] = []


class _HealthInstance(msgspec.Struct):
    id: str
    namespace: str
    role: str
    model: str
    engine: str
    # Only elastic workers have these fields.
    prefill_share: float | None = None
    decode_share: float | None = None
    shares_since: str | None = None


class _ErrorBody(msgspec.Struct):
    """The body of an error."""

    error: _ErrorDetail


class _ErrorDetail(msgspec.Struct):
    message: str


class _HealthPair(msgspec.Struct):
    decode: str
    state: str
    prefill: str | None = None
    reason: str = ""


@command(StatusConfig, f"{COMMAND_NAME} status", NothingRuns)
def main(config: StatusConfig) -> int:
    """Run the command.

    Exit with status 0 if all processes are ready, 1 if a process is not ready or nothing runs, and
    2 for a bad command line.
    """
    reports = asyncio.run(_show(config))
    return 0 if all(report.is_ready for report in reports) else 1


async def _show(config: StatusConfig) -> list[DeploymentReport]:
    """Show the status; with --watch again and again until a Ctrl-C.

    On a terminal, the status is replaced in place. Otherwise, each status follows the one before.
    """
    is_on_terminal = sys.stdout.isatty() and not config.json_output and is_installed("rich")
    meter = RateMeter()

    async def measured() -> list[DeploymentReport]:
        reports = await collect(config)
        if config.watch:
            meter.add(reports, time.monotonic())
        return reports

    if is_on_terminal and config.watch:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            while True:
                reports = await measured()
                live.update(colored(reports, time.strftime("%H:%M:%S")), refresh=True)
                await asyncio.sleep(config.interval_s)
    while True:
        reports = await measured()
        if is_on_terminal:
            from rich.console import Console

            Console().print(colored(reports))
        elif config.json_output:
            encoded = msgspec.json.encode(reports)
            if not config.watch:
                encoded = msgspec.json.format(encoded)
            sys.stdout.write(f"{encoded.decode()}\n")
        else:
            separator = "\n" if config.watch else ""
            sys.stdout.write(as_text(reports) + separator)
        if not config.watch:
            return reports
        sys.stdout.flush()
        await asyncio.sleep(config.interval_s)


async def _of_url(url: str, client: _StatusClient) -> DeploymentReport:
    """Return the deployment of the frontend at --url. Raise NothingRuns if it does not answer."""
    try:
        return await _of_frontend(url, client)
    except _RequestRejected as exc:
        raise NothingRuns(str(exc)) from exc
    except OSError as exc:
        raise NothingRuns(
            f"no frontend answers at {url} ({_reason_of(exc)}); start one, or change --url"
        ) from exc


async def collect(config: StatusConfig) -> list[DeploymentReport]:
    """Return the deployments that run.

    Raises:
        ConfigError: a setting can't be used.
        NothingRuns: no deployment was found.
    """
    now = asyncio.get_running_loop().time()
    deadline = now + config.timeout_s
    client = _StatusClient(deadline, config.api_key, config.client_tls_files)
    if config.url is not None:
        return [await _of_url(config.url, client)]
    has_namespace = config.source_of("namespace") != DEFAULT_SOURCE
    has_etcd = config.source_of("etcd_endpoints") != DEFAULT_SOURCE
    launched = _launched(config.deployment_name)
    records = launched
    if has_namespace:
        records = [record for record in launched if record.namespace == config.namespace]
    # An address of etcd that the user gives may belong to another deployment than the launched
    # ones.
    if records and not has_etcd:
        return list(await asyncio.gather(*(_of_launcher(record, client) for record in records)))
    reasons = []  # why no deployment was found
    others = {record.namespace for record in launched} - {config.namespace}
    if others:
        reasons.append(f"only {', '.join(sorted(others))} was launched on this machine")
    else:
        reasons.append("no deployment was launched on this machine")
    if not has_namespace and not has_etcd:
        half_time = now + config.timeout_s / 2  # the other half is for etcd
        try:
            return [await _of_frontend(DEFAULT_FRONTEND, client._replace(deadline=half_time))]
        except _RequestRejected as exc:
            reasons.append(str(exc))
        except OSError as exc:
            reasons.append(f"no frontend answers at {DEFAULT_FRONTEND} ({_reason_of(exc)})")
    try:
        async with asyncio.timeout_at(deadline):
            report, namespaces = await _of_etcd(config)
        if report.processes or report.not_ready:
            return [report]
        in_others = "nor in another one"
        if namespaces:
            in_others = f"it has workers in {', '.join(sorted(namespaces))}"
        reasons.append(f"etcd has no worker in namespace {config.namespace} ({in_others})")
    except UserRejected as exc:
        raise NothingRuns(f"{', '.join(reasons)}, {exc.message}") from exc
    except (Unreachable, TimeoutError):
        reasons.append(f"no etcd answers at {mask_address(config.etcd_endpoints)}")
    raise NothingRuns(
        f"{', '.join(reasons)}; start one with '{COMMAND_NAME} demo', or pass --url or"
        " --etcd-endpoints"
    )


def _launched(name: str | None) -> list[LaunchRecord]:
    """Return the deployments of this machine, or the one with this name. Raises ConfigError."""
    if name is None:
        return running_deployments()
    record = running_deployment(name, "with --deployment-name")
    return [] if record is None else [record]


class _StatusClient(NamedTuple):
    """How processes are asked for their status."""

    deadline: float  # a time of the event loop's clock
    api_key: str | None
    client_files: ClientTlsFiles | None  # the certificate of this client


async def _of_launcher(record: LaunchRecord, client: _StatusClient) -> DeploymentReport:
    """Ask the processes that a launcher of this machine has started."""
    report = DeploymentReport(namespace=record.namespace, name=record.name, processes=[])
    if not record.processes:
        report.not_ready.append("etcd and NATS are starting")
        return report
    asked: list[Awaitable[ProcessStatus]] = [
        _of_server("etcd", record.etcd, check_etcd, client.deadline),
        _of_server("nats", record.nats, check_nats, client.deadline),
        *(_of_process(process, client) for process in record.processes),
    ]
    health = None
    frontend = record.frontend
    if frontend is not None:
        report.url = frontend.url
        health = asyncio.create_task(_health(frontend, client))
    report.processes += await asyncio.gather(*asked)
    if health is not None:
        try:
            _add_health(report, await health, ended=set(record.ended_instances))
        except _RequestRejected as exc:
            report.unknown = f"the health of the models: {exc}"
        except OSError:  # the frontend does not answer, which its row shows
            pass
    return report


async def _of_frontend(url: str, client: _StatusClient) -> DeploymentReport:
    """Ask a frontend for itself and the workers that it knows.

    Raise OSError if it does not answer.
    """
    parts = urllib.parse.urlsplit(url)
    shown = mask_address(url)
    if "@" in parts.netloc or parts.path or parts.query:
        raise ConfigError(
            f"--url is {shown!r}: status needs http://HOST:PORT or https://HOST:PORT, without a"
            " password or path"
        )
    record = ProcessRecord(
        name=FRONTEND,
        role=FRONTEND,
        host=parts.hostname or "",
        port=parts.port or _PORTS[parts.scheme],
        pid=_UNKNOWN_PID,
        uses_tls=parts.scheme == "https",
    )
    health, process = await asyncio.gather(_health(record, client), _of_process(record, client))
    namespaces = sorted({instance.namespace for instance in health.instances})
    report = DeploymentReport(namespace=", ".join(namespaces), url=url, processes=[process])
    _add_health(report, health)
    return report


async def _of_etcd(config: StatusConfig) -> tuple[DeploymentReport, Set[str]]:
    """Return the workers that are registered in etcd.

    If there is none, also return the namespaces that have workers instead.

    Raises:
        Unreachable: etcd does not answer.
    """
    from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
    from dynamo_trtllm.cluster.discovery.records import (
        PREFIX,
        BadRecord,
        namespace_prefix,
        read_instance,
        shown_key,
    )
    from dynamo_trtllm.cluster.discovery.share_records import is_planner_key, is_share_key

    async def read_workers(prefix: str) -> dict[str, bytes]:
        """Return the records of workers below a prefix. Planners and shares have records, too."""
        snapshot = await store.read_all(prefix)
        return {
            key: record
            for key, record in snapshot.records.items()
            if not is_share_key(key) and not is_planner_key(key)
        }

    report = DeploymentReport(namespace=config.namespace, processes=[])
    async with aclosing(EtcdStore(config)) as store:
        workers = await read_workers(namespace_prefix(config.namespace))
        if not workers:
            everywhere = await read_workers(f"{PREFIX}/")
            paths = [key.removeprefix(f"{PREFIX}/") for key in everywhere]
            return report, {path.partition("/")[0] for path in paths}
    for key, record in sorted(workers.items()):
        try:
            instance = read_instance(key, record)
        except BadRecord as exc:
            report.not_ready.append(f"record {shown_key(key)}: {exc}")
            continue
        worker = _registered(
            f"{instance.id:x}", str(instance.role), instance.card.name, instance.engine
        )
        report.processes.append(worker)
    return report, set()


def _registered(instance_id: str, role: str, model: str, engine: str) -> ProcessStatus:
    return ProcessStatus(
        name=instance_id,
        role=role,
        state=REGISTERED,
        instance_id=instance_id,
        model=model,
        engine=engine,
    )


def _add_health(report: DeploymentReport, health: _Health, ended: Set[str] = frozenset()) -> None:
    """Add the problems that a frontend reports, and the workers that only the frontend knows.

    Workers in `ended` are left out.
    """
    known = {process.instance_id: process for process in report.processes}
    for instance in health.instances:
        if instance.id in ended:
            continue
        process = known.get(instance.id)
        if process is None:
            process = _registered(instance.id, instance.role, instance.model, instance.engine)
            report.processes.append(process)
        if instance.prefill_share is not None and instance.decode_share is not None:
            process.prefill_share = instance.prefill_share
            process.decode_share = instance.decode_share
            process.shares_since = instance.shares_since
    if health.message:
        report.not_ready.append(health.message)
    report.problems += [str(line) for line in health.mismatched]
    if health.discovery_problem:
        report.problems.append(health.discovery_problem)
    for pair in health.pairs:
        if pair.state == _QUARANTINED:
            report.problems.append(
                f"the pair prefill {pair.prefill or '-'}, decode {pair.decode} gets no requests:"
                f" {pair.reason}"
            )


async def _of_process(process: ProcessRecord, client: _StatusClient) -> ProcessStatus:
    """Ask a process whether it is ready, and for its load."""
    status = msgspec.convert(process, ProcessStatus, from_attributes=True)
    try:
        code, body = await _get(process, "/ready", client)
        answer = msgspec.json.decode(body, type=ReadyAnswer)
        is_ready = code == 200
        status.state = READY if is_ready else answer.status
        status.reason = answer.reason
        status.instance_id = answer.instance_id
        if is_ready:  # a frontend that starts answers no other request yet
            status.reason = await _add_load(status, process, client)
    except ConnectionRefusedError as exc:
        # If the process runs, it does not listen yet.
        if _runs(process.pid):
            status.state = _STARTING
            status.reason = ""
        else:
            _mark_unreachable(status, exc)
    except (OSError, ValueError) as exc:  # ValueError: the answer of another program
        _mark_unreachable(status, exc)
    return status


async def _add_load(status: ProcessStatus, process: ProcessRecord, client: _StatusClient) -> str:
    """Add the load of a ready process. Return why the load is not known; "" if it is known."""
    try:
        _, body = await _get(process, "/metrics", client)
    except _RequestRejected as exc:
        return str(exc)
    page = body.decode()
    status.load = sum_samples(page, PREFIX)
    status.keys = keys_of(page)
    if process.role == FRONTEND:
        status.ttft_buckets = ttft_buckets(page)
    return ""


def _mark_unreachable(status: ProcessStatus, error: Exception) -> None:
    status.state = UNREACHABLE
    status.reason = _reason_of(error)


def _runs(pid: int) -> bool:
    """Return True if a process with this id runs."""
    if pid == _UNKNOWN_PID:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


async def _of_server(
    name: str, addresses: str, check: Callable[[str, int], Awaitable[None]], deadline: float
) -> ProcessStatus:
    """Check the first address of etcd or NATS, unless it has TLS or has no port."""
    status = ProcessStatus(name=name, role=name, state=REGISTERED, address=mask_address(addresses))
    first, _, _ = addresses.partition(",")
    first = first.strip()
    parts = urllib.parse.urlsplit(first if "://" in first else f"//{first}")
    if parts.scheme in ("https", "tls") or parts.hostname is None or parts.port is None:
        return status
    try:
        async with asyncio.timeout_at(deadline):
            await check(parts.hostname, parts.port)
        status.state = READY
    except (NotYet, OSError) as exc:
        _mark_unreachable(status, exc)
    return status


async def _health(frontend: ProcessRecord, client: _StatusClient) -> _Health:
    """Return a frontend's `/health`. Raise OSError if there is none."""
    _, body = await _get(frontend, f"/health?limit={_MAX_WORKERS}", client)
    try:
        return msgspec.json.decode(body, type=_Health)
    except msgspec.DecodeError as exc:
        raise OSError(f"the answer is not that of a frontend: {exc}") from exc


async def _get(process: ProcessRecord, path: str, client: _StatusClient) -> tuple[int, bytes]:
    """Return the status and the body of a response.

    Raises:
        _RequestRejected: the process needs another API key or a client certificate.
        OSError: there is no answer.
    """
    async with asyncio.timeout_at(client.deadline):
        url = http_url(process.host, process.port, path, uses_tls=process.uses_tls)
        tls: ssl.SSLContext | None
        if process.certificate:
            tls = own_server_context(Path(process.certificate), client.client_files)
        else:
            tls = client_context(url, client.client_files)
        headers = http_client.bearer(client.api_key)
        status, body = await http_client.request(
            url, "GET", headers=headers, max_bytes=_METRICS_BYTES, tls=tls
        )
    if status in (401, 403):
        raise _RequestRejected(_rejection(url, status, body, client))
    return status, body


def _rejection(url: str, status: int, body: bytes, client: _StatusClient) -> str:
    """Return a text that says who rejected which client, why, and what to do."""
    sent = []
    if client.api_key:
        sent.append("an API key")
    if client.client_files is not None:
        sent.append(f"the certificate {client.client_files.certificate}")
    try:
        reason = msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        reason = "no reason given"
    return (
        f"{url} rejects a client with {' and '.join(sent) or 'no API key and no certificate'}"
        f" (status {status}: {shorten(reason, _MAX_REASON_CHARS)}); set {ENV_PREFIX}API_KEY to a"
        " key with scope status or all, or --tls-client-cert-file and --tls-client-key-file"
    )


def _reason_of(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number:
        return os.strerror(number)
    return str(error) or "no answer in time"

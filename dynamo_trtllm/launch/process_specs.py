"""Derive the processes of a deployment: names, command lines, environments, ports.

The module starts no process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dynamo_trtllm.config.child_settings import to_argv, to_environ
from dynamo_trtllm.config.commands import LaunchConfig
from dynamo_trtllm.config.config_base import DEFAULT_SOURCE
from dynamo_trtllm.config.deployment import DeploymentConfig, WorkerSpec
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.http_access import HttpAccessConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.engines.arguments import ENGINE_FLAGS
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.support.network.addresses import LOOPBACK
from dynamo_trtllm.support.tls_files import TlsFiles

FRONTEND = "frontend"
PLANNER = "planner"
_SLO_LIMITS = ("slo_ttft_ms", "slo_itl_ms")
_PLANNER_STOP_S = 10.0
# An address may contain a password, so it is passed in the environment: command lines are public.
ADDRESS_VARIABLES = {"etcd": f"{ENV_PREFIX}ETCD_ENDPOINTS", "nats": f"{ENV_PREFIX}NATS_SERVER"}
# Settings for the certificates and credentials of servers that others run. They are left out when
# the launcher starts its own servers.
_OF_OTHER_SERVERS = {
    "etcd": ("ETCD_CA", "ETCD_CERT", "ETCD_KEY", "ETCD_CREDENTIALS_FILE"),
    "nats": ("NATS_CA", "NATS_CERT", "NATS_KEY", "NATS_CREDENTIALS_FILE", "NATS_INBOX_PREFIX"),
}
# The same settings, under the names without a prefix that other programs read, too.
_COMMON_NAMES = {
    "etcd": ("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"),
    "nats": ("NATS_CA", "NATS_CERT", "NATS_KEY"),
}
_EVERY_INTERFACE = ("0.0.0.0", "::")
_STOP_MARGIN_S = 5.0  # time for the end of a worker after its drain
# Settings that are left out when a deployment gets another engine.
_LOST_WITH_ENGINE = (
    "extra_engine_args",
    "override_engine_args",
    "kernels_profile",
    "kv_transfer_host",
    "kv_transfer_bind_host",
    *ENGINE_FLAGS,
)
_FRONTEND_STOP_S = 35.0  # running requests have 30 s

C = TypeVar("C", bound=HttpAccessConfig)
Flags: TypeAlias = dict[str, Any]  # flags by field name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to supervise."""

    name: str
    module: str  # run with `python -m`
    argv: tuple[str, ...]  # arguments without the port flag
    env: Mapping[str, str]  # added to the launcher's environment
    host: str  # address of its HTTP port, which answers /ready
    port: int  # 0: the launcher chooses one at each start
    port_flag: str
    stop_timeout_s: float  # time from SIGTERM to SIGKILL
    worker: WorkerConfig | None = None  # None for the frontend and the planner
    api_key: str = field(default="", repr=False)  # for the launcher's own requests to the frontend
    needs_api_key: bool = False
    tls_files: TlsFiles | None = None  # None: its HTTP port has no TLS

    @property
    def role(self) -> Role | None:
        return None if self.worker is None else self.worker.disaggregation_mode

    @property
    def engine(self) -> str | None:
        return None if self.worker is None else self.worker.engine

    @property
    def model(self) -> str:
        """Return the model name that clients send; empty if the process is no worker."""
        return "" if self.worker is None else self.worker.model_name

    @property
    def is_frontend(self) -> bool:
        return self.name == FRONTEND

    @property
    def certificate(self) -> Path | None:
        """Return the file with the certificate of the HTTP port; None: it has no TLS."""
        return None if self.tls_files is None else self.tls_files.certificate.absolute()

    def arguments(self, port: int) -> list[str]:
        """Return `argv` with the port flag of one start."""
        return [*self.argv, f"{self.port_flag}={port}"]


def processes(deployment: DeploymentConfig, environ: Mapping[str, str] = {}) -> list[ProcessSpec]:
    """Return the processes of a deployment in start order.

    The launcher adds the addresses of etcd and NATS.

    Args:
        deployment: the deployment.
        environ: environment that the processes inherit.

    Raises:
        ConfigError: a process would reject its settings, or two processes have the same port.
    """
    common = {"namespace": deployment.namespace}
    environ = _with_placeholder_addresses(environ)
    specs = []
    limits: Flags = {}
    if deployment.frontend is not None:
        frontend, spec = _frontend(common | deployment.frontend, environ)
        specs.append(spec)
        # The limits may be set in the environment, too.
        limits = slo_limits(frontend.model_dump(include=set(_SLO_LIMITS)))
    for worker in deployment.workers:
        flags = common | worker.flags
        specs.extend(_worker(worker, number, flags, environ) for number in range(worker.count))
    planner = planner_flags(deployment, limits)
    if planner is not None:
        specs.append(_planner(common | planner, environ))
    _check_ports(specs)
    return specs


def is_open_to_all(deployment: DeploymentConfig, environ: Mapping[str, str]) -> bool:
    """Return whether every client of other machines could use the frontend of a deployment.

    `processes` rejects such a deployment. Arguments and errors are those of `processes`.
    """
    if deployment.frontend is None:
        return False
    environ = _with_placeholder_addresses(environ)
    config, _ = _planned(FRONTEND, FrontendConfig, "http", deployment.frontend, {}, environ)
    authenticates_clients = config.needs_api_key or config.needs_certificate
    return config.is_exposed and not (authenticates_clients or config.allow_anonymous)


def _with_placeholder_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with placeholders for the addresses of etcd and NATS.

    The settings can then be checked before these servers run.
    """
    placeholders = dict.fromkeys(ADDRESS_VARIABLES.values(), "localhost")
    return {**environ, **placeholders}


def without_other_servers(environ: Mapping[str, str], own_servers: Sequence[str]) -> dict[str, str]:
    """Return an environment without certificates and users of other servers.

    Args:
        environ: environment that the processes inherit.
        own_servers: the servers that the launcher starts: `etcd`, `nats` or both.
    """
    dropped = set()
    for server in own_servers:
        dropped |= {f"{ENV_PREFIX}{name}" for name in _OF_OTHER_SERVERS[server]}
        dropped |= set(_COMMON_NAMES[server])
    return {name: value for name, value in environ.items() if name not in dropped}


def with_settings(deployment: DeploymentConfig, config: LaunchConfig) -> DeploymentConfig:
    """Return a copy with the model, the engine and the address of the command line, if set.

    A model is served under its own name. A worker with another engine loses its engine arguments.

    Raises:
        ConfigError: an address is set, but the deployment has no frontend.
    """
    workers = []
    for worker in deployment.workers:
        flags = dict(worker.flags)
        if config.model is not None:
            flags.pop("served_model_name", None)
            flags["model_path"] = config.model
        if config.engine is not None and config.engine != flags.get("engine"):
            flags = {name: value for name, value in flags.items() if name not in _LOST_WITH_ENGINE}
            flags["engine"] = config.engine
        workers.append(worker.model_copy(update={"flags": flags}))
    frontend = deployment.frontend
    address: Flags = {}
    if config.host is not None:
        address["http_host"] = config.host
    if config.port is not None:
        address["http_port"] = config.port
    if address:
        if frontend is None:
            raise ConfigError(
                "--host and --port need a frontend, but the deployment starts none; remove them"
            )
        frontend = frontend | address
    return deployment.model_copy(update={"workers": workers, "frontend": frontend})


def _frontend(flags: Flags, environ: Mapping[str, str]) -> tuple[FrontendConfig, ProcessSpec]:
    config, spec_fields = _planned(FRONTEND, FrontendConfig, "http", flags, {}, environ)
    config.check_exposure()
    spec = ProcessSpec(
        module="dynamo_trtllm.frontend",
        stop_timeout_s=_FRONTEND_STOP_S,
        api_key=config.api_key[0] if config.api_key else "",
        needs_api_key=config.needs_api_key,
        **spec_fields,
    )
    return config, spec


def slo_limits(frontend: Flags) -> Flags:
    """Return the limits of times among the settings of a frontend, by field name."""
    return {name: frontend[name] for name in _SLO_LIMITS if frontend.get(name) is not None}


def planner_flags(deployment: DeploymentConfig, limits: Flags) -> Flags | None:
    """Return the flags of a deployment's planner by field name; None: it has no planner.

    Args:
        deployment: the deployment.
        limits: the `slo_limits` of its frontend.
    """
    if deployment.planner is False:
        return None
    if deployment.planner is not None:
        return limits | deployment.planner
    # The deployment says nothing about a planner. A planner runs only if it can do something: if
    # there are elastic workers, and the frontend has both limits.
    has_elastic = any(worker.disaggregation_mode is Role.ELASTIC for worker in deployment.workers)
    has_limits = len(limits) == len(_SLO_LIMITS)
    return limits if has_elastic and has_limits else None


def _planner(flags: Flags, environ: Mapping[str, str]) -> ProcessSpec:
    _, spec_fields = _planned(PLANNER, PlannerConfig, "system", flags, {}, environ)
    return ProcessSpec(
        module="dynamo_trtllm.planner", stop_timeout_s=_PLANNER_STOP_S, **spec_fields
    )


def _worker(
    worker: WorkerSpec, number: int, flags: Flags, environ: Mapping[str, str]
) -> ProcessSpec:
    name = worker.process_names[number]
    flags = {**flags, "disaggregation_mode": worker.disaggregation_mode}
    env = {"CUDA_VISIBLE_DEVICES": devices_of(worker, number), **worker.env}
    config, spec_fields = _planned(name, WorkerConfig, "system", flags, env, environ)
    stop_timeout_s = config.drain_timeout_s + _STOP_MARGIN_S
    return ProcessSpec(
        module="dynamo_trtllm", stop_timeout_s=stop_timeout_s, worker=config, **spec_fields
    )


def _planned(
    name: str,
    model: type[C],
    http_prefix: str,
    flags: Flags,
    env: Mapping[str, str],
    environ: Mapping[str, str],
) -> tuple[C, dict[str, Any]]:
    """Return the configuration as the process will load it, and fields of its ProcessSpec.

    Args:
        name: name of the process.
        model: class of its settings.
        http_prefix: prefix of the settings of its HTTP port.
        flags: its flags by field name.
        env: variables added to its environment.
        environ: environment that the process inherits. It may set the host and the port, too.
    """
    argv = to_argv(model, flags)
    env = {**env, **to_environ(model, flags)}
    port_flag = f"--{http_prefix}-port"
    try:
        config = load(model, prog=name, argv=argv, environ={**environ, **env})
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc.message}", field=exc.field) from exc
    host = getattr(config, f"{http_prefix}_host")
    if config.source_of(f"{http_prefix}_host") == DEFAULT_SOURCE:
        # By default, the port does not authenticate clients. So only this machine can reach it,
        # unless a host is set.
        host = LOOPBACK
        argv.append(f"--{http_prefix}-host={host}")
    return config, {
        "name": name,
        # `ProcessSpec.arguments` adds the port flag.
        "argv": tuple(word for word in argv if not word.startswith(f"{port_flag}=")),
        "env": env,
        "host": host,
        "port": getattr(config, f"{http_prefix}_port") or 0,
        "port_flag": port_flag,
        "tls_files": config.tls_files,
    }


def _check_ports(specs: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError if two processes have the same port.

    Readiness checks could not tell them apart.
    """
    for one, other in combinations([spec for spec in specs if spec.port], 2):
        hosts = {one.host, other.host}
        share_address = len(hosts) == 1 or not hosts.isdisjoint(_EVERY_INTERFACE)
        if one.port == other.port and share_address:
            raise ConfigError(
                f"{one.name} and {other.name} have the same port {one.port}; change one of them, or"
                f" set {other.port_flag}=0 for a free one"
            )


def devices_of(worker: WorkerSpec, number: int) -> str:
    """Return CUDA_VISIBLE_DEVICES of worker `number` of the group; empty if it runs on the CPU."""
    if worker.devices == "cpu":
        return ""
    num_devices = len(worker.devices) // worker.count
    first = number * num_devices
    return ",".join(str(device) for device in worker.devices[first : first + num_devices])

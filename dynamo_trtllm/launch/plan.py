"""Derive the processes of a deployment: names, command lines, environments, ports. The module starts no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from dynamo_trtllm.config.base import DEFAULT_SOURCE, Config
from dynamo_trtllm.config.deployment import DeploymentConfig, WorkerSpec
from dynamo_trtllm.config.load import ENV_PREFIX, load, to_argv
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.arguments import ENGINE_FLAGS
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Role
from dynamo_trtllm.network.addresses import LOOPBACK

FRONTEND = "frontend"
_EVERY_INTERFACE = ("0.0.0.0", "::")
_STOP_MARGIN_S = 5.0
_OF_ENGINE = (  # settings that are specific to an engine
    "extra_engine_args",
    "override_engine_args",
    "kernels_profile",
    "kv_transfer_host",
    "kv_transfer_bind_host",
    *ENGINE_FLAGS,
)
_FRONTEND_STOP_S = 35.0  # running requests have 30 s

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to supervise."""

    name: str
    module: str  # run with `python -m`
    argv: tuple[str, ...]  # without the port flag
    env: Mapping[str, str]  # added to the launcher's environment
    host: str  # address of its HTTP port, which answers /ready
    port: int  # 0: the launcher chooses one at each start
    port_flag: str
    stop_timeout_s: float  # from SIGTERM to SIGKILL
    role: Role | None = None  # this and the fields below are set for workers only
    engine: str = ""
    model: str = ""  # name that clients send
    worker: WorkerConfig | None = None

    @property
    def is_frontend(self) -> bool:
        return self.name == FRONTEND

    def arguments(self, port: int) -> list[str]:
        """Return `argv` with the port flag of one start."""
        return [*self.argv, f"{self.port_flag}={port}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses of etcd and NATS."""

    etcd: str
    nats: str


def processes(
    deployment: DeploymentConfig, addresses: Addresses, environ: Mapping[str, str] | None = None
) -> list[ProcessSpec]:
    """Return the processes of a deployment in start order.

    Args:
        deployment: The deployment.
        addresses: Addresses of etcd and NATS.
        environ: Environment that the processes inherit.

    Raises:
        ConfigError: A process would reject its settings, or two processes have the same port.
    """
    common = {"namespace": deployment.namespace, "etcd_endpoints": addresses.etcd}
    env = {f"{ENV_PREFIX}NATS_SERVER": addresses.nats}  # may contain a password; command lines are public
    specs = []
    if deployment.frontend is not None:
        specs.append(_frontend(common | deployment.frontend, env, environ or {}))
    for worker in deployment.workers:
        flags = common | worker.flags
        specs.extend(_worker(worker, number, flags, env, environ or {}) for number in range(worker.count))
    _check_ports(specs)
    return specs


def with_model(deployment: DeploymentConfig, model: str) -> DeploymentConfig:
    """Return a copy in which every worker runs `model`, under the model's own name."""
    workers = [
        worker.model_copy(
            update={
                "flags": {k: v for k, v in worker.flags.items() if k != "served_model_name"} | {"model_path": model}
            }
        )
        for worker in deployment.workers
    ]
    return deployment.model_copy(update={"workers": workers})


def with_engine(deployment: DeploymentConfig, engine: str) -> DeploymentConfig:
    """Return a copy in which every worker runs `engine`. A worker with another engine loses its engine arguments."""
    workers = [
        worker
        if worker.flags.get("engine") == engine
        else worker.model_copy(
            update={"flags": {k: v for k, v in worker.flags.items() if k not in _OF_ENGINE} | {"engine": engine}}
        )
        for worker in deployment.workers
    ]
    return deployment.model_copy(update={"workers": workers})


def with_address(deployment: DeploymentConfig, *, host: str | None, port: int | None) -> DeploymentConfig:
    """Return a copy whose frontend listens on `host` and `port`; None leaves a value unchanged.

    Raises:
        ConfigError: The deployment has no frontend.
    """
    given = {name: value for name, value in (("http_host", host), ("http_port", port)) if value is not None}
    if not given:
        return deployment
    if deployment.frontend is None:
        raise ConfigError("--host and --port need a frontend, but the deployment starts none; remove them")
    return deployment.model_copy(update={"frontend": deployment.frontend | given})


def model_names(deployment: DeploymentConfig) -> list[str]:
    """Return the model names of all workers, as clients send them, in order and without duplicates."""
    names = [_model_name(worker.flags) for worker in deployment.workers]
    return list(dict.fromkeys(names))


def reachable(listening: str) -> str:
    """Return the HOST:PORT to connect to on this machine, for the HOST:PORT that a server listens on."""
    host, _, port = listening.rpartition(":")
    if host in (*_EVERY_INTERFACE, LOOPBACK):
        return f"localhost:{port}"
    return f"[{host}]:{port}" if ":" in host else listening


def _model_name(flags: Mapping[str, Any]) -> str:
    return str(flags.get("served_model_name") or Path(str(flags["model_path"])).name)


def _frontend(flags: Mapping[str, Any], env: Mapping[str, str], environ: Mapping[str, str]) -> ProcessSpec:
    argv = to_argv(FrontendConfig, flags)
    config = _as_read(FrontendConfig, FRONTEND, argv, {**environ, **env})
    host = config.http_host
    if config.source_of("http_host") == DEFAULT_SOURCE:
        host = LOOPBACK  # requests are not authenticated
        argv.append(f"--http-host={host}")
    return ProcessSpec(
        name=FRONTEND,
        module="dynamo_trtllm.frontend",
        argv=_without(argv, "--http-port"),
        env=env,
        host=host,
        port=config.http_port,
        port_flag="--http-port",
        stop_timeout_s=_FRONTEND_STOP_S,
    )


def _worker(
    worker: WorkerSpec, number: int, flags: Mapping[str, Any], env: Mapping[str, str], environ: Mapping[str, str]
) -> ProcessSpec:
    name = worker.name if worker.count == 1 else f"{worker.name}-{number + 1}"
    argv = to_argv(WorkerConfig, {**flags, "disaggregation_mode": worker.disaggregation_mode})
    env = {**env, "CUDA_VISIBLE_DEVICES": _devices(worker, number), **worker.env}
    config = _as_read(WorkerConfig, name, argv, {**environ, **env})
    host = config.system_host
    if config.source_of("system_host") == DEFAULT_SOURCE:
        host = LOOPBACK
        argv.append(f"--system-host={host}")
    return ProcessSpec(
        name=name,
        module="dynamo_trtllm",
        argv=_without(argv, "--system-port"),
        env=env,
        host=host,
        port=config.system_port or 0,
        port_flag="--system-port",
        stop_timeout_s=config.drain_timeout_s + _STOP_MARGIN_S,
        role=worker.disaggregation_mode,
        engine=config.engine or "",
        model=_model_name(flags),
        worker=config,
    )


def _as_read(model: type[C], name: str, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """Return the configuration as the process will load it: a port may come from the environment."""
    try:
        return load(model, prog=name, description="", argv=argv, environ=environ)
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc.message}", field=exc.field) from exc


def _without(argv: Sequence[str], flag: str) -> tuple[str, ...]:
    return tuple(word for word in argv if not word.startswith(f"{flag}="))


def _check_ports(specs: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError if two processes have the same port, because readiness checks could not tell them apart."""
    for one, other in combinations([spec for spec in specs if spec.port], 2):
        if one.port == other.port and (one.host == other.host or {one.host, other.host} & {*_EVERY_INTERFACE}):
            raise ConfigError(
                f"{one.name} and {other.name} have the same port {one.port}; change one of them, or set "
                f"{other.port_flag}=0 for a free one"
            )


def _devices(worker: WorkerSpec, number: int) -> str:
    """Return CUDA_VISIBLE_DEVICES of worker `number` of the group; empty for a worker on the CPU."""
    if worker.devices == "cpu":
        return ""
    share = len(worker.devices) // worker.count
    return ",".join(str(device) for device in worker.devices[number * share : (number + 1) * share])

"""From a deployment to the processes it means: names, command lines, environments. Pure; starts nothing."""

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
_OF_ENGINE = (  # of one engine
    "extra_engine_args",
    "override_engine_args",
    "kernels_profile",
    "kv_transfer_host",
    "kv_transfer_bind_host",
    *ENGINE_FLAGS,
)
_FRONTEND_STOP_S = 35.0  # it gives running requests 30 s

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep running."""

    name: str
    module: str  # run with `python -m`
    argv: tuple[str, ...]  # without its port
    env: Mapping[str, str]  # added to the launcher's own
    host: str  # where it listens, and answers /ready
    port: int  # 0: the launcher chooses one at each start
    port_flag: str
    stop_timeout_s: float  # from SIGTERM to SIGKILL
    role: Role | None = None  # of a worker, as what follows
    engine: str = ""
    model: str = ""  # what clients send
    worker: WorkerConfig | None = None

    @property
    def is_frontend(self) -> bool:
        return self.name == FRONTEND

    def arguments(self, port: int) -> list[str]:
        """Return `argv` with the port of this start."""
        return [*self.argv, f"{self.port_flag}={port}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the processes meet."""

    etcd: str
    nats: str


def processes(
    deployment: DeploymentConfig, addresses: Addresses, environ: Mapping[str, str] | None = None
) -> list[ProcessSpec]:
    """Return the processes in start order. `environ`: what they inherit. Raise ConfigError for settings that a process
    or the launcher rejects."""
    common = {"namespace": deployment.namespace, "etcd_endpoints": addresses.etcd}
    env = {f"{ENV_PREFIX}NATS_SERVER": addresses.nats}  # it may hold a password, and everybody can read command lines
    specs = []
    if deployment.frontend is not None:
        specs.append(_frontend(common | deployment.frontend, env, environ or {}))
    for worker in deployment.workers:
        flags = common | worker.flags
        specs.extend(_worker(worker, number, flags, env, environ or {}) for number in range(worker.count))
    _check_ports(specs)
    return specs


def with_model(deployment: DeploymentConfig, model: str) -> DeploymentConfig:
    """The same deployment, every worker serving `model` under its own name."""
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
    """The same deployment, every worker on `engine`. A worker that changes loses the old engine's arguments."""
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
    """The same deployment, the frontend listening on `host` and `port` where they are given.

    Raises ConfigError when there is no frontend.
    """
    given = {name: value for name, value in (("http_host", host), ("http_port", port)) if value is not None}
    if not given:
        return deployment
    if deployment.frontend is None:
        raise ConfigError("--host and --port are the frontend's, and the deployment starts no frontend; leave them out")
    return deployment.model_copy(update={"frontend": deployment.frontend | given})


def model_names(deployment: DeploymentConfig) -> list[str]:
    """What clients send as `model`, in the order of the workers, each once."""
    names = [_model_name(worker.flags) for worker in deployment.workers]
    return list(dict.fromkeys(names))


def reachable(listening: str) -> str:
    """HOST:PORT for a client on this machine, of the HOST:PORT that a server listens on."""
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
    """The configuration as the process will read it: its port may come from the environment."""
    try:
        return load(model, prog=name, description="", argv=argv, environ=environ).config
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc.message}", field=exc.field) from exc


def _without(argv: Sequence[str], flag: str) -> tuple[str, ...]:
    return tuple(word for word in argv if not word.startswith(f"{flag}="))


def _check_ports(specs: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError when two processes share a port: the launcher could mistake one's answer for the other's."""
    for one, other in combinations([spec for spec in specs if spec.port], 2):
        if one.port == other.port and (one.host == other.host or {one.host, other.host} & {*_EVERY_INTERFACE}):
            raise ConfigError(
                f"{one.name} and {other.name} both use port {one.port}; give each its own, or {other.port_flag}=0 for "
                "a free one"
            )


def _devices(worker: WorkerSpec, number: int) -> str:
    """The share of one of `count` workers; nothing is visible to a worker on the CPU."""
    if worker.devices == "cpu":
        return ""
    share = len(worker.devices) // worker.count
    return ",".join(str(device) for device in worker.devices[number * share : (number + 1) * share])

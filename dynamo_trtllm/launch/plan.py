"""From a deployment to the processes it means: names, command lines, environments. Pure; starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_trtllm.config.deployment import DeploymentConfig, WorkerSpec
from dynamo_trtllm.config.load import ENV_PREFIX, to_argv
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engine.arguments import ENGINE_FLAGS
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Role

FRONTEND = "frontend"
_ANY_HOST = ("0.0.0.0", "::", "127.0.0.1")
_READ_LEVELS = ("debug", "info")  # readiness is a line of level info
_STOP_MARGIN_S = 5.0
_OF_ENGINE = ("extra_engine_args", "override_engine_args", "kernels_profile", *ENGINE_FLAGS)  # of one engine
_FRONTEND_STOP_S = 35.0  # it gives running requests 30 s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep running."""

    name: str
    module: str  # run with `python -m`
    argv: tuple[str, ...]
    env: Mapping[str, str]  # added to the launcher's own
    ready_sign: str  # regular expression; the line that says that it serves; group 1 is where, or who it is
    stop_timeout_s: float  # from SIGTERM to SIGKILL
    role: Role | None = None  # of a worker, as what follows
    engine: str = ""
    model: str = ""  # what clients send

    @property
    def is_frontend(self) -> bool:
        return self.name == FRONTEND


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the processes meet."""

    etcd: str
    nats: str


def processes(deployment: DeploymentConfig, addresses: Addresses) -> list[ProcessSpec]:
    """In the order of their start. Raises ConfigError for what only a launcher can't do."""
    common = {"namespace": deployment.namespace, "etcd_endpoints": addresses.etcd, "log_level": "info"}
    env = {f"{ENV_PREFIX}NATS_SERVER": addresses.nats}  # it may hold a password, and everybody can read command lines
    specs = []
    if deployment.frontend is not None:
        specs.append(_frontend(common | deployment.frontend, env))
    for worker in deployment.workers:
        specs.extend(_workers(worker, common | worker.flags, env))
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


def model_names(deployment: DeploymentConfig) -> list[str]:
    """What clients send as `model`, in the order of the workers, each once."""
    names = [_model_name(worker.flags) for worker in deployment.workers]
    return list(dict.fromkeys(names))


def reachable(listening: str) -> str:
    """HOST:PORT for a client on this machine, of the HOST:PORT that a server listens on."""
    host, _, port = listening.rpartition(":")
    return f"localhost:{port}" if host in _ANY_HOST else listening


def _model_name(flags: Mapping[str, Any]) -> str:
    return str(flags.get("served_model_name") or Path(str(flags["model_path"])).name)


def _frontend(flags: Mapping[str, Any], env: Mapping[str, str]) -> ProcessSpec:
    _check_log_level(flags, FRONTEND)
    return ProcessSpec(
        name=FRONTEND,
        module="dynamo_trtllm.frontend",
        argv=tuple(to_argv(FrontendConfig, flags)),
        env=env,
        ready_sign=r"listening on http://(\S+:\d+)",
        stop_timeout_s=_FRONTEND_STOP_S,
    )


def _workers(worker: WorkerSpec, flags: Mapping[str, Any], env: Mapping[str, str]) -> list[ProcessSpec]:
    _check_log_level(flags, worker.name)
    values = {**flags, "disaggregation_mode": worker.disaggregation_mode}
    config = WorkerConfig.model_validate(values)
    return [
        ProcessSpec(
            name=worker.name if worker.count == 1 else f"{worker.name}-{number + 1}",
            module="dynamo_trtllm",
            argv=tuple(to_argv(WorkerConfig, values)),
            env={**env, "CUDA_VISIBLE_DEVICES": _devices(worker, number), **worker.env},
            ready_sign=r"serving as instance ([0-9a-f]+)",
            stop_timeout_s=config.drain_timeout_s + _STOP_MARGIN_S,
            role=worker.disaggregation_mode,
            engine=config.engine or "",
            model=_model_name(flags),
        )
        for number in range(worker.count)
    ]


def _devices(worker: WorkerSpec, number: int) -> str:
    """The share of one of `count` workers; nothing is visible to a worker on the CPU."""
    if worker.devices == "cpu":
        return ""
    share = len(worker.devices) // worker.count
    return ",".join(str(device) for device in worker.devices[number * share : (number + 1) * share])


def _check_log_level(flags: Mapping[str, Any], name: str) -> None:
    if flags["log_level"] not in _READ_LEVELS:
        raise ConfigError(f"{name}: log_level is {flags['log_level']!r}: the launcher reads in the log that a process "
                          "serves; use info or debug")  # fmt: skip

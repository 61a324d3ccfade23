"""Define the launcher's YAML file, and read and check it. The module starts no process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from dynamo_trtllm.config.config_base import (
    Config,
    EtcdAddresses,
    Namespace,
    NatsAddress,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    RoleName,
    matching,
)
from dynamo_trtllm.config.flags import flags_of
from dynamo_trtllm.config.layers import find_file, read_yaml, unknown_key
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.protocol.errors import ConfigError

C = TypeVar("C", bound=Config)

# Names of the other processes, and of the launcher's own output. Commands find processes by name.
_OTHER_PROCESSES = ("frontend", "planner", "etcd", "nats", "launch")

# `$$`, `${NAME}` or `${NAME:-default}`, and as `bad` any other text that begins with `${`.
_REFERENCE = re.compile(
    r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}|(?P<bad>\{[^}]*\}?))"
)


def expand_env(value: Any, environ: Mapping[str, str], where: str) -> Any:
    """Replace `${NAME}` and `${NAME:-default}` in all strings of a value from YAML, not in keys.

    As in a shell, the default also replaces an empty variable, and `$$` is a dollar sign.

    Args:
        value: any value from YAML. Lists and mappings are copied.
        environ: the variables.
        where: place of the value, for errors: the file and the path inside it.

    Raises:
        ConfigError: a variable is not set and has no default, or a reference is malformed.
    """
    if isinstance(value, str):
        return _REFERENCE.sub(partial(_replacement, environ=environ, where=where), value)
    if isinstance(value, Mapping):
        return {key: expand_env(inner, environ, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [expand_env(item, environ, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def _replacement(match: re.Match[str], environ: Mapping[str, str], where: str) -> str:
    """Return the text for a reference. Raise ConfigError as `expand_env`."""
    name = match["name"]
    default = match["default"]
    if match["bad"]:
        raise ConfigError(
            f"{where}: {match[0]!r} is not ${{NAME}} or ${{NAME:-default}}; write $$ for a dollar"
            " sign"
        )
    if name is None:
        return "$"  # for "$$"
    if default is None:
        if name not in environ:
            raise ConfigError(
                f"{where}: {name} is not set in the environment, and {match[0]} has no default"
            )
        return environ[name]
    return environ.get(name) or default


START = "start"
_SHIPPED = Path("deploy/local")

# Settings that the launcher passes itself, and the key of the deployment file that sets each.
_RESERVED = {
    "etcd_endpoints": "services.etcd",
    "nats_server": "services.nats",
    "namespace": "namespace",
    "deployment_name": "namespace",
    "disaggregation_mode": "disaggregation_mode of the worker",
}

_GPU_NUMBERS = re.compile(r"[0-9]+(,[0-9]+)*")
WorkerName = Annotated[
    str,
    matching(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "expected lower-case letters, digits and dashes"),
]


def _by_field(model: type[Config], given: Any) -> Any:
    """Return flags by field name.

    They may be written as on the command line, with or without leading dashes.
    """
    if not isinstance(given, dict):
        return given  # pydantic reports it
    field_of: dict[str, str] = {}
    for flag in flags_of(model):
        for flag_name in flag.names:
            field_of[_field_name(flag_name)] = flag.field
    result: dict[str, Any] = {}
    for key, value in given.items():
        name = _field_name(str(key))
        problem = unknown_key([name], field_of)
        if problem:
            raise ValueError(problem)
        field = field_of[name]
        if field in _RESERVED and field in model.model_fields:
            raise ValueError(f"{key}: set {_RESERVED[field]} instead")
        if field in result:
            raise ValueError(f"{field} is given twice")
        result[field] = value
    return result


def _field_name(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _gpu_numbers(given: Any) -> Any:
    """Return the value of `devices`: GPU numbers may be a text such as 0,1."""
    if isinstance(given, str) and _GPU_NUMBERS.fullmatch(given):
        return [int(number) for number in given.split(",")]
    if given != "cpu" and not isinstance(given, list):
        raise ValueError(f"expected cpu or a list of GPU numbers, got {given!r}")
    return given


class Section(Config):
    """A mapping of the file.

    The error for an unknown key suggests the most similar one, as pydantic's would not.
    """

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            problem = unknown_key(data, cls.model_fields)
            if problem:
                raise ValueError(problem)
        return data


class ServicesConfig(Section):
    """The etcd and NATS servers.

    `start` runs one on a free loopback port; an address selects a running one.
    """

    etcd: EtcdAddresses = Field(default=START, description="start, or comma-separated addresses.")
    nats: NatsAddress = Field(default=START, description="start, or an address.")


class RestartConfig(Section):
    """Restart policy of all processes, etcd and NATS included.

    The launcher stops the deployment at the limit.
    """

    max_restarts: NonNegativeInt = Field(
        default=3, description="Maximum restarts of one process per window."
    )
    window_s: PositiveFloat = Field(
        default=60.0, description="Window in seconds. Earlier restarts are not counted."
    )
    pause_s: NonNegativeFloat = Field(
        default=0.0,
        description="Seconds before the second restart within the window, doubled with each"
        " further one. The first restart has no pause.",
    )
    decode_workers: bool = Field(
        default=True,
        description="When a prefill worker of the vllm engine on GPUs dies, also drain and restart"
        " its decode workers on GPUs, which otherwise hold its memory. These restarts are not"
        " counted.",
    )


class WorkerSpec(Section):
    """A group of `count` workers with the same settings."""

    name: WorkerName = Field(
        description="Prefix of its log lines. With count above 1: NAME-1, NAME-2 and so on."
    )
    disaggregation_mode: RoleName = Field(
        description="prefill, decode or prefill_and_decode (also agg, pd)."
    )
    count: int = Field(
        default=1, gt=0, le=1024, description="Number of identical workers, at most 1024."
    )
    devices: Annotated[list[NonNegativeInt] | Literal["cpu"], BeforeValidator(_gpu_numbers)] = (
        Field(
            default="cpu",
            description="cpu, or GPU numbers ([0, 1] or 0,1). With count N they are divided into N"
            " equal parts.",
        )
    )
    flags: Annotated[dict[str, Any], BeforeValidator(partial(_by_field, WorkerConfig))] = Field(
        default_factory=dict,
        description="Flags of `dynamo-trtllm worker` without the leading dashes.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of its processes, added to the launcher's.",
    )

    @property
    def process_names(self) -> list[str]:
        """Return the names of the processes. With a count above 1, they are numbered from 1."""
        if self.count == 1:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(1, self.count + 1)]

    @model_validator(mode="after")
    def _devices_divide(self) -> WorkerSpec:
        if self.devices == "cpu":
            return self
        num_devices = len(self.devices)
        if num_devices == 0 or num_devices % self.count:
            raise ValueError(
                f"{num_devices} devices can't be divided equally among {self.count} workers"
            )
        return self


def _planner_flags(given: Any) -> Any:
    """Return the flags of the planner by field name; False: it is off."""
    # YAML 1.1 reads off as false, but not if it is quoted.
    if given is False or (isinstance(given, str) and given.lower() == "off"):
        return False
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"must be flags of `dynamo-trtllm planner`, or off; not {given!r}")
    return _by_field(PlannerConfig, given)


class DeploymentConfig(Section):
    """The deployment of one machine: services, frontend and workers."""

    namespace: Namespace = Field(
        default="dynamo", description="Namespace of the frontend and all workers."
    )
    services: ServicesConfig = Field(default=ServicesConfig(), description="etcd and NATS.")
    frontend: Annotated[
        dict[str, Any] | None, BeforeValidator(partial(_by_field, FrontendConfig))
    ] = Field(
        default_factory=dict,
        description="Flags of `dynamo-trtllm frontend` without the leading dashes. null: no"
        " frontend is started.",
    )
    planner: Annotated[dict[str, Any] | Literal[False] | None, BeforeValidator(_planner_flags)] = (
        Field(
            default=None,
            description="Flags of `dynamo-trtllm planner` without the leading dashes; or off: none"
            " is started. Default: one is started if there are elastic workers and the frontend has"
            " the limits slo-ttft-ms and slo-itl-ms. They are the default limits of the planner.",
        )
    )
    workers: list[WorkerSpec] = Field(min_length=1, description="Worker groups; at least one.")
    restart: RestartConfig = Field(
        default=RestartConfig(), description="Policy for processes that die."
    )
    ready_timeout_s: PositiveFloat = Field(
        default=120.0,
        description="Maximum seconds until a process is ready. If one takes longer at its first"
        " start, the deployment is stopped. After a restart, only this process is killed, and"
        " started again with twice the limit, up to eight times ready_timeout_s.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> DeploymentConfig:
        names = [worker.name for worker in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two workers are named {name!r}; give each its own name, or use count"
                )
        owners = dict.fromkeys(_OTHER_PROCESSES, "another process of a deployment")
        for worker in self.workers:
            for name in worker.process_names:
                if name in owners:
                    raise ValueError(
                        f"a process of workers {worker.name!r} and {owners[name]} are both named"
                        f" {name!r}; give the workers another name"
                    )
                owners[name] = f"one of workers {worker.name!r}"
        return self


def _check_exists(path: Path) -> None:
    """Raise ConfigError if there is no such file, but a shipped one has this name."""
    shipped = _SHIPPED / f"{path.name.removesuffix('.yaml')}.yaml"
    if not os.path.exists(find_file(path)) and os.path.exists(find_file(shipped)):
        raise ConfigError(f"there is no file {path}; did you mean {shipped}?", field="deployment")


def load_deployment(path: Path, environ: Mapping[str, str] | None = None) -> DeploymentConfig:
    """Read and check a deployment file.

    Args:
        path: the YAML file. One of `deploy/local/` may also be the package's own.
        environ: variables for references like `${NAME:-default}` in its values.

    Raises:
        ConfigError: the file is not valid. The message names the file and the path inside it.
    """
    _check_exists(path)
    content = read_yaml(find_file(path))
    data = {
        key: expand_env(value, environ or {}, f"{path}: {key}") for key, value in content.items()
    }
    return checked_deployment(data, str(path))


def checked_deployment(data: Mapping[str, Any], where: str) -> DeploymentConfig:
    """Check a deployment and all flags in it.

    Args:
        data: content of a deployment file, without references to variables.
        where: name of the file, for errors.

    Raises:
        ConfigError: the deployment is not valid.
    """
    deployment = _validate(DeploymentConfig, data, where, separator=": ")
    # Check every flag now: a process would report a wrong one only after others have started.
    _validate(FrontendConfig, deployment.frontend or {}, f"{where}: frontend")
    for index, worker in enumerate(deployment.workers):
        flags = {**worker.flags, "disaggregation_mode": worker.disaggregation_mode}
        _validate(WorkerConfig, flags, f"{where}: workers[{index}].flags")
    return deployment


def _validate(model: type[C], values: Mapping[str, Any], where: str, separator: str = ".") -> C:
    """Return checked settings.

    Args:
        model: class of the settings.
        values: values by field name.
        where: place of the settings, for errors.
        separator: stands in errors between this place and the path inside the settings.

    Raises:
        ConfigError: a value is wrong or missing.
    """
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        path = _path_in_file(error["loc"])
        place = f"{where}{separator}{path}" if path else where
        message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        if error["type"] == "missing":
            problem = " is missing"
        elif error["type"] == "value_error":
            problem = f": {message}"
        else:
            problem = f" is {error['input']!r}: {message}"
        raise ConfigError(f"{place}{problem}", field=path or None) from exc


def _path_in_file(location: Sequence[str | int]) -> str:
    """Return the place of an error of pydantic as a path like `workers[0].flags`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        # pydantic also names the tried alternative of a union, which the file does not contain.
        elif part.replace("-", "_").isidentifier():
            path += f".{part}"
    return path.removeprefix(".")

"""Define the base of all settings: field types, command-line options, connection settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.config import JsonDict

from dynamo_trtllm.config.engine_names import check_engine_name
from dynamo_trtllm.config.value_errors import value_error
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.number_types import MAX_INT64, MAX_SECONDS
from dynamo_trtllm.support.network.addresses import is_wildcard


def _role(given: object) -> object:
    """Return the role that a newer name of NVIDIA Dynamo means: `agg`, or `pd` for a worker that
    does both phases.
    """
    return Role.AGGREGATED if given in ("agg", "pd") else given


RoleName = Annotated[Role, BeforeValidator(_role)]
NonEmpty = Annotated[str, Field(min_length=1)]
PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT64)]
PositiveFloat = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT64)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MAX_SECONDS)]


def matching(pattern: str, message: str) -> AfterValidator:
    """Return a validator that accepts a text if the whole of it matches; otherwise the error is
    `message`.
    """
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(message)
        return value

    return AfterValidator(check)


def _reachable_host(value: str) -> str:
    if is_wildcard(value):
        raise ValueError(
            f"other workers cannot connect to {value}; give an address of this host here, and pass"
            f" {value} to --kv-transfer-bind-host"
        )
    return value


def _ip_address(value: str) -> str:
    # Its ValueError names the value.
    ip_address(value)
    return value


# 1 to 65535. gRPC would take 65536 + n for port n.
_PORT = r"0*(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
_SERVER = rf"(\[[0-9a-fA-F:]+\]|[^\s/:,@\[\]]+)(:{_PORT})?/?"  # host and port
_ORIGIN = r"[A-Za-z][A-Za-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?"
_ETCD = rf"\s*(https?://)?{_SERVER}\s*"
NAME = r"[^/.*>\s\x00-\x1f\x7f-\x9f]{1,256}"
NAME_RULE = "1 to 256 characters and no '/', '.', '*', '>', white space or control characters"
Namespace = Annotated[str, matching(NAME, f"must have {NAME_RULE}")]
Component = Annotated[
    str,
    matching(r"[A-Za-z0-9_-]{1,64}", "must have 1 to 64 letters, digits, '_' or '-'"),
]
Endpoint = Annotated[
    str,
    matching(
        rf"dyn://{NAME}\.{NAME}\.{NAME}",
        f"expected dyn://NAMESPACE.COMPONENT.ENDPOINT; each name must have {NAME_RULE}",
    ),
]
# Addresses of a cluster within one process. A name may follow, which tells clusters apart.
INPROC: Final = "inproc://"
MEMORY: Final = "memory://"
EtcdAddresses = Annotated[
    str,
    matching(
        f"{MEMORY}({NAME})?|{_ETCD}(,{_ETCD})*",
        "expected comma-separated addresses like http://localhost:2379, with a port from 1 to"
        " 65535, or memory:// for a cluster within one Python process",
    ),
]
NatsAddress = Annotated[
    str,
    matching(
        rf"{INPROC}({NAME})?|((nats|tls)://)?([^\s/@,]+@)?{_SERVER}",
        "expected an address like nats://localhost:4222, with a port from 1 to 65535, or inproc://"
        " for a cluster within one Python process",
    ),
]
# The subjects of replies begin with this name. NATS rejects one with wildcards or empty parts.
InboxPrefix = Annotated[
    str,
    matching(
        r"[^.*>\s]{1,64}(\.[^.*>\s]{1,64}){0,2}",
        "expected a name like _INBOX_worker or _INBOX_worker.prefill-1, with at most 64 characters"
        " and no '*', '>' or white space between its points",
    ),
]
Origins = Annotated[
    str,
    matching(
        rf"\*|{_ORIGIN}(,{_ORIGIN})*",
        "expected * or comma-separated origins like https://chat.example.org",
    ),
]
OtlpEndpoint = Annotated[
    str, matching(r"https?://[^\s/@]+(/\S*)?", "expected a URL like http://localhost:4318")
]
ReachableHost = Annotated[str, AfterValidator(_reachable_host)]
IpAddress = Annotated[str, AfterValidator(_ip_address)]
Port = Annotated[int, Field(ge=0, le=65535)]
EngineName = Annotated[str, AfterValidator(check_engine_name)]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
LOG_LEVEL = "DYN_LOG"  # variables of NVIDIA Dynamo
LOG_FORMAT = ("DYN_LOGGING_JSONL", "DYN_LOGGING_CONSOLE_FORMAT")

DEFAULT_SOURCE = "default"
CODE_SOURCE = "configuration"


class ClusterRole(StrEnum):
    """What a process may do in etcd and NATS, as far as these have a user for each role."""

    FRONTEND = "frontend"
    WORKER = "worker"
    PLANNER = "planner"
    TOOL = "tool"  # a command of an operator, such as `status`


# Stands for the role in the path of a certificate, key or credentials file, so that the processes
# of all roles can have the same settings.
ROLE_IN_PATH: Final = "{role}"
_ROLE_HELP = " {role} in its path stands for frontend, worker, planner, or tool for other commands."


# The titles of the groups of flags in --help, in this order.
Group = Literal[
    "this command",
    "model",
    "engine",
    "role",
    "KV cache and transfer",
    "load",
    "HTTP and routing",
    "HTTP access",
    "control plane",
    "process",
]
GROUPS: tuple[Group, ...] = get_args(Group)


def option(
    group: Group,
    default: Any,
    *,
    aliases: Sequence[str] = (),
    env: str | Sequence[str] = (),
    positional: bool = False,
    const_flags: Mapping[str, str] | None = None,
    is_address: bool = False,
    words: Sequence[str] = (),
    is_secret: bool = False,
    help: str,
) -> Any:
    """Return a pydantic field that is also a command-line option.

    Args:
        group: title of the field's group in `--help`.
        default: default value; `...` for a required field.
        aliases: further names of the field's flag; for a positional field, flags that set it, too.
        env: well-known environment variables, read in addition to the DYN_TRTLLM_ one.
        positional: the field is a positional argument.
        const_flags: flags without a value, each mapped to the value that it sets.
        is_address: the value may contain a password, which is masked when printed.
        words: the usual values of a text, for `--help` and the completion of shells.
        is_secret: the value is never printed, and child processes get it in their environment.
        help: text of the flag in `--help`.
    """
    extra: JsonDict = {
        "group": group,
        "aliases": list(aliases),
        "env": [env] if isinstance(env, str) else list(env),
        "positional": positional,
        "const_flags": dict(const_flags or {}),
        "is_address": is_address,
        "words": list(words),
        "is_secret": is_secret,
    }
    return Field(default=default, description=help, json_schema_extra=extra, repr=not is_secret)


class _RaisesConfigError(type(BaseModel)):  # type: ignore[misc]
    """Creates settings. A wrong value in Python code raises ConfigError, as one in a flag does."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as exc:
            raise value_error(cls, exc) from exc


# For type checkers, settings have the metaclass of pydantic, which tells them the fields.
_SETTINGS_TYPE: Any = _RaisesConfigError


class Config(BaseModel, metaclass=_SETTINGS_TYPE):  # type: ignore[metaclass]
    """Base of all settings: immutable, rejects unknown fields, and stores the source of each value.

    The docstring of a command's settings is part of its help: the first line describes the command,
    the rest is what `--help` ends with.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def with_sources(self, sources: Mapping[str, str]) -> Self:
        """Return a copy with a source for each field; `source_of` returns it."""
        copy = self.model_copy()
        copy._sources = dict(sources)
        return copy

    def source_of(self, name: str) -> str:
        """Return a setting's source: `flag --x`, `environment X`, `default`, or `configuration` if
        code set it.
        """
        return self._sources.get(name) or (
            CODE_SOURCE if name in self.model_fields_set else DEFAULT_SOURCE
        )

    def __eq__(self, other: object) -> bool:
        """Compare the values only, not their sources."""
        return isinstance(other, Config) and type(self) is type(other) and dict(self) == dict(other)


class ConnectionConfig(Config):
    """Settings that workers, frontends and clear_namespace share: etcd, NATS, namespace,
    logging.
    """

    cluster_role: ClassVar[ClusterRole] = ClusterRole.TOOL

    namespace: Namespace = option(
        "control plane",
        "dynamo",
        env="DYN_NAMESPACE",
        help="Name of the deployment. Workers and frontends see only instances of the same"
        " namespace.",
    )
    etcd_endpoints: EtcdAddresses = option(
        "control plane",
        "http://localhost:2379",
        env="ETCD_ENDPOINTS",
        is_address=True,
        help="etcd addresses, separated by commas.",
    )
    etcd_ca: Path | None = option(
        "control plane",
        None,
        env="ETCD_AUTH_CA",
        help="PEM file of the CA that signed etcd's certificate, for https:// endpoints.",
    )
    etcd_cert: Path | None = option(
        "control plane",
        None,
        env="ETCD_AUTH_CLIENT_CERT",
        help="PEM file of the client certificate for etcd." + _ROLE_HELP,
    )
    etcd_key: Path | None = option(
        "control plane",
        None,
        env="ETCD_AUTH_CLIENT_KEY",
        help="PEM file of the client certificate's key." + _ROLE_HELP,
    )
    etcd_credentials_file: Path | None = option(
        "control plane",
        None,
        help="File with one line USER:PASSWORD for etcd. It is read again when the process logs in"
        " again." + _ROLE_HELP,
    )
    nats_server: NatsAddress = option(
        "control plane",
        "nats://localhost:4222",
        env="NATS_SERVER",
        is_address=True,
        help="NATS address; tls:// requires TLS.",
    )
    nats_ca: Path | None = option(
        "control plane",
        None,
        env="NATS_CA",
        help="PEM file of the CA that signed NATS' certificate, for a tls:// address. Default: the"
        " certificate authorities of the system.",
    )
    nats_cert: Path | None = option(
        "control plane",
        None,
        env="NATS_CERT",
        help="PEM file of the client certificate for NATS. It is read again at each connection."
        + _ROLE_HELP,
    )
    nats_key: Path | None = option(
        "control plane",
        None,
        env="NATS_KEY",
        help="PEM file of the client certificate's key." + _ROLE_HELP,
    )
    nats_credentials_file: Path | None = option(
        "control plane",
        None,
        help="File with one line USER:PASSWORD for NATS. It is read again at each connection."
        + _ROLE_HELP,
    )
    nats_inbox_prefix: InboxPrefix | None = option(
        "control plane",
        None,
        help="Beginning of the NATS subjects at which this process receives replies. Its user must"
        " be allowed to subscribe to them. Default: _INBOX_frontend, _INBOX_worker, _INBOX_planner,"
        " or _INBOX_tool for the other commands.",
    )
    log_level: LogLevel = option("process", "info", env=LOG_LEVEL, help="Minimum log level.")
    log_format: LogFormat = option(
        "process",
        "text",
        env=LOG_FORMAT,
        help="Format of log lines: text, or json (one object per line).",
    )

    @property
    def uses_inproc_plane(self) -> bool:
        """Return True if requests stay within this process."""
        return self.nats_server.startswith(INPROC)

    def file_of_role(self, path: Path | None) -> Path | None:
        """Return the path of a file, in which {role} stands for the role of this process."""
        if path is None:
            return None
        return Path(str(path).replace(ROLE_IN_PATH, self.cluster_role))

    @property
    def inbox_prefix(self) -> str:
        """Return the beginning of the subjects at which this process receives replies."""
        return self.nats_inbox_prefix or f"_INBOX_{self.cluster_role}"

    @property
    def uses_memory_discovery(self) -> bool:
        """Return True if instances are registered in the memory of this process."""
        return self.etcd_endpoints.startswith(MEMORY)

    @model_validator(mode="after")
    def _servers_fit(self) -> Self:
        """Reject instances in etcd that other processes can't call."""
        if self.uses_inproc_plane and not self.uses_memory_discovery:
            raise ValueError(
                f"--nats-server {self.nats_server} needs --etcd-endpoints {MEMORY}: etcd would list"
                " workers for processes that can't reach them; set both, or use a NATS server"
            )
        return self


class ProcessConfig(ConnectionConfig):
    """Settings that workers and frontends share."""

    recorder_dir: NonEmpty | None = option(
        "process",
        None,
        help="Folder of the flight recorder's files, on tmpfs. Default: dynamo_trtllm in"
        " $XDG_RUNTIME_DIR, otherwise /dev/shm/dynamo_trtllm-UID. off: record nothing.",
    )

"""What all settings are made of: their types, how one shows on the command line, and what worker and frontend share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from pydantic.config import JsonDict

from dynamo_trtllm.network.addresses import is_wildcard

_ALIKE = 0.7  # of 1; at 0.6 --help was offered for --tp


def suggest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that `name` is probably a mistyping of, or None. Dashes and capitals don't count."""
    plain = {_plain(each): each for each in allowed}
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_ALIKE)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    return "".join("  ".join([*map(str.ljust, row, widths), row[-1]]) + "\n" for row in rows)


PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _one_address(value: str) -> str:
    if is_wildcard(value):
        raise ValueError(
            f"{value} is not an address that other workers can connect to; give an address of this host here, and "
            "0.0.0.0 or :: to --kv-transfer-bind-host"
        )
    return value


def _ip_address(value: str) -> str:
    ip_address(value)  # its ValueError names the value
    return value


ReachableHost = Annotated[str, AfterValidator(_one_address)]
IpAddress = Annotated[str, AfterValidator(_ip_address)]
Port = Annotated[int, Field(ge=0, le=65535)]
EngineName = Literal["trtllm", "vllm", "torch", "mock"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

DEFAULT_SOURCE = "default"
CODE_SOURCE = "configuration"

MODEL = "model"
ENGINE = "engine"
ROLE = "role"
KV = "KV cache and hand-off"
CONTROL = "control plane"
HTTP = "HTTP and routing"
LOAD = "load"
PROCESS = "process"
GROUPS = (MODEL, ENGINE, ROLE, KV, LOAD, HTTP, CONTROL, PROCESS)  # in the order of --help

_NAME = re.compile(r"[^/.*>\s\x00-\x1f\x7f-\x9f]{1,256}")
_HOST = r"(\[[0-9a-fA-F:]+\]|[^\s/:,@\[\]]+)"
_ETCD = re.compile(rf"(https?://)?{_HOST}(:\d{{1,5}})?/?")
_NATS = re.compile(rf"((nats|tls)://)?([^\s/@,]+@)?{_HOST}(:\d{{1,5}})?/?")


def cli_option(
    group: str,
    *flags: str,
    env: str | None = None,
    positional: bool = False,
    const_flags: Mapping[str, str] | None = None,
    is_address: bool = False,
) -> JsonDict:
    """Return how a field shows on the command line, as `json_schema_extra` of its pydantic field.

    Args:
        group: title of the field's group in `--help`.
        flags: further flags for the same field.
        env: environment variable by which others know the setting, beside our own.
        positional: the field is an argument without a flag.
        const_flags: flags that take no value, each with the value that it stands for.
        is_address: the value may hold a password, which is never printed.
    """
    return {
        "group": group,
        "flags": list(flags),
        "env": env,
        "positional": positional,
        "const_flags": dict(const_flags or {}),
        "is_address": is_address,
    }


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    examples: ClassVar[str] = ""  # launch lines shown under --help
    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def with_sources(self, sources: Mapping[str, str]) -> Self:
        """The same settings, each with the place that it comes from."""
        noted = self.model_copy()
        noted._sources = dict(sources)
        return noted

    def source_of(self, name: str) -> str:
        """Where a setting comes from: `flag --x`, `environment X`, `default`; `configuration` where code set it."""
        return self._sources.get(name) or (CODE_SOURCE if name in self.model_fields_set else DEFAULT_SOURCE)

    def __eq__(self, other: object) -> bool:
        """Where values come from is no part of what they are."""
        return isinstance(other, Config) and type(self) is type(other) and dict(self) == dict(other)


class ConnectionConfig(Config):
    """What worker and frontend share."""

    namespace: str = Field(
        default="dynamo",
        description="deployment name; workers and frontends see only their own",
        json_schema_extra=cli_option(CONTROL, env="DYN_NAMESPACE"),
    )
    etcd_endpoints: str = Field(
        default="http://localhost:2379",
        description="etcd addresses, comma-separated",
        json_schema_extra=cli_option(CONTROL, env="ETCD_ENDPOINTS", is_address=True),
    )
    etcd_ca: Path | None = Field(
        default=None,
        description="PEM file of the authority that signed etcd's certificate, for https:// endpoints",
        json_schema_extra=cli_option(CONTROL, env="ETCD_AUTH_CA"),
    )
    etcd_cert: Path | None = Field(
        default=None,
        description="PEM file of the client certificate that etcd asks for",
        json_schema_extra=cli_option(CONTROL, env="ETCD_AUTH_CLIENT_CERT"),
    )
    etcd_key: Path | None = Field(
        default=None,
        description="PEM file of that certificate's key",
        json_schema_extra=cli_option(CONTROL, env="ETCD_AUTH_CLIENT_KEY"),
    )
    nats_server: str = Field(
        default="nats://localhost:4222",
        description="NATS address",
        json_schema_extra=cli_option(CONTROL, env="NATS_SERVER", is_address=True),
    )
    log_level: LogLevel = Field(
        default="info", description="least severe level logged", json_schema_extra=cli_option(PROCESS)
    )
    log_format: LogFormat = Field(
        default="text",
        description="format of log lines: text, or json (one object per line)",
        json_schema_extra=cli_option(PROCESS),
    )

    @field_validator("namespace")
    @classmethod
    def _namespace_is_a_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "must have 1 to 256 characters and no '/', '.', '*', '>', white space or control characters"
            )
        return value

    @field_validator("etcd_endpoints")
    @classmethod
    def _etcd_addresses(cls, value: str) -> str:
        for part in value.split(","):
            if not _ETCD.fullmatch(part.strip()):
                raise ValueError("expected comma-separated addresses like http://localhost:2379")
        return value

    @field_validator("nats_server")
    @classmethod
    def _nats_address(cls, value: str) -> str:
        if not _NATS.fullmatch(value):
            raise ValueError("expected an address like nats://localhost:4222")
        return value

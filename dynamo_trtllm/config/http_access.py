"""Define the settings that decide who may use a frontend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from dynamo_trtllm.config.config_base import Config, ProcessConfig, matching, option
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network.addresses import LOOPBACK, is_loopback
from dynamo_trtllm.support.tls_files import ClientTlsFiles, TlsFiles

_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]{16,256}")  # a comma separates keys in the environment


def _key_list(given: object) -> object:
    """Return the keys of a value, which is a text from the environment or a list from YAML.

    The error for a value of another type does not quote it, because it may be a key.
    """
    if isinstance(given, str):
        return tuple(part.strip() for part in given.split(","))
    if not isinstance(given, list | tuple) or not all(isinstance(key, str) for key in given):
        raise ValueError("expected API keys as texts")
    return tuple(given)


def _check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ValueError(
                "an API key must have 16 to 256 visible ASCII characters and no comma; openssl rand"
                " -hex 32 makes one"
            )
    if len(set(keys)) < len(keys):
        raise ValueError("an API key is given twice; remove one of them")
    return keys


ApiKeyList = Annotated[tuple[str, ...], BeforeValidator(_key_list), AfterValidator(_check_keys)]


def _first_key(given: object) -> object:
    """Return the first key of a variable. It may have several, because frontends read it, too."""
    return given.partition(",")[0].strip() if isinstance(given, str) else given


SentApiKey = Annotated[
    str,
    BeforeValidator(_first_key),
    matching(r"[\x21-\x7e]{1,256}", "an API key has 1 to 256 visible ASCII characters"),
]
HostNames = Annotated[
    str,
    matching(
        r"\*|[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*",
        "expected * or comma-separated names like api.example.org, without ports",
    ),
]


class HttpClientConfig(Config):
    """The settings with which a command proves to a frontend who it is."""

    api_key: SentApiKey | None = option(
        "HTTP access",
        None,
        is_secret=True,
        help="API key to send. Prefer the environment: the users of the machine can read command"
        " lines. Default: none.",
    )
    tls_client_cert_file: Path | None = option(
        "HTTP access",
        None,
        help="PEM file of the client certificate, for https:// frontends that need one"
        " (--tls-client-ca-file). Default: none.",
    )
    tls_client_key_file: Path | None = option(
        "HTTP access",
        None,
        help="PEM file of the client certificate's private key, which only this user may read.",
    )

    @property
    def client_tls_files(self) -> ClientTlsFiles | None:
        """Return the files of the client certificate; None: there is none."""
        if self.tls_client_cert_file is None or self.tls_client_key_file is None:
            return None
        return ClientTlsFiles(self.tls_client_cert_file, self.tls_client_key_file)

    @model_validator(mode="after")
    def _certificate_is_complete(self) -> Self:
        """Reject a certificate without its key, and a key without its certificate."""
        if (self.tls_client_cert_file is None) != (self.tls_client_key_file is None):
            raise ValueError(
                "only one of --tls-client-cert-file and --tls-client-key-file is set; set both"
            )
        return self


class HttpAccessConfig(ProcessConfig):
    """The settings of workers and frontends that decide who may use their HTTP ports."""

    api_key: ApiKeyList = option(
        "HTTP access",
        (),
        is_secret=True,
        help="API key that clients must send, for all paths and without limits. May be repeated; in"
        " the environment, commas separate keys. The users of the machine can read command lines,"
        " so prefer the environment.",
    )
    api_keys_file: Path | None = option(
        "HTTP access",
        None,
        help="File of API keys with names, models and limits, written by dynamo-trtllm keys. It is"
        " read again when it changes.",
    )
    allow_anonymous: bool = option(
        "HTTP access",
        False,
        help="Serve clients of other machines without API keys. Restrict the network instead.",
    )

    tls_cert_file: Path | None = option(
        "HTTP access",
        None,
        aliases=("--tls-cert-path",),
        env="DYN_TLS_CERT_PATH",
        help="PEM file of the certificate of this server, with those of intermediate CAs behind it."
        " The HTTP port of a frontend and the system port of a worker then need https. The files of"
        " TLS are read again when they change.",
    )
    tls_key_file: Path | None = option(
        "HTTP access",
        None,
        aliases=("--tls-key-path",),
        env="DYN_TLS_KEY_PATH",
        help="PEM file of the certificate's private key, which only this user may read.",
    )
    tls_client_ca_file: Path | None = option(
        "HTTP access",
        None,
        aliases=("--tls-client-ca-cert-path",),
        env="DYN_TLS_CLIENT_CA_CERT_PATH",
        help="PEM file of the CAs of client certificates. Clients then need a certificate for all"
        " paths but /live and /ready.",
    )

    @property
    def tls_files(self) -> TlsFiles | None:
        """Return the files of the server's TLS; None: it serves http."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    @property
    def needs_certificate(self) -> bool:
        """Return whether clients need a certificate."""
        return self.tls_client_ca_file is not None

    @property
    def needs_api_key(self) -> bool:
        """Return whether clients need an API key."""
        return bool(self.api_key) or self.api_keys_file is not None

    @model_validator(mode="after")
    def _access_is_clear(self) -> Self:
        """Reject keys that nothing checks, and TLS without one of its files."""
        needed = {
            "--api-key": bool(self.api_key),
            "--api-keys-file": self.api_keys_file is not None,
            "--tls-client-ca-file": self.needs_certificate,
        }
        for flag, is_set in needed.items():
            if self.allow_anonymous and is_set:
                raise ValueError(f"--allow-anonymous contradicts {flag}; remove one of them")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            if self.tls_cert_file is None:
                raise ValueError("--tls-key-file needs --tls-cert-file, too; pass both")
            raise ValueError("--tls-cert-file needs --tls-key-file, too; pass both")
        if self.needs_certificate and self.tls_files is None:
            raise ValueError("--tls-client-ca-file needs --tls-cert-file and --tls-key-file")
        return self


# The settings that decide who may use an HTTP port.
ACCESS_FIELDS: Final = frozenset(HttpAccessConfig.model_fields) - frozenset(
    ProcessConfig.model_fields
)


class FrontendAccessConfig(HttpAccessConfig):
    """The settings of a frontend that decide who may use it."""

    http_host: str = option(
        "HTTP and routing",
        LOOPBACK,
        env="DYN_HTTP_HOST",
        aliases=("--host",),
        help="Address to listen on. 0.0.0.0 accepts connections from other machines; it needs API"
        " keys, --tls-client-ca-file or --allow-anonymous.",
    )
    allowed_hosts: HostNames | None = option(
        "HTTP access",
        None,
        help="Names by which clients call this server (in the header Host), separated by commas; *"
        " for all. IP addresses and names without a dot are always allowed. Default: none on a"
        " loopback address without API keys, so that web pages cannot reach it under names of their"
        " own; otherwise all.",
    )

    @property
    def is_exposed(self) -> bool:
        """Return whether other machines can connect."""
        return not is_loopback(self.http_host)

    @property
    def host_names(self) -> frozenset[str] | None:
        """Return the names by which clients may call this server; None: all."""
        if self.allowed_hosts is None:
            return None if self.needs_api_key or self.is_exposed else frozenset()
        names = frozenset(self.allowed_hosts.lower().split(","))
        return None if "*" in names else names

    def check_exposure(self) -> None:
        """Check that other machines can't connect without API keys, unless this is allowed.

        Raises:
            ConfigError: they can.
        """
        checks_clients = self.needs_api_key or self.needs_certificate
        if self.is_exposed and not (checks_clients or self.allow_anonymous):
            raise ConfigError(
                f"--http-host {self.http_host} lets other machines connect, and without API keys"
                f" they all can use the API; set {ENV_PREFIX}API_KEY (in Python: api_key) or"
                " --api-keys-file, or listen on 127.0.0.1. If the network admits only trusted"
                f" clients, set --allow-anonymous ({ENV_PREFIX}ALLOW_ANONYMOUS=true)",
                field="http_host",
            )

"""Connect to the members of an etcd cluster: failover, TLS, and the user of this process.

A user logs in with a client certificate whose common name is the name of the user, or with a
password. For a password, etcd returns a token. The token is valid until etcd restarts, or until
some minutes after the last call.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import grpc.aio

from dynamo_trtllm.cluster.credentials import CredentialsFile
from dynamo_trtllm.cluster.discovery import etcd_api as api
from dynamo_trtllm.cluster.discovery.etcd_api import EtcdCalls
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable, UserRejected
from dynamo_trtllm.support.file_watch import FileVersion, version_of
from dynamo_trtllm.support.trusted_file import UntrustedFile, read_trusted

log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 3.0
_MAX_KEY_BYTES: Final = 1 << 20
Metadata: TypeAlias = tuple[tuple[str, str], ...]
_PORT = re.compile(r":\d+$")
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # share no back-off with other channels of the process
    ("grpc.keepalive_time_ms", 10_000),  # detects a frozen peer; etcd rejects less than 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
    # Without this, gRPC would send the calls to the proxy of $http_proxy, also those to 127.0.0.1.
    ("grpc.enable_http_proxy", 0),
]
# Parts of the error texts of gRPC if TLS fails.
_TLS_FAILED: Final = (
    "Tls handshake failed",
    "Handshake read failed",  # the server does not use TLS, or ended the handshake
    "verification check failed",  # the name in the certificate is another one
)
# gRPC's error text if an http:// endpoint uses TLS. It has other causes, too.
_CLOSED_AT_ONCE: Final = "failed to connect to all addresses; last error: UNAVAILABLE: "
# Parts of the error texts of etcd.
_NO_USERS: Final = "authentication is not enabled"
_TOKEN_REJECTED: Final = (
    "invalid auth token",
    "revision of auth store is old",
    "user name is empty",  # users were added to etcd after the login
)
_USER_REJECTED: Final = (
    *_TOKEN_REJECTED,
    "permission denied",
    "authentication failed, invalid user ID or password",
)


def parse_endpoints(text: str) -> list[str]:
    """Return `host:port` of each comma-separated endpoint of a `ConnectionConfig`.

    The default port is 2379.
    """
    endpoints = []
    for part in text.split(","):
        host = part.strip().rpartition("//")[2].rstrip("/")
        endpoints.append(host if _PORT.search(host) else f"{host}:2379")
    return endpoints


def channel_credentials(config: ConnectionConfig) -> grpc.ChannelCredentials | None:
    """Return TLS credentials for https:// endpoints, or None for http:// ones.

    Raises:
        ConfigError: only some endpoints are https://, or the files are incomplete, unreadable, no
            certificates and keys, or not needed.
    """
    schemes = {part.strip().startswith("https://") for part in config.etcd_endpoints.split(",")}
    if len(schemes) > 1:
        raise ConfigError(
            f"the etcd endpoints {config.etcd_endpoints} mix https:// and http://; use https:// for"
            " all of them or for none",
            field="etcd_endpoints",
        )
    if schemes != {True}:
        if config.etcd_ca or config.etcd_cert or config.etcd_key:
            raise ConfigError(
                "--etcd-ca, --etcd-cert or --etcd-key is set, but the endpoints are http://; use"
                " https:// endpoints or unset ETCD_AUTH_CA, ETCD_AUTH_CLIENT_CERT and"
                " ETCD_AUTH_CLIENT_KEY",
                field="etcd_endpoints",
            )
        return None
    if (config.etcd_cert is None) != (config.etcd_key is None):
        raise ConfigError(
            "only one of --etcd-cert and --etcd-key is set; set both", field="etcd_cert"
        )
    authority = _pem(config, "etcd_ca")
    key = _pem(config, "etcd_key")
    certificate = _pem(config, "etcd_cert")
    _check_pem(config)
    return grpc.ssl_channel_credentials(
        root_certificates=authority, private_key=key, certificate_chain=certificate
    )


def _check_pem(config: ConnectionConfig) -> None:
    """Raise ConfigError if a file is not in PEM form, or if key and certificate do not fit.

    gRPC would only say that it failed to create a handshaker, at each connection.
    """

    def no_passphrase() -> str:
        """Reject an encrypted key, for which OpenSSL would ask on the terminal and wait."""
        raise OSError("the key has a passphrase; remove it with openssl pkey")

    authority = config.file_of_role(config.etcd_ca)
    certificate = config.file_of_role(config.etcd_cert)
    key = config.file_of_role(config.etcd_key)
    named = [f"--etcd-ca {authority}"] if authority else []
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate and key:
            named = [f"--etcd-cert {certificate} and --etcd-key {key}"]
            context.load_cert_chain(certificate, key, password=no_passphrase)
    except OSError as exc:
        raise ConfigError(
            f"{' '.join(named)} can't be used: {exc.strerror or exc}; check that they are PEM"
            " files, and that the key is that of the certificate",
            field="etcd_cert" if certificate else "etcd_ca",
        ) from exc


def _pem(config: ConnectionConfig, field: str) -> bytes | None:
    """Return the content of the PEM file that a setting names. None: the setting is not used."""
    path = config.file_of_role(getattr(config, field))
    if path is None:
        return None
    flag = "--" + field.replace("_", "-")
    try:
        if field == "etcd_key":
            return read_trusted(path, _MAX_KEY_BYTES, is_secret=True)
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"{flag} {path} can't be read: {exc.strerror or exc}", field=field
        ) from exc
    except UntrustedFile as exc:
        raise ConfigError(f"{flag} {path} {exc.problem}", field=field) from exc


class _Call(NamedTuple):
    """The calls of one member of etcd, and the token of the user for a call."""

    etcd: EtcdCalls
    metadata: Metadata


class EtcdConnection:
    """Channels to all members of one etcd cluster. After a failed call, the next member is used.

    Create it on a running event loop.

    Raises:
        ConfigError: endpoints and certificate files don't fit together, or a file can't be read.
    """

    def __init__(self, config: ConnectionConfig) -> None:
        self.addresses = parse_endpoints(config.etcd_endpoints)
        self.closed = False
        self.answered = False  # True after the first successful call
        self._config = config
        self._credentials: CredentialsFile | None = None
        credentials_file = config.file_of_role(config.etcd_credentials_file)
        if credentials_file is not None:
            self._credentials = CredentialsFile(credentials_file, "etcd_credentials_file")
        self._token: str | None = None  # None: log in before the next call
        self._logging_in = asyncio.Lock()
        self._current = 0  # index of the endpoint in use
        # All channels, including those with former certificates.
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[EtcdCalls] = []
        # Endpoints with which TLS failed, with the error. A name can have several addresses, as
        # `localhost` has. gRPC names the error of one of them, so each error is kept until a call
        # succeeds.
        self._tls_failures: dict[int, str] = {}
        self._problem = ""  # why changed certificates could not be read; "": they are in use
        self._read_versions = _file_versions(config)
        self._open_channels()

    def _open_channels(self) -> None:
        credentials = channel_credentials(self._config)
        connect = grpc.aio.insecure_channel
        if credentials is not None:
            connect = partial(grpc.aio.secure_channel, credentials=credentials)
        channels = [connect(f"dns:///{address}", options=_OPTIONS) for address in self.addresses]
        self._channels += channels
        self._calls = [EtcdCalls(channel) for channel in channels]

    async def call(self, name: str, request: Any) -> Any:
        """Make a call of `EtcdCalls`, which must not be a stream, and return the reply.

        Raises:
            Unreachable: etcd does not answer, or rejects the user of this process.
        """
        token_before = self._token
        try:
            async with self.attempt() as (etcd, metadata):
                return await getattr(etcd, name)(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except UserRejected:
            was_token_rejected = token_before is not None and self._token is None
            if not was_token_rejected:
                raise
        # The token was rejected and removed, so this attempt logs in again.
        async with self.attempt() as (etcd, metadata):
            return await getattr(etcd, name)(request, timeout=CALL_TIMEOUT_S, metadata=metadata)

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[_Call]:
        """Log in if necessary, and raise failures of the block as Unreachable.

        grpc.aio 1.85 raises InvalidStateError for a write to a broken call, and CancelledError or
        UsageError for a call that `aclose` ended.
        """
        index = self._current
        etcd = self._calls[index]
        try:
            yield _Call(etcd, await self._metadata(etcd))
            self.answered = True
            self._tls_failures.pop(index, None)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as exc:
            # Another call may have changed to the next endpoint already.
            if index == self._current:
                self._current = (index + 1) % len(self._calls)
            self._reopen_if_changed()
            raise self._failure(index, exc) from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            # If nothing has cancelled this task, `aclose` has ended the call.
            if self.closed and task is not None and not task.cancelling():
                raise self.unreachable(index, "closed") from exc
            raise

    async def _metadata(self, etcd: EtcdCalls) -> Metadata:
        """Return the token of the user as metadata of a call. Log in if there is no token."""
        if self._credentials is None:
            return ()
        async with self._logging_in:
            if self._token is None:
                self._token = await self._log_in(etcd, self._credentials)
        return (("token", self._token),) if self._token else ()

    async def _log_in(self, etcd: EtcdCalls, file: CredentialsFile) -> str:
        """Log in, and return a token, or "" if etcd has no users yet."""
        user, password = file.current()
        request = api.AuthenticateRequest(name=user, password=password)
        try:
            reply = await etcd.authenticate(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            if _NO_USERS in (exc.details() or ""):
                return ""
            raise
        return str(reply.token)

    def _failure(self, index: int, error: Exception) -> Unreachable:
        """Return the error of a call. If the token is no longer valid, remove it."""
        if not isinstance(error, grpc.aio.AioRpcError):
            return self.unreachable(index, str(error))
        details = error.details() or ""
        reason = f"{error.code().name}: {details}"
        # A token names the change of etcd's data at which it was made. An etcd that has lost its
        # data, or has older ones of a backup, waits for this change and never answers. So the next
        # call logs in again.
        has_no_answer = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if has_no_answer or any(text in details for text in _TOKEN_REJECTED):
            self._token = None
        if not any(text in details for text in _USER_REJECTED):
            return self.unreachable(index, reason)
        return UserRejected(
            f"etcd at {self.addresses[index]} rejects this process, {self._identity()} ({reason});"
            " check --etcd-credentials-file or --etcd-cert, and the permissions of this user",
            field="etcd_endpoints",
        )

    def _identity(self) -> str:
        """Return, as text for users, as which user this process logs in."""
        if self._credentials is not None:
            return self._credentials.identity()
        certificate = self._config.file_of_role(self._config.etcd_cert)
        if certificate is not None:
            return f"the user of certificate {certificate}"
        return "a client without a user"

    def unreachable(self, index: int | None, reason: str) -> Unreachable:
        """Return the error that an endpoint did not answer. None: the current endpoint."""
        if index is None:
            index = self._current
        address = self.addresses[index]
        if any(text in reason for text in _TLS_FAILED):
            self._tls_failures[index] = reason
        if index in self._tls_failures:
            return Unreachable(
                f"TLS with etcd at {address} fails ({self._tls_failures[index]}); check --etcd-ca,"
                " --etcd-cert and --etcd-key, the certificate of etcd, and that etcd uses TLS",
                field="etcd_ca",
            )
        uses_tls = self._config.etcd_endpoints.strip().startswith("https://")
        hint = ""
        if _CLOSED_AT_ONCE in reason and not uses_tls:
            hint = "; if etcd uses TLS, its endpoints begin with https://"
        return Unreachable(
            f"etcd at {address} did not answer ({reason}); check --etcd-endpoints and that etcd"
            f" runs{hint}",
            field="etcd_endpoints",
        )

    def _reopen_if_changed(self) -> None:
        """Open new channels if a certificate has changed, because gRPC reads certificates once.

        The former channels stay open, because a watch may still run on one.
        """
        files = _file_versions(self._config)
        # A problem, such as too few open files, may pass without a change of the files.
        if self.closed or (files == self._read_versions and not self._problem):
            return
        self._read_versions = files
        try:
            self._open_channels()
        except ConfigError as exc:
            if exc.message != self._problem:
                log.error("the certificates that were read before are used: %s", exc.message)
            self._problem = exc.message
        else:
            self._problem = ""
            log.info("certificates for etcd were read again")

    async def aclose(self) -> None:
        """Cancel running calls and close the connections. Idempotent."""
        self.closed = True
        for channel in self._channels:
            await channel.close()


def _file_versions(config: ConnectionConfig) -> list[FileVersion | None]:
    """Return values that change when a certificate file or its permissions change.

    None: there is no file.
    """
    paths = [
        config.file_of_role(setting)
        for setting in (config.etcd_ca, config.etcd_cert, config.etcd_key)
    ]
    return [None if path is None else version_of(path) for path in paths]

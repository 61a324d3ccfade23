"""Connect clients of nats-py with credentials and TLS, and close them, within limits."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from dynamo_trtllm.cluster.credentials import Credentials, CredentialsFile
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.trusted_file import UntrustedFile, read_trusted

log = logging.getLogger(__name__)

_MAX_KEY_BYTES: Final = 1 << 20
_CLOSE_TIMEOUT_S = 2
_CANCEL_AGAIN_S = 0.1  # time between two cancels of a task
_RECONNECT_S: Final = 0.1  # time between two attempts to connect
# The longest time between two attempts while the server rejects this process. The attempts become
# less frequent, because a rejection lasts until someone corrects the credentials.
_MAX_REJECTED_S: Final = 5.0
_CONNECT_OPTIONS: Final[dict[str, Any]] = {
    "reconnect_time_wait": _RECONNECT_S,
    "max_reconnect_attempts": -1,
    "ping_interval": 2,
    "max_outstanding_pings": 2,
    "pending_size": 1 << 40,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAccess:
    """How a process proves to NATS who it is, and where it receives replies.

    Args:
        inbox_prefix: begin of the subjects of replies to this process.
        credentials_file: file with the user and the password of this process.
        ca: PEM file of the CA of the server's certificate. None: the CAs of the system.
        cert: PEM file of the client certificate.
        key: PEM file of the key of the client certificate.
    """

    inbox_prefix: str = "_INBOX"
    credentials_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of(cls, config: ConnectionConfig) -> Self:
        """Return the access that the settings of a process describe.

        Raises:
            ConfigError: a file would not be used, or there are two passwords.
        """
        if (config.nats_cert is None) != (config.nats_key is None):
            raise ConfigError(
                "only one of --nats-cert and --nats-key is set; set both", field="nats_cert"
            )
        has_tls_file = config.nats_ca is not None or config.nats_cert is not None
        if has_tls_file and not config.nats_server.startswith("tls://"):
            raise ConfigError(
                "--nats-ca or --nats-cert is set, but --nats-server does not begin with tls://; use"
                " a tls:// address, or unset NATS_CA, NATS_CERT and NATS_KEY",
                field="nats_server",
            )
        if config.nats_credentials_file is not None and "@" in config.nats_server:
            raise ConfigError(
                "--nats-server has a user, and --nats-credentials-file is set, too; leave one out",
                field="nats_credentials_file",
            )
        return cls(
            inbox_prefix=config.inbox_prefix,
            credentials_file=config.file_of_role(config.nats_credentials_file),
            ca=config.nats_ca,
            cert=config.file_of_role(config.nats_cert),
            key=config.file_of_role(config.nats_key),
        )

    def tls_context(self) -> ssl.SSLContext:
        """Read the files and return a context for TLS. Raises OSError if a file can't be used."""

        def no_passphrase() -> str:
            """Reject an encrypted key, for which OpenSSL would ask on the terminal and wait."""
            raise OSError(f"{self.key} has a passphrase; remove it with openssl pkey")

        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None and self.key is not None:
            try:
                read_trusted(self.key, _MAX_KEY_BYTES, is_secret=True)
            except UntrustedFile as exc:
                raise OSError(f"{self.key} {exc.problem}") from exc
            context.load_cert_chain(self.cert, self.key, password=no_passphrase)
        return context


# Parts of the server's error texts, in lower case as nats-py passes them on.
DENIED: Final = "permissions violation"
# This is part of "authorization violation", "user authentication expired", "authentication timeout"
# and others.
_REJECTED: Final = "auth"
NO_CREDENTIALS: Final = NatsAccess()


def is_rejection(error: Exception) -> bool:
    """Return whether the server has rejected the user of this process, or its password."""
    text = str(error).lower()
    # The error of a denied permission names a subject. Another client may have chosen the subject,
    # so `_REJECTED` may be in it by chance.
    is_denied = DENIED in text
    return isinstance(error, nats_errors.Error) and not is_denied and _REJECTED in text


class NatsClient(Client):
    """A client that reads its credentials and certificates again at each connection.

    Args:
        access: how the process proves who it is.

    Raises:
        ConfigError: a file of credentials or certificates can't be read.
    """

    def __init__(self, access: NatsAccess) -> None:
        super().__init__()
        # Set by `connect_client`. It also holds for further servers that the first server names.
        self.requires_tls = False
        self._access = access
        # `connect` would set this attribute, but `new_inbox` is called before `connect`.
        self._inbox_prefix = bytearray(access.inbox_prefix.encode())
        self._credentials_file: CredentialsFile | None = None
        self._credentials = Credentials("", "")
        if access.credentials_file is not None:
            self._credentials_file = CredentialsFile(
                access.credentials_file, "nats_credentials_file"
            )
        try:
            if access.ca is not None or access.cert is not None:
                access.tls_context()
        except OSError as exc:
            files = {"ca": access.ca, "cert": access.cert, "key": access.key}
            named = ", ".join(f"--nats-{name} {path}" for name, path in files.items() if path)
            raise ConfigError(
                f"{named} can't be used: {exc.strerror or exc}; check that they are PEM files",
                field="nats_ca",
            ) from exc

    def access_options(self) -> dict[str, Any]:
        """Return the options of `connect` that prove who this process is."""
        options: dict[str, Any] = {"inbox_prefix": self._access.inbox_prefix}
        if self._credentials_file is not None:
            options |= {"user": self._user, "password": self._password}
        return options

    def identity(self, url: str) -> str:
        """Return, as text for users, as which user this process logs in at an address."""
        if self._credentials_file is not None:
            return self._credentials_file.identity()
        if self._access.cert is not None:
            return f"the user of certificate {self._access.cert}"
        return "the user in --nats-server" if "@" in url else "a client without a user"

    async def _connect_to_server(self, s: Any) -> None:
        """Connect to a server.

        The connection of a failed attempt is closed first. nats-py would only drop the connection,
        so it would stay open until a garbage collection.
        """
        _abort_transport(self)
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """Log in. After each rejection, wait twice as long before the next attempt to connect."""
        try:
            await super()._process_connect_init()
        except nats_errors.Error as exc:
            if is_rejection(exc):
                wait_s = self.options["reconnect_time_wait"]
                self.options["reconnect_time_wait"] = min(2 * wait_s, _MAX_REJECTED_S)
            raise
        self._finish_tls()
        self.options["reconnect_time_wait"] = _RECONNECT_S

    def _finish_tls(self) -> None:
        """Give the reader of a connection with TLS its transport, which nats-py 2.16 leaves out.

        Without it, asyncio logs a warning when the server ends the connection, and the reader can't
        pause the server, however much data it has.
        """
        transport = self._transport
        if not isinstance(transport, TcpTransport) or transport._io_writer is None:
            return
        if transport._io_writer is not transport._bare_io_writer:
            writing = transport._io_writer.transport
            writing.get_protocol().connection_made(writing)

    def _user(self) -> str:
        """Read the file, and return the user. The client calls this before `_password`."""
        assert self._credentials_file is not None
        self._credentials = self._credentials_file.current()
        return self._credentials.user

    def _password(self) -> str:
        return self._credentials.password

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return self._access.tls_context()

    def _connect_command(self) -> bytes:
        """Return the first command, which may have a password.

        If the server does not ask for TLS, nats-py sends this command without TLS, even to a tls://
        address. So this raises an error in that case.
        """
        if self.requires_tls and not self._server_info.get("tls_required"):
            raise ssl.SSLError(
                ssl.SSLErrorNumber.SSL_ERROR_SSL,
                "the server does not require TLS; configure it, or use a nats:// address",
            )
        return super()._connect_command()

    async def _process_err(self, err_msg: str) -> None:
        """Handle an error of the server.

        If users are removed, the server ends their connections. nats-py would then close the client
        for good. This client tries again, because its file may have other credentials by then.
        """
        if is_rejection(nats_errors.Error(err_msg)):
            await self._process_op_err(nats_errors.AuthorizationError())
            return
        await super()._process_err(err_msg)


async def connect_client(client: NatsClient, url: str, timeout_s: float, **callbacks: Any) -> None:
    """Connect a client. If this fails or is cancelled, close all that the client has opened.

    The client retries without end. Therefore it connects in a separate task, which `_end_task` can
    end. `Client.close` would not be enough: if the client is cancelled while it closes a failed
    connection, it counts as closed, but the connection stays open.

    Raises:
        TimeoutError: the client did not connect in time.
    """
    client.requires_tls = url.startswith("tls://")
    connecting = asyncio.get_running_loop().create_task(
        client.connect(url, **client.access_options(), **callbacks, **_CONNECT_OPTIONS)
    )
    try:
        await asyncio.wait({connecting}, timeout=timeout_s)
        if not connecting.done():
            raise TimeoutError
        connecting.result()
    except BaseException:
        # No connection may stay open, not even after a cancel. A second cancel does not interrupt
        # this.
        await asyncio.shield(_abort_connecting(client, connecting))
        raise


async def _abort_connecting(client: Client, connecting: asyncio.Task[None]) -> None:
    await _end_task(connecting)
    abort_client(client)


async def _end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task of the client until it ends.

    The client uses `wait_for`. In Python 3.11, `wait_for` drops a cancel that arrives together with
    a result or an error. The client then continues to retry, so the cancel has to be repeated.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    # This marks the error of the task as retrieved, so asyncio does not log the error.
    await asyncio.gather(task, return_exceptions=True)


def abort_client(client: Client) -> None:
    """Close the client and its connection. This does not await, so no cancel can interrupt it."""
    tasks = [
        client._reading_task,
        client._ping_interval_task,
        client._flusher_task,
        client._reconnection_task,
    ]
    tasks += [subscription._wait_for_msgs_task for subscription in client._subs.values()]
    for task in tasks:
        if task is not None:
            task.cancel()
    _abort_transport(client)
    client._status = Client.CLOSED


def _abort_transport(client: Client) -> None:
    """Close the connection of the client, if it has one, without awaiting. Idempotent."""
    transport = client._transport
    if isinstance(transport, TcpTransport) and transport._io_writer is not None:
        transport._io_writer.transport.abort()


async def close_client(client: Client) -> None:
    """Close the client and its connection.

    This takes a few seconds if the server is frozen. Idempotent.
    """
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            if client._reconnection_task is not None:
                await _end_task(client._reconnection_task)  # the client cancels it only once
            await client.close()
    except (OSError, TimeoutError) as exc:
        # `Client.close` of nats-py 2.16 first writes pending data. With a lost or frozen
        # connection, it stops there, and leaves the client half closed.
        log.warning("connection to NATS closed, messages may be unsent: %r", exc)
        abort_client(client)

"""Make the TLS contexts of servers and clients.

The certificate of a server can be replaced while the server runs.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.file_watch import FileWatch
from dynamo_trtllm.support.tls_files import ClientTlsFiles, TlsFiles, read_pem

_PROTOCOL: Final = "http/1.1"  # for ALPN


class ServerCertificate:
    """The certificate of a server.

    When the certificate is replaced, open connections keep the certificate with which they began.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ConfigError: a file can't be read, the files are not a certificate and its key, or other
                users have write access to a file or read access to the key.
        """
        # The context of new connections. `FileWatch` sets it below, by calling `_use`.
        self.context: ssl.SSLContext
        # Counts an event in a metric. The arguments are the name of the metric and its label.
        self.count: Callable[[str, str], None] = _do_nothing
        paths = [files.certificate, files.key]
        if files.client_ca is not None:
            paths.append(files.client_ca)
        self._watch = FileWatch(
            what="TLS certificate",
            paths=paths,
            read=lambda: server_context(files),
            use=self._use,
            count=lambda outcome: self.count("tls_reloads_total", outcome),
        )

    async def follow_files(self) -> None:
        """Read the files again whenever one of them has changed, until cancelled."""
        await self._watch.follow()

    async def reload(self) -> None:
        """Read the files again if one of them has changed.

        If the new files are wrong, the former certificate stays in use.
        """
        await self._watch.reload()

    def _use(self, context: ssl.SSLContext) -> None:
        self.context = context


def server_certificate(files: TlsFiles | None) -> ServerCertificate | None:
    """Return the certificate in these files, or None without files. Raises ConfigError."""
    return None if files is None else ServerCertificate(files)


def _do_nothing(metric: str, label: str) -> None: ...


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for the connections of a server, with TLS 1.2 or newer.

    Raises:
        ConfigError: a file can't be read, the files are not a certificate and its key, or other
            users have write access to a file or read access to the key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([_PROTOCOL])
    _load(context, files.certificate, files.key, "tls_cert_file", "tls_key_file")
    if files.client_ca is not None:
        authorities = read_pem(files.client_ca, "tls_client_ca_file")
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError) as exc:
            raise ConfigError(
                f"the TLS file {files.client_ca} has a certificate that can't be read ({exc});"
                " pass CA certificates in PEM form",
                field="tls_client_ca_file",
            ) from exc
        # TLS does not require a certificate, because orchestrators have none and may ask for /live
        # and /ready. For all other requests, the server checks that there is a certificate.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(url: str, files: ClientTlsFiles | None = None) -> ssl.SSLContext | None:
    """Return a context for a client of a server, or None if the URL is not https://.

    The client trusts the CAs in the file that the variable SSL_CERT_FILE names. Without the
    variable, it trusts the CAs of the system.

    Args:
        url: the URL of the server.
        files: the certificate of the client, for servers that ask for one. None: the client has no
            certificate.

    Raises:
        ConfigError: a file can't be used, as for `server_context`.
    """
    if urlsplit(url).scheme != "https":
        return None
    context = ssl.create_default_context()
    _load_client(context, files)
    return context


def untrusted(host: str, error: ssl.SSLCertVerificationError) -> ConnectionError:
    """Return the error of a client with `client_context` that does not trust a server."""
    return ConnectionError(
        f"the certificate of {host} is not trusted: {error.verify_message}; to trust another CA,"
        " set SSL_CERT_FILE to its PEM file"
    )


def own_server_context(
    certificate: Path, client_files: ClientTlsFiles | None = None
) -> ssl.SSLContext:
    """Return a context for a client of a server on this machine.

    The client trusts only the certificates in the server's own file. The name of the server does
    not matter: a launcher reaches its processes at other addresses than their clients do.

    Args:
        certificate: the file with the certificate of the server.
        client_files: the certificate of the client, see `client_context`.

    Raises:
        OSError: the file can't be read, or has no certificate.
        ConfigError: a file of the client can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Trust the certificate of the server also if the file does not have the certificate of its CA.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cafile=certificate)
    _load_client(context, client_files)
    return context


def _load_client(context: ssl.SSLContext, files: ClientTlsFiles | None) -> None:
    if files is not None:
        _load(context, files.certificate, files.key, "tls_client_cert_file", "tls_client_key_file")


def _load(
    context: ssl.SSLContext, certificate: Path, key: Path, cert_field: str, key_field: str
) -> None:
    """Load a certificate and its key into a context.

    Args:
        context: the context.
        certificate: file of the certificate.
        key: file of its private key.
        cert_field: setting that names the file of the certificate.
        key_field: setting that names the file of the key.

    Raises:
        ConfigError: as for `server_context`.
    """

    def no_passphrase() -> str:
        """Reject an encrypted key, for which OpenSSL would ask on the terminal."""
        raise ConfigError(
            f"the private key in --{key_field.replace('_', '-')} has a passphrase, which no one"
            " could enter at a restart; remove it with openssl pkey",
            field=key_field,
        )

    certificate_pem = read_pem(certificate, cert_field)
    key_pem = read_pem(key, key_field, is_key=True)
    with _memory_file(certificate_pem) as certificate_path, _memory_file(key_pem) as key_path:
        try:
            context.load_cert_chain(certificate_path, key_path, password=no_passphrase)
        except ssl.SSLError as exc:
            if exc.reason == "KEY_VALUES_MISMATCH":
                why = "do not belong together"
            else:
                why = f"can't be used ({exc.reason or exc})"
            raise ConfigError(
                f"the certificate {certificate} and the private key {key} {why}; pass a"
                " certificate in PEM form and its key",
                field=cert_field,
            ) from exc


@contextmanager
def _memory_file(data: bytes) -> Iterator[str]:
    """Yield the path of a file in memory with this content.

    OpenSSL loads a certificate only from a path. With the path of the file on disk, it might load a
    file that has replaced the checked one meanwhile.
    """
    file = os.memfd_create("tls")
    with open(file, "wb") as opened:
        opened.write(data)
        opened.flush()
        yield f"/proc/self/fd/{file}"

"""TLS: the certificate of a server, which is replaced while it serves, and what clients trust."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.file_watch import FileWatch
from dynamo_trtllm.support.tls_files import TlsFiles, read_pem

_PROTOCOL: Final = "http/1.1"  # for ALPN


class ServerCertificate:
    """The certificate of a server. Connections that are open keep the one that they began with."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ConfigError: a file can't be read, others may write it or read the key, or the files
                are not a certificate and its key.
        """
        self._files = files
        self.context: ssl.SSLContext  # of connections that begin now
        # Counts an event: the name of a metric, and the value of its label.
        self.count: Callable[[str, str], None] = _do_nothing
        paths = [files.certificate, files.key]
        if files.client_ca is not None:
            paths.append(files.client_ca)
        self._watch = FileWatch(
            "TLS certificate",
            paths,
            lambda: server_context(files),
            self._use,
            lambda outcome: self.count("tls_reloads_total", outcome),
        )

    async def follow_files(self) -> None:
        """Read the files again whenever one of them has changed, until cancelled."""
        await self._watch.follow()

    async def reload(self) -> None:
        """Read the files again if one of them has changed. If they are wrong, nothing changes."""
        await self._watch.reload()

    def _use(self, context: ssl.SSLContext) -> None:
        self.context = context


def server_certificate(files: TlsFiles | None) -> ServerCertificate | None:
    """Return the certificate in these files; None: the server has no TLS. Raises ConfigError."""
    return None if files is None else ServerCertificate(files)


def _do_nothing(metric: str, label: str) -> None: ...


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for the connections of a server, with TLS 1.2 or newer.

    Raises:
        ConfigError: a file can't be read, others may write it or read the key, or the files are not
            a certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([_PROTOCOL])
    certificate = read_pem(files.certificate, "tls_cert_file")
    key = read_pem(files.key, "tls_key_file", is_key=True)
    with _memory_file(certificate) as certificate_path, _memory_file(key) as key_path:
        try:
            context.load_cert_chain(certificate_path, key_path, password=_no_passphrase)
        except ssl.SSLError as exc:
            raise _not_loaded(files, exc) from exc
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
        # Orchestrators have no certificate, and may ask for /live and /ready. The server checks
        # the other requests.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def own_server_context(certificate: Path) -> ssl.SSLContext:
    """Return a context for a client of a server of this machine, whose certificate is in a file.

    The client trusts the certificates of this file and no others. The name of the server does not
    matter: a launcher reaches its processes at other addresses than their clients do.

    Raises:
        OSError: the file can't be read, or has no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The certificate itself may be trusted, without that of its CA.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cafile=certificate)
    return context


def _no_passphrase() -> str:
    """Reject an encrypted key, for which OpenSSL would ask on the terminal."""
    raise ConfigError(
        "the private key in --tls-key-file has a passphrase, which no one could enter at a restart;"
        " remove it with openssl pkey",
        field="tls_key_file",
    )


def _not_loaded(files: TlsFiles, exc: ssl.SSLError) -> ConfigError:
    if exc.reason == "KEY_VALUES_MISMATCH":
        why = "do not belong together"
    else:
        why = f"can't be used ({exc.reason or exc})"
    return ConfigError(
        f"the certificate {files.certificate} and the private key {files.key} {why}; pass a"
        " certificate in PEM form and its key",
        field="tls_cert_file",
    )


@contextmanager
def _memory_file(data: bytes) -> Iterator[str]:
    """Yield the path of a file in memory with this content, because OpenSSL wants a path.

    What was checked is loaded, also if the file on disk was replaced meanwhile.
    """
    file = os.memfd_create("tls")
    with open(file, "wb") as opened:
        opened.write(data)
        opened.flush()
        yield f"/proc/self/fd/{file}"

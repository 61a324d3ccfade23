"""Certificates that sign themselves, for servers and clients."""

from __future__ import annotations

import functools
import ssl
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from dynamo_trtllm.support.tls import ServerCertificate
from dynamo_trtllm.support.tls_files import TlsFiles
from tests.kit.waiting import SOON_S

_FOLDER = tempfile.TemporaryDirectory(prefix="tests-certificates-")


def make_certificate(folder: Path, name: str = "server") -> TlsFiles:
    """Make a certificate for this machine, and its key."""
    files = TlsFiles(folder / f"{name}.crt", folder / f"{name}.key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command += ["-keyout", str(files.key), "-out", str(files.certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=SOON_S)
    files.key.chmod(0o600)
    return files


@functools.cache
def shared_certificate() -> TlsFiles:
    """Return the files of a certificate that no test changes."""
    return make_certificate(Path(_FOLDER.name))


def shared_server_certificate() -> ServerCertificate:
    """Return the certificate of a server."""
    return ServerCertificate(shared_certificate())


def trusting(files: TlsFiles) -> ssl.SSLContext:
    """Return a context of a client that trusts this certificate."""
    return ssl.create_default_context(cafile=str(files.certificate))


@functools.cache
def client_context() -> ssl.SSLContext:
    """Return a context of a client that trusts the shared certificate."""
    return trusting(shared_certificate())


class TlsClient:
    """The client's end of TLS, without a socket."""

    def __init__(self, context: ssl.SSLContext | None = None, name: str = "localhost") -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.tls = (context or client_context()).wrap_bio(
            self.incoming, self.outgoing, server_hostname=name
        )

    def step(self, received: bytes = b"") -> bytes:
        """Go on with the handshake after what the server has sent. Return what is to be sent."""
        self.incoming.write(received)
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        """Return data as it is sent to the server."""
        self.tls.write(data)
        return self.outgoing.read()

    def decrypt(self, received: bytes) -> bytes:
        """Return the data in what the server has sent."""
        self.incoming.write(received)
        parts = []
        with suppress(ssl.SSLWantReadError):
            while part := self.tls.read(1 << 16):
                parts.append(part)
        return b"".join(parts)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Connect a client and a server in memory. Raise ssl.SSLError if one rejects the other.

    Args:
        client: context of the client.
        server: context of the server.
        name: that of the server, for the client.
    """
    to_server = ssl.MemoryBIO()
    from_server = ssl.MemoryBIO()
    accepted = server.wrap_bio(to_server, from_server, server_side=True)
    connecting = TlsClient(client, name)
    for _ in range(2):
        to_server.write(connecting.step(from_server.read()))
        with suppress(ssl.SSLWantReadError):
            accepted.do_handshake()

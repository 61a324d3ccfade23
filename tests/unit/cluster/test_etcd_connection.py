"""Certificates for etcd are read again after a failed call. Without etcd."""

from __future__ import annotations

import errno
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from dynamo_trtllm.cluster.discovery import etcd_connection
from dynamo_trtllm.cluster.discovery.etcd_connection import (
    EtcdConnection,
    channel_credentials,
)
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable
from dynamo_trtllm.support import trusted_file
from tests.kit.certificates import make_certificate, shared_certificate
from tests.kit.waiting import SOON_S


def few_files(*_: object, **__: object) -> bytes:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("problem", ["mode", "few files"])
async def test_certificates_are_read_when_their_problem_has_passed(
    tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(trusted_file, "_ROOT", -1)  # this test may run as root
    files = make_certificate(tmp_path)
    config = ConnectionConfig(
        etcd_endpoints="https://127.0.0.1:1", etcd_cert=files.certificate, etcd_key=files.key
    )
    connection = EtcdConnection(config)

    async def fail_calls() -> None:
        for _ in range(2):
            with suppress(Unreachable):
                async with connection.attempt():
                    raise grpc.aio.UsageError("no answer")

    files.certificate.write_bytes(files.certificate.read_bytes())
    with monkeypatch.context() as patch:
        if problem == "mode":
            files.key.chmod(0o644)
        else:
            patch.setattr(etcd_connection, "read_trusted", few_files)
        await fail_calls()
    assert caplog.text.count("the certificates that were read before are used") == 1
    if problem == "mode":
        files.key.chmod(0o600)  # as the log line says
    await fail_calls()
    assert caplog.text.count("certificates for etcd were read again") == 1
    await connection.aclose()


@pytest.mark.parametrize("case", ["authority", "other key", "passphrase"])
def test_files_that_are_no_certificates_are_an_error(tmp_path: Path, case: str) -> None:
    """gRPC would say at each connection that it failed to create a handshaker, and no more."""
    files = make_certificate(tmp_path)
    given: dict[str, Any] = {"etcd_cert": files.certificate, "etcd_key": files.key}
    match = "^--etcd-cert .*/server.crt and --etcd-key .*/server.key can't be used: "
    if case == "authority":
        files.certificate.write_text("no certificate\n")
        given = {"etcd_ca": files.certificate}
        match = "^--etcd-ca .*/server.crt can't be used: "
    elif case == "other key":
        files.key.write_bytes(shared_certificate().key.read_bytes())
    else:
        command = ["openssl", "pkey", "-aes128", "-passout", "pass:secret", "-in", str(files.key)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=SOON_S)
        files.key.write_bytes(done.stdout)
        match += "the key has a passphrase"
    with pytest.raises(ConfigError, match=match):
        channel_credentials(ConnectionConfig(etcd_endpoints="https://127.0.0.1:1", **given))


async def test_failure_of_tls_is_not_hidden_by_that_of_another_address() -> None:
    """gRPC names the error of one address only, and for localhost that can be the one of IPv6."""
    connection = EtcdConnection(ConnectionConfig(etcd_endpoints="https://localhost:1"))
    connection.unreachable(0, "UNAVAILABLE: Tls handshake failed: certificate has expired")
    error = connection.unreachable(0, "UNAVAILABLE: ipv6:%5B::1%5D:1: Connection refused")
    assert "TLS with etcd at localhost:1 fails" in error.message
    assert "certificate has expired" in error.message
    assert "check --etcd-ca, --etcd-cert and --etcd-key" in error.message
    async with connection.attempt():
        pass
    error = connection.unreachable(0, "UNAVAILABLE: Connection refused")
    assert "check --etcd-endpoints and that etcd runs" in error.message
    await connection.aclose()

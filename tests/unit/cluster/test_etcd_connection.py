"""Certificates for etcd are read again after a failed call. Without etcd."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest

from dynamo_trtllm.cluster.discovery import etcd_connection
from dynamo_trtllm.cluster.discovery.etcd_connection import EtcdConnection
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.support import trusted_file
from tests.kit.certificates import make_certificate


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

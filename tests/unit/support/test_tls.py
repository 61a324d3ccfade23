"""The files of TLS, and whom a client of this machine trusts. Without sockets."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import trusted_file
from dynamo_trtllm.support.tls import own_server_context, server_context
from dynamo_trtllm.support.tls_files import TlsFiles
from tests.kit.certificates import make_certificate, shake_hands, shared_certificate


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return make_certificate(tmp_path)


def break_key_mode(files: TlsFiles) -> None:
    files.key.chmod(0o604)


def break_certificate_mode(files: TlsFiles) -> None:
    files.certificate.chmod(0o666)


def break_pair(files: TlsFiles) -> None:
    files.key.write_bytes(shared_certificate().key.read_bytes())


def break_certificate(files: TlsFiles) -> None:
    files.certificate.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def swap(files: TlsFiles) -> None:
    data = files.certificate.read_bytes()
    files.certificate.write_bytes(files.key.read_bytes())
    files.key.write_bytes(data)


def remove_key(files: TlsFiles) -> None:
    files.key.unlink()


def encrypt_key(files: TlsFiles) -> None:
    command = ["openssl", "pkey", "-in", files.key, "-aes256", "-passout", "pass:x"]
    done = subprocess.run(command, check=True, capture_output=True)
    files.key.write_bytes(done.stdout)


@pytest.mark.parametrize(
    ("fault", "field", "problem"),
    [
        (break_key_mode, "tls_key_file", "mode 0604.*chmod 600"),
        (break_certificate_mode, "tls_cert_file", "mode 0666.*chmod go-w"),
        (break_pair, "tls_cert_file", "do not belong together"),
        (break_certificate, "tls_cert_file", "can't be used"),
        (swap, "tls_cert_file", "has no certificate"),
        (remove_key, "tls_key_file", "can't be read: No such file"),
        (encrypt_key, "tls_key_file", "has a passphrase"),
    ],
)
def test_files_that_can_not_be_used_are_an_error(
    files: TlsFiles, fault: object, field: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_file, "_ROOT", -1)  # this test may run as root
    server_context(files)
    fault(files)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=problem) as caught:
        server_context(files)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nAAAA", "CERTIFICATE"])
def test_client_ca_that_is_no_certificate_is_an_error(files: TlsFiles, text: str) -> None:
    path = files.key.with_name("ca")
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        server_context(files._replace(client_ca=path))
    assert caught.value.field == "tls_client_ca_file"


def test_no_file_descriptor_is_left(files: TlsFiles) -> None:
    server_context(files)
    before = os.listdir("/proc/self/fd")
    server_context(files)
    assert os.listdir("/proc/self/fd") == before


def test_own_server_is_trusted_under_any_name(files: TlsFiles) -> None:
    client = own_server_context(files.certificate)
    shake_hands(client, server_context(files), name="another.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(client, server_context(shared_certificate()), name="localhost")

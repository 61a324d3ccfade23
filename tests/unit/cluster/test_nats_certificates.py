"""The files of TLS for NATS. Without a server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess
from tests.kit.certificates import make_certificate


def test_key_with_a_passphrase_is_an_error_and_no_question(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    NatsAccess(cert=files.certificate, key=files.key).tls_context()
    command = ["openssl", "pkey", "-in", str(files.key), "-aes256", "-passout", "pass:secret"]
    done = subprocess.run(command, check=True, capture_output=True)
    files.key.write_bytes(done.stdout)
    with pytest.raises(OSError, match="has a passphrase; remove it"):
        NatsAccess(cert=files.certificate, key=files.key).tls_context()

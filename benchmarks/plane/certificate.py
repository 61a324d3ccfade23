"""Makes a certificate for the frontends that are measured with TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .stack import HOST, Certificate, NotReady

_TIMEOUT_S = 30.0


def make_certificate(folder: Path) -> Certificate:
    """Make a certificate for this machine with the command `openssl`.

    Raises:
        NotReady: `openssl` is missing or failed.
    """
    files = Certificate(folder / "tls.crt", folder / "tls.key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
    command += ["-subj", "/CN=benchmark", "-addext", f"subjectAltName=IP:{HOST}"]
    command += ["-keyout", str(files.key), "-out", str(files.certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
    except FileNotFoundError as exc:
        raise NotReady("openssl is not installed; it makes the certificate") from exc
    except subprocess.SubprocessError as exc:
        raise NotReady(f"openssl made no certificate: {exc}") from exc
    files.key.chmod(0o600)
    return files

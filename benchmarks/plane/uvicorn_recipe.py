"""Installs uvicorn from PyPI into a separate environment, and starts it: what a server that does
nothing else costs per token, with TLS and without.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_trtllm.models.vocabulary import default_cache_dir

from .stack import HOST, Certificate

VERSION = "0.54.0"


def default_folder() -> Path:
    return default_cache_dir() / f"uvicorn-{VERSION}"


def install(folder: Path) -> None:
    """Create the environment if it does not exist. Raise CalledProcessError."""
    mark = folder / "installed"  # written last
    if mark.is_file():
        return
    sys.stderr.write(f"installing uvicorn {VERSION} into {folder}\n")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"uvicorn=={VERSION}", "uvloop", "httptools"], check=True)
    mark.touch()


class Uvicorn:
    """Uvicorn with `uvicorn_app` as a `Recipe`. It has no workers: the frontend makes the tokens.

    Args:
        folder: its environment.
        certificate: TLS of the frontend; None: it has none.
    """

    api_key = ""
    num_consoles = 0
    framing_tokens = 0

    def __init__(self, folder: Path, certificate: Certificate | None) -> None:
        self.name = "uvicorn" if certificate is None else "uvicorn with TLS"
        self.python = str(folder / "bin" / "python")
        self.certificate = certificate

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        return {}

    def frontend(self, port: int, pace_s: float) -> Sequence[str]:
        program = Path(__file__).with_name("uvicorn_app.py")
        flags = ["--host", HOST, "--port", str(port), "--step-s", str(pace_s)]
        if self.certificate is not None:
            flags += ["--ssl-certfile", str(self.certificate.certificate)]
            flags += ["--ssl-keyfile", str(self.certificate.key)]
        # -P: the folder of the program has modules of this project, which it must not import.
        return ("-P", str(program), *flags)

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        return ()

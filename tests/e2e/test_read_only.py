"""Frontends, workers, etcd and NATS on a read-only root file system, as in the recipes for
Kubernetes.

Only HOME, the temporary folder and /dev/shm can be written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Mounts belong to a namespace of this script. The folder of the test is in memory there.
SCRIPT = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/home" "$1/tmp"
mount -o remount,bind,ro /
! touch "$PWD/probe" 2>/dev/null
shift
exec "$@"
"""


@pytest.mark.extra
@pytest.mark.timeout(300)
def test_deployment_writes_home_and_temporary_files_only(tmp_path: Path) -> None:
    environ = os.environ | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    environ.pop("XDG_CACHE_HOME", None)
    command = ["unshare", "--mount"]
    if os.geteuid() != 0:
        command += ["--map-root-user"]
    command += ["bash", "-c", SCRIPT, "script", str(tmp_path)]
    command += [sys.executable, "-m", "dynamo_trtllm.launch", "deploy/local/demo.yaml"]
    command += ["--engine", "mock", "--demo", "--once", "--port", "0"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr

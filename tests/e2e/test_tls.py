"""TLS of all processes that the launcher starts, with several frontend processes on the port."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.certificates import make_certificate, trusting
from tests.kit.cluster import PLAIN
from tests.kit.launcher_process import LauncherProcess
from tests.kit.waiting import SOON_S

DEPLOYMENT = """
services: {{etcd: start, nats: start}}
frontend: {{http_port: {port}, workers: 2}}
workers:
- name: worker
  disaggregation_mode: prefill_and_decode
  devices: cpu
  flags: {{engine: mock, model: tiny-gpt-oss}}
"""


@pytest.mark.long
@pytest.mark.timeout(180)
def test_launched_processes_are_ready_over_https(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    port = free_ports()
    path = tmp_path / "deployment.yaml"
    path.write_text(DEPLOYMENT.format(port=port))
    environ = {
        "DYN_TRTLLM_TLS_CERT_FILE": str(files.certificate),
        "DYN_TLS_KEY_PATH": str(files.key),  # as NVIDIA Dynamo names it
    }
    launched = LauncherProcess(tmp_path, str(path), env=environ)
    try:
        launched.wait_line(rf"Ready: https://localhost:{port}")
        health = launched.wait_line(r"health at (https://localhost:\d+)")[1]
        shown = subprocess.run(
            [sys.executable, "-c", "from dynamo_trtllm.cli import status; status.main([])"],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=SOON_S,
            check=False,
        )
        assert shown.returncode == 0, shown
        assert f"ready, https://localhost:{port}" in shown.stdout
        body = {"model": "tiny-gpt-oss", "prompt": "Hi", "max_tokens": 3}
        for _ in range(6):  # connections go to both processes
            answer = httpx.post(
                f"https://localhost:{port}/v1/completions",
                json=body,
                timeout=SOON_S,
                **PLAIN | {"verify": trusting(files)},
            )
            assert answer.status_code == 200
        ready = httpx.get(f"{health}/ready", verify=trusting(files), timeout=SOON_S)
        assert ready.status_code == 200
    finally:
        launched.close()

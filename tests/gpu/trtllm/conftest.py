"""Where the tests of the real package run: the GPUs that nvidia-smi lists, and the model that was
named.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator

import pytest

from tests.gpu.trtllm.checks import Served, Site, start
from tests.kit.cluster import Cluster


@pytest.fixture(scope="session")
def site(pytestconfig: pytest.Config) -> Site:
    model = pytestconfig.getoption("--trtllm-model") or os.environ.get("TRTLLM_TEST_MODEL")
    if not model:
        pytest.fail("name a model: --trtllm-model FOLDER, or TRTLLM_TEST_MODEL")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return Site(model=str(model), gpus=listed.count("GPU "))


@pytest.fixture(scope="session")
def served(site: Site, etcd_server: str, nats_server: str) -> Iterator[Served]:
    cluster = Cluster(etcd_server, nats_server, f"trtllm-{secrets.token_hex(4)}")
    try:
        yield start(cluster, site)
    finally:
        cluster.stop()

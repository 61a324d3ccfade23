"""Where the torch engine's tests run: on the GPUs that are there, one for each role if there are
two.

`pytest tests/gpu/torch --torch-device cpu` runs the same texts in small and without a GPU, which is
how they are known to work; it says nothing about GPUs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.torch.site import Pair, Site, start_pair, write_gpt_oss_20b_shape
from tests.kit.cluster import Cluster
from tests.kit.tiny_models import save_tiny_gpt_oss

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torch-device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: rehearse without a GPU",
    )


def _device(config: pytest.Config) -> str:
    # unknown where this folder was not named
    return str(config.getoption("--torch-device", default="cuda"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(300))
            if _device(config) == "cuda":
                item.add_marker("gpu")


@pytest.fixture(scope="session")
def site(pytestconfig: pytest.Config) -> Site:
    return Site(device=_device(pytestconfig))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("tiny-gpt-oss"))


@pytest.fixture(scope="session", params=["tiny", "20b-shape"])
def pair(
    request: pytest.FixtureRequest,
    site: Site,
    tmp_path_factory: pytest.TempPathFactory,
    etcd_server: str,
    nats_server: str,
) -> Iterator[Pair]:
    """A prefill, a decode and an aggregated worker of one model behind a frontend."""
    name = str(request.param)
    if name == "tiny":
        folder = request.getfixturevalue("tiny")
    else:
        folder = write_gpt_oss_20b_shape(
            tmp_path_factory.mktemp("gpt-oss-20b"), full=site.device == "cuda"
        )
    # Dummy weights answer differently when bfloat16 rounds differently, as it does for the rest of
    # a cached prompt.
    is_tiny = name == "tiny"
    flags = () if is_tiny else ("--load-format", "dummy")
    cluster = Cluster(etcd_server, nats_server, f"gpu-torch-{secrets.token_hex(4)}")
    try:
        yield start_pair(cluster, site, folder, flags, enable_prefix_caching=is_tiny)
    finally:
        cluster.stop()

"""Discovery over TLS: an etcd that asks for a client certificate, both ends with what
deploy/make_secrets made.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import yaml

from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Synced
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.launch.servers import etcd_binary
from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.instance_events import instance_events
from tests.kit.instances import make_instance

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    subprocess.run(
        [DEPLOY / "make_secrets", "compose", "--folder", folder], check=True, capture_output=True
    )
    return folder / "compose" / "secrets"


@pytest.fixture(scope="module")
def address(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """127.0.0.1:PORT of an etcd with the flags of docker-compose.yml, on free ports and in folders
    of this test.
    """
    folder = tmp_path_factory.mktemp("etcd")
    client = free_ports(3)
    peer = client + 1
    metrics = client + 2
    flags = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["etcd"][
        "command"
    ][1:]
    for old, new in {
        "/tls": str(secrets),
        "=/data": f"={folder}/data",
        "0.0.0.0:2379": f"127.0.0.1:{client}",
        ":2380": f":{peer}",
        "0.0.0.0:2381": f"127.0.0.1:{metrics}",
    }.items():
        flags = [flag.replace(old, new) for flag in flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [etcd_binary(), *flags, "--heartbeat-interval=10"], stdout=log, stderr=log
        )
    yield f"127.0.0.1:{client}"
    process.kill()
    process.wait()


def files_of(secrets: Path) -> dict[str, Path]:
    return {
        "etcd_ca": secrets / "ca.crt",
        "etcd_cert": secrets / "client.crt",
        "etcd_key": secrets / "client.key",
    }


async def test_instance_registered_with_certificate_is_visible(address: str, secrets: Path) -> None:
    config = ConnectionConfig(etcd_endpoints=f"https://{address}", **files_of(secrets))
    worker = EtcdDiscovery(config, start_timeout_s=15)
    frontend = EtcdDiscovery(config, start_timeout_s=15)
    instance = make_instance(1)
    try:
        await worker.register(instance)
        async with aclosing(instance_events(frontend, instance.namespace)) as events:
            assert await anext(events) == Added(instance)
            assert await anext(events) == Synced()
            another = make_instance(2)
            await worker.register(another)
            assert await anext(events) == Added(another)
    finally:
        await worker.aclose()
        await frontend.aclose()


@pytest.mark.parametrize("case", ["no certificate", "not its authority", "no TLS"])
async def test_etcd_when_asked_without_what_it_wants_then_unreachable(
    address: str, secrets: Path, case: str
) -> None:
    good = files_of(secrets)
    files = {
        "no certificate": {"etcd_ca": good["etcd_ca"]},
        "not its authority": {name: good[name] for name in ("etcd_cert", "etcd_key")},
        "no TLS": {},
    }[case]
    endpoints = ("http" if case == "no TLS" else "https") + f"://{address}"
    allowed = EtcdDiscovery(
        ConnectionConfig(etcd_endpoints=f"https://{address}", **good), start_timeout_s=15
    )
    discovery = EtcdDiscovery(
        ConnectionConfig(etcd_endpoints=endpoints, **files), start_timeout_s=1
    )
    try:
        await allowed.register(make_instance(3))  # it is there
        with pytest.raises(Unreachable):
            await discovery.register(make_instance(4))
    finally:
        await discovery.aclose()
        await allowed.aclose()

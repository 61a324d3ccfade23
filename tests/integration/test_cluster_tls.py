"""etcd and NATS over TLS, in the configuration of docker-compose.yml and with what
deploy/make_secrets made: the user is the common name of the client's certificate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dynamo_trtllm.cli import roles
from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Synced
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane, NatsTransport
from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess
from dynamo_trtllm.cluster.roles import cluster_users, nats_configuration
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.launch.local_servers import etcd_binary, nats_binary
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable
from dynamo_trtllm.protocol.messages import GetFile
from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.cluster import PLAIN, START_TIMEOUT_S, Process, until
from tests.kit.instance_events import instance_events
from tests.kit.instances import make_instance
from tests.kit.request_planes import LIMITS, ScriptedService
from tests.kit.request_planes import until as until_soon
from tests.kit.waiting import SOON_S

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
OWN = "prefill-1"  # component of a worker with a certificate of its own


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    subprocess.run(
        [DEPLOY / "make_secrets", "compose", "--folder", folder, "--worker", OWN],
        check=True,
        capture_output=True,
    )
    return folder / "compose" / "secrets"


@pytest.fixture(scope="module")
def etcd(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoints of an etcd with the flags of docker-compose.yml, on free ports and in folders
    of this test.
    """
    folder = tmp_path_factory.mktemp("etcd")
    client = free_ports(3)
    peer = client + 1
    metrics = client + 2
    flags = COMPOSE["services"]["etcd"]["command"][1:]
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
    endpoints = f"https://127.0.0.1:{client}"
    try:
        set_up(endpoints, secrets)
        yield endpoints
    finally:
        process.kill()
        process.wait()


def set_up(endpoints: str, secrets: Path) -> None:
    """Create the users, as soon as etcd answers."""
    words = ["etcd", "--worker", OWN, f"--etcd-endpoints={endpoints}"]
    for flag, file in (("ca", "ca.crt"), ("cert", "root.crt"), ("key", "root.key")):
        words.append(f"--etcd-{flag}={secrets / file}")
    with pytest.raises(SystemExit) as ended:
        roles.main(words)
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def nats(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a nats-server with the configuration of docker-compose.yml."""
    folder = tmp_path_factory.mktemp("nats")
    shutil.copytree(secrets, folder / "tls")
    users = cluster_users(["dynamo"], own_components=[OWN])
    (folder / "nats-users.conf").write_text(nats_configuration(users))
    text = (DEPLOY / "compose" / "nats.conf").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("listen:", "http:"))]
    config = folder / "nats.conf"
    config.write_text(
        "\n".join(lines).replace("/tls/", f"{folder}/tls/").replace("/data", str(folder))
    )
    port = free_ports(1)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [nats_binary(), "-a", "127.0.0.1", "-p", str(port), "--config", config],
            stdout=log,
            stderr=log,
        )
    yield f"tls://127.0.0.1:{port}"
    process.kill()
    process.wait()


def settings(secrets: Path, etcd: str, nats: str, name: str = "{role}") -> dict[str, Any]:
    """The settings of `client.env`, with the addresses of these servers."""
    file = secrets / ("client.env" if name == "{role}" else f"{name}.env")
    environ = dict(line.split("=", 1) for line in file.read_text().splitlines())
    environ |= {"ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats}
    config = load(FrontendConfig, prog="p", argv=[], environ=environ)
    names = ConnectionConfig.model_fields.keys() & config.model_fields_set
    found = {name: getattr(config, name) for name in names}
    assert {"nats_cert", "etcd_cert", "nats_ca", "etcd_ca"} <= found.keys()
    return found


async def test_roles_of_certificates_work_together(secrets: Path, etcd: str, nats: str) -> None:
    common = settings(secrets, etcd, nats)
    worker_config = WorkerConfig(model_path="m", **common)
    frontend_config = FrontendConfig(**common)
    worker = EtcdDiscovery(worker_config, start_timeout_s=15)
    frontend = EtcdDiscovery(frontend_config, start_timeout_s=15)
    instance = make_instance(1)
    planes = [
        await NatsPlane.connect(nats, LIMITS, access=NatsAccess.of(config))
        for config in (worker_config, frontend_config)
    ]
    try:
        await worker.register(instance)
        async with aclosing(instance_events(frontend, instance.namespace)) as events:
            assert await anext(events) == Added(instance)
            assert await anext(events) == Synced()
            another = make_instance(2)
            await worker.register(another)
            assert await anext(events) == Added(another)
        with pytest.raises(Unreachable, match="rejects this process, "):
            await EtcdDiscovery(frontend_config, start_timeout_s=0).register(make_instance(3))
        service = ScriptedService(lambda _request: pytest.fail("no request comes"))
        await planes[0].serve(instance.subject, service)
        assert await planes[1].client.control(instance.subject, GetFile("f", 0))
    finally:
        for plane in planes:
            await plane.aclose()
        await worker.aclose()
        await frontend.aclose()


async def test_worker_with_own_certificate_has_its_component_alone(
    secrets: Path, etcd: str, nats: str
) -> None:
    config = WorkerConfig(model_path="m", **settings(secrets, etcd, nats, f"worker-{OWN}"))
    assert config.nats_inbox_prefix == f"_INBOX_worker.{OWN}"
    plane = await NatsPlane.connect(nats, LIMITS, access=NatsAccess.of(config))
    service = ScriptedService(lambda _request: pytest.fail("no request comes"))
    discovery = EtcdDiscovery(config, start_timeout_s=0)
    try:
        await plane.serve(f"dynamo_{OWN}.generate-1", service)
        with pytest.raises(Unreachable, match="subscription"):
            await plane.serve("dynamo_backend.generate-1", service)
        with pytest.raises(Unreachable, match="rejects this process, "):
            await discovery.register(make_instance(3))
    finally:
        await plane.aclose()
        await discovery.aclose()


@pytest.mark.parametrize("case", ["no certificate", "not its authority", "no TLS"])
async def test_servers_reject_a_client_without_what_they_want(
    secrets: Path, etcd: str, nats: str, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    good = settings(secrets, etcd, nats)
    kept = {
        "no certificate": {"etcd_ca", "nats_ca"},
        "not its authority": {"etcd_cert", "etcd_key", "nats_cert", "nats_key"},
        "no TLS": set[str](),
    }[case]
    bad = {name: value for name, value in good.items() if name in kept}
    if case == "no TLS":
        etcd = etcd.replace("https://", "http://")
        nats = nats.replace("tls://", "nats://")
    config = WorkerConfig(model_path="m", etcd_endpoints=etcd, nats_server=nats, **bad)
    discovery = EtcdDiscovery(config, start_timeout_s=0.5)
    try:
        hint = "its endpoints begin with https://" if case == "no TLS" else "check --etcd-ca, "
        with pytest.raises(Unreachable, match=hint):
            await discovery.register(make_instance(4))
        with pytest.raises(Unreachable):
            await NatsPlane.connect(nats, access=NatsAccess.of(config), connect_timeout_s=0.5)
    finally:
        await discovery.aclose()
    assert "ssl_transport_security" not in capfd.readouterr().err  # a log line of gRPC


async def test_end_of_a_connection_with_tls_logs_no_warning_of_asyncio(
    secrets: Path, etcd: str, nats: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = WorkerConfig(model_path="m", **settings(secrets, etcd, nats))
    transport = NatsTransport(nats, access=NatsAccess.of(config))
    await transport.connect(SOON_S)
    connected: Any = transport._client._transport
    reader = connected._io_reader
    assert reader._transport is not None
    reader._transport.get_protocol().eof_received()
    await transport.aclose()
    assert "eof_received" not in caplog.text


def test_health_check_of_compose_passes_with_users(secrets: Path, etcd: str) -> None:
    check = COMPOSE["services"]["etcd"]["healthcheck"]["test"][1:]
    words = [
        word.replace("https://127.0.0.1:2379", etcd).replace("/tls", str(secrets)) for word in check
    ]
    program = Path(etcd_binary()).with_name(words[0])
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_password_is_not_sent_to_a_server_without_tls(
    nats_server: str, tmp_path: Path
) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("worker:secret\n")
    credentials.chmod(0o600)
    address = nats_server.replace("nats://", "tls://")
    access = NatsAccess(credentials_file=credentials)
    with pytest.raises(Unreachable, match=r"^TLS with NATS at .* fails \(the server does not requ"):
        await NatsPlane.connect(address, access=access, connect_timeout_s=0.5)


async def test_changed_certificates_are_read_without_a_restart(
    secrets: Path, etcd: str, nats: str, tmp_path: Path
) -> None:
    """The files have those of another role first."""
    for name in ("crt", "key"):
        shutil.copy(secrets / f"tool.{name}", tmp_path / f"x.{name}")
    files = {
        "etcd_cert": tmp_path / "x.crt",
        "etcd_key": tmp_path / "x.key",
        "nats_cert": tmp_path / "x.crt",
        "nats_key": tmp_path / "x.key",
    }
    config = WorkerConfig(model_path="m", **settings(secrets, etcd, nats) | files)
    transport = NatsTransport(nats, access=NatsAccess.of(config))
    await transport.connect(SOON_S)
    discovery = EtcdDiscovery(config, start_timeout_s=SOON_S)
    store = EtcdStore(config)
    try:
        with pytest.raises(Unreachable, match="rejects a subscription"):
            await transport.until_subscribed(0.2)
        with pytest.raises(Unreachable, match="rejects this process, "):
            await store.delete("v1/instances/other/backend/generate/1")
        for name in ("crt", "key"):
            shutil.copy(secrets / f"worker.{name}", tmp_path / f"x.{name}")
        await transport._client.force_reconnect()
        await transport.until_subscribed(SOON_S)
        await discovery.register(make_instance(5))
    finally:
        await transport.aclose()
        await store.aclose()
        await discovery.aclose()


async def test_failure_of_tls_at_a_reconnect_is_named(
    secrets: Path, etcd: str, nats: str, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.crt"
    shutil.copy(secrets / "ca.crt", authority)
    config = WorkerConfig(model_path="m", **settings(secrets, etcd, nats) | {"nats_ca": authority})
    transport = NatsTransport(nats, access=NatsAccess.of(config))
    await transport.connect(SOON_S)
    try:
        # A certificate that has not signed that of the server.
        shutil.copy(secrets / "root.crt", authority)
        await transport._client.force_reconnect()
        await until_soon(lambda: "certificate" in (transport.unavailable_reason() or ""))
        assert "check --nats-ca" in (transport.unavailable_reason() or "")
        with pytest.raises(Unreachable, match="TLS with NATS"):
            await NatsPlane.connect(nats, access=NatsAccess.of(config), connect_timeout_s=0.5)
        shutil.copy(secrets / "ca.crt", authority)
        await until_soon(lambda: transport.unavailable_reason() is None)
    finally:
        await transport.aclose()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"nats_server": "tls://h:1", "nats_cert": Path("c")}, "set both"),
        ({"nats_server": "nats://h:1", "nats_ca": Path("c")}, "does not begin with tls://"),
    ],
)
def test_files_for_nats_that_do_not_fit_are_an_error(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        NatsAccess.of(ConnectionConfig(**values))


def test_services_of_the_mock_file_answer_as_processes(secrets: Path, etcd: str, nats: str) -> None:
    """Run the commands of deploy/compose/mock.yml with its variables, without containers."""
    services = yaml.safe_load((DEPLOY / "compose" / "mock.yml").read_text())["services"]
    processes: list[Process] = []
    with ExitStack() as stack:
        for service in services.values():
            environ = {
                name: str(value).replace("/tls/", f"{secrets}/")
                for name, value in service["environment"].items()
            }
            environ |= {"ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats}
            _, _, module, *flags = map(str, service["command"])
            # Ports that are free here.
            flags = [flag.replace("9090", "0").replace("8000", "0") for flag in flags]
            processes.append(Process(module, flags, {**os.environ, **environ}))
            stack.callback(processes[-1].stop)
        frontend, *workers = processes
        for worker in workers:
            worker.instance()
        url = frontend.url()
        body = {
            "model": "tiny-gpt-oss",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4,
        }
        with httpx.Client(base_url=url, timeout=SOON_S, **PLAIN) as client:
            until(
                lambda: client.get("/v1/models/tiny-gpt-oss/ready").status_code == 200,
                START_TIMEOUT_S,
            )
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4

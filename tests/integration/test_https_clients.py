"""A deployment with TLS in this process, and the clients of this project that ask it.

Its frontend needs client certificates.
"""

from __future__ import annotations

import asyncio
import io
import os
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.client import choose_model
from benchmarks.load_client import Client, Load
from dynamo_trtllm import serve
from dynamo_trtllm.cli import chat
from dynamo_trtllm.cli.status import NothingRuns, collect
from dynamo_trtllm.config.commands import ChatConfig, StatusConfig
from dynamo_trtllm.launch.embedded import EmbeddedDeployment
from dynamo_trtllm.launch.readiness import check_ready
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.tls_files import TlsFiles
from tests.kit.certificates import make_certificate, shared_certificate, trusting
from tests.kit.waiting import SOON_S


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """The certificate of the clients, which is its own CA."""
    return make_certificate(tmp_path_factory.mktemp("client"), "client")


@pytest.fixture(scope="module")
def deployment(files: TlsFiles, owner: TlsFiles) -> Iterator[EmbeddedDeployment]:
    settings = {
        "tls_cert_file": files.certificate,
        "tls_key_file": files.key,
        "tls_client_ca_file": owner.certificate,
    }
    made = serve(
        "tiny-gpt-oss",
        engine="mock",
        prefill=0,
        decode=0,
        aggregated=1,
        frontend_settings=settings,
    )
    with made:
        yield made


@pytest.fixture
def trusted(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all clients trust the certificate, as users do."""
    monkeypatch.setenv("SSL_CERT_FILE", str(files.certificate))


@pytest.fixture
def certified(owner: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all clients send their certificate, as users do."""
    monkeypatch.setenv("DYN_TRTLLM_TLS_CLIENT_CERT_FILE", str(owner.certificate))
    monkeypatch.setenv("DYN_TRTLLM_TLS_CLIENT_KEY_FILE", str(owner.key))


@pytest.mark.usefixtures("trusted", "certified")
def test_chat_gets_an_answer(
    deployment: EmbeddedDeployment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    with pytest.raises(SystemExit) as ended:
        chat.main(["--url", deployment.url, "--max-tokens", "4"])
    assert ended.value.code in (0, None)
    assert "TTFT" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("trusted")
async def test_status_shows_the_frontend(deployment: EmbeddedDeployment, owner: TlsFiles) -> None:
    config = StatusConfig(
        url=deployment.url, tls_client_cert_file=owner.certificate, tls_client_key_file=owner.key
    )
    (report,) = await collect(config)
    assert deployment.url.startswith("https://")
    assert report.url == deployment.url
    assert [process.state for process in report.processes if process.role == "frontend"] == [
        "ready"
    ]


@pytest.mark.usefixtures("trusted", "certified")
async def test_load_client_measures_streams(deployment: EmbeddedDeployment) -> None:
    model, _ = await asyncio.to_thread(choose_model, deployment.url, None)
    client = Client(Load(url=deployment.url, model=model, concurrency=2, requests=4, osl=4))
    records = await client.run()
    client.aclose()
    assert [record.error for record in records] == [""] * 4
    assert [record.output_tokens for record in records] == [4] * 4


@pytest.mark.usefixtures("trusted")
def test_clients_without_a_certificate_say_what_to_set(deployment: EmbeddedDeployment) -> None:
    with pytest.raises(
        chat.ChatFailed, match=r"403: .*needs a client certificate.*--tls-client-cert"
    ):
        chat.models(chat.ChatServer(deployment.url))
    with pytest.raises(NothingRuns, match=r"needs a client certificate.*--tls-client-cert-file"):
        asyncio.run(collect(StatusConfig(url=deployment.url)))
    with pytest.raises(SystemExit, match=r"needs a client certificate.*_TLS_CLIENT_CERT_FILE"):
        choose_model(deployment.url, None)


@pytest.mark.parametrize("given", ["tls_client_cert_file", "tls_client_key_file"])
def test_certificate_without_its_key_is_an_error(given: str, owner: TlsFiles) -> None:
    with pytest.raises(ConfigError, match=r"only one of .* is set; set both"):
        ChatConfig(**{given: owner.key})


def test_load_client_that_does_not_trust_the_ca_says_what_to_do(
    deployment: EmbeddedDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(shared_certificate().certificate))
    with pytest.raises(SystemExit, match=r"is not trusted: .*set SSL_CERT_FILE"):
        choose_model(deployment.url, None)


async def test_client_that_does_not_trust_the_ca_says_what_to_do(
    deployment: EmbeddedDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(shared_certificate().certificate))
    with pytest.raises(ConnectionError, match=r"is not trusted: .*set SSL_CERT_FILE"):
        await http_client.request(f"{deployment.url}/live", "GET")


async def test_launcher_trusts_the_file_and_no_other(
    deployment: EmbeddedDeployment, files: TlsFiles
) -> None:
    port = httpx.URL(deployment.url).port
    assert port is not None
    assert (await check_ready("localhost", port, files.certificate)).status == "ready"
    with pytest.raises(ConnectionError, match="is not trusted"):
        await check_ready("localhost", port, shared_certificate().certificate)


def test_new_certificate_is_served_and_the_reload_counted(
    deployment: EmbeddedDeployment, files: TlsFiles, owner: TlsFiles, tmp_path: Path
) -> None:
    before = trusting(files)
    before.load_cert_chain(owner.certificate, owner.key)
    with httpx.Client(verify=before, base_url=deployment.url, timeout=SOON_S) as kept:
        kept.get("/live").raise_for_status()
        new = make_certificate(tmp_path, "new")
        os.replace(new.certificate, files.certificate)
        os.replace(new.key, files.key)
        until(lambda: is_trusted(deployment.url, trusting(files)))
        assert not is_trusted(deployment.url, before)
        metrics = kept.get("/metrics").raise_for_status().text  # on the connection from before
    assert 'dynamo_trtllm_tls_reloads_total{outcome="ok"} 1.0' in metrics
    assert 'dynamo_trtllm_tls_handshakes_total{outcome="failed"}' in metrics


def is_trusted(url: str, context: ssl.SSLContext) -> bool:
    try:
        return httpx.get(f"{url}/live", verify=context, timeout=SOON_S).status_code == 200
    except httpx.ConnectError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

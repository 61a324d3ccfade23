"""Requests with and without a client certificate, which TLS has checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker.health import Health, health_app
from tests.kit.cases import each_case
from tests.kit.frontend_app import front
from tests.kit.memory_http import PEER, MemoryClient

KEY = "sk-key-of-the-settings"
TLS: dict[str, Any] = {
    "tls_cert_file": Path("c"),
    "tls_key_file": Path("k"),
    "tls_client_ca_file": Path("ca"),
}
STRANGER = ("10.0.0.9", 9)


async def status_of(
    app: Any,
    path: str,
    *,
    has_certificate: bool,
    headers: str = "",
    peer: Any = PEER,
    host: str = "10.0.0.1",
) -> int:
    client = MemoryClient(app, peer)
    client.connection.has_client_certificate = has_certificate
    client.send(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode())
    await client.until_answered()
    return int(client.received.split()[1])


@each_case(
    ("path", "has_certificate", "status"),
    [
        ("/v1/models", False, 403),
        ("/metrics", False, 403),
        ("/nothing", False, 403),
        ("/v1/models", True, 200),
        ("/metrics", True, 200),
        ("/live", False, 200),
    ],
)
async def test_frontend_needs_a_certificate(path: str, has_certificate: bool, status: int) -> None:
    app = front(**TLS).built.router
    assert await status_of(app, path, has_certificate=has_certificate) == status


@pytest.mark.parametrize(("has_certificate", "status"), [(False, 403), (True, 200)])
async def test_frontend_with_keys_needs_a_certificate_too(
    has_certificate: bool, status: int
) -> None:
    app = front(api_key=(KEY,), **TLS).built.router
    headers = f"Authorization: Bearer {KEY}\r\n"
    asked = status_of(app, "/v1/models", has_certificate=has_certificate, headers=headers)
    assert await asked == status
    without_key = status_of(app, "/v1/models", has_certificate=has_certificate)
    assert await without_key == (401 if has_certificate else 403)


async def test_page_of_another_server_is_rejected() -> None:
    # A browser sends the certificate with the requests of every page.
    client = MemoryClient(front(**TLS).built.router)
    client.connection.has_client_certificate = True
    client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 10.0.0.1\r\nOrigin: https://evil.example\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    await client.until_answered()
    assert b" 403 " in client.received.partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("peer", "has_certificate", "status"),
    [(STRANGER, False, 403), (STRANGER, True, 200), (PEER, False, 200)],
)
async def test_other_machines_need_a_certificate_of_workers(
    peer: Any, has_certificate: bool, status: int
) -> None:
    access = AccessControl(WorkerConfig(model_path="m", **TLS))
    app = health_app(Health("serving"), lambda: b"", guard=access.check_status)
    asked = status_of(app, "/health", has_certificate=has_certificate, peer=peer)
    assert await asked == status


@pytest.mark.parametrize("headers", ["", "Authorization: Bearer key-that-nothing-checks\r\n"])
async def test_certificate_of_a_browser_opens_no_worker_to_pages(headers: str) -> None:
    access = AccessControl(WorkerConfig(model_path="m", **TLS))
    app = health_app(Health("serving"), lambda: b"", guard=access.check_status)
    asked = status_of(app, "/health", has_certificate=True, headers=headers, host="evil.example")
    assert await asked == 403


def test_other_machines_may_connect_if_certificates_are_checked() -> None:
    FrontendConfig(http_host="0.0.0.0", **TLS).check_exposure()
    without = TLS | {"tls_client_ca_file": None}
    with pytest.raises(ConfigError, match="--allow-anonymous"):
        FrontendConfig(http_host="0.0.0.0", **without).check_exposure()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls_cert_file": "c"}, "--tls-cert-file needs --tls-key-file"),
        ({"tls_key_file": "k"}, "--tls-key-file needs --tls-cert-file"),
        ({"tls_client_ca_file": "ca"}, "needs --tls-cert-file and --tls-key-file"),
        (TLS | {"allow_anonymous": True}, "contradicts --tls-client-ca-file"),
    ],
)
def test_settings_that_need_others_are_an_error(settings: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        FrontendConfig(**settings)

"""The URLs that workers and frontends show lead to them: over TLS, and on an IPv6 address."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from dynamo_trtllm import Frontend, FrontendConfig, Worker, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.planner.process import PlannerProcess
from tests.kit.certificates import client_context, shared_certificate
from tests.kit.waiting import SOON_S

HOST = "::1"
CLUSTER = {"nats_server": "inproc://urls", "etcd_endpoints": "memory://urls"}


def tls() -> dict[str, Path]:
    files = shared_certificate()
    return {"tls_cert_file": files.certificate, "tls_key_file": files.key}


async def test_urls_over_tls_and_ipv6_lead_to_their_servers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    settings = {**CLUSTER, **tls()}
    worker = Worker(
        WorkerConfig(
            model_path="tiny-gpt-oss", engine="mock", system_host=HOST, system_port=0, **settings
        )
    )
    frontend = Frontend(FrontendConfig(http_host=HOST, http_port=0, **settings))
    async with asyncio.timeout(SOON_S), worker, frontend:
        context = client_context()
        context.check_hostname = False  # the certificate is for 127.0.0.1 and localhost
        async with httpx.AsyncClient(verify=context) as client:
            for url in (worker.url, frontend.url):
                assert url is not None
                assert url.startswith("https://[::1]:")
                assert (await client.get(f"{url}/live")).status_code == 200
    shown = caplog.text
    assert f"health at {worker.url}" in shown
    assert f"listening on {frontend.url}" in shown


def test_url_of_a_planner_has_its_scheme() -> None:
    limits = {"slo_ttft_ms": 2000, "slo_itl_ms": 100}
    planner = PlannerProcess(PlannerConfig(system_host=HOST, **limits, **tls()))
    planner._system_port = 9
    assert planner.url == "https://[::1]:9"

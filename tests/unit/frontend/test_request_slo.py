"""The limits that a request sets for its times, and how frontends answer for them."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from dynamo_trtllm.frontend.http.app import build_app
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.cost_model import CostModel, linear_decode_fit, linear_prefill_fit
from dynamo_trtllm.protocol.messages import LoadReport, RequestSlo, Role
from tests.kit.frontend_app import CARD, MODEL, FakeFrontend, chunk, front, stop
from tests.kit.routing import FINISHED, Cluster, kv_chunk
from tests.unit.frontend.responses_client import ask, check_error

CONFIG: dict[str, Any] = {"router_mode": "slo", "slo_ttft_ms": 2000, "slo_itl_ms": 100}
COST = CostModel(linear_decode_fit(0.01), linear_prefill_fit(0.01, 1e-4), step_tokens=1000)


async def asked(
    served: FakeFrontend,
    headers: dict[str, str] | None = None,
    *,
    model: str = MODEL,
    **nvext: Any,
) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    if nvext:
        body["nvext"] = nvext
    return await ask(served, "POST", "/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize(
    ("headers", "nvext", "slo"),
    [
        ({}, {}, None),
        ({"X-SLO-TTFT-MS": "500"}, {}, RequestSlo(ttft_s=0.5)),
        ({}, {"slo_itl_ms": 20.5}, RequestSlo(itl_s=0.0205)),
        ({"X-SLO-ITL-MS": "20"}, {"slo_ttft_ms": 500}, RequestSlo(ttft_s=0.5, itl_s=0.02)),
        ({"X-SLO-ITL-MS": "20"}, {"slo_itl_ms": 20}, RequestSlo(itl_s=0.02)),
    ],
)
async def test_limits_of_a_request_reach_the_router(
    headers: dict[str, str], nvext: dict[str, Any], slo: RequestSlo | None
) -> None:
    served = front(chunk("a"), stop(), **CONFIG)
    response = await asked(served, headers, **nvext)
    assert response.status_code == 200, response.text
    assert served.router.requests[0].slo == slo


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "3600001", "fast", "", "1" * 99])
async def test_limit_that_is_no_time_is_rejected(value: str) -> None:
    response = await asked(front(stop(), **CONFIG), {"X-SLO-TTFT-MS": value})
    message = check_error(response, 400, "invalid_request", "X-SLO-TTFT-MS")
    assert "above 0 and at most 3600000" in message


@pytest.mark.parametrize("value", [0, -1, 3600001, "fast", True])
async def test_limit_of_the_body_that_is_no_time_is_rejected(value: Any) -> None:
    response = await asked(front(stop(), **CONFIG), slo_itl_ms=value)
    check_error(response, 400, "invalid_request", "nvext.slo_itl_ms")


async def test_header_and_field_that_differ_are_rejected() -> None:
    response = await asked(front(stop(), **CONFIG), {"X-SLO-TTFT-MS": "5"}, slo_ttft_ms=6)
    check_error(response, 400, "invalid_request", "nvext.slo_ttft_ms")


async def test_limits_without_slo_mode_are_rejected() -> None:
    response = await asked(front(stop()), {"X-SLO-ITL-MS": "5"})
    message = check_error(response, 400, "unsupported_parameter", "nvext.slo_itl_ms")
    assert "--router-mode round-robin" in message


async def served_by_pair(cluster: Cluster, queued_tokens: int) -> FakeFrontend:
    """Return a frontend that rejects late requests, with a prefill and a decode worker."""
    placement = SloPlacement(2.0, 0.1, rejects=True)
    cluster.router = RequestRouter(cluster.view, cluster.plane, placement=placement)
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")])
    await cluster.add(2, Role.DECODE, FINISHED)
    now = cluster.router.clocks.monotonic()
    for id_, tokens in ((1, queued_tokens), (2, 0)):
        placement.loads.on_report(LoadReport(id_, 1, 0, 0, tokens, 0, 1000, 0, COST), now)
    served = front(**CONFIG)
    served.catalog.served["tiny"] = ServedModel(
        msgspec.structs.replace(CARD, name="tiny"), served.catalog.renderer
    )
    served.built = build_app(served.config, served.catalog, cluster.router, served.metrics)
    return served


async def test_request_that_would_be_late_gets_429(cluster: Cluster) -> None:
    served = await served_by_pair(cluster, queued_tokens=80_000)
    response = await asked(served, model="tiny")
    message = check_error(response, 429, "slo_unreachable")
    assert "(limit 2000)" in message
    assert int(response.headers["retry-after"]) >= 7


async def test_log_and_metrics_have_path_and_prediction(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dynamo_trtllm")
    served = await served_by_pair(cluster, queued_tokens=0)
    response = await asked(served, model="tiny")
    assert response.status_code == 200, response.text
    (line,) = [text for text in caplog.messages if "finish=" in text]
    assert "workers_path=prefill_decode predicted_ttft=" in line
    assert "predicted_gap=0.0100s" in line
    counted = b'paths_total{model="tiny",path="prefill_decode",slo="met"} 1'
    assert counted in served.metrics.render()

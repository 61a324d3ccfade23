"""Models, readiness, health, metrics, and what is no path."""

from __future__ import annotations

import httpx
import pytest

from dynamo_trtllm.frontend.api.response_schemas import RejectedRecord
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case
from tests.kit.frontend_app import MODEL, FakeFrontend, front
from tests.kit.instances import make_instance
from tests.kit.memory_http import asgi


async def ask(served: FakeFrontend, method: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=asgi(served.app)), base_url="http://frontend"
    ) as client:
        # or httpx would take //x for a host
        return await client.request(method, f"http://frontend{path}")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
async def test_models_then_list_with_ids_and_context(path: str) -> None:
    body = (await ask(front(), "GET", path)).json()
    assert body["object"] == "list"
    assert [(model["id"], model["max_model_len"]) for model in body["data"]] == [(MODEL, 100)]


async def test_one_model_whose_id_has_a_slash_then_it_is_found() -> None:
    assert (await ask(front(), "GET", f"/v1/models/{MODEL}")).json()["id"] == MODEL


@pytest.mark.parametrize("path", ["/v1/models/no/such", "/v1/models/no/such/ready"])
async def test_one_model_that_is_unknown_then_404(path: str) -> None:
    response = await ask(front(), "GET", path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_ready_when_something_is_lacking_then_503_says_what() -> None:
    served = front()
    assert (await ask(served, "GET", f"/v1/models/{MODEL}/ready")).status_code == 200
    served.catalog.lacks = "model lab/tiny has no decode worker"
    response = await ask(served, "GET", f"/v1/models/{MODEL}/ready")
    assert response.status_code == 503
    assert "decode worker" in response.json()["message"]


async def test_health_with_all_roles_has_the_guides_form() -> None:
    served = front()
    served.catalog.up = [make_instance(2), make_instance(27, role=Role.PREFILL), make_instance(3)]
    body = (await ask(served, "GET", "/health")).json()
    assert body["status"] == "healthy"
    assert body["endpoints"] == [
        "dyn://dynamo.prefill.generate",
        "dyn://dynamo.tensorrt_llm.generate",
    ]
    assert body["instances"][0] == {
        "component": "prefill",
        "endpoint": "generate",
        "namespace": "dynamo",
        "instance_id": 27,
        "id": "1b",
        "role": "prefill",
        "model": "tiny",
        "engine": "mock",
        "transport": {"nats_tcp": "dynamo_prefill.generate-1b"},
    }
    assert "message" not in body


async def test_health_lists_a_limited_number_of_workers() -> None:
    served = front()
    served.catalog.up = [make_instance(number) for number in range(1, 201)]
    body = (await ask(served, "GET", "/health")).json()
    assert body["num_instances"] == {"decode": 200}
    assert [instance["instance_id"] for instance in body["instances"]] == [*range(1, 101)]
    assert len((await ask(served, "GET", "/health?limit=200")).json()["instances"]) == 200
    assert (await ask(served, "GET", "/health?limit=0")).json()["error"]["param"] == "limit"


async def test_health_when_not_ready_says_what_is_missing() -> None:
    served = front()
    served.catalog.lacks = "model lab/tiny has no worker"
    rejected: list[RejectedRecord] = [
        {"key": "v1/instances/dynamo/x", "reason": "the key is not of the form"}
    ]
    served.catalog.shown["mismatched"] = ["instance 3 (decode): strategy differs"]
    served.catalog.shown["rejected_records"] = rejected
    response = await ask(served, "GET", "/health")
    assert response.status_code == 200
    assert response.json()["status"] == "not_ready"
    assert response.json()["message"] == "model lab/tiny has no worker"
    assert response.json()["mismatched"] == ["instance 3 (decode): strategy differs"]
    assert response.json()["rejected_records"] == rejected


async def test_health_when_no_worker_is_registered_then_not_ready() -> None:
    served = front()
    served.catalog.served.clear()
    assert (await ask(served, "GET", "/health")).json()["status"] == "not_ready"


async def test_ready_awaiting_other_processes_is_503() -> None:
    served = front()
    served.not_ready_reason = "other processes of this frontend are starting"
    before = await ask(served, "GET", "/ready")
    served.not_ready_reason = None
    after = await ask(served, "GET", "/ready")
    assert (before.status_code, before.headers["retry-after"]) == (503, "1")
    assert before.json() == {
        "status": "not_ready",
        "reason": "other processes of this frontend are starting",
    }
    assert (after.status_code, after.json()) == (200, {"status": "ready", "reason": ""})


async def test_live_and_metrics_then_200() -> None:
    assert (await ask(front(), "GET", "/live")).json() == {"status": "live"}
    assert "dynamo_trtllm_inflight" in (await ask(front(), "GET", "/metrics")).text


@each_case(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
        ("GET", "//v1/models", 404, "unknown_url"),
    ],
)
async def test_no_such_path_or_method_then_openai_shape(
    method: str, path: str, status: int, code: str
) -> None:
    response = await ask(front(), method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert f" {path}" in response.json()["error"]["message"]
    assert response.headers["x-request-id"]
    assert ("allow" in response.headers) == (status == 405)

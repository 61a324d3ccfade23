"""The ids of requests, and the lines that are logged of them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec
import pytest

from dynamo_trtllm.frontend.http.app import build_app
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.observability.logging import TextFormatter
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.messages import Role
from tests.kit.frontend_app import CARD, MODEL, FakeFrontend, chunk, front, stop
from tests.kit.routing import FINISHED, Cluster
from tests.unit.frontend.responses_client import ask, check_error

NAMED = {"x-request-id": "job-7"}


async def asked(
    served: FakeFrontend, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
    return await ask(served, "POST", "/v1/chat/completions", json=body, headers=headers)


async def test_same_request_id_twice_has_different_engine_ids() -> None:
    served = front(stop("a"))
    first = await asked(served, NAMED)
    await asked(served, NAMED)
    assert first.headers["x-request-id"] == "job-7"
    one, two = (request.request_id for request in served.router.requests)
    assert one != two
    assert one.startswith("job-7-")


async def test_finished_request_then_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dynamo_trtllm")
    response = await asked(front(chunk("a"), stop()))
    (line,) = [
        record.getMessage() for record in caplog.records if record.name.endswith("request_reports")
    ]
    assert f"status=200 path=/v1/chat/completions id={response.json()['id']} model={MODEL} " in line
    assert "prefill=ab decode=cd isl=2 osl=2 cached_tokens=2" in line
    assert line.endswith("finish=stop")


async def test_streamed_request_log_has_the_client_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dynamo_trtllm")
    response = await asked(front(chunk("a"), stop()), stream=True)
    first = json.loads(response.text.split("\n")[0].removeprefix("data: "))
    (line,) = [
        record.getMessage() for record in caplog.records if record.name.endswith("request_reports")
    ]
    assert f" id={first['id']} " in line


@pytest.mark.parametrize("request_id", ["job-7", None, "a/b"])
async def test_request_log_lines_have_the_client_id(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    cluster: Cluster,
    request_id: str | None,
) -> None:
    caplog.set_level("INFO", logger="dynamo_trtllm")
    monkeypatch.setattr(caplog.handler, "formatter", TextFormatter("frontend"))
    await cluster.add(1, Role.AGGREGATED, [errors.Draining("worker 1 drains")], FINISHED)
    served = front()
    served.catalog.served["tiny"] = ServedModel(
        msgspec.structs.replace(CARD, name="tiny"), served.catalog.renderer
    )
    served.built = build_app(served.config, served.catalog, cluster.router, served.metrics)
    headers = {} if request_id is None else {"x-request-id": request_id}
    response = await asked(served, headers, model="tiny")
    assert response.status_code == 200, response.text
    given = response.headers["x-request-id"]
    assert given == (request_id or given)
    lines = caplog.text.splitlines()
    retried, finished = [
        line.split(" ") for line in lines if "finish" in line or "retrying" in line
    ]
    assert retried[3] == finished[3] == given


async def test_rejected_request_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dynamo_trtllm")
    response = await asked(front(), NAMED, max_tokens=0)
    check_error(response, 400, "invalid_request", "max_tokens")
    (line,) = [
        record.getMessage() for record in caplog.records if record.name.endswith("request_reports")
    ]
    reason = response.json()["error"]["message"]
    assert re.fullmatch(r"request [0-9a-f]{8} ended", line.split(":")[0])
    line = line.partition(": ")[2]
    assert (
        line
        == f"status=400 path=/v1/chat/completions finish=invalid_request param=max_tokens: {reason}"
    )


async def test_large_rejected_request_log_is_short(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dynamo_trtllm")
    await asked(front(), model="x\n" * 5000)
    (line,) = [
        record.getMessage() for record in caplog.records if record.name.endswith("request_reports")
    ]
    assert " status=4" in line
    assert len(line) < 500


async def test_unserved_request_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dynamo_trtllm")
    await asked(front(errors.NoInstances("model 'm' has no decode worker now")))
    (line,) = [
        record.getMessage() for record in caplog.records if record.name.endswith("request_reports")
    ]
    assert line.endswith("finish=no_instances: model 'm' has no decode worker now")

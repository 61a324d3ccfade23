"""What an operator reads off a deployment: metrics, and the statistics of one request."""

from __future__ import annotations

import signal

import httpx
import pytest

from tests.e2e.demo_model.torch_cluster import AGGREGATED, TorchCluster
from tests.kit.cluster import TINY, events

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

HELLO = {"model": TINY, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


def test_metrics_all_count_after_requests(tiny: httpx.Client) -> None:
    assert tiny.post("/v1/chat/completions", json=HELLO).status_code == 200
    text = tiny.get("/metrics").text
    for name in (
        "requests_total",
        "ttft_seconds_bucket",
        "itl_seconds_bucket",
        "request_seconds_bucket",
    ):
        assert f"dynamo_trtllm_{name}{{" in text, name
    for name in ("prompt_tokens_total", "output_tokens_total", "kv_bytes_total"):
        assert f"dynamo_trtllm_{name}{{" in text, name
    for phase, role in (
        ("queue", "prefill"),
        ("prefill", "prefill"),
        ("kv_transfer", "decode"),
        ("decode_wait", "decode"),
    ):
        count = f'dynamo_trtllm_phase_seconds_count{{model="{TINY}",phase="{phase}",role="{role}"}}'
        assert count in text, phase
    assert "dynamo_trtllm_inflight " in text


@pytest.mark.parametrize("stream", [False, True])
def test_stats_when_asked_for_then_who_served_and_how(
    tiny: httpx.Client, torch_cluster: TorchCluster, stream: bool
) -> None:
    asked = HELLO | {"stream": stream}
    with tiny.stream(
        "POST", "/v1/chat/completions", json=asked, headers={"x-dynamo-stats": "1"}
    ) as answer:
        if stream:
            stats = list(events(answer.iter_lines()))[-1]["dynamo_trtllm"]
        else:
            answer.read()
            stats = answer.json()["dynamo_trtllm"]
    assert (
        stats["prefill_instance"]
        == torch_cluster.prefill.instance()
        == answer.headers["x-prefill-instance"]
    )
    assert (
        stats["decode_instance"]
        == torch_cluster.decode.instance()
        == answer.headers["x-decode-instance"]
    )
    assert stats["kv_bytes"] > 0
    assert stats["transport"] in ("nixl/ucx", "tcp")
    assert 0 < stats["ttft_s"] < 20
    assert stats["tokens_per_s"] > 0
    assert {
        "tokenize",
        "send",
        "queue",
        "prefill",
        "export",
        "kv_transfer",
        "decode_wait",
        "decode",
    } <= set(stats["phase_s"])
    assert sum(stats["phase_s"].values()) == pytest.approx(stats["total_s"])
    assert 0 < stats["part_s"]["kv_transfer.read"] <= stats["phase_s"]["kv_transfer"]


def test_stats_when_not_asked_for_then_none(tiny: httpx.Client) -> None:
    assert "dynamo_trtllm" not in tiny.post("/v1/chat/completions", json=HELLO).json()


def test_stopped_example_drains_and_exits_with_0(
    tiny: httpx.Client, torch_cluster: TorchCluster
) -> None:
    """The last test of this folder: one of the workers ends."""
    assert tiny.post("/v1/chat/completions", json=HELLO | {"model": AGGREGATED}).status_code == 200
    torch_cluster.aggregated.send(signal.SIGTERM)
    assert torch_cluster.aggregated.wait(20.0) == 0
    torch_cluster.cluster.until_status(AGGREGATED, 503)

"""The guides' requests, the OpenAI SDK and the operator's paths against the demo model, over HTTP.

Shapes, not wording: what the model says is held by its own tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.cluster import TINY, events
from tests.e2e.conftest import TorchCluster

pytestmark = pytest.mark.timeout(120)  # the first test also starts the cluster

QUESTION = {"role": "user", "content": "Hey, quick check: is everything up and running?"}
HEALTH_TOOL = {
    "type": "function",
    "function": {
        "name": "get_system_health",
        "description": "Returns the current health status of the LLM runtime—use before critical operations to verify"
        " the service is live.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "get_system_health", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": '{"status":"ok","uptime_seconds":372045}'}

FIRST_ROUND: dict[str, Any] = {
    "model": TINY,
    "messages": [QUESTION],
    "chat_template_args": {"reasoning_effort": "low"},
    "tools": [HEALTH_TOOL],
    "response_format": {"type": "text"},
    "stream": False,
    "max_tokens": 300,
}
SECOND_ROUND = FIRST_ROUND | {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, RESULT]}
EXPLAIN = {
    "model": TINY,
    "messages": [
        {
            "role": "user",
            "content": "Explain the concept of disaggregated serving in LLM inference in 3 sentences.",
        }
    ],
    "stream": False,
    "max_tokens": 200,
}
FEDERER = {
    "model": TINY,
    "messages": [
        {
            "role": "user",
            "content": "Explain why Roger Federer is considered one of the greatest tennis players of all time",
        }
    ],
    "chat_template_args": {"reasoning_effort": "high"},
    "top_p": 1,
    "max_tokens": 300,
}
GUIDES = {
    "explain": EXPLAIN,
    "first round with tools": FIRST_ROUND,
    "second round with the tool's result": SECOND_ROUND,
    "first round without effort": {k: v for k, v in FIRST_ROUND.items() if k != "chat_template_args"},
    "recommended parameters": FEDERER,
}


def check_message(message: dict[str, Any], finish: str) -> None:
    assert message["role"] == "assistant"
    if finish == "tool_calls":
        (call,) = message["tool_calls"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "get_system_health"
    else:
        assert finish in ("stop", "length")
        assert isinstance(message["content"], str)
        assert message["content"] or message.get("reasoning_content")
        assert "<|" not in message["content"]


@pytest.mark.parametrize("request_name", GUIDES)
def test_chat_when_asked_as_in_the_guides_then_a_whole_completion(tiny: httpx.Client, request_name: str) -> None:
    answer = tiny.post("/v1/chat/completions", json=GUIDES[request_name])
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == TINY
    (choice,) = body["choices"]
    assert choice["index"] == 0
    check_message(choice["message"], choice["finish_reason"])
    usage = body["usage"]
    assert usage["prompt_tokens"] > 60
    assert 1 <= usage["completion_tokens"] <= GUIDES[request_name]["max_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("request_name", GUIDES)
def test_chat_when_streamed_then_the_same_answer_in_chunks(tiny: httpx.Client, request_name: str) -> None:
    greedy = GUIDES[request_name] | {"temperature": 0}
    whole = tiny.post("/v1/chat/completions", json=greedy).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with tiny.stream("POST", "/v1/chat/completions", json=greedy | options) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(answer.iter_lines()))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *parts, totals = chunks
    assert totals["choices"] == []
    assert totals["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in parts]
    assert choices[0]["delta"]["role"] == "assistant"
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes == [None] * (len(finishes) - 1) + [whole["choices"][0]["finish_reason"]]
    message = whole["choices"][0]["message"]
    assert _joined(choices, "content") == (message["content"] or "")
    assert _joined(choices, "reasoning_content") == message.get("reasoning_content", "")
    arguments = [call["function"]["arguments"] for c in choices for call in c["delta"].get("tool_calls", ())]
    assert "".join(arguments) == "".join(c["function"]["arguments"] for c in message.get("tool_calls", ()))


def _joined(choices: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for choice in choices)


@pytest.fixture
def sdk(torch_cluster: TorchCluster) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{torch_cluster.cluster.frontend.url()}/v1", api_key="none", http_client=http, max_retries=0
        ) as client,
    ):
        yield client


def test_sdk_when_it_chats_then_message_and_usage(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=TINY, messages=[{"role": "user", "content": "Hello"}], max_tokens=20)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 20


def test_sdk_when_it_streams_then_deltas_and_one_finish(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model=TINY, messages=[{"role": "user", "content": "Hello"}], max_tokens=20, stream=True
    )
    finishes = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert len(finishes) > 1
    assert finishes[-1] in ("stop", "length")
    assert set(finishes[:-1]) == {None}


def test_sdk_when_it_completes_token_ids_then_text_and_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=TINY, prompt=[1000, 2000, 3000], max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 8
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)


def test_sdk_when_the_model_is_unknown_then_its_not_found_error(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="gpt-none", messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_sdk_when_it_lists_models_then_both_deployments(sdk: openai.OpenAI) -> None:
    listed = {model.id: model for model in sdk.models.list()}
    assert set(listed) == {TINY, f"{TINY}-aggregated"}
    assert sdk.models.retrieve(TINY).id == TINY
    assert listed[TINY].object == "model"


def test_health_when_all_serve_then_both_guides_shapes(tiny: httpx.Client, torch_cluster: TorchCluster) -> None:
    body = tiny.get("/health").json()
    namespace = torch_cluster.cluster.env["DYN_NAMESPACE"]
    assert body["status"] == "healthy"
    assert set(body["endpoints"]) == {f"dyn://{namespace}.{name}.generate" for name in ("prefill", "tensorrt_llm")}
    by_id = {f"{each['instance_id']:x}": each for each in body["instances"]}
    workers = (torch_cluster.prefill, torch_cluster.decode, torch_cluster.aggregated)
    assert set(by_id) == {worker.instance() for worker in workers}
    for each in by_id.values():
        assert set(each) == {"component", "endpoint", "namespace", "instance_id", "transport"}
        assert each["transport"]["nats_tcp"]
    assert by_id[torch_cluster.prefill.instance()]["component"] == "prefill"


def test_metrics_when_requests_were_served_then_every_name_counts(tiny: httpx.Client) -> None:
    assert tiny.post("/v1/chat/completions", json=EXPLAIN | {"max_tokens": 20}).status_code == 200
    text = tiny.get("/metrics").text
    for name in ("requests_total", "ttft_seconds_bucket", "itl_seconds_bucket", "request_seconds_bucket"):
        assert f"dynamo_trtllm_{name}{{" in text, name
    for name in ("prompt_tokens_total", "output_tokens_total", "kv_bytes_total"):
        assert f"dynamo_trtllm_{name}{{" in text, name
    for phase in ("queue", "prefill", "handoff", "decode_wait"):
        assert f'dynamo_trtllm_phase_seconds_count{{model="{TINY}",phase="{phase}"}}' in text, phase
    assert "dynamo_trtllm_inflight " in text


@pytest.mark.parametrize("stream", [False, True])
def test_stats_when_asked_for_then_who_served_and_how(
    tiny: httpx.Client, torch_cluster: TorchCluster, stream: bool
) -> None:
    asked = EXPLAIN | {"max_tokens": 20, "stream": stream}
    with tiny.stream("POST", "/v1/chat/completions", json=asked, headers={"x-dynamo-stats": "1"}) as answer:
        if stream:
            stats = list(events(answer.iter_lines()))[-1]["dynamo_trtllm"]
        else:
            answer.read()
            stats = answer.json()["dynamo_trtllm"]
    assert stats["prefill_instance"] == torch_cluster.prefill.instance() == answer.headers["x-prefill-instance"]
    assert stats["decode_instance"] == torch_cluster.decode.instance() == answer.headers["x-decode-instance"]
    assert stats["kv_bytes"] > 0
    assert stats["transport"] in ("nixl/ucx", "tcp")
    assert 0 < stats["ttft_s"] < 20
    assert stats["tokens_per_s"] > 0
    assert set(stats["phase_s"]) == {"queue", "prefill", "handoff", "decode_wait"}


def test_stats_when_not_asked_for_then_none(tiny: httpx.Client) -> None:
    assert "dynamo_trtllm" not in tiny.post("/v1/chat/completions", json=EXPLAIN | {"max_tokens": 5}).json()

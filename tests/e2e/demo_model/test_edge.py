"""What the HTTP edge adds to a generation, over real processes: several choices at once, and its
own description.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.e2e.demo_model.torch_cluster import TorchCluster
from tests.kit.cluster import TINY, events

pytestmark = pytest.mark.timeout(180)

ASKED: dict[str, Any] = {
    "model": TINY,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 16,
}
CHAT = "/v1/chat/completions"


def test_streamed_choices_are_complete_and_usage_counts_once(tiny: httpx.Client) -> None:
    asked = ASKED | {
        "n": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with tiny.stream("POST", CHAT, json=asked) as answer:
        chunks = list(events(answer.iter_lines()))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    *parts, totals = chunks
    texts: defaultdict[int, str] = defaultdict(str)
    finishes: defaultdict[int, list[str]] = defaultdict(list)
    for part in parts:
        (choice,) = part["choices"]
        delta = choice["delta"]
        texts[choice["index"]] += delta.get("reasoning_content", "") + (delta.get("content") or "")
        finishes[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) == 1, "greedy choices are equal"
    assert all(len(finishes[index]) == 1 for index in texts)
    whole = tiny.post(CHAT, json=ASKED | {"temperature": 0}).json()
    assert totals["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert totals["usage"]["completion_tokens"] == 3 * whole["usage"]["completion_tokens"]


def test_best_of_then_the_answer_is_the_likeliest(tiny: httpx.Client) -> None:
    asked = {
        "model": TINY,
        "prompt": "Hello",
        "max_tokens": 8,
        "temperature": 1.5,
        "seed": 11,
        "logprobs": 0,
    }
    tried = tiny.post("/v1/completions", json=asked | {"n": 4}).json()["choices"]
    best = tiny.post("/v1/completions", json=asked | {"best_of": 4}).json()["choices"]
    means = [
        sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])
        for choice in tried
    ]
    assert [choice["text"] for choice in best] == [tried[means.index(max(means))]["text"]]


def test_stats_when_several_choices_then_those_of_each(
    tiny: httpx.Client, torch_cluster: TorchCluster
) -> None:
    answer = tiny.post(CHAT, json=ASKED | {"n": 2}, headers={"x-dynamo-stats": "1"})
    stats = answer.json()["dynamo_trtllm"]
    assert (
        stats["prefill_instance"]
        == torch_cluster.prefill.instance()
        == answer.headers["x-prefill-instance"]
    )
    assert stats["kv_bytes"] == sum(choice["kv_bytes"] for choice in stats["choices"]) > 0
    assert all(0 < stats["ttft_s"] <= choice["ttft_s"] for choice in stats["choices"])


def test_openapi_describes_what_is_answered(tiny: httpx.Client) -> None:
    described = tiny.get("/openapi.json").json()
    schema = {"$ref": "#/components/schemas/ChatCompletion", "components": described["components"]}
    jsonschema_rs.validate(schema, tiny.post(CHAT, json=ASKED).json())
    page = tiny.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "openapi.json" in page.text

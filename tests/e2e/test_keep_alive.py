"""A long prefill of the mock engine, with --sse-keep-alive-s, as a client on a socket and OpenAI's
SDK see it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.kit.cluster import Cluster

pytestmark = pytest.mark.timeout(180)
CHAT = "/v1/chat/completions"
COMMENT = ": keep-alive"
SILENCE_S = 0.1
PREFILL_S = 0.6
ASKED: dict[str, Any] = {
    "model": "mock",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "stream": True,
}


@pytest.mark.long  # tests/unit/frontend/test_keep_alive.py covers it without processes
def test_long_prefill_sends_comments_before_first_token(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(flags=["--sse-keep-alive-s", str(SILENCE_S), "--probe-interval-s", "0"])
    # the prompt has about 60 tokens
    cluster.mock("prefill_and_decode", "mock", prefill_token_s=PREFILL_S / 60)
    cluster.until_ready("mock")
    with cluster.client() as client:
        check_comments(client)
        check_sdk(str(client.base_url))
        check_errors(client)


def check_comments(client: httpx.Client) -> None:
    begun = time.monotonic()
    with client.stream("POST", CHAT, json=ASKED) as answer:
        headers_s = time.monotonic() - begun
        assert answer.status_code == 200
        assert answer.headers["x-accel-buffering"] == "no"
        lines = [line for line in answer.iter_lines() if line]
    total_s = time.monotonic() - begun
    first_token = next(at for at, line in enumerate(lines) if line.startswith("data: "))
    assert lines[:first_token] == [COMMENT] * first_token
    assert first_token >= 2
    assert SILENCE_S <= headers_s < total_s / 2
    assert lines[-1] == "data: [DONE]"


def check_sdk(url: str) -> None:
    """Let OpenAI's SDK parse a stream of each endpoint, comments included."""
    sdk = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="unused", max_retries=0)
    chat = sdk.chat.completions.create(**ASKED)
    assert [chunk.choices[0].finish_reason for chunk in chat][-1] == "length"
    text = sdk.completions.create(model="mock", prompt="hi " * 60, max_tokens=4, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in text][-1] == "length"
    with sdk.responses.stream(model="mock", input="hi", max_output_tokens=4) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def check_errors(client: httpx.Client) -> None:
    """A deadline after the headers is an event. The same deadline before them is a status."""
    with client.stream("POST", CHAT, json=ASKED | {"timeout": 3 * SILENCE_S}) as answer:
        assert answer.status_code == 200
        lines = [
            line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")
        ]
    assert json.loads(lines[0])["error"]["code"] == "deadline"
    assert lines[1:] == ["[DONE]"]
    early = client.post(CHAT, json=ASKED | {"timeout": SILENCE_S / 10})
    assert early.status_code == 504
    assert early.json()["error"]["code"] == "deadline"

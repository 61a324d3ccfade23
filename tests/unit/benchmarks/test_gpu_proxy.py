"""The proxy that we are compared with: what it asks of which server, and what it passes on."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from benchmarks.gpu.proxy import application, beside

ASKED = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
ANSWER = b"data: x\n\ndata: [DONE]\n\n"
PARAMS = {"remote_block_ids": [3], "remote_host": "h"}


async def answered(prefill: httpx.Response) -> tuple[httpx.Response, list[tuple[str, dict[str, Any]]]]:
    """The proxy's answer, and what it asked, in order."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, orjson.loads(request.content)))
        return prefill if request.url.host == "prefill" else httpx.Response(200, stream=httpx.ByteStream(ANSWER))

    async with httpx.AsyncClient(transport=httpx.MockTransport(serve)) as servers:
        app = application(servers, "http://prefill", "http://decode")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            return await client.post("/v1/completions", json=ASKED), asked


async def test_request_when_proxied_then_prefill_makes_one_token_and_decode_gets_where_its_kv_is() -> None:
    answer, asked = await answered(httpx.Response(200, json={"kv_transfer_params": PARAMS}))
    assert answer.content == ANSWER
    (first, first_body), (second, second_body) = asked
    assert (first, second) == ("prefill", "decode")
    assert (first_body["max_tokens"], first_body["stream"]) == (1, False)
    assert first_body["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream_options" not in first_body
    assert second_body == ASKED | {"kv_transfer_params": PARAMS}


@pytest.mark.parametrize("status", [400, 503])
async def test_request_when_prefill_refuses_then_decode_is_not_asked(status: int) -> None:
    answer, asked = await answered(httpx.Response(status, json={"error": {"message": "no"}}))
    assert (answer.status_code, answer.json()) == (status, {"error": {"message": "no"}})
    assert [host for host, _ in asked] == ["prefill"]


def test_beside_when_one_served_less_then_no_ratio_of_it() -> None:
    ours = {"a": figures(64, 90.0, 20.0), "b": figures(60, 90.0, 20.0), "c": figures(0, 0.0, 0.0)}
    theirs = {"a": figures(64, 100.0, 10.0), "b": figures(64, 100.0, 10.0), "c": figures(0, 0.0, 0.0)}
    (row,) = beside(ours, theirs)
    assert row.what.startswith("a, ")
    assert (row.value, row.met) == ("tokens/s 0.900, TTFT p50 2.000", None)


def figures(ok: int, tokens_per_s: float, ttft_ms: float) -> dict[str, Any]:
    return {"ok": ok, "tokens_per_s": tokens_per_s, "ttft_ms": {"p50": ttft_ms}}

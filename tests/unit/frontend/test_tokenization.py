"""`/tokenize`, `/detokenize` and `/version`, as vLLM has them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.responses.input_token_count_response import InputTokenCountResponse

import dynamo_trtllm
from dynamo_trtllm.frontend.http import tokenization
from dynamo_trtllm.frontend.requests import preprocess
from tests.kit.cases import each_case
from tests.kit.frontend_app import (
    CALL,
    MODEL,
    Catalog,
    FakeFrontend,
    ScriptedRouter,
    front,
    stop,
)
from tests.kit.memory_http import asgi

MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object"}},
}


async def post(served: FakeFrontend, path: str, **fields: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.post(path, json={"model": MODEL} | fields)


def check_error(response: httpx.Response, status: int, code: str, param: str | None) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    return str(error["message"])


async def test_prompt_then_its_tokens_and_no_generation() -> None:
    served = front()
    response = await post(served, "/tokenize", prompt="hi")
    assert response.json() == {
        "count": 2,
        "max_model_len": 100,
        "tokens": [104, 105],
        "token_strs": None,
    }
    assert served.router.requests == []
    metrics = served.metrics.render().decode()
    assert 'requests_total{code="ok",endpoint="tokenize",model=""} 1.0' in metrics
    assert "dynamo_trtllm_inflight 0.0" in metrics


async def test_prompt_texts_are_one_per_token() -> None:
    response = await post(front(), "/tokenize", prompt="hi", return_token_strs=True)
    assert response.json()["token_strs"] == ["<104>", "<105>"]


async def test_prompt_longer_than_context_is_counted() -> None:
    assert (await post(front(), "/tokenize", prompt="x" * 1000)).json()["count"] == 1000


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none", "temperature": 0.5},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"truncate_prompt_tokens": 3},
    ],
)
async def test_messages_then_the_tokens_of_the_same_chat_request(fields: dict[str, Any]) -> None:
    served = front(stop("x"))
    counted = await post(served, "/tokenize", messages=MESSAGES, **fields)
    assert counted.status_code == 200, counted.text
    await post(served, "/v1/chat/completions", messages=MESSAGES, **fields)
    assert counted.json()["tokens"] == served.router.requests[0].token_ids.tolist()


async def test_messages_without_answer_start_end_the_prompt() -> None:
    served = front()
    choice = {"type": "function", "function": {"name": "get_weather"}}
    response = await post(
        served,
        "/tokenize",
        messages=MESSAGES,
        add_generation_prompt=False,
        tools=[TOOL],
        tool_choice=choice,
    )
    assert CALL not in response.json()["tokens"]
    assert not served.catalog.renderer.conversations[0].opens_answer


@each_case(
    ("fields", "code", "param"),
    [
        ({}, "invalid_request", "prompt"),
        ({"prompt": "hi", "messages": MESSAGES}, "invalid_request", "prompt"),
        ({"prompt": ["hi"]}, "invalid_request", "prompt"),
        (
            {"messages": MESSAGES, "add_special_tokens": True},
            "unsupported_parameter",
            "add_special_tokens",
        ),
        ({"prompt": "hi", "return_token_str": True}, "unsupported_parameter", "return_token_str"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
    ],
)
async def test_tokenize_when_the_body_is_wrong_then_400(
    fields: dict[str, Any], code: str, param: str
) -> None:
    check_error(await post(front(), "/tokenize", **fields), 400, code, param)


async def test_tokenize_when_the_model_is_unknown_then_404() -> None:
    check_error(
        await post(front(), "/tokenize", model="other", prompt="hi"),
        404,
        "model_not_found",
        "model",
    )


async def test_tokenize_warns_of_unknown_fields_in_a_header() -> None:
    response = await post(front(unknown_fields="warn"), "/tokenize", prompt="hi", odd=1)
    assert response.headers["x-dynamo-ignored-fields"] == "odd"


async def test_tokenize_when_there_are_too_many_tokens_then_400(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenization, "MAX_PROMPT_TOKENS", 8)
    response = await post(front(), "/tokenize", prompt="x" * 9)
    assert "9 tokens; at most 8" in check_error(response, 400, "invalid_request", "prompt")
    assert preprocess.MAX_PROMPT_TOKENS == 2 << 20


@pytest.mark.parametrize(("size", "on_loop"), [(100, True), (2000, False)])
async def test_tokenize_when_the_body_is_long_then_off_the_loop(size: int, on_loop: bool) -> None:
    served = FakeFrontend(ScriptedRouter([]), catalog=Catalog(context_length=10_000))
    await post(served, "/tokenize", messages=[{"role": "user", "content": "a" * size}])
    assert served.catalog.renderer.rendered_on_loop == [on_loop]


async def test_tokenize_when_the_body_is_too_large_then_413() -> None:
    response = await post(front(max_body_bytes=100), "/tokenize", prompt="x" * 200)
    check_error(response, 413, "payload_too_large", None)


async def test_detokenize_then_the_text() -> None:
    response = await post(front(), "/detokenize", tokens=[104, 105])
    assert response.json() == {"prompt": "hi"}
    assert (await post(front(), "/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("tokens", "code", "param"),
    [
        ([1 << 20], "invalid_request", "tokens"),
        ([-1], "invalid_request", "tokens[0]"),
        (["hi"], "invalid_request", "tokens[0]"),
        ([104] * 101, "context_length_exceeded", "tokens"),
    ],
)
async def test_detokenize_when_the_ids_are_wrong_then_400(
    tokens: list[Any], code: str, param: str
) -> None:
    check_error(await post(front(), "/detokenize", tokens=tokens), 400, code, param)


async def test_version_then_that_of_the_package() -> None:
    transport = httpx.ASGITransport(app=asgi(front().app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        response = await client.get("/version")
    assert response.json() == {"version": dynamo_trtllm.__version__}


async def test_input_tokens_then_as_many_as_the_same_response_has() -> None:
    served = front(stop("x"))
    fields = {"input": "hi", "instructions": "be"}
    counted = await post(served, "/v1/responses/input_tokens", **fields)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 4}
    InputTokenCountResponse.model_validate(counted.json(), strict=True)
    whole = await post(served, "/v1/responses", **fields)
    assert whole.json()["usage"]["input_tokens"] == 4
    after = {"input": "so", "previous_response_id": whole.json()["id"]}
    counted = await post(served, "/v1/responses/input_tokens", **after)
    assert counted.json()["input_tokens"] == len("hi" + "x" + "so")
    assert len(served.router.requests) == 1


async def test_input_tokens_of_unknown_response_are_404() -> None:
    fields = {"input": "hi", "previous_response_id": "resp_x"}
    response = await post(front(), "/v1/responses/input_tokens", **fields)
    check_error(response, 404, "response_not_found", "previous_response_id")

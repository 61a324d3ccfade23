"""Every body and every chunk against the openai SDK's own types, strictly, and with no field that
it does not know.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dynamo_trtllm.protocol.messages import Chunk, FinishReason
from tests.kit.cases import each_case
from tests.kit.frontend_app import (
    CALL,
    CONTENT,
    HALF,
    MODEL,
    REASONING,
    FakeFrontend,
    chunk,
    front,
    stop,
)
from tests.kit.memory_http import asgi

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PLAIN = ("content", "nothing", "cut", "with logprobs")  # a text parser tells no channels apart
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_system_health", "parameters": {"type": "object"}},
    }
]
# documented, and not the SDK's
OURS = {"reasoning_content", "reasoning", "dynamo_trtllm", "max_model_len"}


def answers() -> dict[str, list[Chunk]]:
    return {
        "content": [chunk("Hel"), chunk(ids=[HALF]), chunk("lo"), stop()],
        "reasoning and content": [
            chunk("why", ids=[REASONING]),
            chunk("so", ids=[CONTENT]),
            stop("!"),
        ],
        "both in one step": [chunk("w", ids=[REASONING]), chunk("x" + chr(CONTENT) + "y"), stop()],
        "a call": [chunk("why", ids=[REASONING]), chunk("{", ids=[CALL]), chunk("}"), stop()],
        "two calls": [chunk("{}", ids=[CALL]), chunk("{}", ids=[CALL]), stop()],
        "nothing": [stop()],
        "cut": [chunk("Hel"), chunk("l", finish=FinishReason.LENGTH)],
        "with logprobs": [*(chunk(text, logprobs=True) for text in ("Hé", chr(HALF), "x")), stop()],
    }


async def ask(served: FakeFrontend, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=asgi(served.app)), base_url="http://frontend"
    ) as client:
        response = await client.request(method, path, **kwargs)
    assert response.status_code == 200, response.text
    return response


def check_conforms(kind: type[pydantic.BaseModel], text: str) -> None:
    value = kind.model_validate_json(text, strict=True)
    assert set(extras(value)) <= OURS
    assert value.to_dict(exclude_unset=True, mode="json") == json.loads(text)  # type: ignore[attr-defined]


def extras(value: Any) -> Iterator[str]:
    """The fields of all objects within that their types do not have."""
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(extras, value))


def lines(response: httpx.Response) -> list[str]:
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [event.removeprefix("data: ") for event in events]


def chat(name: str, **fields: Any) -> dict[str, Any]:
    logprobs = {"logprobs": True, "top_logprobs": 2} if "logprobs" in name else {}
    return (
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
        | logprobs
        | fields
    )


def text(name: str, **fields: Any) -> dict[str, Any]:
    return (
        {"model": MODEL, "prompt": "hi"}
        | ({"logprobs": 2} if "logprobs" in name else {"echo": True})
        | fields
    )


STATS = {"x-dynamo-stats": "1"}


@each_case("n", [1, 2])
@each_case("name", answers())
async def test_chat_when_whole_then_the_sdks_type(name: str, n: int) -> None:
    response = await ask(front(*answers()[name]), "POST", CHAT, json=chat(name, n=n), headers=STATS)
    check_conforms(ChatCompletion, response.text)
    body = response.json()
    assert {"cached_tokens"} == set(body["usage"]["prompt_tokens_details"])
    assert {"reasoning_tokens"} == set(body["usage"]["completion_tokens_details"])
    for choice in body["choices"]:
        assert {"role", "content", "refusal"} <= set(choice["message"])
        assert set(choice) == {"index", "message", "logprobs", "finish_reason"}


@each_case("n", [1, 2])
@each_case("name", answers())
async def test_chat_when_streamed_then_each_chunk_the_sdks_type(name: str, n: int) -> None:
    asked = chat(name, n=n, stream=True, stream_options={"include_usage": True})
    for line in lines(await ask(front(*answers()[name]), "POST", CHAT, json=asked, headers=STATS)):
        check_conforms(ChatCompletionChunk, line)


async def test_streamed_call_fields_have_the_sdk_order() -> None:
    asked = chat("", stream=True)
    chunks = [
        json.loads(line)
        for line in lines(await ask(front(*answers()["two calls"]), "POST", CHAT, json=asked))
    ]
    calls = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    for index in (0, 1):
        first, *more = [call for call in calls if call["index"] == index]
        assert list(first) == ["index", "id", "type", "function"]
        assert list(first["function"]) == ["name", "arguments"]
        assert all(list(call) == ["index", "function"] for call in more)
    assert len({call["id"] for call in calls if "id" in call}) == 2


@pytest.mark.parametrize("name", PLAIN)
async def test_text_when_whole_then_the_sdks_type(name: str) -> None:
    check_conforms(
        Completion,
        (await ask(front(*answers()[name]), "POST", TEXT, json=text(name), headers=STATS)).text,
    )


@pytest.mark.parametrize("name", PLAIN)
async def test_streamed_text_chunks_have_the_sdk_type(name: str) -> None:
    asked = text(name, stream=True, stream_options={"include_usage": True})
    for line in lines(await ask(front(*answers()[name]), "POST", TEXT, json=asked, headers=STATS)):
        chunk = json.loads(line)
        # null as OpenAI's server sends it, which its SDK's type does not allow for
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check_conforms(Completion, json.dumps(chunk))


async def test_models_then_the_sdks_type() -> None:
    for model in (await ask(front(), "GET", "/v1/models")).json()["data"]:
        check_conforms(Model, json.dumps(model))
    check_conforms(Model, (await ask(front(), "GET", f"/v1/models/{MODEL}")).text)

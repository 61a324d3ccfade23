"""Log-probabilities and text of `/v1/completions`, with tokens whose text depends on others."""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import msgspec
import pytest

from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, TokenLogprob, token_ids
from tests.kit.frontend_app import CARD, MODEL, FakeFrontend, front
from tests.kit.memory_http import asgi
from tests.unit.frontend.tokenization.test_template import files, renderer

LIKELIEST = 7  # a token that was never sampled
SIGN = "𒀀"  # has several tokens


@functools.cache
def harmony() -> Renderer:
    return HarmonyRenderer()


@functools.cache
def like_llama_2() -> Renderer:
    """Return a renderer whose decoder drops a blank at the start of a text."""
    return renderer(files("byte_fallback"))


def served_by(made: Renderer, *sampled: int) -> FakeFrontend:
    """Return a frontend of a model that generates these tokens, one in a step."""
    steps = [
        Chunk(
            token_ids=token_ids([token_id]),
            logprobs=(TokenLogprob(token_id, -2.0, ((LIKELIEST, -0.1),)),),
            finish_reason=FinishReason.LENGTH if at == len(sampled) else None,
        )
        for at, token_id in enumerate(sampled, start=1)
    ]
    served = front(*steps)
    card = msgspec.structs.replace(CARD, vocab_size=201088)
    served.catalog.served[MODEL] = ServedModel(card, made)
    return served


async def completed(served: FakeFrontend, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return the text and the log-probabilities of the only choice."""
    body = {"model": MODEL, "max_tokens": 50, "stream": stream, **fields}
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = response.json()["choices"]
        return {"text": choice["text"], **(choice["logprobs"] or {})}
    merged: dict[str, Any] = {"text": ""}
    for line in response.text.split("\n\n"):
        if line in ("", "data: [DONE]"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        merged["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            merged.setdefault(name, []).extend(values)
    return merged


@pytest.mark.parametrize("stream", [False, True])
async def test_offset_of_each_token_is_its_place_in_the_text(stream: bool) -> None:
    encoded = harmony().encode
    end = 200007  # a special token, which has no text
    sampled = [*encoded("Hi"), end, *encoded(f" {SIGN}!")]
    got = await completed(served_by(harmony(), *sampled), stream=stream, prompt="x", logprobs=1)
    assert got["text"] == f"Hi {SIGN}!"
    offsets = got["text_offset"]
    assert offsets[:3] == [0, 2, 2]
    assert set(offsets[3:-1]) == {3}
    assert offsets[-1] == len("Hi  ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [f"a{SIGN}", [200006, 64]])
async def test_offsets_after_an_echo_begin_behind_its_text(prompt: Any, stream: bool) -> None:
    (sampled,) = harmony().encode("!")
    served = served_by(harmony(), sampled)
    got = await completed(served, stream=stream, prompt=prompt, echo=True, logprobs=1)
    assert got["text"].endswith("!")
    assert len(got["tokens"]) == len(got["text_offset"]) > 2
    assert got["text_offset"][-1] == len(got["text"]) - 1


@pytest.mark.parametrize("stream", [False, True])
async def test_alternatives_include_the_sampled_token(stream: bool) -> None:
    (sampled,) = harmony().encode("Hi")
    likeliest = harmony().token_text(LIKELIEST)
    got = await completed(served_by(harmony(), sampled), stream=stream, prompt="x", logprobs=1)
    assert got["top_logprobs"] == [{likeliest: -0.1, "Hi": -2.0}]


@pytest.mark.parametrize("prompt", ["the", SIGN, "the ", [263, 260]])
async def test_blank_of_a_continuation_is_kept_after_any_prompt(prompt: Any) -> None:
    served = served_by(like_llama_2(), 261)
    got = await completed(served, stream=False, prompt=prompt)
    assert got["text"] == " quick"


@pytest.mark.parametrize("stream", [False, True])
async def test_blank_between_prompt_and_continuation_is_kept(stream: bool) -> None:
    quick, fox = (261, 262)
    served = served_by(like_llama_2(), quick, fox)
    got = await completed(served, stream=stream, prompt="the", logprobs=0, echo=True)
    assert got["text"] == "the quick fox"
    assert got["tokens"][-2:] == [" quick", " fox"]
    assert got["text_offset"][-2:] == [3, 9]
    # The begin-of-text token is no part of the echoed string, which begins without a blank.
    assert got["text_offset"][:3] == [0, 0, 0]

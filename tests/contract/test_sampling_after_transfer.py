"""Sampling, penalties and structured output choose the same tokens in one process and after a KV
transfer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.torch import format_compiler, grammar
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import (
    FinishReason,
    OutputFormat,
    Phase,
    Role,
    StructuredOutput,
    token_ids,
)
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    started,
    tokens,
)
from tests.kit.engines import answer, make, prefill_then_decode
from tests.kit.small_tokenizer import CONTROL, spell, write_tokenizer

END, CHANNEL, MESSAGE, _ = CONTROL.values()
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def folder(gpt_oss: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer and a stop token of it."""
    copy = tmp_path_factory.mktemp("guided") / "model"
    shutil.copytree(gpt_oss, copy)
    write_tokenizer(copy)
    for name in ("config.json", "generation_config.json"):
        file = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(file | {"eos_token_id": END}))
    return copy


def form(after: tuple[int, ...] = (), literal: str = "") -> StructuredOutput:
    alternative = OutputFormat(json_schema=json.dumps(SCHEMA), prefix=literal)
    return StructuredOutput(alternatives=(alternative,), trigger_ids=token_ids(after))


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"city", "days"}
    assert len(value["city"]) <= 6
    assert 1 <= len(value["days"]) <= 3
    assert set(value["days"]) <= {1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_guided_over_two_calls_gives_same_json(folder: Path, temperature: float) -> None:
    aggregated, prefill, decode = (
        make("torch", folder, role) for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
    )
    async with started(aggregated, prefill, decode):
        for seed in range(2):
            sampling: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 200}
            sampling["guided"] = form(literal="<|message|>")
            chunks = await collect(aggregated, ask(prompt_of(20, seed), **sampling))
            assert chunks[-1].finish_reason is FinishReason.STOP
            ids = tokens(chunks)
            assert (
                tokens(await prefill_then_decode(prefill, decode, prompt_of(20, seed), **sampling))
                == ids
            )
            assert (ids[0], ids[-1]) == (MESSAGE, END)
            check_schema(spell(ids[1:-1]))
        for engine in (aggregated, decode):
            await check_nothing_left(engine)


async def test_guided_decode_knows_the_form_begun_by_first_token(folder: Path) -> None:
    """The prefill call's only token is `after` itself, so only the KV transfer parameters tell the
    decode worker.
    """
    aggregated, prefill, decode = (
        make("torch", folder, role) for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
    )
    sampling: dict[str, Any] = {
        "max_tokens": 200,
        "guided": form((CHANNEL,)),
        "logit_bias": ((CHANNEL, 100.0),),
    }
    async with started(aggregated, prefill, decode):
        ids = await answer(aggregated, prompt_of(9), **sampling)
        assert tokens(await prefill_then_decode(prefill, decode, prompt_of(9), **sampling)) == ids
    assert (ids[0], ids[-1]) == (CHANNEL, END)
    check_schema(spell(ids[1:-1]))


async def test_guided_resumed_midway_equals_undisturbed_run(folder: Path) -> None:
    engine = make("torch", folder, Role.AGGREGATED)
    sampling: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 2,
        "guided": form((CHANNEL,), literal="<|message|>"),
    }
    sampling["logit_bias"] = ((CHANNEL, 50.0),)
    async with started(engine):
        whole = await answer(engine, prompt_of(9), max_tokens=200, **sampling)
        for made in (1, 2, 5, len(whole) - 1):
            so_far = prompt_of(9) + token_ids(whole[:made])
            rest = {**sampling, "max_tokens": 200 - made}
            assert (
                tokens(await collect(engine, ask(so_far, num_resumed_output_tokens=made, **rest)))
                == whole[made:]
            )


async def test_guided_output_outside_the_form_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar.GrammarMatcher, "apply_mask", lambda *_: None)
    engine = make("torch", folder, Role.AGGREGATED)
    async with started(engine):
        with pytest.raises(
            RequestRejected, match="the output does not follow this format"
        ) as refused:
            await collect(engine, ask(prompt_of(9), guided=form(), logit_bias=((CHANNEL, 100.0),)))
        await check_nothing_left(engine)
    assert refused.value.field == "guided"
    assert "\n" not in refused.value.message
    assert "doesn't satisfy the grammar" in caplog.text


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
async def test_penalty_counts_first_token_at_decode(folder: Path, penalty: str) -> None:
    """The biases make 7 win, then 11 as long as 7 is penalized."""
    aggregated, prefill, decode = (
        make("torch", folder, role) for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
    )
    async with started(aggregated, prefill, decode):
        for temperature in (0.0, 0.9):
            asked: dict[str, Any] = {
                "logit_bias": ((7, 80.0), (11, 60.0)),
                penalty: 40.0,
                "temperature": temperature,
            }
            asked |= {"seed": 3, "max_tokens": 12, "ignore_eos": True, "min_p": 0.02}
            ids = await answer(aggregated, prompt_of(9), **asked)
            assert ids[:2] == [7, 11]
            assert tokens(await prefill_then_decode(prefill, decode, prompt_of(9), **asked)) == ids


async def test_guided_bad_schema_is_rejected_before_computing(folder: Path) -> None:
    prefill = make("torch", folder, Role.PREFILL)
    bad = StructuredOutput(alternatives=(OutputFormat(json_schema='{"type": "objekt"}'),))
    async with started(prefill):
        with pytest.raises(RequestRejected, match="Invalid type: objekt"):
            await collect(prefill, ask(prompt_of(9), phase=Phase.PREFILL, guided=bad))
        with pytest.raises(RequestRejected, match="min_tokens must be 0"):
            await collect(
                prefill, ask(prompt_of(9), phase=Phase.PREFILL, guided=form(), min_tokens=1)
            )
        await check_nothing_left(prefill)


async def test_guided_without_library_or_tokenizer_is_rejected(
    folder: Path, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    try:
        assert "guided" in (await engine.start()).unsupported_features
        with pytest.raises(RequestRejected, match="llguidance"):
            await answer(engine, prompt_of(9), guided=form())
    finally:
        await engine.aclose()
    monkeypatch.setattr(format_compiler, "is_available", lambda: False)
    engine = make("torch", folder, Role.AGGREGATED)
    try:
        assert "guided" in (await engine.start()).unsupported_features
    finally:
        await engine.aclose()

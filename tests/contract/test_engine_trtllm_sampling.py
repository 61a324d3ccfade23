"""What TensorRT-LLM ignores in a request, or fails on, is served right or rejected by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import FinishReason, Role
from tests.engines import answer, ask, collect, make, prefill_then_decode, prompt_of, started, tokens
from tests.fakes_path import RELEASES, fake_tensorrt_llm
from tests.trtllm_engines import full_sampler

PROMPT = prompt_of(70)
IGNORED = {"seed": 7, "min_tokens": 3, "min_p": 0.1, "presence_penalty": 0.5}


async def rejected_field(engine: Any, **sampling: Any) -> str | None:
    try:
        await answer(engine, PROMPT, **sampling)
    except RequestRejected as exc:
        return exc.field
    return None


@pytest.mark.parametrize("version", RELEASES)
async def test_field_when_the_sampler_ignores_it_then_rejected_by_name(version: str, gpt_oss: Path) -> None:
    with fake_tensorrt_llm(version):
        engine = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            rejected = {name: await rejected_field(engine, **{name: value}) for name, value in IGNORED.items()}
    ignores = version in ("1.1.0", "1.2.1")  # 1.0 runs the TRTLLM sampler
    assert rejected == {name: name if ignores else None for name in IGNORED}


@pytest.mark.parametrize("version", RELEASES)
async def test_seed_and_min_tokens_when_supported_then_they_have_an_effect(version: str, gpt_oss: Path) -> None:
    with fake_tensorrt_llm(version) as package:
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, **full_sampler(package))
        async with started(engine):
            sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 30}
            assert await answer(engine, PROMPT, **sampled) == await answer(engine, PROMPT, **sampled)
            ended = await answer(engine, PROMPT, logit_bias=((1, 1000.0),), min_tokens=3)
            assert (len(ended), ended[-1]) == (4, 1)


@pytest.mark.parametrize("version", RELEASES)
async def test_stop_token_when_the_models_own_are_ignored_then_it_still_stops(version: str, gpt_oss: Path) -> None:
    with fake_tensorrt_llm(version):
        roles = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
        whole, prefill, decode = (make("trtllm", gpt_oss, role) for role in roles)
        async with started(whole, prefill, decode):
            free = await answer(whole, PROMPT, ignore_eos=True)
            chosen = {"ignore_eos": True, "stop_token_ids": (free[4],), "min_tokens": 2}  # which is idle
            for chunks in (
                await collect(whole, ask(PROMPT, **chosen)),
                await prefill_then_decode(prefill, decode, PROMPT, **chosen),
            ):
                assert tokens(chunks) == free[:5]
                assert chunks[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("version", RELEASES)
async def test_logprobs_when_prefill_and_decode_are_apart_then_rejected_where_the_first_token_has_none(
    version: str, gpt_oss: Path
) -> None:
    with fake_tensorrt_llm(version):
        prefill, decode = make("trtllm", gpt_oss, Role.PREFILL), make("trtllm", gpt_oss, Role.DECODE)
        async with started(prefill, decode):
            if version == "1.3.0rc29":
                chunks = await prefill_then_decode(prefill, decode, PROMPT, logprobs=1)
                assert [entry.token_id for chunk in chunks for entry in chunk.logprobs] == tokens(chunks)
                return
            for engine in (prefill, decode):
                assert await rejected_field(engine, logprobs=1) == "logprobs"

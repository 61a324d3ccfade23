"""What TensorRT-LLM ignores in a request, or fails on, is served right or rejected by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import FinishReason, Role
from dynamo_trtllm.testing.engine_requests import ask, collect, prompt_of, started, tokens
from tests.kit.engines import answer, make, prefill_then_decode
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm
from tests.kit.trtllm_engines import full_sampler

PROMPT = prompt_of(70)
SAMPLED = {"temperature": 1.0, "max_tokens": 30}
FAVORED = {"logit_bias": ((9, 1000.0), (11, 999.0))}  # chosen by turns if the last one is penalized
FIELDS: dict[str, dict[str, Any]] = {
    "seed": SAMPLED | {"seed": 7},
    "min_tokens": {"min_tokens": 3, "logit_bias": ((1, 1000.0),)},
    "min_p": SAMPLED | {"seed": 7, "min_p": 0.9},
    "presence_penalty": FAVORED | {"presence_penalty": 1.9},
    "frequency_penalty": FAVORED | {"frequency_penalty": 1.9},
    "repetition_penalty": FAVORED | {"repetition_penalty": 1.9},
}
# Fields that the PyTorch sampler ignores.
ALL = frozenset(FIELDS)
REJECTED = {
    "1.1.0": ALL,
    "1.2.1": ALL,
    "1.3.0rc20": ALL,
    "1.3.0rc25": frozenset({"seed", "min_p"}),  # which is asked for with a seed here
    "1.3.0rc29": frozenset[str](),
    "1.4.0rc1": frozenset[str](),
}


@pytest.fixture(scope="module")
def of_torch(gpt_oss: Path) -> dict[str, list[int]]:
    """The answers of the torch engine itself."""

    async def ask_torch() -> dict[str, list[int]]:
        engine = make("torch", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            answers = {
                name: await answer(engine, PROMPT, **sampling) for name, sampling in FIELDS.items()
            }
            assert await answer(engine, PROMPT, **FAVORED) not in answers.values()
            return answers

    return asyncio.run(ask_torch())


async def rejected_field(engine: Any, **sampling: Any) -> str | None:
    try:
        await answer(engine, PROMPT, **sampling)
    except RequestRejected as exc:
        return exc.field
    return None


# The others differ from their neighbors in nothing that this test sees.
BOUNDARIES = ("1.2.1", "1.3.0rc20", "1.3.0rc25", "1.3.0rc29")


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(version, marks=() if version in BOUNDARIES else pytest.mark.long)
        for version in REJECTED
    ],
)
async def test_field_that_sampler_ignores_is_rejected_by_name(
    version: str, gpt_oss: Path, of_torch: dict[str, list[int]]
) -> None:
    with fake_tensorrt_llm(version) as package:
        plain = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(plain):
            for name, sampling in FIELDS.items():
                if name in REJECTED[version]:
                    assert await rejected_field(plain, **sampling) in (name, "seed")
                else:
                    assert await answer(plain, PROMPT, **sampling) == of_torch[name]
        args = full_sampler(package)
        if not args:
            return
        full = make("trtllm", gpt_oss, Role.AGGREGATED, **args)
        async with started(full):
            for name, sampling in FIELDS.items():
                assert await answer(full, PROMPT, **sampling) == of_torch[name]


@pytest.mark.parametrize("version", RELEASES)
async def test_stop_token_still_stops_when_model_stops_are_ignored(
    version: str, gpt_oss: Path
) -> None:
    with fake_tensorrt_llm(version):
        roles = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
        aggregated, prefill, decode = (make("trtllm", gpt_oss, role) for role in roles)
        async with started(aggregated, prefill, decode):
            free = await answer(aggregated, PROMPT, ignore_eos=True)
            # which is idle
            chosen = {"ignore_eos": True, "stop_token_ids": (free[4],), "min_tokens": 2}
            for chunks in (
                await collect(aggregated, ask(PROMPT, **chosen)),
                await prefill_then_decode(prefill, decode, PROMPT, **chosen),
            ):
                assert tokens(chunks) == free[:5]
                assert chunks[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("version", RELEASES)
async def test_logprobs_are_rejected_where_first_token_has_none(
    version: str, gpt_oss: Path
) -> None:
    with fake_tensorrt_llm(version):
        prefill = make("trtllm", gpt_oss, Role.PREFILL)
        decode = make("trtllm", gpt_oss, Role.DECODE)
        async with started(prefill, decode):
            if version >= "1.3":
                chunks = await prefill_then_decode(prefill, decode, PROMPT, logprobs=1)
                assert [entry.token_id for chunk in chunks for entry in chunk.logprobs] == tokens(
                    chunks
                )
                return
            for engine in (prefill, decode):
                assert await rejected_field(engine, logprobs=1) == "logprobs"


@pytest.mark.parametrize("version", RELEASES)
async def test_stop_token_as_last_allowed_token_finishes_with_stop(
    version: str, gpt_oss: Path
) -> None:
    """A Harmony tool call that fits exactly ends with one."""
    with fake_tensorrt_llm(version):
        roles = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
        aggregated, prefill, decode = (make("trtllm", gpt_oss, role) for role in roles)
        async with started(aggregated, prefill, decode):
            free = await answer(aggregated, PROMPT)
            chosen = {"stop_token_ids": (free[4],), "max_tokens": 5}
            for chunks in (
                await collect(aggregated, ask(PROMPT, **chosen)),
                await prefill_then_decode(prefill, decode, PROMPT, **chosen),
            ):
                assert (tokens(chunks), chunks[-1].finish_reason) == (free[:5], FinishReason.STOP)

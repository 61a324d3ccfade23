"""An elastic engine runs all kinds of calls at the same time, with the answers of other roles."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    run_both,
    started,
    tokens,
)
from tests.kit.engines import make
from tests.kit.fake_packages import fake_vllm


@pytest.mark.parametrize("kind", ["mock", "torch", "vllm"])
async def test_elastic_engine_runs_every_kind_of_call(kind: str, gpt_oss: Path) -> None:
    with ExitStack() as stack:
        if kind == "vllm":
            stack.enter_context(fake_vllm())
        elastic, prefill, decode = (
            make(kind, gpt_oss, role) for role in (Role.ELASTIC, Role.PREFILL, Role.DECODE)
        )
        async with started(elastic, prefill, decode):
            requests = [ask(prompt_of(100, seed=seed), max_tokens=8) for seed in range(4)]
            expected = [tokens(await collect(decode, request)) for request in requests]
            for to_run in (
                [run_both(elastic, decode, request) for request in requests],
                [run_both(prefill, elastic, request) for request in requests],
                [collect(elastic, request) for request in requests],
            ):
                answers = await asyncio.gather(*to_run)
                assert [tokens(chunks) for chunks in answers] == expected
            mixed = await asyncio.gather(
                run_both(elastic, decode, requests[0]),
                run_both(prefill, elastic, requests[1]),
                collect(elastic, requests[2]),
            )
            assert [tokens(chunks) for chunks in mixed] == expected[:3]
            await check_nothing_left(elastic)

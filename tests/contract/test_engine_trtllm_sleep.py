"""A trtllm engine over its stand-in that releases its GPU memory: when it may, and that nothing is
lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.protocol.errors import EngineFailed
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import prompt_of, started
from tests.kit.engines import answer, make
from tests.kit.fake_packages import fake_tensorrt_llm

PROMPT = prompt_of(40)
NO_REUSE = {"kv_cache_config": {"enable_block_reuse": False}}


async def test_sleep_when_it_wakes_then_the_same_answers(gpt_oss: Path) -> None:
    with fake_tensorrt_llm("1.3.0rc29") as package:
        engine: Any = make("trtllm", gpt_oss, Role.AGGREGATED, **NO_REUSE, sleep_config={})
        async with started(engine):
            assert engine.sleep_obstacle == ""
            before = await answer(engine, PROMPT)
            await engine.sleep()
            assert engine._llm._executor.asleep == {"kv_cache", "model", "model_weights"}
            await engine.check()
            await engine.wake()
            assert await answer(engine, PROMPT) == before
            await engine.sleep()
            with (
                package.standin.traps.turned("wakeup_fails"),
                pytest.raises(EngineFailed, match=r"wakeup.*memory"),
            ):
                await engine.wake()

"""A program that serves the fake TensorRT-LLM with the trap `submit_blocks`: its event loop blocks
for ever.

Its argument is the release. It submits a short request and then a long one, and prints which of
them has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys

from dynamo_trtllm.models import resolve
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import prompt_of, started
from tests.kit import planted_assumptions  # noqa: F401 - a test may plant one in this process, too
from tests.kit.engines import answer, make
from tests.kit.fake_packages import fake_tensorrt_llm

LONG_TOKENS = 1500


async def main() -> None:
    engine = make("trtllm", resolve("tiny-gpt-oss"), Role.AGGREGATED, max_seq_len=2048)
    async with started(engine):
        await answer(engine, prompt_of(33))
        print("the short request was answered", flush=True)
        await answer(engine, prompt_of(33), max_tokens=LONG_TOKENS)
        print("the long request has ended", flush=True)


if __name__ == "__main__":
    os.environ["STANDIN_TRAPS"] = "submit_blocks"
    with fake_tensorrt_llm(sys.argv[1]):
        asyncio.run(main())

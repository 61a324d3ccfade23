"""Generate answers to a file of prompts with a prefill and a decode engine: no HTTP, no servers.

    python examples/offline_batch.py /models/tiny prompts.jsonl answers.jsonl --engine torch

A line of prompts is {"id": "a", "token_ids": [1, 2], "max_tokens": 40}. Ctrl-C keeps the answers so
far; when the script is started again, it goes on with the other prompts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from array import array
from contextlib import aclosing
from pathlib import Path
from typing import Any, TextIO

from dynamo_trtllm import (
    DynamoError,
    Engine,
    GenerateRequest,
    Phase,
    ReleaseOutcome,
    Role,
    Sampling,
    TransfersKv,
    WorkerConfig,
    as_stream,
    create_engine,
)

CONCURRENT = 32  # prompts at once
TIMEOUT_S = 600


async def generate(prefill: Engine, decode: Engine, prompt: dict[str, Any]) -> list[int]:
    call: dict[str, Any] = {
        "request_id": str(prompt["id"]),
        "model": "batch",
        "token_ids": array("I", prompt["token_ids"]),
        "sampling": Sampling(max_tokens=prompt.get("max_tokens", 256), temperature=0.0),
        "deadline": time.time() + TIMEOUT_S,
    }
    output: list[int] = []
    async with aclosing(as_stream(prefill, GenerateRequest(phase=Phase.PREFILL, **call))) as chunks:
        async for chunk in chunks:
            output += chunk.token_ids
    kv_params = chunk.kv_params
    if kv_params is None:
        # The answer has ended with its first token.
        return output
    request = GenerateRequest(phase=Phase.DECODE, kv_params=kv_params, **call)
    outcome = ReleaseOutcome.ABORTED
    try:
        async with aclosing(as_stream(decode, request)) as chunks:
            async for chunk in chunks:
                output += chunk.token_ids
        outcome = ReleaseOutcome.FETCHED
    finally:
        # Otherwise, the prefill engine would hold the KV of a failed call until it expires.
        assert isinstance(prefill, TransfersKv)
        prefill.release(kv_params.transfer_id, outcome)
    return output


async def run(settings: dict[str, Any], prompts: list[dict[str, Any]], answers: TextIO) -> None:
    config = WorkerConfig(**settings, disaggregation_mode=Role.PREFILL)
    prefill = create_engine(config, instance_id=1)
    config = WorkerConfig(**settings, disaggregation_mode=Role.DECODE)
    decode = create_engine(config, instance_id=2)
    places = asyncio.Semaphore(CONCURRENT)
    num_done = 0

    async def answer(prompt: dict[str, Any]) -> None:
        nonlocal num_done
        async with places:
            try:
                result: dict[str, Any] = {"token_ids": await generate(prefill, decode, prompt)}
            except DynamoError as error:
                # The other prompts go on.
                result = {"error": error.code, "message": error.message}
        answers.write(json.dumps({"id": prompt["id"], **result}) + "\n")
        answers.flush()
        num_done += 1
        print(f"\r{num_done} of {len(prompts)}", end="", file=sys.stderr)

    try:
        await asyncio.gather(prefill.start(), decode.start())
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(answer(prompt))
    finally:
        await asyncio.gather(prefill.aclose(), decode.aclose())


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model_path")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--engine", default="torch")
    given = parser.parse_args()
    with given.answers.open("a+") as answers:
        answers.seek(0)
        done = {json.loads(line)["id"] for line in answers}
        prompts = [json.loads(line) for line in given.prompts.read_text().splitlines()]
        left = [prompt for prompt in prompts if prompt["id"] not in done]
        settings = {"model_path": given.model_path, "engine": given.engine}
        asyncio.run(run(settings, left, answers))


if __name__ == "__main__":
    main()

"""Serve an engine of your own in one process. This one repeats the last message of the prompt.

    pip install openai
    python examples/own_engine.py

docs/own-engine.md describes the interface. tests/unit/test_own_engine.py runs the contract.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from array import array
from collections.abc import Iterator
from typing import ClassVar

import openai
from pydantic import BaseModel, Field

from dynamo_trtllm import (
    Chunk,
    EngineFailed,
    EngineInfo,
    EngineStats,
    EngineTraits,
    FinishReason,
    Frontend,
    FrontendConfig,
    GenerateRequest,
    OnEvent,
    PhaseTimings,
    StreamHandle,
    TaskStream,
    Worker,
    WorkerConfig,
    check_request,
    engine_arguments,
    stop_token_ids,
    token_ids,
)

NATS = "inproc://"
ETCD = "memory://"
# Tokens of the Harmony format, in which gpt-oss speaks: a message is
# <|start|>user<|message|>TEXT<|end|>, and an answer <|channel|>final<|message|>TEXT<|return|>.
RETURN, CHANNEL, END, MESSAGE, FINAL = 200002, 200005, 200007, 200008, 17196


class EchoArguments(BaseModel):
    """Engine arguments, from --extra-engine-args, --override-engine-args or flags."""

    max_seq_len: int = Field(4096, gt=0, description="maximum prompt and output tokens")
    token_s: float = Field(0.0, ge=0, description="seconds per output token")


class EchoEngine:
    """Answers with the last message of the prompt. It transfers no KV."""

    traits: ClassVar = EngineTraits(arguments=EchoArguments)

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        self._args = engine_arguments(config, EchoArguments, "echo")
        self._tasks: set[asyncio.Task[None]] = set()  # of the running streams
        self._info: EngineInfo | None = None  # None: not started, or closed

    async def start(self) -> EngineInfo:
        self._info = EngineInfo(
            engine="echo",
            context_length=self._args.max_seq_len,
            vocab_size=201_088,
            eos_token_ids=(RETURN,),
            renderer="harmony",
            unsupported_features=(
                "min_tokens",
                "frequency_penalty",
                "presence_penalty",
                "repetition_penalty",
                "logit_bias",
                "guided",
                "logprobs",
                "prompt_logprobs",
            ),
        )
        return self._info

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = TaskStream(on_event, self._tasks)
        stream.run(self._answer(request, stream), f"echo-{request.request_id}")
        return stream

    async def _answer(self, request: GenerateRequest, stream: TaskStream) -> Chunk:
        """Send the tokens but the last, and return the chunk that ends the stream."""
        info = self._info
        if info is None:
            raise EngineFailed("the echo engine is not running")
        check_request(request, info, transfers_kv=False, engine="echo engine")
        space = info.context_length - len(request.token_ids)
        stops = stop_token_ids(request.sampling, info)
        last = token_ids()
        for token in itertools.islice(answer_to(request), min(request.sampling.max_tokens, space)):
            await asyncio.sleep(self._args.token_s)
            if last:
                stream.emit(Chunk(token_ids=last))
            last = token_ids([token])
            if token in stops:
                return ending(last, FinishReason.STOP)
        return ending(last, FinishReason.LENGTH)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._tasks))

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        self._info = None
        for task in self._tasks:
            task.cancel()  # its stream ends in EngineFailed
        await self.drain()


def ending(token: array[int], reason: FinishReason) -> Chunk:
    return Chunk(token_ids=token, finish_reason=reason, stats=PhaseTimings())


def answer_to(request: GenerateRequest) -> Iterator[int]:
    """Yield the answer again and again; with ignore_eos, it does not end."""
    # The last tokens of the prompt may be the begin of this answer, from a worker that failed.
    resumed = request.num_resumed_output_tokens
    prompt = list(request.token_ids)[: len(request.token_ids) - resumed]
    answer = [*prompt, RETURN]  # of a prompt without messages, as in /v1/completions
    if END in prompt:
        end = len(prompt) - 1 - prompt[::-1].index(END)
        begin = end - prompt[:end][::-1].index(MESSAGE)
        answer = [CHANNEL, FINAL, MESSAGE, *prompt[begin:end], RETURN]
    return itertools.islice(itertools.cycle(answer), resumed, None)


async def main() -> None:
    worker = Worker(
        WorkerConfig(model_path="echo", nats_server=NATS, etcd_endpoints=ETCD), engine=EchoEngine
    )
    frontend = Frontend(
        FrontendConfig(http_host="127.0.0.1", http_port=0, nats_server=NATS, etcd_endpoints=ETCD)
    )
    async with worker, frontend:
        async with openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "Is anyone there?"}]
            )
        sys.stdout.write(f"{answer.choices[0].message.content}\n")


if __name__ == "__main__":
    asyncio.run(main())

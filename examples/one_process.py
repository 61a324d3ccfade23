"""Run a prefill worker, a decode worker and a frontend in one process: no etcd, NATS or network.

pip install openai
python examples/one_process.py          # the mock engine: random tokens
python examples/one_process.py torch    # a real model, with the torch extra
"""

import asyncio
import sys
from typing import Literal

import openai

from dynamo_trtllm import Frontend, FrontendConfig, Role, Worker, WorkerConfig

NATS = "inproc://"
ETCD = "memory://"


async def main(engine: Literal["mock", "torch"]) -> None:
    def worker(role: Role) -> Worker:
        config = WorkerConfig(
            model_path="tiny-gpt-oss",
            engine=engine,
            disaggregation_mode=role,
            nats_server=NATS,
            etcd_endpoints=ETCD,
        )
        return Worker(config)

    frontend = Frontend(
        FrontendConfig(http_host="127.0.0.1", http_port=0, nats_server=NATS, etcd_endpoints=ETCD)
    )
    async with worker(Role.PREFILL), worker(Role.DECODE), frontend:
        async with openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(
                model="tiny-gpt-oss",
                messages=[{"role": "user", "content": "Who are you?"}],
                max_tokens=40,
            )
        sys.stdout.write(f"{answer.choices[0].message.content}\n{answer.usage}\n")


if __name__ == "__main__":
    asyncio.run(main("torch" if "torch" in sys.argv else "mock"))

"""Run one end of a NATS request plane: `python -m tests.integration.plane_peer URL serve|call
SUBJECT`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.protocol.messages import Chunk, Control, GenerateRequest, Sampling, token_ids
from tests.kit.generator_streams import ChunkSource, call_stream


class QuietService(ChunkSource):
    """A service that sends one token and then nothing."""

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([7]))
        await asyncio.Event().wait()

    async def control(self, verb: Control) -> bytes:
        return b""


def make_request(seconds: float = 60.0) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=9),
        deadline=time.time() + seconds,
    )


async def main(url: str, what: str, subject: str) -> None:
    plane = await NatsPlane.connect(url)
    if what == "serve":
        await plane.serve(subject, QuietService())
        print("ready", flush=True)
        await asyncio.Event().wait()
    async with aclosing(call_stream(plane, subject, make_request())) as chunks:
        async for _ in chunks:
            print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

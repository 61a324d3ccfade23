"""What a client sent is freed with its answer: an error refers to frames that hold it, and nothing
keeps the error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator

import pytest

from dynamo_trtllm.background import in_thread
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.frontend.generation.flow_events import RouteTrace
from dynamo_trtllm.messages import GenerateRequest
from dynamo_trtllm.streams import OnChunk
from tests.memory_http import MemoryClient
from tests.unit.frontend.app_helpers import MODEL, FakeFrontend, ScriptedPipeline


def refuse() -> None:
    raise InvalidRequest("wrong")


class Refusing(ScriptedPipeline):
    error: weakref.ref[BaseException] | None = None

    async def play(self, request: GenerateRequest, trace: RouteTrace, on_chunk: OnChunk) -> None:
        try:
            refuse()
        except InvalidRequest as exc:
            self.error = weakref.ref(exc)
            raise


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stream", [False, True])
async def test_error_when_it_was_answered_then_it_is_freed_without_the_garbage_collector(
    stream: bool,
) -> None:
    pipeline = Refusing([])
    client = MemoryClient(FakeFrontend(pipeline, FrontendConfig()).app)
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": stream}).encode()
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    await client.until_answered()
    assert b" 400 " in client.received
    await asyncio.sleep(0)
    assert pipeline.error is not None
    assert pipeline.error() is None


@pytest.mark.usefixtures("no_collector")
async def test_error_when_it_was_raised_in_a_thread_then_it_is_freed_without_the_garbage_collector() -> (
    None
):
    error: weakref.ref[BaseException] | None = None
    try:
        await in_thread(refuse)
    except InvalidRequest as exc:
        error = weakref.ref(exc)
    assert error is not None
    for _ in range(1000):  # the thread lets go of its work a moment after it has given the result
        if error() is None:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the error is still referred to")

"""What a client sent is freed with its answer: an error refers to frames that hold it, and nothing
keeps the error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests import serve_request
from dynamo_trtllm.frontend.requests.admission import (
    AdmissionLimits,
    IterationTime,
    RequestAdmission,
)
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.protocol.messages import GenerateRequest
from dynamo_trtllm.protocol.streams import OnChunk
from dynamo_trtllm.support.background import in_thread
from tests.kit.frontend_app import MODEL, FakeFrontend, ScriptedRouter
from tests.kit.memory_http import MemoryClient


def refuse() -> None:
    raise InvalidRequest("wrong")


class Refusing(ScriptedRouter):
    error: weakref.ref[BaseException] | None = None

    async def play(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_chunk: OnChunk
    ) -> None:
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
async def test_answered_error_is_freed_without_garbage_collector(stream: bool) -> None:
    router = Refusing([])
    client = MemoryClient(FakeFrontend(router, FrontendConfig()).app)
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": stream}).encode()
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await client.until_answered()
    assert b" 400 " in client.received
    await asyncio.sleep(0)
    assert router.error is not None
    assert router.error() is None


@pytest.mark.usefixtures("no_collector")
async def test_thread_error_is_freed_without_garbage_collector() -> None:
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


@pytest.mark.usefixtures("no_collector")
async def test_late_body_of_gone_client_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    admissions: list[weakref.ref[RequestAdmission]] = []
    waits = asyncio.Event()

    class Tracked(RequestAdmission):
        def __init__(self, limits: AdmissionLimits, timeline: RequestTimeline) -> None:
            super().__init__(limits, timeline)
            admissions.append(weakref.ref(self))

    @asynccontextmanager
    async def wait_for_ever(_: IterationTime, size: int = 1) -> AsyncGenerator[None, None]:
        waits.set()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(serve_request, "RequestAdmission", Tracked)
    monkeypatch.setattr(IterationTime, "turn", wait_for_ever)
    config = FrontendConfig(receive_timeout_s=0.01)
    client = MemoryClient(FakeFrontend(ScriptedRouter([]), config).app)
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 9\r\n\r\n{"
    )
    await waits.wait()
    client.leave()
    for _ in range(5):
        await asyncio.sleep(0)
    assert admissions[0]() is None

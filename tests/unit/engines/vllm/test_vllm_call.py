"""One call of AsyncLLM: what happens while it is submitted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.vllm.library import VllmLibrary
from dynamo_trtllm.engines.vllm.requests import VllmModelLimits
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.protocol.errors import EngineFailed
from dynamo_trtllm.protocol.messages import Chunk, Role
from dynamo_trtllm.protocol.streams import StreamEvent
from tests.kit.scripted_library import ask, info_of, serve
from tests.kit.waiting import SOON_S


class Llm:
    """An AsyncLLM that has outputs before `add_request` returns, and returns when it may."""

    errored = False

    def __init__(self, early: Any = None) -> None:
        self.collector = SimpleNamespace(output=early)
        self.may_return = asyncio.Event()
        self.aborted: list[str] = []

    async def add_request(self, request_id: str) -> Any:
        await self.may_return.wait()
        return self.collector

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.collector.put(output(finish="abort"))


def output(*tokens: int, finish: str | None = None) -> Any:
    completion = SimpleNamespace(token_ids=list(tokens), logprobs=None, finish_reason=finish)
    return SimpleNamespace(
        outputs=[completion], num_cached_tokens=64, kv_transfer_params=None, metrics=None
    )


def runner_of(llm: Llm) -> ExternalEngine:
    bindings: Any = SimpleNamespace(
        dead=RuntimeError, version="0.24.0", arguments=lambda converted: {}
    )
    limits = VllmModelLimits(role=Role.AGGREGATED, info=info_of(), max_logprobs=20)
    guard = TransferGuard()
    library = VllmLibrary(bindings, llm, limits, lambda: None, guard)  # type: ignore[arg-type,return-value]
    return serve(library)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_submission_keeps_outputs_that_came_early() -> None:
    llm = Llm(early=output(1, 2))
    events = list[StreamEvent]()
    runner = runner_of(llm)
    runner.generate(ask(), events.append)
    llm.may_return.set()
    await settle()
    llm.collector.put(output(3, finish="length"))
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [list(chunk.token_ids) for chunk in chunks] == [[1, 2], [3]]
    assert [chunk.stats and chunk.stats.cached_tokens for chunk in chunks] == [
        64,
        64,
    ]  # a client may stop before the end
    await asyncio.wait_for(runner.drain(), SOON_S)


@pytest.mark.parametrize("is_early", [True, False])
async def test_dead_engine_ends_the_stream_with_its_cause(is_early: bool) -> None:
    death = ValueError("the process is gone")
    llm = Llm(early=death if is_early else None)
    events = list[StreamEvent]()
    runner_of(llm).generate(ask(), events.append)
    llm.may_return.set()
    await settle()
    if not is_early:
        llm.collector.put(death)
    (error,) = events
    assert isinstance(error, EngineFailed)
    assert error.__cause__ is death


async def test_cancel_during_submission_aborts_after_it() -> None:
    llm = Llm()
    events = list[StreamEvent]()
    runner = runner_of(llm)
    stream = runner.generate(ask(), events.append)
    await settle()
    stream.cancel()
    await settle()
    assert llm.aborted == []
    llm.may_return.set()
    await asyncio.wait_for(runner.drain(), SOON_S)
    assert (llm.aborted, events) == (["r.1"], [])

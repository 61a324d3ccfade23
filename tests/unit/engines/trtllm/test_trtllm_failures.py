"""Errors, the end of an executor, and deadlines, over a scripted library."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

import msgspec
import pytest

from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.trtllm.library import TrtllmLibrary
from dynamo_trtllm.engines.trtllm.reports.statistics import StatsPoller
from dynamo_trtllm.protocol.errors import (
    EngineFailed,
    MigrationFailed,
    RequestRejected,
)
from dynamo_trtllm.protocol.messages import (
    Phase,
    Role,
)
from dynamo_trtllm.protocol.streams import as_stream
from tests.kit.waiting import SOON_S
from tests.unit.engines.trtllm.fake_bindings import (
    Llm,
    Refusal,
    ask,
    check_idle,
    make,
    some_transfer_params,
    started,
)

pytestmark = pytest.mark.usefixtures("quick")


class RemoteError(Exception):
    """As TensorRT-LLM's RPCError and ZMQ's errors: a subclass of Exception alone."""


async def test_error_when_it_is_one_requests_then_the_others_go_on() -> None:
    at, llm = make(Role.AGGREGATED)
    first, broken = await started(at, llm, ask())
    second, result = await started(at, llm, ask())
    broken.fail(Refusal("no"))
    with pytest.raises(RequestRejected):
        await first
    result.say(1, finish="length")
    assert len(await second) == 1
    await at.check()


@pytest.mark.parametrize(
    "error", [RemoteError("no"), ValueError("no"), AssertionError("no"), ImportError("no")]
)
async def test_error_of_healthy_executor_is_of_its_request(error: Exception) -> None:
    at, llm = make(Role.AGGREGATED)
    first, broken = await started(at, llm, ask())
    second, result = await started(at, llm, ask())
    broken.fail(error)
    with pytest.raises(EngineFailed, match=f"TensorRT-LLM failed: {type(error).__name__}: no"):
        await first
    result.say(1, finish="length")
    assert len(await second) == 1
    await at.check()
    await check_idle(at)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Refusal("no"), RequestRejected),
        (ValueError("no"), RequestRejected),
        (TypeError("no"), RequestRejected),
        (AssertionError("no"), RequestRejected),
        (NotImplementedError("no"), RequestRejected),
        (RemoteError("no"), EngineFailed),
        (OSError("no"), EngineFailed),
        (RuntimeError("LLM is shutting down"), EngineFailed),
    ],
)
async def test_submission_error_class_says_whose_fault(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, llm = make(Role.AGGREGATED)
    monkeypatch.setattr(llm, "generate_async", Mock(side_effect=error))
    with pytest.raises(kind):
        await anext(as_stream(at, ask()))
    await at.check()
    await check_idle(at)


async def test_check_when_executor_is_unreachable_then_engine_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at, llm = make(Role.AGGREGATED)
    monkeypatch.setattr(llm, "_check_health", Mock(side_effect=RemoteError("no answer")))
    with pytest.raises(EngineFailed):
        await at.check()


async def test_decode_rejected_by_vendor_is_no_transfer_fault(
    decode: tuple[ExternalEngine, Llm], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, llm = decode

    def reject(**_: object) -> None:
        raise Refusal("no")

    monkeypatch.setattr(llm, "generate_async", reject)
    with pytest.raises(RequestRejected, match="no"):
        await anext(as_stream(at, ask(Phase.DECODE, kv_params=await some_transfer_params())))
    await check_idle(at)


async def test_error_when_it_is_the_executors_then_everybody_hears_it() -> None:
    at, llm = make(Role.AGGREGATED)
    first, broken = await started(at, llm, ask())
    second, _ = await started(at, llm, ask())
    llm.healthy = False
    broken.fail(Refusal("a rank was lost"))
    for task in (first, second):
        with pytest.raises(EngineFailed, match="a rank was lost"):
            await task
    with pytest.raises(EngineFailed):
        await at.check()
    with pytest.raises(EngineFailed):
        await anext(as_stream(at, ask()))
    await check_idle(at)


async def test_check_after_shutdown_ends_waiting_streams() -> None:
    at, llm = make(Role.AGGREGATED)
    task, _ = await started(at, llm, ask())
    llm.healthy = False
    with pytest.raises(EngineFailed):
        await at.check()
    with pytest.raises(EngineFailed):
        await task


async def test_check_without_progress_fails_and_logs_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StatsPoller, "pause_s", 0.001)
    at, llm = make(Role.AGGREGATED, ttl_s=0.01)
    assert isinstance(at.library, TrtllmLibrary)
    at.library.poll_stats()
    task, _ = await started(at, llm, ask())
    await at.check()
    monkeypatch.setattr(at.library, "_stall_s", 0.0)
    await at.check()  # no statistics came yet, so their absence shows nothing
    llm.rows = [{"iter": 6, "numQueuedRequests": 1}, {"iter": 7, "numQueuedRequests": 3}]
    poller = at.library._stats_poller
    async with asyncio.timeout(SOON_S):
        while not poller.has_reported:  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.001)
    with pytest.raises(EngineFailed, match="no iteration for"):
        await at.check()
    with pytest.raises(EngineFailed):
        await task
    assert '{"iter": 7, "numQueuedRequests": 3}' in caplog.text  # the last row of statistics
    assert "stack of thread MainThread" in caplog.text
    assert "stack of thread trtllm-stats" in caplog.text
    await at.aclose()


async def test_check_when_idle_then_nothing_has_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    at, _ = make(Role.AGGREGATED)
    monkeypatch.setattr(at.library, "_stall_s", 0.0)
    monkeypatch.setattr(StatsPoller, "has_reported", True)
    await at.check()


async def test_stream_cancelled_by_the_library_is_reported() -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask())
    result.say(1)
    result.say(finish="cancelled")
    with pytest.raises(MigrationFailed, match="cancelled"):
        await task


async def test_stream_when_it_ends_without_a_word_then_it_is_said() -> None:
    at, llm = make(Role.AGGREGATED)
    task, result = await started(at, llm, ask())
    result.fail(StopAsyncIteration())
    with pytest.raises(MigrationFailed, match="without a finish reason"):
        await task


async def test_close_ends_streams_and_forgets_transfers() -> None:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    await task
    running, _ = await started(at, llm, ask(Phase.PREFILL))
    await at.aclose()
    await at.aclose()
    with pytest.raises(EngineFailed):
        await running
    await check_idle(at)


async def test_deadline_after_kv_is_the_requests_own(decode: tuple[ExternalEngine, Llm]) -> None:
    at, llm = decode
    kv_params = msgspec.structs.replace(await some_transfer_params(), expires_at=time.time() + 1.5)
    task, result = await started(at, llm, ask(Phase.DECODE, kv_params=kv_params))
    result.say(7)
    await asyncio.sleep(1.6)
    result.say(8, finish="length")
    assert [list(chunk.token_ids) for chunk in await task] == [[7], [8]]

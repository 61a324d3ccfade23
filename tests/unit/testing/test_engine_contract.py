"""The contract of engines names the promise that an engine breaks: each engine here breaks one."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo, EngineStats
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.errors import InternalError, RequestRejected
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    Phase,
    ReleaseOutcome,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamEvent, StreamHandle
from dynamo_trtllm.testing import LIMITS, EngineContract
from dynamo_trtllm.testing.engine_pool import EnginePool
from examples.own_engine import EchoEngine
from tests.kit.loopback_backend import named_backend

NUMBERS = itertools.count(100)


class ChangedEvents(EchoEngine):
    """An engine whose subclass changes the events of its streams."""

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        def pass_on(event: StreamEvent) -> None:
            for changed in self.changed(event, request):
                on_event(changed)

        return super().generate(request, pass_on)

    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        raise NotImplementedError


class GivesOtherTokens(ChangedEvents):
    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        if isinstance(event, Chunk):
            return [msgspec.structs.replace(event, token_ids=token_ids([next(NUMBERS)]))]
        return [event]


class EndsTwice(ChangedEvents):
    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        is_last = isinstance(event, Chunk) and event.finish_reason is not None
        return [event, event] if is_last else [event]


class GivesNoStats(ChangedEvents):
    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        return [msgspec.structs.replace(event, stats=None) if isinstance(event, Chunk) else event]


class GivesTokenBeyondVocabulary(ChangedEvents):
    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        if isinstance(event, Chunk):
            return [msgspec.structs.replace(event, token_ids=token_ids([300_000]))]
        return [event]


class NamesOtherField(ChangedEvents):
    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        return [RequestRejected("no") if isinstance(event, RequestRejected) else event]


class NeverEnds(ChangedEvents):
    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        is_last = isinstance(event, Chunk) and event.finish_reason is not None
        return [] if is_last else [event]


class EndsInInternalError(ChangedEvents):
    def changed(self, event: StreamEvent, request: GenerateRequest) -> list[StreamEvent]:
        return [event if isinstance(event, Chunk) else InternalError("oops")]


class CutsLongPrompts(EchoEngine):
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        cut = msgspec.structs.replace(request, token_ids=request.token_ids[:1000])
        return super().generate(cut, on_event)


class IgnoresSampling(EchoEngine):
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        sampling = msgspec.structs.replace(
            request.sampling, frequency_penalty=0.0, stop_token_ids=()
        )
        return super().generate(msgspec.structs.replace(request, sampling=sampling), on_event)


class GivesOneTokenMore(EchoEngine):
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        longer = msgspec.structs.replace(
            request.sampling, max_tokens=request.sampling.max_tokens + 1
        )
        return super().generate(msgspec.structs.replace(request, sampling=longer), on_event)


class BeginsAnswersAgain(EchoEngine):
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        return super().generate(
            msgspec.structs.replace(request, num_resumed_output_tokens=0), on_event
        )


class CallsBackAtOnce(EchoEngine):
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        on_event(Chunk(token_ids=token_ids([1])))
        return super().generate(request, on_event)


class IgnoresCancel(EchoEngine):
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        super().generate(request, on_event)
        return Stream(on_event)


class DrainsAtOnce(EchoEngine):
    async def drain(self) -> None:
        pass


class DrainsForEver(EchoEngine):
    async def drain(self) -> None:
        await asyncio.Event().wait()


class CountsNothing(EchoEngine):
    def stats(self) -> EngineStats:
        return EngineStats()


class CountsForEver(EchoEngine):
    count = 0

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        self.count += 1
        return super().generate(request, on_event)

    def stats(self) -> EngineStats:
        return EngineStats(running=self.count)


class StartsWithoutInfo(EchoEngine):
    async def start(self) -> EngineInfo:
        await super().start()
        return None  # type: ignore[return-value]


class LeavesStreamsOpen(EchoEngine):
    async def aclose(self) -> None:
        self._tasks = set()


class AnswersAfterClose(EchoEngine):
    async def aclose(self) -> None:
        info = self._info
        await super().aclose()
        self._info = info


class HangsInClose(EchoEngine):
    async def aclose(self) -> None:
        await asyncio.Event().wait()


class MakesNewDeques(MockEngine):
    @property
    def steps(self) -> deque[StepSample]:
        return deque()


class UsesMoreKvThanItHas(EchoEngine):
    def stats(self) -> EngineStats:
        return replace(super().stats(), kv_blocks_used=2, kv_blocks_total=1)


class ReportsOnlyUsedKv(EchoEngine):
    """It does not know its number of blocks. While it runs a request, it uses one."""

    def stats(self) -> EngineStats:
        stats = super().stats()
        return replace(stats, kv_blocks_used=stats.running)


class LosesKv(MockEngine):
    def is_pending(self, transfer_id: str) -> bool:
        return False


class KeepsKv(MockEngine):
    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        pass


class OffersKvTwice(MockEngine):
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        def pass_on(event: StreamEvent) -> None:
            if isinstance(event, Chunk) and event.kv_params is not None:
                on_event(Chunk(kv_params=event.kv_params))
            on_event(event)

        return super().generate(request, pass_on)


class ChecksNoKv(MockEngine):
    """Its decode calls are aggregated calls, which give the same tokens without a fetch."""

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        if request.kv_params is None:
            return super().generate(request, on_event)
        alone = msgspec.structs.replace(request, phase=Phase.AGGREGATED)
        return super().generate(msgspec.structs.replace(alone, kv_params=None), on_event)


STREAMS = "stream_starts_after_generate_returns_and_ends_once"
CLOSE = "close_ends_running_streams_and_is_idempotent"
BROKEN = [
    (GivesOtherTokens, "generate_twice_gives_same_greedy_tokens", "is always the same"),
    (
        GivesNoStats,
        "generate_twice_gives_same_greedy_tokens",
        "the last chunk of a stream has stats",
    ),
    (GivesOneTokenMore, "generate_twice_gives_same_greedy_tokens", "exactly max_tokens tokens"),
    (GivesTokenBeyondVocabulary, "generate_twice_gives_same_greedy_tokens", "below vocab_size"),
    (NeverEnds, "generate_twice_gives_same_greedy_tokens", "a stream ends with a finish_reason"),
    (EndsTwice, STREAMS, "exactly one event of a stream is terminal|no event follows the end"),
    (CallsBackAtOnce, STREAMS, "the first event comes after generate"),
    (CutsLongPrompts, STREAMS, "ends with ContextTooLong"),
    (IgnoresCancel, "stream_when_cancelled_in_an_event_then_none_follows", "follows a cancel"),
    (BeginsAnswersAgain, "generate_resumed_equals_undisturbed_run", "continues as if"),
    (IgnoresSampling, "stop_token_ends_the_answer_with_stop", "ends with STOP at one of"),
    (IgnoresSampling, "bad_request_is_rejected_and_names_its_field", "unsupported frequency_pen"),
    (NamesOtherField, "bad_request_is_rejected_and_names_its_field", "names the field token_ids"),
    (DrainsAtOnce, "drain_waits_until_no_request_runs", "waits until running requests have ended"),
    (DrainsForEver, "drain_waits_until_no_request_runs", "drain.. returns when no request runs"),
    (CountsNothing, "stats_count_running_requests_only", "counts a request as running"),
    (CountsForEver, "stats_count_running_requests_only", r"stats\(\) has .*'running': 1"),
    (UsesMoreKvThanItHas, "stats_count_running_requests_only", "at most kv_blocks_total"),
    (
        StartsWithoutInfo,
        "start_returns_what_the_engine_registers",
        "returns an EngineInfo, not None",
    ),
    (LeavesStreamsOpen, CLOSE, "ends running streams before it returns"),
    (EndsInInternalError, CLOSE, "ends running streams with EngineFailed"),
    (AnswersAfterClose, CLOSE, "after aclose"),
    (HangsInClose, CLOSE, r"aclose\(\) returns: this did not happen"),
    (MakesNewDeques, "steps_are_in_one_bounded_deque", "is always the same deque"),
    (LosesKv, "transfer_blocks_stay_counted_until_release", "is True until a transfer is released"),
    (KeepsKv, "drain_waits_until_transfers_are_released", "when all KV is released"),
    (OffersKvTwice, "two_calls_equal_one_call_and_free_both_sides", "only the last chunk"),
    (ChecksNoKv, "two_calls_equal_one_call_and_free_both_sides", "kv_bytes"),
]


def created(engine_class: type[Any], role: Role) -> Engine:
    config = WorkerConfig(model_path="m", disaggregation_mode=role)
    number = list(Role).index(role) + 1
    if issubclass(engine_class, MockEngine):
        return engine_class(config, instance_id=number, backend=named_backend("loopback"))
    slow = config.model_copy(update={"override_engine_args": {"token_s": 0.002}})
    return engine_class(slow, instance_id=number)


def contract_of(engine_class: type[Any]) -> EngineContract:
    class Contract(EngineContract):
        @classmethod
        def create_engine(cls, role: Role, **settings: Any) -> Engine:
            return created(engine_class, role)

    return Contract()


# The limit at which the contract finds that something does not happen.
WAITS: dict[type[Engine], str] = {
    NeverEnds: "answer_s",
    DrainsForEver: "soon_s",
    CountsForEver: "soon_s",
    HangsInClose: "close_s",
    KeepsKv: "soon_s",
}


@pytest.mark.parametrize(("broken", "test", "promise"), BROKEN)
async def test_broken_engine_fails_with_the_promise(
    monkeypatch: pytest.MonkeyPatch, broken: type[Engine], test: str, promise: str
) -> None:
    if broken in WAITS:
        monkeypatch.setattr(LIMITS, WAITS[broken], 0.2)
    contract = contract_of(broken)
    pool = EnginePool(contract.create_engine)
    with pytest.raises(AssertionError, match=promise):
        await getattr(contract, f"test_{test}")(pool)


def test_misspelled_setting_of_a_contract_is_an_error() -> None:
    with pytest.raises(
        TypeError, match=r"max_seqlen, which no test uses; use some of .*max_seq_len"
    ):
        type("TestTypo", (EngineContract,), {"settings": frozenset({"max_seqlen"})})


async def test_engine_that_reports_no_total_of_kv_blocks_passes() -> None:
    contract = contract_of(ReportsOnlyUsedKv)
    pool = EnginePool(contract.create_engine)
    await contract.test_stats_count_running_requests_only(pool)
    await pool.aclose()

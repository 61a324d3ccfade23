"""The worker's side of the request plane over a scripted engine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_trtllm.engines.capabilities import MeasuresSteps, TransfersKv
from dynamo_trtllm.engines.engine_interface import EngineStats
from dynamo_trtllm.observability.metrics import PREFIX, WorkerMetrics
from dynamo_trtllm.protocol.cost_model import StepSample, decode_features
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TransferFailed,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FileChunk,
    FinishReason,
    GenerateRequest,
    GetFile,
    KvTransferParams,
    LoadReport,
    Phase,
    PhaseTimings,
    ReleaseKv,
    ReleaseOutcome,
    ReleaseSlot,
    ReserveSlot,
    Role,
    Sampling,
    decode,
    encode,
    token_ids,
)
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.worker.card import FILE_CHUNK_BYTES, digest
from dynamo_trtllm.worker.cost_fit import CallSample
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.cases import each_case
from tests.kit.generator_streams import ChunkEngine
from tests.kit.instances import make_instance, make_transfer_params
from tests.kit.request_planes import until

ANSWER = (
    Chunk(token_ids=token_ids([1, 2])),
    Chunk(token_ids=token_ids([3]), finish_reason=FinishReason.LENGTH),
)
FITTING = [
    (Role.PREFILL, Phase.PREFILL),
    (Role.DECODE, Phase.DECODE),
    (Role.AGGREGATED, Phase.AGGREGATED),
    *((Role.ELASTIC, phase) for phase in Phase),
]
TRANSFER_PARAMS = make_transfer_params("t-1")


class PlainEngine(ChunkEngine):
    """An engine without KV that yields the chunks of its script and raises its exceptions."""

    def __init__(self, script: Sequence[Chunk | Exception | asyncio.Event] = ANSWER) -> None:
        self.script = script
        self.asked = 0
        self.closed = 0

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.asked += 1
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.closed += 1


class TransferringEngine(PlainEngine, TransfersKv):
    def __init__(self) -> None:
        super().__init__()
        self.released: list[tuple[str, ReleaseOutcome]] = []

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        self.released.append((transfer_id, outcome))

    def is_pending(self, transfer_id: str) -> bool:
        return not self.released


class MeteredService:
    """A service with its metrics."""

    def __init__(
        self,
        engine: PlainEngine,
        role: Role = Role.AGGREGATED,
        files: dict[str, Path] | None = None,
        *,
        can_aggregate: bool = False,
        admission: WorkerAdmission | None = None,
        timing: WorkerTiming = TIMING,
    ) -> None:
        self.engine = engine
        self.admission = admission or WorkerAdmission()
        self.metrics = WorkerMetrics()
        instance = msgspec.structs.replace(make_instance(1, role=role), can_aggregate=can_aggregate)
        self.service = WorkerService(
            engine,
            instance,
            self.admission,
            files=files or {},
            metrics=self.metrics,
            timing=timing,
        )

    async def ask(self, **fields: Any) -> list[Chunk]:
        async with aclosing(as_stream(self.service, request(**fields))) as chunks:
            return [chunk async for chunk in chunks]

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        """Label values in label order, of a counter of the worker's."""
        families = text_string_to_metric_families(self.metrics.render().decode())
        samples = [
            sample
            for family in families
            for sample in family.samples
            if sample.name == PREFIX + name
        ]
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for sample in samples
        }


def request(**fields: Any) -> GenerateRequest:
    values: dict[str, Any] = {"request_id": "r-42", "model": "tiny", "deadline": time.time() + 60}
    return GenerateRequest(
        **{**values, "token_ids": token_ids([5, 6]), "sampling": Sampling(max_tokens=3), **fields}
    )


@pytest.mark.parametrize(("role", "phase"), FITTING)
async def test_generate_of_own_phase_passes_and_counts(role: Role, phase: Phase) -> None:
    bench = MeteredService(PlainEngine(), role)
    assert await bench.ask(
        phase=phase, kv_params=TRANSFER_PARAMS if phase is Phase.DECODE else None
    ) == list(ANSWER)
    assert bench.counted("requests_total") == {("ok", str(phase)): 1}
    assert bench.counted("output_tokens_total") == {(str(phase),): 3}


@each_case(
    ("role", "phase"),
    [(role, phase) for role in Role for phase in Phase if (role, phase) not in FITTING],
)
async def test_generate_of_another_phase_is_rejected(role: Role, phase: Phase) -> None:
    bench = MeteredService(PlainEngine(), role)
    with pytest.raises(InvalidRequest) as caught:
        await bench.ask(phase=phase, kv_params=TRANSFER_PARAMS if phase is Phase.DECODE else None)
    assert caught.value.field == "phase"
    assert bench.engine.asked == 0
    assert bench.counted("requests_total") == {("invalid_request", str(phase)): 1}


@pytest.mark.parametrize(
    ("role", "phase", "kv_params"),
    [(Role.DECODE, Phase.DECODE, None), (Role.PREFILL, Phase.PREFILL, TRANSFER_PARAMS)],
)
async def test_generate_when_transfer_and_phase_disagree_then_refused(
    role: Role, phase: Phase, kv_params: KvTransferParams | None
) -> None:
    bench = MeteredService(PlainEngine(), role)
    with pytest.raises(InvalidRequest, match="KV transfer parameters"):
        await bench.ask(phase=phase, kv_params=kv_params)
    assert bench.engine.asked == 0


async def test_generate_aggregated_by_decode_worker_passes() -> None:
    bench = MeteredService(PlainEngine(), Role.DECODE, can_aggregate=True)
    assert await bench.ask(phase=Phase.AGGREGATED) == list(ANSWER)


async def test_generate_of_another_model_names_both() -> None:
    bench = MeteredService(PlainEngine())
    with pytest.raises(ModelNotFound, match="'tiny', not 'other'") as caught:
        await bench.ask(model="other")
    assert caught.value.field == "model"
    assert bench.engine.asked == 0
    assert bench.counted("requests_total") == {("model_not_found", "aggregated"): 1}


async def test_generate_typed_error_passes_with_its_code(caplog: pytest.LogCaptureFixture) -> None:
    error = Overloaded("full")
    bench = MeteredService(PlainEngine([ANSWER[0], error]))
    with pytest.raises(DynamoError) as caught:
        await bench.ask()
    assert caught.value is error
    assert bench.counted("requests_total") == {("overloaded", "aggregated"): 1}
    assert bench.counted("output_tokens_total") == {("aggregated",): 2}
    assert caplog.records == []


async def test_generate_engine_bug_is_internal_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bug = ZeroDivisionError("secret detail")
    bench = MeteredService(PlainEngine([ANSWER[0], bug]))
    with pytest.raises(InternalError) as caught:
        await bench.ask()
    assert caught.value.__cause__ is bug
    assert "ZeroDivisionError" in caught.value.message
    assert "secret detail" not in caught.value.message  # the message goes to clients
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "r-42" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is bug
    assert bench.counted("requests_total") == {("internal", "aggregated"): 1}


async def test_generate_closed_midway_counts_cancelled() -> None:
    bench = MeteredService(PlainEngine([ANSWER[0], asyncio.Event()]))
    async with aclosing(as_stream(bench.service, request())) as chunks:
        await anext(chunks)
        assert bench.engine.closed == 0
    await asyncio.sleep(0)
    assert bench.engine.closed == 1
    assert bench.counted("requests_total") == {("cancelled", "aggregated"): 1}
    assert bench.counted("output_tokens_total") == {("aggregated",): 2}


async def test_generate_closed_on_terminal_chunk_counts_ok() -> None:
    bench = MeteredService(PlainEngine())
    async with aclosing(as_stream(bench.service, request())) as chunks:
        while (await anext(chunks)).finish_reason is None:
            pass
    assert bench.counted("requests_total") == {("ok", "aggregated"): 1}


async def test_decode_observes_transfer_once_by_transport() -> None:
    stats = PhaseTimings(queue_s=3.0, kv_transfer_s=0.5, kv_bytes=4_000_000, transport="nixl/ucx")
    chunks = [
        Chunk(token_ids=token_ids([1]), stats=stats),
        Chunk(token_ids=token_ids([2])),
        Chunk(finish_reason=FinishReason.LENGTH, stats=stats),
    ]
    bench = MeteredService(PlainEngine(chunks), Role.DECODE)
    await bench.ask(phase=Phase.DECODE, kv_params=TRANSFER_PARAMS)
    for name, value in (("seconds", 0.5), ("bytes", 4e6), ("bytes_per_second", 8e6)):
        assert bench.counted(f"kv_transfer_{name}_count") == {("nixl/ucx",): 1}
        assert bench.counted(f"kv_transfer_{name}_sum") == {("nixl/ucx",): pytest.approx(value)}


@pytest.mark.parametrize(
    "last",
    [
        # no time is known
        Chunk(finish_reason=FinishReason.LENGTH, stats=PhaseTimings(kv_bytes=7, transport="tcp")),
        Chunk(finish_reason=FinishReason.LENGTH),
        TransferFailed("no peer"),
    ],
)
async def test_decode_without_transfer_time_observes_none(last: Chunk | Exception) -> None:
    bench = MeteredService(PlainEngine([last]), Role.DECODE)
    with suppress(TransferFailed):
        await bench.ask(phase=Phase.DECODE, kv_params=TRANSFER_PARAMS)
    assert bench.counted("kv_transfer_seconds_count") == {}


async def test_prefill_observes_no_transfer() -> None:
    stats = PhaseTimings(prefill_s=0.5, kv_bytes=7, transport="tcp")
    bench = MeteredService(
        PlainEngine([Chunk(finish_reason=FinishReason.LENGTH, stats=stats)]), Role.PREFILL
    )
    await bench.ask(phase=Phase.PREFILL)
    assert bench.counted("kv_transfer_seconds_count") == {}


@pytest.mark.parametrize(
    "size_bytes", [0, 1, FILE_CHUNK_BYTES, FILE_CHUNK_BYTES + 1, 2 * FILE_CHUNK_BYTES + 17]
)
async def test_file_when_fetched_in_pieces_then_it_is_whole(
    tmp_path: Path, size_bytes: int
) -> None:
    content = bytes(range(251)) * (size_bytes // 251 + 1)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content[:size_bytes])
    sha256 = digest(path)
    bench = MeteredService(PlainEngine(), files={sha256: path})
    data = b""
    chunks = 0
    while True:
        chunk = decode(await bench.service.control(GetFile(sha256, len(data))), FileChunk)
        assert chunk.total_bytes == size_bytes
        assert len(chunk.data) <= FILE_CHUNK_BYTES
        data = data + chunk.data
        chunks = chunks + 1
        if len(data) >= chunk.total_bytes:
            break
    assert hashlib.sha256(data).hexdigest() == sha256
    assert chunks == max(1, -(-size_bytes // FILE_CHUNK_BYTES))


async def test_file_past_its_end_gives_an_empty_piece(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    bench = MeteredService(PlainEngine(), files={"f": path})
    for offset in (9, (1 << 63) - 1):
        assert decode(await bench.service.control(GetFile("f", offset)), FileChunk) == FileChunk(
            b"", 3
        )


async def test_file_when_it_is_unknown_then_rejected_by_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await MeteredService(PlainEngine()).service.control(GetFile("unknown"))
    assert caught.value.field == "sha256"


async def test_call_resuming_too_many_tokens_is_rejected() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await MeteredService(PlainEngine()).ask(num_resumed_output_tokens=3)
    assert caught.value.field == "resumed_tokens"


async def test_release_calls_the_engine_at_once() -> None:
    engine = TransferringEngine()
    assert (
        await MeteredService(engine, Role.PREFILL).service.control(
            ReleaseKv("t-1", ReleaseOutcome.ABORTED)
        )
        == b""
    )
    assert engine.released == [("t-1", ReleaseOutcome.ABORTED)]


async def test_release_when_the_engine_has_no_transfers_then_no_error() -> None:
    assert (
        await MeteredService(PlainEngine()).service.control(
            ReleaseKv("t-1", ReleaseOutcome.FETCHED)
        )
        == b""
    )


async def test_generate_without_place_is_rejected_before_engine() -> None:
    go = asyncio.Event()
    bench = MeteredService(PlainEngine([ANSWER[0], go, ANSWER[1]]), admission=WorkerAdmission(1))
    async with aclosing(as_stream(bench.service, request())) as chunks:
        await anext(chunks)
        with pytest.raises(Overloaded):
            await bench.ask()
    assert bench.engine.asked == 1
    go.set()
    assert await bench.ask() == list(ANSWER)
    assert bench.counted("requests_total") == {
        ("cancelled", "aggregated"): 1,
        ("overloaded", "aggregated"): 1,
        ("ok", "aggregated"): 1,
    }


async def test_generate_over_held_kv_rejects_prefill() -> None:
    class Full(PlainEngine):
        def stats(self) -> EngineStats:
            return EngineStats(
                running=0,
                waiting=0,
                kv_blocks_used=6,
                kv_blocks_total=10,
                pending_kv_transfers=1,
                pending_kv_blocks=6,
            )

    admission = WorkerAdmission(
        max_pending_kv_fraction=0.5, timing=WorkerTiming(unfetched_kv_s=0.0)
    )
    bench = MeteredService(Full(), Role.PREFILL, admission=admission)
    with pytest.raises(Overloaded, match="6 of 10 KV blocks"):
        await bench.ask(phase=Phase.PREFILL)
    assert bench.engine.asked == 0


async def test_reserve_ignores_the_frontend_clock() -> None:
    bench = MeteredService(PlainEngine(), Role.DECODE, admission=WorkerAdmission(1))
    await bench.service.control(ReserveSlot("a", time.time() - 3540, 60.0))
    with pytest.raises(Overloaded):
        await bench.ask(phase=Phase.DECODE, kv_params=TRANSFER_PARAMS)


async def test_reserve_at_decode_worker_holds_a_slot() -> None:
    bench = MeteredService(PlainEngine(), Role.DECODE, admission=WorkerAdmission(1))
    await bench.service.control(ReserveSlot("a", time.time() + 60))
    assert bench.counted("reserved") == {(): 1}
    with pytest.raises(Overloaded):
        await bench.ask(phase=Phase.DECODE, kv_params=TRANSFER_PARAMS)
    assert await bench.ask(
        phase=Phase.DECODE, kv_params=TRANSFER_PARAMS, reservation_id="a"
    ) == list(ANSWER)
    assert bench.counted("reserved") == {(): 0}
    assert bench.counted("active_calls") == {(): 0}


async def test_unreserve_when_asked_then_the_slot_is_free() -> None:
    bench = MeteredService(PlainEngine(), Role.DECODE, admission=WorkerAdmission(1))
    await bench.service.control(ReserveSlot("a", time.time() + 60))
    await bench.service.control(ReleaseSlot("a"))
    assert await bench.ask(phase=Phase.DECODE, kv_params=TRANSFER_PARAMS) == list(ANSWER)


async def test_reserve_when_a_prefill_worker_is_asked_then_refused() -> None:
    with pytest.raises(InvalidRequest, match="no decode slots to reserve"):
        await MeteredService(PlainEngine(), Role.PREFILL).service.control(
            ReserveSlot("a", time.time() + 60)
        )


async def test_load_read_soon_again_is_the_same_report() -> None:
    class Counted(PlainEngine):
        def stats(self) -> EngineStats:
            return EngineStats(
                running=1,
                waiting=2,
                kv_blocks_used=3,
                kv_blocks_total=4,
                pending_kv_transfers=0,
                pending_kv_blocks=0,
                queued_prefill_tokens=5,
                context_tokens=6,
            )

    def worker_with(load_age_s: float) -> WorkerService:
        timing = WorkerTiming(load_age_s=load_age_s)
        return MeteredService(Counted(), Role.PREFILL, timing=timing).service

    worker = worker_with(load_age_s=1e9)
    first = worker.load_report()
    assert first == LoadReport(
        first.instance_id,
        1,
        1,
        2,
        queued_prefill_tokens=5,
        kv_blocks_used=3,
        kv_blocks_total=4,
        context_tokens=6,
    )
    assert worker.load_report() is first
    worker = worker_with(load_age_s=0.0)
    assert worker.load_report() == first
    assert worker.load_report() == msgspec.structs.replace(first, number=2)


@pytest.mark.parametrize(("role", "expected"), [(Role.PREFILL, (1, 4)), (Role.DECODE, (0, 0))])
async def test_prefill_worker_reports_aggregated_streams(
    role: Role, expected: tuple[int, int]
) -> None:
    gate = asyncio.Event()
    engine = PlainEngine((ANSWER[0], gate, ANSWER[1]))
    timing = WorkerTiming(load_age_s=0.0)
    bench = MeteredService(engine, role, can_aggregate=True, timing=timing)

    def reported() -> tuple[int, int]:
        report = bench.service.load_report()
        return report.num_generating, report.generating_tokens

    async with aclosing(as_stream(bench.service, request(phase=Phase.AGGREGATED))) as chunks:
        assert reported() == (0, 0)
        await anext(chunks)
        # Two tokens of the prompt, and two of the output.
        assert reported() == expected
        gate.set()
        await anext(chunks)
        assert reported() == (0, 0)


async def test_load_report_counts_prompts_whose_kv_is_fetched() -> None:
    fetched, more = asyncio.Event(), asyncio.Event()
    timing = WorkerTiming(load_age_s=0.0)
    engine = PlainEngine((fetched, ANSWER[0], more, ANSWER[1]))
    bench = MeteredService(engine, Role.ELASTIC, timing=timing)
    samples: list[CallSample] = []
    bench.service._cost.add_call = samples.append  # type: ignore[method-assign]

    def call(phase: Phase = Phase.DECODE) -> AsyncGenerator[Chunk, None]:
        kv_params = TRANSFER_PARAMS if phase is Phase.DECODE else None
        return as_stream(bench.service, request(phase=phase, kv_params=kv_params))

    def fetching() -> int:
        return bench.service.load_report().fetching_tokens

    calls = (call(), call(), call(Phase.PREFILL))  # a prefill call fetches none
    async with aclosing(calls[0]), aclosing(calls[1]), aclosing(calls[2]):
        assert fetching() == 0
        begun = [asyncio.create_task(anext(stream)) for stream in calls]
        await until(lambda: fetching() == 4)
        fetched.set()
        await asyncio.gather(*begun)
        assert fetching() == 0  # while the streams go on
        more.set()
    assert [sample.other_tokens for sample in samples if sample.fetches_kv] == [0, 2]


async def test_decode_call_that_ends_early_fetches_no_more() -> None:
    timing = WorkerTiming(load_age_s=0.0)
    bench = MeteredService(PlainEngine((asyncio.Event(), *ANSWER)), Role.DECODE, timing=timing)
    stream = bench.service.generate(
        request(phase=Phase.DECODE, kv_params=TRANSFER_PARAMS), lambda _: None
    )
    assert bench.service.load_report().fetching_tokens == 2
    stream.cancel()
    await until(lambda: bench.service.load_report().fetching_tokens == 0)


async def test_load_report_counts_the_prompts_that_were_computed() -> None:
    timing = WorkerTiming(load_age_s=0.0)
    bench = MeteredService(PlainEngine(ANSWER), Role.ELASTIC, can_aggregate=True, timing=timing)
    for _ in range(2):
        async with aclosing(as_stream(bench.service, request(phase=Phase.AGGREGATED))) as chunks:
            async for _ in chunks:
                pass
    report = bench.service.load_report()
    assert (report.computed_prompts, report.computed_tokens) == (2, 4)


async def test_load_with_cost_reaches_frontends_and_metrics() -> None:
    class Measured(PlainEngine, MeasuresSteps):
        steps: ClassVar = deque([StepSample(9.0, 1)])

    engine = Measured()
    bench = MeteredService(engine, Role.DECODE)
    engine.steps += [
        StepSample(0.01 + 0.001 * (number % 8), number % 8, 100) for number in range(200)
    ]
    await bench.ask(phase=Phase.DECODE, kv_params=TRANSFER_PARAMS)
    report = decode(encode(bench.service.load_report_with_cost()), LoadReport)
    assert report.cost is not None
    assert report.cost.readable() == report.cost
    assert report.cost.decode is not None
    assert report.cost.decode.predict(decode_features(5, 100)) == pytest.approx(0.015, rel=0.02)
    assert not engine.steps
    # without the step of the warm-up
    assert bench.counted("cost_samples") == {("decode_step",): 200}
    assert bench.counted("predictions_total").keys() <= {
        ("decode_step", "within"),
        ("decode_step", "outside"),
    }
    assert bench.service.load_report().cost is None  # it is in broadcasts only

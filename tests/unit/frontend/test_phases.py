"""The phases of a request: adjacent intervals that add up, whatever workers report and whichever of
them fail.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import cast

import httpx
import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.frontend.http.app import build_app
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import Disconnected, Draining, EngineFailed
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    GenerateRequest,
    PhaseTimings,
    ReleaseKv,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.phases import PHASES, PhaseSeconds, Span, divide
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamEvent, StreamHandle
from tests.kit.cases import each_case
from tests.kit.frontend_app import CARD, MODEL, FakeFrontend, chunk, front, stop
from tests.kit.instances import make_instance
from tests.kit.loopback_backend import LoopbackBackend
from tests.kit.memory_http import asgi
from tests.kit.routing import FINISHED, Cluster, kv_chunk

PREFILL = PhaseTimings(queue_s=0.2, prefill_s=0.5, more={"queue.slots": 0.1, "export": 0.1})
DECODE = PhaseTimings(kv_transfer_s=0.3, decode_queue_s=0.4, more={"kv_transfer.read": 0.2})


def served(prefill: PhaseTimings | None, decode: PhaseTimings | None) -> PhaseSeconds:
    spans = [
        Span("tokenize", 10.0),
        Span("select", 10.5),
        Span("prefill", 11.0, Role.PREFILL),
        Span("first_token", 12.0, Role.DECODE),
        Span("decode", 12.5, Role.DECODE),
        Span("respond", 14.0),
    ]
    return divide(spans, 14.25, prefill, decode)


def test_divide_counts_the_rest_of_each_call_as_send() -> None:
    phases = served(PREFILL, DECODE)
    assert phases == pytest.approx(
        {
            ("frontend", "tokenize"): 0.5,
            ("frontend", "select"): 0.5,
            ("prefill", "queue"): 0.2,
            ("prefill", "prefill"): 0.5,
            ("prefill", "export"): 0.1,
            ("prefill", "send"): 0.2,
            ("decode", "kv_transfer"): 0.3,
            ("decode", "send"): 0.2,
            ("decode", "decode_wait"): 0.4,
            ("decode", "decode"): 1.1,
            ("frontend", "respond"): 0.25,
        }
    )
    assert {phase for _, phase in phases} <= set(PHASES)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (None, None),
        (PREFILL, None),
        (
            PhaseTimings(queue_s=9.0, prefill_s=9.0),
            PhaseTimings(kv_transfer_s=math.inf, decode_queue_s=9.0),
        ),
        (PhaseTimings(queue_s=-1.0, prefill_s=math.nan), PhaseTimings(kv_transfer_s=1e-9)),
    ],
)
def test_divide_with_bad_reports_still_adds_up(
    prefill: PhaseTimings | None, decode: PhaseTimings | None
) -> None:
    phases = served(prefill, decode)
    assert sum(phases.values()) == pytest.approx(4.25)
    assert all(seconds > 0 for seconds in phases.values())


def test_repeated_prefill_call_keeps_its_own_statistics() -> None:
    """The statistics of the last attempt are of another call than the first one."""
    spans = [
        Span("prefill", 10.0, Role.PREFILL, stats=PhaseTimings(prefill_s=0.5)),
        Span("retry", 11.0),
        Span("prefill", 12.0, Role.PREFILL),
        Span("decode", 13.0, Role.DECODE),
    ]
    phases = divide(spans, 14.0, PhaseTimings(prefill_s=0.25), None)
    assert phases["prefill", "prefill"] == pytest.approx(0.75)


def names(trace: ChoiceTimeline) -> list[str]:
    return [span.phase for span in trace.spans]


async def test_spans_show_a_failed_attempt_as_one_span(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [EngineFailed("broken")], [kv_chunk("t1")])
    await cluster.add(2, Role.PREFILL, [kv_chunk("t2")], [kv_chunk("t3")])
    await cluster.add(3, Role.DECODE, FINISHED, FINISHED)
    trace = ChoiceTimeline()
    await cluster.tokens(trace)
    assert names(trace) == ["retry", "select", "prefill", "first_token", "decode"]
    assert trace.retries == 1


async def test_spans_show_rejected_decode_call_as_the_retry(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, [Draining("bye")])
    await cluster.add(3, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    await cluster.tokens(trace)
    assert names(trace) == ["select", "prefill", "retry", "first_token", "decode"]


async def test_spans_show_a_migration_gap_as_one_span(cluster: Cluster) -> None:
    first = Chunk(token_ids=token_ids([10]), stats=DECODE)
    await cluster.add(1, Role.PREFILL, [kv_chunk("t1")], [kv_chunk("t2")])
    await cluster.add(2, Role.DECODE, [first, Disconnected("gone")])
    await cluster.add(3, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    await cluster.tokens(trace)
    assert names(trace) == ["select", "prefill", "first_token", "decode", "migration", "decode"]
    assert trace.spans[2].stats == DECODE
    begins = [span.begin_s for span in trace.spans]
    assert begins == sorted(begins)
    end_s = time.monotonic()
    phases = divide(trace.spans, end_s, trace.prefill_stats, trace.decode_stats)
    assert sum(phases.values()) == pytest.approx(end_s - begins[0])
    assert ("frontend", "migration") in phases
    assert [span.role for span in trace.spans if span.phase == "decode"] == [Role.DECODE] * 2


def test_timings_with_unknown_phase_are_readable() -> None:
    newer = msgspec.msgpack.encode(PhaseTimings(queue_s=0.5, more={"next": 1.0}))
    assert msgspec.msgpack.decode(newer)["queue_s"] == 0.5
    assert (
        msgspec.msgpack.decode(
            b"\x81\xa7queue_s\xcb?\xe0\x00\x00\x00\x00\x00\x00", type=PhaseTimings
        ).more
        == {}
    )


# --- many requests, on engines that fail ----------------------------------------------------------

_FAILS_EACH = 31  # events of a worker


class _FailingStream(Stream):
    """A call that ends with an error at an event that its worker chooses."""

    def __init__(self, worker: FailingWorker, request: GenerateRequest, on_event: OnEvent) -> None:
        super().__init__(on_event)
        self._worker = worker
        self._source = worker.engine.generate(request, self._take)

    def _take(self, event: StreamEvent) -> None:
        self._worker.events += 1
        if self._worker.events % _FAILS_EACH:
            self.emit(event)
        else:
            self.emit(EngineFailed("killed by the test"))

    def _close(self, last: StreamEvent | None) -> None:
        if not isinstance(last, Chunk):
            self._source.cancel()


class FailingWorker:
    """A mock engine on the request plane, some of whose calls fail before or after their first
    token.
    """

    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self.events = 0

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        return _FailingStream(self, request, on_event)

    async def control(self, verb: Control) -> bytes:
        if isinstance(verb, ReleaseKv):
            self.engine.release(verb.transfer_id, verb.outcome)
        return b""


@pytest.fixture
async def mock_frontend(cluster: Cluster) -> AsyncIterator[FakeFrontend]:
    """A frontend with two prefill and two decode workers."""
    engines = []
    for number, role in enumerate((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE), start=1):
        config = WorkerConfig(
            model_path="tiny",
            engine="mock",
            disaggregation_mode=role,
            override_engine_args={"step_s": 0.001, "max_batch_size": 40},
        )
        engines.append(MockEngine(config, instance_id=number, backend=LoopbackBackend()))
        await engines[-1].start()
        instance = make_instance(number, role=role)
        await cluster.plane.serve(instance.subject, FailingWorker(engines[-1]))
        cluster.view.add(instance)
    served = front()
    served.catalog.served["tiny"] = ServedModel(
        msgspec.structs.replace(CARD, name="tiny"), served.catalog.renderer
    )
    served.built = build_app(
        served.config, cast("ModelRegistry", served.catalog), cluster.router, served.metrics
    )
    yield served
    for engine in engines:
        await engine.aclose()


@pytest.mark.parametrize("early_first_token", [False, True])
async def test_phases_of_retried_requests_add_up(
    mock_frontend: FakeFrontend, cluster: Cluster, early_first_token: bool
) -> None:
    cluster.router.options = RouterOptions(early_token_pause_s=60.0 if early_first_token else 0.0)
    for decode_id in (3, 4):
        cluster.router.pauses.note(decode_id, 0.001)
    app = asgi(mock_frontend.app)

    async def ask(number: int) -> tuple[float, httpx.Response]:
        body = {"model": "tiny", "prompt": "x" * (1 + number % 50), "max_tokens": 2 + number % 30}
        begun_s = time.monotonic()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://frontend"
        ) as client:
            response = await client.post(
                "/v1/completions", json=body, headers={"x-dynamo-stats": "1"}
            )
        return time.monotonic() - begun_s, response

    answers = await asyncio.gather(*map(ask, range(200)))
    assert sum(response.status_code == 200 for _, response in answers) > 150
    seen: set[str] = set()
    before_first_token: set[str] = set()
    first_s = named_s = 0.0
    for client_s, response in answers:
        if response.status_code != 200:  # it failed too often
            continue
        stats = response.json()["dynamo_trtllm"]
        phases = stats["phase_s"]
        seen |= {name for name, seconds in phases.items() if seconds}
        assert sum(phases.values()) == pytest.approx(stats["total_s"])
        assert stats["total_s"] <= client_s
        first_s += stats["ttft_s"]
        named_s += sum(stats["ttft_phase_s"].values())
        before_first_token |= stats["ttft_phase_s"].keys()
    assert {
        "retry",
        "migration",
        "send",
        "queue",
        "prefill",
        "export",
        "kv_transfer",
        "decode_wait",
        "decode",
    } <= seen
    assert seen <= set(PHASES)
    assert named_s == pytest.approx(first_s)
    assert ("kv_transfer" in before_first_token) == (not early_first_token)


# --- what Dynamo's clients ask for ----------------------------------------------------------------


ASKED: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}


async def post(path: str, extra_fields: list[str], **fields: object) -> httpx.Response:
    app = asgi(front(chunk("a"), stop("b")).app)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://frontend"
    ) as client:
        asked = {"model": MODEL, "nvext": {"extra_fields": extra_fields}} | ASKED[path] | fields
        return await client.post(path, json=asked)


@each_case("path", ASKED)
@each_case("stream", [False, True])
async def test_nvext_returns_workers_and_times(path: str, stream: bool) -> None:
    response = await post(path, ["timing", "worker_id"], stream=stream)
    *_, last = (line for line in response.text.splitlines() if "nvext" in line)
    body = json.loads(last.removeprefix("data: "))
    nvext = body.get("response", body)["nvext"]
    assert nvext["worker_id"] == {"prefill_worker_id": 0xAB, "decode_worker_id": 0xCD}
    timing = nvext["timing"]
    assert timing["prefill_wait_time_ms"] + timing["prefill_time_ms"] == pytest.approx(
        timing["ttft_ms"]
    )
    assert timing["ttft_ms"] <= timing["total_time_ms"]
    assert timing["kv_hit_rate"] == 1.0  # both tokens of the prompt
    assert timing["request_received_ms"] > 1e12


async def test_nvext_not_requested_is_absent() -> None:
    path = next(iter(ASKED))
    assert "nvext" not in (await post(path, [])).json()
    error = (await post(path, ["engine_data"])).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "nvext.extra_fields[0]")

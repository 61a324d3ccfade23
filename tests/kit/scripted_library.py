"""A library whose results a test passes in, under the runner of library engines."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.external.library import Counts, ResultReceiver
from dynamo_trtllm.engines.external.runner import ExternalCall
from dynamo_trtllm.protocol.errors import (
    RequestRejected,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    Limits,
    Phase,
    Sampling,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.protocol.streams import StreamEvent
from tests.kit.waiting import SOON_S

LAYOUT = KvLayout(dtype="bfloat16", block_tokens=16, num_layers=2, num_kv_heads=2, head_dim=8)
STOP_ID = 99


def info_of(**fields: Any) -> EngineInfo:
    """Return properties of an engine."""
    values = {
        "engine": "vllm",
        "context_length": 100,
        "vocab_size": 1000,
        "eos_token_ids": (STOP_ID,),
        "renderer": "harmony",
        "layout": LAYOUT,
        "limits": Limits(),
    }
    return EngineInfo(**{**values, **fields})


class Call:
    """A call whose results the test passes in."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.exports_kv = request.phase is Phase.PREFILL
        self.stop_ids = frozenset({STOP_ID})
        self.aborts = 0
        self.releases: list[bool] = []  # has_expired of each
        self.receiver: Any = None
        self.reported: dict[str, float] = {}  # phases
        self.num_generated = 0
        self.cached_tokens = 3

    async def run(self, receiver: ResultReceiver) -> None:
        self.receiver = receiver

    def read(self, result: Any) -> tuple[Chunk, str | None]:
        if isinstance(result.error, Exception):
            raise result.error
        (output,) = result.outputs
        logprobs = tuple(TokenLogprob(token, -1.0) for token in output.token_ids)
        return Chunk(token_ids=token_ids(output.token_ids), logprobs=logprobs), output.finish_reason

    def phases(self, result: Any) -> dict[str, float]:
        return dict(self.reported)

    def export(self, result: Any, chunk: Chunk) -> tuple[Chunk, bytes]:
        return chunk, b"state"

    def abort(self) -> None:
        self.aborts += 1

    def release_kv(self, *, has_expired: bool) -> None:
        self.releases.append(has_expired)

    def say(self, *ids: int, finish: str | None = None, error: Exception | None = None) -> None:
        self.num_generated += len(ids)
        output = SimpleNamespace(token_ids=list(ids), finish_reason=finish)
        self.receiver.on_result(SimpleNamespace(outputs=[output], error=error))


class Scripted:
    """A library that creates a `Call` for each request."""

    name = "Scripted"
    transfer_hint = "; look there"

    def __init__(self, *, can_abort_fetch: bool = True, keeps_unfetched_kv: bool = False) -> None:
        self.can_abort_fetch = can_abort_fetch
        self.keeps_unfetched_kv = keeps_unfetched_kv
        self.calls: list[Call] = []
        self.reason = ""
        self.waiting_since: float | None = None
        self.is_closed = False

    def prepare(self, request: GenerateRequest, kv_params: KvTransferParams | None) -> Call:
        if request.sampling.max_tokens == 13:
            raise RequestRejected("13 is not accepted", field="max_tokens")
        self.calls.append(Call(request))
        return self.calls[-1]

    def health(self, waiting_since: float | None) -> str:
        self.waiting_since = waiting_since
        return self.reason

    def counts(self, *, is_idle: bool) -> Counts:
        return Counts(waiting=9, kv_blocks_used=0 if is_idle else 5, kv_blocks_total=10)

    async def aclose(self) -> None:
        self.is_closed = True


def make(*, ttl_s: float = 60.0, kv_fetch_timeout_s: float = 30.0, **library_facts: bool) -> Any:
    library = Scripted(**library_facts)
    return serve(library, ttl_s=ttl_s, kv_fetch_timeout_s=kv_fetch_timeout_s), library


class ScriptedEngine(ExternalEngine):
    """An engine whose library a test passes in, started."""

    async def start(self) -> EngineInfo:
        raise AssertionError("it serves already")


def serve(
    library: Any, *, ttl_s: float = 60.0, kv_fetch_timeout_s: float = 30.0, **fields: Any
) -> ExternalEngine:
    """Return an engine that runs requests with a library. `fields`: of its properties."""
    info = info_of(**fields)
    name = getattr(library, "name", "TensorRT-LLM")
    engine = ScriptedEngine(
        WorkerConfig(
            model_path="m", kv_transfer_ttl_s=ttl_s, kv_fetch_timeout_s=kv_fetch_timeout_s
        ),
        engine=info.engine,
        library=name,
        instance_id=5,
    )
    engine._accept_requests(library, info, "a/b")
    return engine


def ask(
    phase: Phase = Phase.AGGREGATED, *, within_s: float = 60.0, **fields: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(20)),
        sampling=Sampling(max_tokens=fields.pop("max_tokens", 8)),
        deadline=time.time() + within_s,
        phase=phase,
        **fields,
    )


async def started(
    runner: ExternalEngine, request: GenerateRequest
) -> tuple[ExternalCall, list[StreamEvent], Call]:
    """Start a call and return its stream, its events so far, and the library's side of it."""
    events: list[StreamEvent] = []
    stream = runner.generate(request, events.append)
    assert events == []
    await asyncio.sleep(0)
    library: Any = runner.library
    return stream, events, library.calls[-1]


async def some_transfer_params() -> KvTransferParams:
    runner, _ = make()
    _, events, call = await started(runner, ask(Phase.PREFILL))
    call.say(7, finish="length")
    (chunk,) = events
    assert isinstance(chunk, Chunk)
    assert chunk.kv_params is not None
    return chunk.kv_params


async def event(events: list[StreamEvent]) -> StreamEvent:
    """Wait for the first event."""
    async with asyncio.timeout(SOON_S):
        while not events:  # noqa: ASYNC110 - the callback appends to a list
            await asyncio.sleep(0.005)
    return events[0]

"""A minimal fake of TensorRT-LLM that tests control, under the runner and the adapter."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from dynamo_trtllm.engines.engine_interface import PromptLimit
from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.trtllm.bindings import TrtllmBindings
from dynamo_trtllm.engines.trtllm.library import TrtllmLibrary
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    Phase,
    Role,
    Sampling,
    token_ids,
)
from dynamo_trtllm.protocol.streams import as_stream
from tests.kit.scripted_library import info_of, serve
from tests.kit.waiting import SOON_S

LAYOUT = KvLayout(dtype="fp8", block_tokens=32, num_layers=1, num_kv_heads=1, head_dim=8)
PARAMS = {"first_gen_tokens": [7], "ctx_request_id": 3, "opaque_state": b"s", "draft_tokens": None}


class Refusal(RuntimeError):
    """The fake's RequestError."""


class Result:
    """The result of one call. `say` adds a result, `fail` adds an error."""

    def __init__(self) -> None:
        self.outputs = [
            SimpleNamespace(token_ids=[], logprobs=None, finish_reason=None, stop_reason=None)
        ]
        self.outputs[0].disaggregated_params = SimpleNamespace(**PARAMS, disagg_request_id=None)
        self.cached_tokens = 0
        self.aborts = 0
        self.request_id = 5
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def say(self, *ids: int, finish: str | None = None) -> None:
        self._queue.put_nowait((ids, finish))

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    def abort(self) -> None:
        self.aborts += 1

    def __aiter__(self) -> Result:
        return self

    async def __anext__(self) -> Result:
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        self.outputs[0].token_ids += found[0]
        self.outputs[0].finish_reason = found[1]
        return self

    def __await__(self) -> Any:
        return self.__anext__().__await__()


class Llm:
    def __init__(self) -> None:
        self.results: list[Result] = []
        self.calls: list[dict[str, Any]] = []  # the arguments of each
        self.healthy = True
        self.rows: list[dict[str, Any]] = []  # of statistics

    def generate_async(self, **call: Any) -> Result:
        self.calls.append(call)
        self.results.append(Result())
        return self.results[-1]

    def get_stats(self, timeout: float) -> list[dict[str, Any]]:
        rows = self.rows
        self.rows = []
        return rows

    def _check_health(self) -> bool:
        return self.healthy


class FakeBindings(TrtllmBindings):
    """Bindings whose DisaggregatedParams has the `fields` besides those of PARAMS."""

    def __init__(self, *fields: str) -> None:
        made = ("LLM", "SamplingParams", "DisaggregatedParams", "GuidedDecodingParams")
        self.version = self.release = "1.2.1"
        self.classes = {**dict.fromkeys(made, dict), "RequestError": Refusal, "Logprob": None}
        self.parameters = frozenset({"cache_salt", "priority"})
        self.disagg_fields = frozenset({"request_type", *PARAMS, *fields})
        self.has_kv_cache_capacity = False
        self.is_since_1_2 = True
        self.is_since_1_3 = False


def make(
    role: Role,
    *fields: str,
    ttl_s: float = 60.0,
    kv_fetch_timeout_s: float = 30.0,
    kv_timeout_s: float = math.inf,
) -> tuple[ExternalEngine, Llm]:
    rules: Any = SimpleNamespace(
        role=role,
        info=info_of(context_length=1000, vocab_size=100),
        prompt_limits={phase: PromptLimit(500, "") for phase in Phase},
        has_structural_tags=True,
        has_min_tokens=True,
        dp_ranks=0,
        uses_conversations=False,
    )
    llm = Llm()
    settled = FakeBindings(*fields)
    library = TrtllmLibrary(
        bindings=settled,
        llm=llm,
        model_limits=rules,
        instance_id=1,
        kv_transfer_ttl_s=ttl_s,
        kv_timeout_s=kv_timeout_s,
    )
    own = {"engine": "trtllm", "layout": LAYOUT, "kv_compat": {"release": "1.2"}}
    return serve(library, ttl_s=ttl_s, kv_fetch_timeout_s=kv_fetch_timeout_s, **own), llm


def ask(
    phase: Phase = Phase.AGGREGATED,
    *,
    kv_params: KvTransferParams | None = None,
    within_s: float = 60,
    max_tokens: int = 8,
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(10)),
        sampling=Sampling(max_tokens=max_tokens),
        deadline=time.time() + within_s,
        phase=phase,
        kv_params=kv_params,
    )


async def started(
    at: ExternalEngine, llm: Llm, request: GenerateRequest
) -> tuple[asyncio.Task[list[Chunk]], Result]:
    async def collected() -> list[Chunk]:
        async with aclosing(as_stream(at, request)) as stream:
            return [chunk async for chunk in stream]

    known = len(llm.results)
    task = asyncio.create_task(collected())
    async with asyncio.timeout(SOON_S):
        while len(llm.results) == known:  # noqa: ASYNC110 - the adapter's task appends to it
            await asyncio.sleep(0)
    return task, llm.results[-1]


async def some_transfer_params() -> KvTransferParams:
    at, llm = make(Role.PREFILL)
    task, result = await started(at, llm, ask(Phase.PREFILL))
    result.say(7, finish="length")
    (chunk,) = await task
    assert chunk.kv_params is not None
    await at.aclose()
    return chunk.kv_params


async def check_idle(at: ExternalEngine) -> None:
    await asyncio.wait_for(at.drain(), SOON_S)
    assert at.stats().running == 0

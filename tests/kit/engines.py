"""Creates engines for tests, sends requests to them, and checks that they release all resources."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine, EngineStats
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.kv_transfer.transfer_backend import TransferBackend
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Phase,
    ReleaseOutcome,
    Role,
    Sampling,
    token_ids,
)
from dynamo_trtllm.protocol.streams import StreamEvent, as_stream
from dynamo_trtllm.worker.service import WorkerAdmission, WorkerService
from tests.kit.instances import make_instance
from tests.kit.loopback_backend import named_backend
from tests.kit.waiting import SOON_S

# TensorRT-LLM frees KV that was not fetched only after a time, which tests wait for
TRTLLM_TTL_S = 2.0


def make(
    kind: str,
    folder: Path,
    role: Role,
    *,
    backend: str | TransferBackend = "loopback",
    ttl_s: float | None = None,
    publish_kv_events: bool = False,
    warm_up_budget_s: float = 0.0,
    **args: Any,
) -> Engine:
    """Create an engine, without the requests that compile kernels, because a CPU has none."""
    if ttl_s is None:
        ttl_s = TRTLLM_TTL_S if kind == "trtllm" else 60.0
    config = WorkerConfig(
        model_path=str(folder),
        served_model_name="tiny",
        disaggregation_mode=role,
        kv_transfer_ttl_s=ttl_s,
        publish_kv_events=publish_kv_events,
        warm_up_budget_s=warm_up_budget_s,
        # named, because else four files are read to choose one by the GPUs
        kernels_profile="fallback" if kind == "trtllm" else None,
        override_engine_args=_ARGUMENTS[kind](role, args) if kind in _ARGUMENTS else args,
    )
    number = list(Role).index(role) + 1
    if kind == "trtllm":  # on the fake TensorRT-LLM, which chooses the transfer backend itself
        from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine

        return TrtllmEngine(config, instance_id=number)
    if kind == "vllm":  # on the fake vLLM
        from dynamo_trtllm.engines.vllm.engine import VllmEngine

        return VllmEngine(config, instance_id=number)
    chosen = named_backend(backend) if isinstance(backend, str) else backend
    if kind == "mock":
        return MockEngine(config, instance_id=number, backend=chosen)
    from dynamo_trtllm.engines.torch.engine import TorchEngine

    return TorchEngine(config, instance_id=number, backend=chosen)


def trtllm_args(role: Role, **args: Any) -> dict[str, Any]:
    """Translate the arguments of the contract tests to TensorRT-LLM's names."""
    kv = dict(args.pop("kv_cache_config", {}))
    if "kv_block_size" in args:
        kv["tokens_per_block"] = args.pop("kv_block_size")
    if "kv_cache_blocks" in args:
        kv["max_tokens"] = args.pop("kv_cache_blocks") * 32
    chosen: dict[str, Any] = {"disable_overlap_scheduler": True} if role is Role.PREFILL else {}
    if role is not Role.AGGREGATED:
        chosen["cache_transceiver_config"] = {
            "backend": args.pop("transceiver", "UCX"),
            "max_tokens_in_buffer": 8192,
        }
    args.pop("transceiver", None)
    return chosen | ({"kv_cache_config": kv} if kv else {}) | args


def vllm_args(args: dict[str, Any]) -> dict[str, Any]:
    """Translate the arguments of the contract tests to vLLM's names."""
    names = {
        "kv_block_size": "block_size",
        "max_batch_size": "max_num_seqs",
        "max_seq_len": "max_model_len",
    }
    chosen = {names.get(name, name): value for name, value in args.items()}
    if "kv_cache_blocks" in chosen:
        chosen["num_gpu_blocks_override"] = chosen.pop("kv_cache_blocks") + 1
    return {"block_size": 32} | chosen


_ARGUMENTS: dict[str, Callable[[Role, dict[str, Any]], dict[str, Any]]] = {
    "trtllm": lambda role, args: trtllm_args(role, **args),
    "vllm": lambda _, args: vllm_args(args),
}


@asynccontextmanager
async def started(*engines: Engine) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.aclose)
            await engine.start()
        yield


class EnginePool:
    """Engines of one kind for many tests.

    One with default arguments serves another test if nothing is left in it.
    """

    def __init__(self, kind: str, folder: Path, *, leaks: bool = False, **args: Any) -> None:
        self.leaks = leaks
        self._make = lambda role, more: make(kind, folder, role, **args, **more)
        self._roles: dict[Engine, Role] = {}  # of those with default arguments
        self._running: set[Engine] = set()
        self._free: list[Engine] = []

    def open(self, role: Role = Role.AGGREGATED, **args: Any) -> Engine:
        """Return an engine for `started`: a new one if it has arguments of its own."""
        found = (
            None
            if args
            else next((engine for engine in self._free if self._roles[engine] is role), None)
        )
        if found is not None:
            self._free.remove(found)
            return found
        engine = self._make(role, args)
        if not args:
            self._roles[engine] = role
        return engine

    @asynccontextmanager
    async def started(self, *engines: Engine) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for engine in engines:
                stack.push_async_callback(self._put_back, engine)
                if engine not in self._running:
                    self._running.add(engine)
                    await engine.start()
            yield

    async def check_nothing_left(self, engine: Engine) -> None:
        await check_nothing_left(engine, leaks=self.leaks)

    async def _put_back(self, engine: Engine) -> None:
        now = stats(engine)
        # the second may lag behind the third
        held = now.pending_kv_transfers or now.kv_blocks_used or now.leaked_kv_blocks
        if engine in self._roles and not (now.running or now.waiting or held):
            self._free.append(engine)
        else:
            await engine.aclose()
            self._running.remove(engine)

    async def aclose(self) -> None:
        for engine in self._running:
            await engine.aclose()


def prompt_of(length: int, seed: int = 1) -> array[int]:
    return token_ids((i * i * 31 + i * 7 + seed * 101) % 2000 + 10 for i in range(length))


def ask(
    prompt: array[int],
    *,
    phase: Phase = Phase.AGGREGATED,
    kv_params: KvTransferParams | None = None,
    num_resumed_output_tokens: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    chosen = Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerateRequest(
        request_id="r",
        model="tiny",
        token_ids=prompt,
        sampling=chosen,
        deadline=time.time() + 60,
        phase=phase,
        kv_params=kv_params,
        num_resumed_output_tokens=num_resumed_output_tokens,
    )


async def collect(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    async with aclosing(as_stream(engine, request)) as stream:
        chunks = [chunk async for chunk in stream]
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]
    return chunks


async def cancel_after(engine: Engine, request: GenerateRequest, turns: int) -> None:
    """Cancel a request after some turns of the event loop.

    Release the KV if it had ended with a transfer.
    """
    events: list[StreamEvent] = []
    handle = engine.generate(request, events.append)
    for _ in range(turns):
        await asyncio.sleep(0)
    handle.cancel()
    if events and isinstance(events[-1], Chunk) and events[-1].kv_params is not None:
        release(engine, events[-1].kv_params)


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def error_code(engine: Engine, request: GenerateRequest) -> str:
    """Return the error code with which a worker with this engine rejects the request."""
    instance = make_instance(1, role=Role.AGGREGATED)
    admission = WorkerAdmission()
    service = WorkerService(engine, instance, admission, files={}, metrics=WorkerMetrics())
    with pytest.raises(DynamoError) as caught:
        async for _ in as_stream(service, request):
            pass
    return caught.value.code


async def answer(engine: Engine, prompt: array[int], **sampling: Any) -> list[int]:
    return tokens(await collect(engine, ask(prompt, **sampling)))


async def prefill_params(engine: Engine, prompt: array[int], **sampling: Any) -> KvTransferParams:
    last = (await collect(engine, ask(prompt, phase=Phase.PREFILL, **sampling)))[-1]
    assert last.finish_reason is FinishReason.KV_TRANSFER
    assert last.kv_params is not None
    assert list(last.token_ids) == []
    return last.kv_params


async def prefill_then_decode(
    prefill: Engine, decode: Engine, prompt: array[int], **sampling: Any
) -> list[Chunk]:
    """Run the prefill and the decode phase like a frontend, and release the KV on the prefill
    engine.
    """
    kv_params = await prefill_params(prefill, prompt, **sampling)
    try:
        return await collect(
            decode, ask(prompt, phase=Phase.DECODE, kv_params=kv_params, **sampling)
        )
    finally:
        release(prefill, kv_params, ReleaseOutcome.FETCHED)


def stats(engine: Engine) -> EngineStats:
    return engine.stats()


def release(
    engine: Engine, kv_params: KvTransferParams, outcome: ReleaseOutcome = ReleaseOutcome.ABORTED
) -> None:
    engine.release(kv_params.transfer_id, outcome)


async def check_stats(engine: Engine, **expected: int) -> None:
    """Wait until the engine's statistics have these values. Fail after a timeout."""
    deadline = time.monotonic() + SOON_S
    while True:
        now = {name: getattr(stats(engine), name) for name in expected}
        if now == expected or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    assert now == expected


async def check_nothing_left(engine: Engine, *, leaks: bool = False) -> None:
    """Wait until the engine is idle. Fail after a timeout.

    Args:
        engine: the engine.
        leaks: it may have KV that it never frees, if it counts it as leaked.
    """
    async with asyncio.timeout(SOON_S):
        await engine.drain()
    leaked = stats(engine).leaked_kv_blocks if leaks else 0
    await check_stats(
        engine,
        running=0,
        waiting=0,
        kv_blocks_used=leaked,
        leaked_kv_blocks=leaked,
        pending_kv_transfers=0,
    )
    await check_stats(engine, queued_prefill_tokens=0, context_tokens=0)

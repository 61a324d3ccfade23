"""Send requests to engines, and check what they answer and that they release all resources."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_trtllm.engines.capabilities import TransfersKv
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Phase,
    ReleaseOutcome,
    Sampling,
    token_ids,
)
from dynamo_trtllm.protocol.streams import Generator, StreamEvent, as_stream


@dataclass
class WaitLimits:
    """How long the tests wait, in seconds. Raise them for an engine that is slow."""

    # Limit for what normally holds at once. A busy machine may pause for seconds.
    soon_s: float = 10.0
    answer_s: float = 60.0  # limit for an answer of some hundred tokens
    close_s: float = 60.0  # limit for the shutdown of an engine


LIMITS = WaitLimits()


@asynccontextmanager
async def within(limit_s: float, promise: str) -> AsyncIterator[None]:
    """Limit the time of the context.

    Args:
        limit_s: the limit in seconds.
        promise: what the engine promises to do in this time, as a sentence.

    Raises:
        AssertionError: the time has passed.
    """
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise AssertionError(f"{promise}: this did not happen within {limit_s:g} s") from None


@asynccontextmanager
async def started(*engines: Engine) -> AsyncIterator[None]:
    """Start engines, and close them at the end of the context."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.aclose)
            await engine.start()
        yield


def prompt_of(length: int, seed: int = 1, vocab_size: int = 2010) -> array[int]:
    """Return token ids that differ between seeds.

    Args:
        length: number of the ids.
        seed: chooses the ids.
        vocab_size: ids are below it, and below 2010.
    """
    first = min(10, vocab_size // 2)  # models use the first ids for control tokens
    count = min(2010, vocab_size) - first
    return token_ids((i * i * 31 + i * 7 + seed * 101) % count + first for i in range(length))


def ask(
    prompt: array[int],
    *,
    phase: Phase = Phase.AGGREGATED,
    kv_params: KvTransferParams | None = None,
    num_resumed_output_tokens: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    """Return a greedy request for 8 tokens. `sampling` has other fields of `Sampling`."""
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


async def collect(engine: Generator, request: GenerateRequest) -> list[Chunk]:
    """Return the chunks of a stream.

    Raises:
        DynamoError: the error that ended the stream.
        AssertionError: the stream did not end, or not as promised.
    """
    async with within(LIMITS.answer_s, "a stream ends with a finish_reason or an error"):
        async with aclosing(as_stream(engine, request)) as stream:
            chunks = [chunk async for chunk in stream]
    finishing = chunks[-1]
    assert all(chunk.kv_params is None for chunk in chunks[:-1]), (
        "only the last chunk of a stream has kv_params"
    )
    assert (finishing.kv_params is None) == (
        finishing.finish_reason is not FinishReason.KV_TRANSFER
    ), f"a stream has kv_params exactly when it ends with KV_TRANSFER, but ended with {finishing}"
    return chunks


async def ended_with(engine: Generator, request: GenerateRequest) -> StreamEvent:
    """Return the last event of a stream: a chunk, or the error that ended it.

    Raises:
        AssertionError: the stream did not end, or not as promised.
    """
    try:
        return (await collect(engine, request))[-1]
    except DynamoError as exc:
        return exc


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
    """Return the token ids of chunks."""
    return [token for chunk in chunks for token in chunk.token_ids]


def call_of(
    request: GenerateRequest, phase: Phase, kv_params: KvTransferParams | None = None
) -> GenerateRequest:
    """Return the call that runs one phase of a request."""
    return msgspec.structs.replace(request, phase=phase, kv_params=kv_params)


async def prefill(engine: Engine, request: GenerateRequest) -> KvTransferParams:
    """Run the prefill call of a request, and return its KV transfer parameters."""
    last = (await collect(engine, call_of(request, Phase.PREFILL)))[-1]
    assert last.kv_params is not None, (
        f"a prefill call of several tokens ends with KV_TRANSFER, but ended with {last}"
    )
    assert not last.token_ids, "the chunk with KV transfer parameters has no tokens"
    return last.kv_params


async def run_both(
    prefill_engine: Engine, decode_engine: Engine, request: GenerateRequest
) -> list[Chunk]:
    """Run the prefill and the decode call like a frontend, and release the KV on the prefill
    engine.
    """
    kv_params = await prefill(prefill_engine, request)
    try:
        return await collect(decode_engine, call_of(request, Phase.DECODE, kv_params))
    finally:
        release(prefill_engine, kv_params, ReleaseOutcome.FETCHED)


def release(
    engine: Engine, kv_params: KvTransferParams, outcome: ReleaseOutcome = ReleaseOutcome.ABORTED
) -> None:
    """Free the KV that an engine holds for a transfer."""
    assert isinstance(engine, TransfersKv)
    engine.release(kv_params.transfer_id, outcome)


async def check_stats(engine: Engine, **expected: int) -> None:
    """Wait until the engine's statistics have these values. Fail after a timeout."""
    limit = time.monotonic() + LIMITS.soon_s
    while True:
        now = {name: getattr(engine.stats(), name) for name in expected}
        if now == expected or time.monotonic() > limit:
            break
        await asyncio.sleep(0.01)
    assert now == expected, f"stats() has {now} and not {expected} after {LIMITS.soon_s:g} s"


async def check_nothing_left(engine: Engine, *, leaks: bool = False) -> None:
    """Wait until the engine runs no request and holds no KV. Fail after a timeout.

    Args:
        engine: the engine.
        leaks: it may never free some KV, which it counts in `leaked_kv_blocks`.
    """
    async with within(LIMITS.soon_s, "drain() returns when no request runs and no KV is held"):
        await engine.drain()
    leaked = engine.stats().leaked_kv_blocks if leaks else 0
    await check_stats(
        engine,
        running=0,
        waiting=0,
        kv_blocks_used=leaked,
        leaked_kv_blocks=leaked,
        pending_kv_transfers=0,
        pending_kv_blocks=0,
        queued_prefill_tokens=0,
        context_tokens=0,
    )

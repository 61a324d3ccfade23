"""The contract of engines, held by the mock and by torch; hand-off by the loopback carrier."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engine.base import Engine, EngineStats, HasStats, HasTickets
from dynamo_trtllm.engine.mock.engine import MockEngine
from dynamo_trtllm.errors import (
    ConfigError,
    ContextTooLong,
    EngineFailed,
    EngineRefused,
    HandoffError,
    Overloaded,
    TicketExpired,
    TicketMismatch,
)
from dynamo_trtllm.handoff.loopback import LoopbackCarrier
from dynamo_trtllm.handoff.select import select_carrier
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    HandoffTicket,
    Phase,
    ReleaseOutcome,
    Role,
    Sampling,
    token_ids,
)
from tests.tiny_models import save_tiny_gpt_oss, save_tiny_llama

LENGTHS = [1, 31, 32, 33, 127, 128, 129, 1000, 5000]
Open = Callable[..., Any]


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


def make(kind: str, folder: Path, role: Role, *, carrier: str = "loopback", ttl_s: float = 60.0, **args: Any) -> Engine:
    config = WorkerConfig(
        model_path=str(folder),
        served_model_name="tiny",
        disaggregation_mode=role,
        ticket_ttl_s=ttl_s,
        override_engine_args=args,
    )
    chosen = LoopbackCarrier() if carrier == "loopback" else select_carrier(carrier)
    number = list(Role).index(role) + 1
    if kind == "mock":
        return MockEngine(config, instance_id=number, carrier=chosen)
    from dynamo_trtllm.engine.torch.engine import TorchEngine

    return TorchEngine(config, instance_id=number, carrier=chosen)


@asynccontextmanager
async def started(*engines: Engine) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.aclose)
            await engine.start()
        yield


@pytest.fixture(params=["mock", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_engine(kind: str, gpt_oss: Path) -> Open:
    return lambda role=Role.AGGREGATED, **args: make(kind, gpt_oss, role, **args)


def prompt_of(length: int, seed: int = 1) -> array[int]:
    return token_ids((i * i * 31 + i * 7 + seed * 101) % 2000 + 10 for i in range(length))


def ask(
    prompt: array[int], *, phase: Phase = Phase.WHOLE, ticket: HandoffTicket | None = None, **sampling: Any
) -> GenerateRequest:
    chosen = Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerateRequest(
        request_id="r",
        model="tiny",
        token_ids=prompt,
        sampling=chosen,
        deadline=time.time() + 60,
        phase=phase,
        ticket=ticket,
    )


async def collect(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    async with aclosing(engine.generate(request)) as stream:
        chunks = [chunk async for chunk in stream]
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return chunks


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def answer(engine: Engine, prompt: array[int], **sampling: Any) -> list[int]:
    return tokens(await collect(engine, ask(prompt, **sampling)))


async def ticket_from(engine: Engine, prompt: array[int], **sampling: Any) -> HandoffTicket:
    last = (await collect(engine, ask(prompt, phase=Phase.PREFILL, **sampling)))[-1]
    assert last.finish_reason is FinishReason.HANDOFF
    assert last.ticket is not None
    assert list(last.token_ids) == []
    return last.ticket


async def two_legs(prefill: Engine, decode: Engine, prompt: array[int], **sampling: Any) -> list[Chunk]:
    ticket = await ticket_from(prefill, prompt, **sampling)
    return await collect(decode, ask(prompt, phase=Phase.DECODE, ticket=ticket, **sampling))


def stats(engine: Engine) -> EngineStats:
    assert isinstance(engine, HasStats)
    return engine.stats()


def release(engine: Engine, ticket: HandoffTicket, outcome: ReleaseOutcome = ReleaseOutcome.REFUSED) -> None:
    assert isinstance(engine, HasTickets)
    engine.release(ticket.ticket_id, outcome)


async def check_nothing_left(engine: Engine) -> None:
    async with asyncio.timeout(5):
        await engine.drain()
    left = stats(engine)
    assert (left.running, left.waiting, left.kv_blocks_used, left.tickets_held) == (0, 0, 0, 0)


# --- both engines --------------------------------------------------------------------------------------


async def test_generate_when_run_twice_then_gives_the_same_greedy_tokens(open_engine: Open) -> None:
    engine = open_engine()
    async with started(engine):
        chunks = await collect(engine, ask(prompt_of(40)))
        assert len(tokens(chunks)) == 8
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert chunks[-1].stats is not None
        assert tokens(chunks) == await answer(engine, prompt_of(40))
        await check_nothing_left(engine)


async def test_generate_when_many_run_at_once_then_each_gets_its_own_tokens(open_engine: Open) -> None:
    engine = open_engine(max_batch_size=4)
    prompts = [prompt_of(5 + 17 * n, n) for n in range(10)]
    async with started(engine):
        alone = [await answer(engine, prompt) for prompt in prompts]
        assert await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)) == alone
        await check_nothing_left(engine)


async def test_prefill_when_one_token_is_wanted_then_there_is_no_ticket(open_engine: Open) -> None:
    engine = open_engine(Role.PREFILL)
    async with started(engine):
        (last,) = await collect(engine, ask(prompt_of(40), phase=Phase.PREFILL, max_tokens=1))
        assert last.ticket is None
        assert last.finish_reason is FinishReason.LENGTH
        assert len(last.token_ids) == 1
        await check_nothing_left(engine)


async def test_two_legs_when_ticket_is_redeemed_then_tokens_equal_and_both_sides_are_empty(open_engine: Open) -> None:
    whole, prefill, decode = open_engine(), open_engine(Role.PREFILL), open_engine(Role.DECODE)
    async with started(whole, prefill, decode):
        chunks = await two_legs(prefill, decode, prompt_of(100), max_tokens=20)
        assert tokens(chunks) == await answer(whole, prompt_of(100), max_tokens=20)
        leg = chunks[-1].stats
        assert leg is not None
        assert leg.kv_bytes > 0
        assert leg.transport == "loopback"
        for engine in (prefill, decode):
            await check_nothing_left(engine)


async def test_ticket_when_held_then_blocks_stay_counted_until_release(open_engine: Open) -> None:
    engine = open_engine(Role.PREFILL)
    async with started(engine):
        ticket = await ticket_from(engine, prompt_of(100))
        held = stats(engine)
        assert (held.tickets_held, held.kv_blocks_used) == (1, 4)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.drain()
        for _ in range(2):
            release(engine, ticket)
        await check_nothing_left(engine)


async def test_ticket_when_it_expires_then_blocks_are_freed_and_decode_is_refused(open_engine: Open) -> None:
    prefill, decode = open_engine(Role.PREFILL, ttl_s=0.05), open_engine(Role.DECODE)
    async with started(prefill, decode):
        ticket = await ticket_from(prefill, prompt_of(100))
        await check_nothing_left(prefill)
        with pytest.raises(TicketExpired):
            await collect(decode, ask(prompt_of(100), phase=Phase.DECODE, ticket=ticket))
        await check_nothing_left(decode)


async def test_decode_when_layout_differs_then_refused_by_name(open_engine: Open) -> None:
    prefill, decode = open_engine(Role.PREFILL), open_engine(Role.DECODE, kv_block_size=16)
    async with started(prefill, decode):
        ticket = await ticket_from(prefill, prompt_of(100))
        with pytest.raises(TicketMismatch) as caught:
            await collect(decode, ask(prompt_of(100), phase=Phase.DECODE, ticket=ticket))
        assert caught.value.field == "layout.block_tokens"
        release(prefill, ticket)
        await check_nothing_left(decode)
        await check_nothing_left(prefill)


async def test_decode_when_offer_is_gone_then_handoff_error_and_nothing_left(open_engine: Open) -> None:
    prefill, decode = open_engine(Role.PREFILL), open_engine(Role.DECODE)
    async with started(prefill, decode):
        ticket = await ticket_from(prefill, prompt_of(100))
        release(prefill, ticket)
        await prefill.drain()
        with pytest.raises(HandoffError):
            await collect(decode, ask(prompt_of(100), phase=Phase.DECODE, ticket=ticket))
        await check_nothing_left(decode)


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.DECODE])
async def test_cancel_when_tokens_flow_then_nothing_left(open_engine: Open, role: Role) -> None:
    prefill, engine = open_engine(Role.PREFILL), open_engine(role)
    async with started(prefill, engine):
        request = ask(prompt_of(100), max_tokens=500)
        if role is Role.DECODE:
            ticket = await ticket_from(prefill, prompt_of(100), max_tokens=500)
            request = msgspec.structs.replace(request, phase=Phase.DECODE, ticket=ticket)
        async with aclosing(engine.generate(request)) as stream:
            for _ in range(3):
                await anext(stream)
        await check_nothing_left(engine)
        await check_nothing_left(prefill)


async def test_cancel_when_waiting_or_prefilling_then_nothing_left(open_engine: Open) -> None:
    engine = open_engine(max_batch_size=1)
    async with started(engine):
        running = [asyncio.create_task(answer(engine, prompt_of(4000, n), max_tokens=100)) for n in range(3)]
        await asyncio.sleep(0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await check_nothing_left(engine)
        assert len(await answer(engine, prompt_of(10))) == 8


async def test_generate_when_queue_is_full_then_overloaded(open_engine: Open) -> None:
    engine = open_engine(max_batch_size=1, max_queue=1)
    async with started(engine):
        results = await asyncio.gather(
            *(answer(engine, prompt_of(20, n), max_tokens=30) for n in range(6)), return_exceptions=True
        )
        assert any(isinstance(result, Overloaded) for result in results)
        assert any(isinstance(result, list) for result in results)
        assert all(isinstance(result, Overloaded | list) for result in results)
        await check_nothing_left(engine)


async def test_generate_when_prompt_is_too_long_then_context_too_long(open_engine: Open) -> None:
    engine = open_engine(max_seq_len=64)
    async with started(engine):
        with pytest.raises(ContextTooLong):
            await answer(engine, prompt_of(64))
        await check_nothing_left(engine)


async def test_generate_when_blocks_are_scarce_then_requests_wait_and_all_finish(open_engine: Open) -> None:
    engine = open_engine(kv_cache_blocks=6)
    async with started(engine):
        results = await asyncio.gather(*(answer(engine, prompt_of(60, n)) for n in range(6)))
        assert [len(result) for result in results] == [8] * 6
        await check_nothing_left(engine)


async def test_close_when_called_twice_or_before_start_then_no_error(open_engine: Open) -> None:
    engine = open_engine()
    await engine.aclose()
    engine = open_engine()
    async with started(engine):
        pass
    await engine.aclose()
    with pytest.raises(EngineFailed):
        await engine.check()


# --- torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
async def test_greedy_when_compared_with_transformers_then_equal(name: str, request: pytest.FixtureRequest) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(name)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    engine = make("torch", folder, Role.AGGREGATED)
    async with started(engine):
        for length in (1, 32, 33, 128, 129, 1000):
            prompt = token_ids(token % 500 + 5 for token in prompt_of(length))
            ids = torch.tensor([list(prompt)])
            got = await answer(engine, prompt, max_tokens=24)
            wanted = reference.generate(ids, max_new_tokens=24, do_sample=False)[0, length:].tolist()
            assert got == wanted
            assert len(set(got)) > 3


@pytest.mark.parametrize("carrier", ["loopback", "tcp", "nixl"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_two_legs_at_every_boundary_then_equal_to_one_process(
    gpt_oss: Path, carrier: str, temperature: float
) -> None:
    whole = make("torch", gpt_oss, Role.AGGREGATED)
    prefill = make("torch", gpt_oss, Role.PREFILL, carrier=carrier)
    decode = make("torch", gpt_oss, Role.DECODE, carrier=carrier)
    sampling = {"max_tokens": 24, "temperature": temperature, "seed": 11, "logprobs": 2}
    async with started(whole, prefill, decode):
        for length in LENGTHS:
            expected = await collect(whole, ask(prompt_of(length), **sampling))
            got = await two_legs(prefill, decode, prompt_of(length), **sampling)
            assert tokens(got) == tokens(expected), length
            logprobs = [entry.token_id for chunk in got for entry in chunk.logprobs]
            assert logprobs == tokens(got)
        await check_nothing_left(decode)
        await check_nothing_left(prefill)


async def test_two_legs_when_cancelled_while_fetching_then_nothing_left(gpt_oss: Path) -> None:
    class Stuck(LoopbackCarrier):
        async def fetch(self, *args: Any, **kwargs: Any) -> None:
            reached.set()
            await asyncio.Event().wait()

    from dynamo_trtllm.engine.torch.engine import TorchEngine

    reached = asyncio.Event()
    config = WorkerConfig(model_path=str(gpt_oss), served_model_name="tiny", disaggregation_mode=Role.DECODE)
    prefill, decode = make("torch", gpt_oss, Role.PREFILL), TorchEngine(config, instance_id=3, carrier=Stuck())
    async with started(prefill, decode):
        ticket = await ticket_from(prefill, prompt_of(100))
        task = asyncio.create_task(collect(decode, ask(prompt_of(100), phase=Phase.DECODE, ticket=ticket)))
        await reached.wait()
        assert stats(decode).kv_blocks_used == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await check_nothing_left(decode)


async def test_sampling_when_seeded_then_reproducible_and_otherwise_not(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "top_p": 0.95, "top_k": 50}
    async with started(engine):
        seeded = [await answer(engine, prompt_of(20), seed=5, **sampling) for _ in range(2)]
        assert seeded[0] == seeded[1]
        assert len({tuple(await answer(engine, prompt_of(20), **sampling)) for _ in range(4)}) > 1


async def test_stop_ids_when_met_then_stop_unless_held_back(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):
        free = await answer(engine, prompt_of(20))
        stop = (free[3],)
        chunks = await collect(engine, ask(prompt_of(20), stop_token_ids=stop))
        assert chunks[-1].finish_reason is FinishReason.STOP
        assert tokens(chunks) == free[:4]
        held = await answer(engine, prompt_of(20), stop_token_ids=stop, min_tokens=8)
        assert len(held) == 8
        assert free[3] not in held


async def test_close_when_streams_run_then_they_end_in_engine_failed(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):
        stream = engine.generate(ask(prompt_of(20), max_tokens=5000))
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineFailed):
            async for _ in stream:
                pass


async def test_step_when_it_breaks_then_streams_fail_and_check_raises(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):

        def broken(*_: Any) -> None:
            raise RuntimeError("no such kernel")

        monkeypatch.setattr("dynamo_trtllm.engine.torch.batcher.choose", broken)
        with pytest.raises(EngineFailed, match="no such kernel"):
            await answer(engine, prompt_of(20))
        with pytest.raises(EngineFailed, match="no such kernel"):
            await engine.check()


async def test_generate_when_request_is_wrong_then_refused(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):
        for prompt in (token_ids(), token_ids([2048])):
            with pytest.raises(EngineRefused):
                await answer(engine, prompt)


async def test_start_when_folder_is_missing_then_config_error_names_it(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        engine = make("torch", folder, Role.AGGREGATED)
        with pytest.raises(ConfigError, match=str(folder)):
            await engine.start()
        await engine.aclose()

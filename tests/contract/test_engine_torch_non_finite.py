"""NaN and infinity in the torch engine end the request with a named error.

No answer is changed by them.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dynamo_trtllm.engines.torch import model_runner, scheduler
from dynamo_trtllm.engines.torch.engine import TorchEngine
from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.sampler import sample
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    EngineFailed,
    InternalError,
    NonFinite,
    NonFiniteKv,
)
from dynamo_trtllm.protocol.messages import Phase, Role, token_ids
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    started,
    tokens,
)
from tests.kit.engines import make, prefill_params, prefill_then_decode

BAD = (torch.nan, torch.inf, -torch.inf)


def torch_engine(folder: Path, role: Role, **args: Any) -> TorchEngine:
    engine = make("torch", folder, role, **args)
    assert isinstance(engine, TorchEngine)
    return engine


def pool_of(engine: TorchEngine) -> KvPool:
    assert engine._scheduler is not None
    return engine._scheduler.pool


def prompt(length: int, seed: int = 1) -> array[int]:
    return token_ids(token % 500 + 5 for token in prompt_of(length, seed))


def spoil_outputs(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor, TorchSequence], None]
) -> None:
    """Call `spoil` with the model's output for each row of each step."""

    def spoiled(logits: torch.Tensor, rows: Sequence[TorchSequence], finite: torch.Tensor) -> Any:
        for made, row in zip(logits, rows, strict=True):
            spoil(made, row)
        return sample(logits, rows, finite)

    monkeypatch.setattr(model_runner, "sample", spoiled)


def nothing_finite(made: torch.Tensor, row: TorchSequence) -> None:
    made.fill_(torch.nan)


async def outcome(engine: TorchEngine, length: int, seed: int) -> list[int] | str:
    try:
        return tokens(await collect(engine, ask(prompt(length), seed=seed)))
    except DynamoError as exc:
        return exc.code


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None], ids=str)
async def test_non_finite_output_ends_only_its_request(
    llama: Path, monkeypatch: pytest.MonkeyPatch, bad: float | None
) -> None:
    victim = 77

    def spoil(made: torch.Tensor, row: TorchSequence) -> None:
        if row.seed == victim and row.num_output_tokens == 3:
            made[7 if bad is not None else slice(None)] = -torch.inf if bad is None else bad

    engine = torch_engine(llama, Role.AGGREGATED)
    async with started(engine):
        lengths = (20, 45, 70)
        clean = await asyncio.gather(*(outcome(engine, length, 1) for length in lengths))
        spoil_outputs(monkeypatch, spoil)
        got = await asyncio.gather(
            *(outcome(engine, *call) for call in zip(lengths, (1, victim, 1), strict=True))
        )
        assert got == [clean[0], "non_finite", clean[2]]
        await check_nothing_left(engine)
        await engine.check()


async def test_non_finite_prompt_output_or_keys_prevent_transfer(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = torch_engine(llama, Role.PREFILL, prefill_chunk_tokens=16)
    async with started(prefill):
        pool = pool_of(prefill)
        finite_keys = KvPool.finite_keys
        slots = []

        def spoiled(self: KvPool, written: torch.Tensor) -> torch.Tensor:
            slots.append(len(written))
            if len(slots) == 2:  # a chunk in the middle, whose output is not looked at
                self.keys.flatten(1, 2)[1, written[3], 0, 0] = -torch.inf
            return finite_keys(self, written)

        with monkeypatch.context() as patched:
            patched.setattr(KvPool, "finite_keys", spoiled)
            with pytest.raises(NonFinite):
                await prefill_params(prefill, prompt(40))
        assert slots == [16, 16, 8]
        with monkeypatch.context() as patched:
            spoil_outputs(patched, nothing_finite)
            with pytest.raises(NonFinite):
                await prefill_params(prefill, prompt(40))
        await check_nothing_left(prefill)
        assert pool.is_finite(torch.arange(pool.num_blocks), pool.num_blocks * pool.block_tokens)


async def test_three_non_finite_outputs_in_a_minute_fail_the_engine(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = torch_engine(llama, Role.AGGREGATED)
    async with started(engine):
        spoil_outputs(monkeypatch, nothing_finite)
        choices = [f"b-00112233aabbccdd-{index}" for index in range(3)]
        # one request again and again may be its own fault
        for name in ("a", "a", "a", *choices, "c"):
            await engine.check()
            with pytest.raises(NonFinite):
                await collect(engine, msgspec.structs.replace(ask(prompt(9)), request_id=name))
        async with asyncio.timeout(10):
            await asyncio.to_thread(engine._scheduler.join)  # type: ignore[union-attr]
            await asyncio.sleep(0)
        with pytest.raises(EngineFailed, match="3 requests within 60 s"):
            await engine.check()


async def test_start_when_model_is_non_finite_then_engine_failed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_outputs(monkeypatch, nothing_finite)
    engine = torch_engine(llama, Role.AGGREGATED)
    with pytest.raises(EngineFailed, match="check its weights"):
        await engine.start()
    await engine.aclose()


async def test_transfer_failed_midway_changes_no_later_answer(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = torch_engine(llama, Role.PREFILL)
    decode = torch_engine(llama, Role.DECODE)
    async with started(prefill, decode):
        wanted = tokens(await prefill_then_decode(prefill, decode, prompt(20)))
        pool = pool_of(decode)
        arrived = []

        async def partial(seq: TorchSequence, *args: Any) -> None:
            pool.keys[:, seq.blocks] = torch.nan
            pool.values[:, seq.blocks] = torch.inf
            arrived.append(seq.block_table.numbers)
            raise RuntimeError("it broke off")

        with monkeypatch.context() as patch:
            patch.setattr(decode.kv_connector, "import_kv", partial)
            kv_params = await prefill_params(prefill, prompt(20))
            with pytest.raises(InternalError, match="RuntimeError"):
                await collect(decode, ask(prompt(20), phase=Phase.DECODE, kv_params=kv_params))
        await check_nothing_left(decode)
        assert decode._scheduler is not None
        assert decode._scheduler.blocks.manager._free[-1:] == arrived[0]  # reserved first
        assert tokens(await prefill_then_decode(prefill, decode, prompt(20))) == wanted


class Poison:
    """Puts single bad numbers into a share of transfers and outputs, and whole blocks of them into
    free memory.
    """

    def __init__(
        self, prefill: TorchEngine, decode: TorchEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._random = random.Random(5)
        self.put: Counter[str] = Counter()
        for engine in (prefill, decode):
            step = scheduler.Scheduler._step.__get__(engine._scheduler)
            monkeypatch.setattr(
                engine._scheduler,
                "_step",
                lambda step=step, engine=engine: self._before(engine, step),
            )
        assert prefill._scheduler is not None
        assert prefill._scheduler.transfer_buffer is not None
        gather = prefill._scheduler.transfer_buffer.gather
        monkeypatch.setattr(
            prefill._scheduler.transfer_buffer,
            "gather",
            lambda allocation, rows: (self._in_kv(prefill, rows), gather(allocation, rows))[1],
        )
        spoil_outputs(monkeypatch, self._in_output)

    def _before(self, engine: TorchEngine, step: Callable[[], None]) -> None:
        pool = pool_of(engine)
        assert engine._scheduler is not None
        numbers = engine._scheduler.blocks.manager._free
        free = torch.tensor(self._random.sample(numbers, min(4, len(numbers))), dtype=torch.long)
        pool.keys[:, free] = self._random.choice(BAD)
        pool.values[:, free] = self._random.choice(BAD)
        step()

    def _in_kv(self, engine: TorchEngine, rows: torch.Tensor) -> None:
        if self._random.random() < 0.2:
            pool = pool_of(engine)
            row = pool.all_rows.view(pool.dtype)[int(self._random.choice(rows))]
            row[self._random.randrange(len(row))] = self._random.choice(BAD)
            self.put["non_finite_kv"] += 1

    def _in_output(self, made: torch.Tensor, row: TorchSequence) -> None:
        if self._random.random() < 0.01:
            made[self._random.randrange(len(made))] = self._random.choice(BAD[:2])
            self.put["non_finite"] += 1


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("llama", 100),
        pytest.param("gpt_oss", 1000, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
    ids=str,
)
async def test_poisoned_memory_gives_no_wrong_answer(
    model: str, count: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(model)
    prefill, decode = (
        torch_engine(folder, role, kv_block_size=8, kv_cache_blocks=200)
        for role in (Role.PREFILL, Role.DECODE)
    )
    lengths = [5, 16, 33, 61, 150]
    seen: Counter[str] = Counter()
    at_once = asyncio.Semaphore(8)

    async def retried(number: int) -> list[int]:
        async with at_once:
            for _ in range(40):  # a fifth of the attempts or more fail by chance
                try:
                    return tokens(
                        await prefill_then_decode(
                            prefill, decode, prompt(lengths[number % 5], number % 7)
                        )
                    )
                except (NonFinite, NonFiniteKv) as exc:
                    seen[exc.code] += 1
            raise AssertionError("forty attempts failed")

    monkeypatch.setattr(scheduler, "_MAX_NON_FINITE", count)
    async with started(prefill, decode):
        clean = await asyncio.gather(*(retried(number) for number in range(35)))
        assert seen == {}
        poison = Poison(prefill, decode, monkeypatch)
        answers = await asyncio.gather(*(retried(number) for number in range(count)))
        wrong = [number for number, got in enumerate(answers) if got != clean[number % 35]]
        assert wrong == []
        # more, because poisoned blocks are reused until a request finds them
        assert seen >= poison.put
        assert min(seen["non_finite"], seen["non_finite_kv"]) > 0
        await check_nothing_left(decode)
        await check_nothing_left(prefill)

"""KV that is changed or withdrawn after it was offered never becomes an answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from dynamo_trtllm.kv_transfer.memory import MemoryRegion, view
from dynamo_trtllm.protocol.errors import TransferFailed
from dynamo_trtllm.protocol.messages import Role, token_ids
from dynamo_trtllm.testing.engine_requests import check_nothing_left, prompt_of, started, tokens
from tests.kit.engines import make, prefill_then_decode
from tests.kit.loopback_backend import LoopbackBackend

_PROMPTS = 35
_OFFERS_PER_ROUND = 10  # of which one is changed, and one withdrawn


class ChangingCarrier(LoopbackBackend):
    """A KV transfer backend that changes one bit of some offers, and withdraws others."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(3)
        self._num_offers = 0  # since faults are injected
        self.injects_faults = False
        self.faults: Counter[str] = Counter()

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], *, ready: int | None = None
    ) -> bytes:
        made = await super().publish(transfer_id, regions, ready=ready)
        if not self.injects_faults:
            return made
        self._num_offers += 1
        number = self._num_offers % _OFFERS_PER_ROUND
        if number == 1:
            region = self._random.choice(regions)
            checksum = self._published[transfer_id].checksum
            assert checksum is not None
            await checksum.hashes(regions.index(region))
            view(region)[self._random.randrange(region.num_bytes)] ^= 1 << self._random.randrange(8)
            self.faults["changed"] += 1
        elif number == 2:
            await self.unpublish(transfer_id)
            self.faults["missing"] += 1
        return made


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("mock", 100),  # about ten of each fault
        ("torch", 25),
        pytest.param("mock", 1000, marks=pytest.mark.long),
        pytest.param("torch", 1000, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
    ids=str,
)
async def test_changed_or_missing_kv_never_gives_a_wrong_answer(
    kind: str, count: int, gpt_oss: Path
) -> None:
    backend = ChangingCarrier()
    prefill = make(
        kind, gpt_oss, Role.PREFILL, backend=backend, kv_block_size=8, kv_cache_blocks=200
    )
    decode = make(kind, gpt_oss, Role.DECODE, kv_block_size=8, kv_cache_blocks=200)
    at_once = asyncio.Semaphore(8)
    failed = 0

    async def retried(number: int) -> list[int]:
        nonlocal failed
        prompt = token_ids(
            token % 500 + 5 for token in prompt_of(5 + 29 * (number % 5), number % 7)
        )
        async with at_once:
            for _ in range(9):
                try:
                    return tokens(await prefill_then_decode(prefill, decode, prompt))
                except TransferFailed:
                    failed += 1
            raise AssertionError("nine attempts failed")

    async with started(prefill, decode):
        clean = await asyncio.gather(*(retried(number) for number in range(_PROMPTS)))
        assert failed == 0
        backend.injects_faults = True
        answers = await asyncio.gather(*(retried(number) for number in range(count)))
        assert [
            number for number, got in enumerate(answers) if got != clean[number % _PROMPTS]
        ] == []
        assert failed == backend.faults.total()
        assert decode.stats().kv_checksum_mismatches == backend.faults["changed"]
        assert min(backend.faults["changed"], backend.faults["missing"]) > 0
        await check_nothing_left(decode)
        await check_nothing_left(prefill)

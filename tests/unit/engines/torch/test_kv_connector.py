"""KV transfer parameters are returned before the GPU's copies have ended, and the reader waits for
each region.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.kv_connector import KvConnector
from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES, TransferBuffer
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.protocol.errors import TransferFailed, TransferMismatch
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvLayout,
    Phase,
    Sampling,
    token_ids,
)
from tests.kit.loopback_backend import LoopbackBackend
from tests.kit.torch_sequences import sequence_of

LAYOUT = KvLayout(dtype="float32", block_tokens=4, num_layers=2, num_kv_heads=2, head_dim=4)
TOKENS = 40


class Copy(threading.Event):
    """An event of torch: `synchronize` returns when the copy has ended."""

    def synchronize(self) -> None:
        assert self.wait(10)


def connector(backend: LoopbackBackend) -> KvConnector:
    return KvConnector(
        backend, WorkerConfig(model_path="m", kv_fetch_timeout_s=10), instance_id=1, layout=LAYOUT
    )


class Side:
    def __init__(self) -> None:
        self.pool = KvPool(LAYOUT, 20, windows=(None, None), device=torch.device("cpu"))
        self.transfer_buffer = TransferBuffer(self.pool, 1 << 16)
        self.retired: list[bool] = []
        self.kv_connector = connector(LoopbackBackend())
        allocation = self.transfer_buffer.allocate(TOKENS, self.pool.row_bytes * 20)
        assert allocation is not None
        self.allocation = allocation


def request(phase: Phase, kv_params: Any = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(TOKENS)),
        sampling=Sampling(max_tokens=4),
        deadline=time.time() + 60,
        phase=phase,
        kv_params=kv_params,
    )


async def exported(holder: Side, copies: list[Any]) -> Chunk:
    retire = partial(holder.retired.append, True)
    first = Chunk(token_ids=token_ids([5]))
    seq = sequence_of(
        request(Phase.PREFILL), max_new_tokens=4, seed=7, first_chunk=first, retire=retire
    )
    return await holder.kv_connector.export_kv(seq, holder.allocation, copies)


async def test_transfer_during_copies_sends_regions_one_by_one() -> None:
    holder = Side()
    reader = Side()
    await holder.kv_connector.start(holder.transfer_buffer)
    await reader.kv_connector.start(reader.transfer_buffer)
    holder.transfer_buffer.memory.copy_(torch.arange(1 << 16, dtype=torch.int64).to(torch.uint8))
    copies = [Copy() for _ in holder.allocation.regions]
    assert len(copies) == 2
    chunk = await exported(holder, copies)
    decode = request(Phase.DECODE, chunk.kv_params)
    terms = reader.kv_connector.engine_state(decode, kv_bytes=holder.pool.moved_bytes(TOKENS))
    assert (terms.seed, terms.region_bytes) == (7, REGION_BYTES["cuda"])
    arrived = asyncio.Queue[int]()
    seq = sequence_of(decode, offer=terms.offer)
    fetch = asyncio.create_task(
        reader.kv_connector.import_kv(seq, reader.allocation, arrived.put_nowait)
    )
    for number, copy in enumerate(copies):
        await asyncio.sleep(0.05)
        assert arrived.empty()
        copy.set()
        assert await arrived.get() == number
    await fetch
    for ours, theirs in zip(reader.allocation.regions, holder.allocation.regions, strict=True):
        assert torch.equal(ours, theirs)
    await reader.kv_connector.aclose()
    await holder.kv_connector.aclose()
    assert len(holder.retired) == 1


async def test_transfer_with_failed_copy_can_be_released(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("no such memory")

    holder = Side()
    await holder.kv_connector.start(holder.transfer_buffer)
    await exported(holder, [Broken(), Broken()])
    await holder.kv_connector.aclose()
    assert "no such memory" in caplog.text
    assert len(holder.retired) == 1


async def test_redeem_of_impossible_piece_size_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = Side()
    await holder.kv_connector.start(holder.transfer_buffer)
    monkeypatch.setitem(REGION_BYTES, "cpu", 0)
    chunk = await exported(holder, [])
    decode = request(Phase.DECODE, chunk.kv_params)
    with pytest.raises(TransferMismatch, match="regions of 0 bytes"):
        holder.kv_connector.engine_state(decode, kv_bytes=holder.pool.moved_bytes(TOKENS))
    await holder.kv_connector.aclose()


async def test_start_uses_host_memory_when_gpu_memory_cannot_move(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class HostOnly(LoopbackBackend):
        registered: list[str]

        async def register(self, region: MemoryRegion) -> None:
            if region.device != "cpu":
                raise TransferFailed("not this memory")
            self.registered = [region.device]

    class OnGpu:
        """A buffer that claims to be on a GPU."""

        num_bytes = 1 << 20
        memory: Any = torch.empty(8, dtype=torch.uint8, device="meta")

        checksum = use_device = None

        def move_to_host(self) -> None:
            self.memory = torch.empty(8, dtype=torch.uint8)

    caplog.set_level(logging.INFO)
    backend = HostOnly()
    kv_connector = connector(backend)
    transfer_buffer: Any = OnGpu()
    await kv_connector.start(transfer_buffer)
    assert backend.registered == ["cpu"]
    assert (
        caplog.text.count("KV transfer uses pinned host memory, which is slower: not this memory")
        == 1
    )
    await kv_connector.aclose()

"""A KV transfer that hangs ends in time, in every engine that moves the KV itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import DeadlineExceeded, DynamoError, TransferTimeout
from dynamo_trtllm.protocol.messages import Phase, Role
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    release,
    started,
)
from tests.kit.engines import make, prefill_params
from tests.kit.loopback_backend import LoopbackBackend
from tests.kit.waiting import SOON_S

PROMPT = prompt_of(100)  # 4 blocks of 32


class Stuck(LoopbackBackend):
    """A KV transfer backend whose fetches never end."""

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        except TimeoutError as exc:
            raise TransferTimeout("it waited in vain") from exc


def stuck(kind: str, folder: Path, kv_fetch_timeout_s: float) -> Engine:
    """A decode engine whose KV transfer backend hangs."""
    config: dict[str, Any] = {
        "model_path": str(folder),
        "served_model_name": "tiny",
        "disaggregation_mode": "decode",
    }
    chosen = WorkerConfig.model_validate(config | {"kv_fetch_timeout_s": kv_fetch_timeout_s})
    if kind == "mock":
        return MockEngine(chosen, instance_id=2, backend=Stuck())
    from dynamo_trtllm.engines.torch.engine import TorchEngine

    return TorchEngine(chosen, instance_id=2, backend=Stuck())


@pytest.mark.parametrize("kind", ["mock", "torch"])
@pytest.mark.parametrize(
    ("seconds", "kv_fetch_timeout_s", "error", "said"),
    [
        (30.0, 0.2, TransferTimeout, "--kv-fetch-timeout-s 0.2 passed"),
        (0.2, 30.0, DeadlineExceeded, "deadline passed"),
    ],
)
async def test_decode_when_transfer_hangs_then_ends_at_nearer_bound(
    kind: str,
    gpt_oss: Path,
    seconds: float,
    kv_fetch_timeout_s: float,
    error: type[DynamoError],
    said: str,
) -> None:
    prefill = make(kind, gpt_oss, Role.PREFILL)
    decode = stuck(kind, gpt_oss, kv_fetch_timeout_s)
    async with started(prefill, decode):
        kv_params = await prefill_params(prefill, PROMPT)
        call = ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params)
        begun = time.monotonic()
        with pytest.raises(error, match=said):
            await collect(decode, msgspec.structs.replace(call, deadline=time.time() + seconds))
        assert time.monotonic() - begun < SOON_S
        await check_nothing_left(decode)
        release(prefill, kv_params)
        await check_nothing_left(prefill)

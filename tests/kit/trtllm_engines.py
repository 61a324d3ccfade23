"""Starts three trtllm engines on one fake TensorRT-LLM: aggregated, prefill and decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import started
from tests.kit.engines import make
from tests.kit.waiting import SOON_S


class TrtllmEngines(NamedTuple):
    package: Any  # the fake that they use
    aggregated: Engine
    prefill: Engine
    decode: Engine

    def all(self) -> tuple[Engine, ...]:
        return self.aggregated, self.prefill, self.decode

    def turned(self, *names: str) -> Any:
        return self.package.standin.traps.turned(*names)


@asynccontextmanager
async def start_engines(package: Any, folder: Path, **args: Any) -> AsyncIterator[TrtllmEngines]:
    args = full_sampler(package) | args
    engines = [
        make("trtllm", folder, role, **args)
        for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
    ]
    async with started(*engines):
        yield TrtllmEngines(package, *engines)


def full_sampler(package: Any) -> dict[str, Any]:
    """Return the arguments of the sampler that supports all fields of requests.

    From 1.3 on, none is needed.
    """
    return {"sampler_type": "TRTLLMSampler"} if package.standin.release.LINE < (1, 3) else {}


async def check_engines_idle(package: Any) -> None:
    """Check in the fake itself that no engine runs a request or uses a KV block."""
    deadline = time.monotonic() + SOON_S
    while True:
        left = [
            (stats.running, stats.waiting, stats.kv_blocks_used)
            for stats in package.standin.core.live_stats()
        ]
        if left == [(0, 0, 0)] * 3 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    assert left == [(0, 0, 0)] * 3

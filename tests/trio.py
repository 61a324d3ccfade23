"""Three trtllm engines over one stand-in: whole, prefill and decode, and what is left in the engines underneath."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm.engines.base import Engine
from dynamo_trtllm.messages import Role
from tests.engines import make, started
from tests.waiting import SOON_S


class Engines(NamedTuple):
    package: Any  # the stand-in that they were started with
    whole: Engine
    prefill: Engine
    decode: Engine

    def all(self) -> tuple[Engine, ...]:
        return self.whole, self.prefill, self.decode

    def turned(self, *names: str) -> Any:
        return self.package.standin.traps.turned(*names)


@asynccontextmanager
async def three(package: Any, folder: Path, **args: Any) -> AsyncIterator[Engines]:
    engines = [make("trtllm", folder, role, **args) for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)]
    async with started(*engines):
        yield Engines(package, *engines)


async def check_vendor_empty(package: Any) -> None:
    """Asked behind the adapter's back: nothing runs, and no KV block is used, in any engine of the stand-in."""
    deadline = time.monotonic() + SOON_S
    while True:
        left = [(each.running, each.waiting, each.kv_blocks_used) for each in package.standin.core.live_stats()]
        if left == [(0, 0, 0)] * 3 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    assert left == [(0, 0, 0)] * 3

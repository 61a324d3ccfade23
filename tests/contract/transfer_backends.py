"""Starts KV transfer backends in one process, for their contract tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from dynamo_trtllm.kv_transfer.transfer_backend import TransferBackend
from tests.kit.loopback_backend import named_backend
from tests.kit.waiting import SOON_S

KINDS = ("loopback", "tcp", "nixl")


class StartedBackend:
    """A started transfer backend, and the ids of the transfers that were fetched from it."""

    def __init__(self, backend: TransferBackend) -> None:
        self.backend = backend
        self.fetched: list[str] = []
        self.threads: list[int] = []
        self._changed = asyncio.Event()

    def on_fetched(self, transfer_id: str) -> None:
        self.fetched.append(transfer_id)
        self.threads.append(threading.get_ident())
        self._changed.set()

    async def wait_fetched(self, count: int) -> list[str]:
        """Wait until this many transfers were fetched. Return their ids."""
        async with asyncio.timeout(SOON_S):
            while len(self.fetched) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.fetched


Start = Callable[[], Awaitable[StartedBackend]]


@asynccontextmanager
async def backend_starter(kind: str) -> AsyncIterator[Start]:
    """Yield a function that starts transfer backends of this kind. Close them at the end."""
    async with AsyncExitStack() as stack:

        async def start() -> StartedBackend:
            side = StartedBackend(named_backend(kind))
            await side.backend.start(side.on_fetched)
            stack.push_async_callback(side.backend.aclose)
            return side

        yield start


def count_registrations(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list of the memory that the NIXL agent has registered from now on and not
    deregistered.
    """
    agent = backend._bindings.agent
    registered = []
    register = agent.register_memory
    deregister = agent.deregister_memory

    def counted(*args: Any) -> Any:
        registered.append(register(*args))
        return registered[-1]

    def discounted(which: Any) -> None:
        deregister(which)
        registered.remove(which)

    monkeypatch.setattr(agent, "register_memory", counted)
    monkeypatch.setattr(agent, "deregister_memory", discounted)
    return registered

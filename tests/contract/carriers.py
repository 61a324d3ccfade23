"""Started carriers of one process, for the contract of carriers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from dynamo_trtllm.kv_transfer.base import TransferBackend
from dynamo_trtllm.kv_transfer.create import create_backend
from tests.waiting import SOON_S

KINDS = ("loopback", "tcp", "nixl")


class Side:
    """A started carrier and what it was told."""

    def __init__(self, backend: TransferBackend) -> None:
        self.backend = backend
        self.fetched: list[str] = []
        self.threads: list[int] = []
        self._heard = asyncio.Event()

    def hear(self, ticket_id: str) -> None:
        self.fetched.append(ticket_id)
        self.threads.append(threading.get_ident())
        self._heard.set()

    async def told(self, count: int) -> list[str]:
        async with asyncio.timeout(SOON_S):
            while len(self.fetched) < count:
                self._heard.clear()
                await self._heard.wait()
        return self.fetched


Start = Callable[[], Awaitable[Side]]


@asynccontextmanager
async def starting(kind: str) -> AsyncIterator[Start]:
    """Starts carriers of this kind, and closes them in the end."""
    async with AsyncExitStack() as stack:

        async def start() -> Side:
            side = Side(create_backend(kind))
            await side.backend.start(side.hear)
            stack.push_async_callback(side.backend.aclose)
            return side

        yield start


def count_registrations(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the NIXL agent has registered from now on and not deregistered."""
    agent, registered = backend._bindings.agent, []
    register, deregister = agent.register_memory, agent.deregister_memory

    def counted(*args: Any) -> Any:
        registered.append(register(*args))
        return registered[-1]

    def discounted(which: Any) -> None:
        deregister(which)
        registered.remove(which)

    monkeypatch.setattr(agent, "register_memory", counted)
    monkeypatch.setattr(agent, "deregister_memory", discounted)
    return registered

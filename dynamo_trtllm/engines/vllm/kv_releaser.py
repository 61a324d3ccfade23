"""Asks vLLM's workers to free the KV of prefill requests that no worker will fetch. One task; posting never waits.

A request whose end has not reached the workers yet is asked for again, a few times; then its lease frees it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

_log = logging.getLogger(__name__)
_TRIES = 4
_AGAIN_S = 0.25
_GRACE_S = 1.0

Release = Callable[[list[str]], Awaitable[Iterable[Iterable[str]]]]  # ids -> per worker, those that it had


class KvReleaser:
    """`release` calls the workers."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self._wanted: dict[str, int] = {}  # id -> how often it was asked for
        self._wake = asyncio.Event()
        self._again: set[asyncio.TimerHandle] = set()
        self._task: asyncio.Task[None] | None = None

    def post(self, request_id: str, tried: int = 0) -> None:
        self._wanted[request_id] = tried
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="vllm-reclaim")

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._wanted = self._wanted, {}
            try:
                released = await self._release(sorted(batch))
            except Exception as exc:  # noqa: BLE001  # vLLM wraps what fails in its workers in a bare one
                _log.warning("vLLM could not free the KV of %d requests: %s", len(batch), exc)
                continue
            found = {each for worker in released for each in worker}
            for request_id, tried in batch.items():
                if request_id not in found and tried + 1 < _TRIES:
                    self._later(request_id, tried + 1)

    def post_later(self, request_id: str) -> None:
        """Once a decode engine, which may read it until its ticket expires by its own clock, has surely let go."""
        self._later(request_id, 0, _GRACE_S)

    def _later(self, request_id: str, tried: int, wait_s: float = _AGAIN_S) -> None:
        def again() -> None:
            self._again.discard(handle)
            self.post(request_id, tried)

        handle = asyncio.get_running_loop().call_later(wait_s, again)
        self._again.add(handle)

    async def aclose(self) -> None:
        """Idempotent."""
        for handle in self._again:
            handle.cancel()
        self._again.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

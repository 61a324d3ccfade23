"""Start, readiness and stop of a server that runs on the event loop of its program."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import Self

from dynamo_trtllm.protocol.errors import Draining


class Lifecycle(ABC):
    """The lifecycle of a worker or frontend.

    `async with` serves in a task of the running event loop: the block begins when requests are
    accepted, and its end stops the server after the running requests. If the server fails
    meanwhile, the block is cancelled and the error is raised at its end. A program that does not
    use a block runs `serve()` in a task of its own and calls `ready()` and `stop()`.
    """

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._is_ready = False
        self._settled = asyncio.Event()  # ready, or ended
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of `serve`
        self._serving: asyncio.Task[None] | None = None  # of `async with`
        self._block: asyncio.Task[object] | None = None  # that runs the block
        self._has_cancelled_block = False

    @abstractmethod
    async def _serve(self) -> None:
        """Serve until `_stop` is set. Call `_accept_requests` once requests are accepted."""

    def _accept_requests(self) -> None:
        self._is_ready = True
        self._settled.set()

    async def serve(self) -> None:
        """Serve until `stop()`, then end after the running requests. Call it once.

        If it is cancelled, it ends without waiting for requests.

        Raises:
            ConfigError: a setting is invalid.
            DynamoError: a server or the engine failed.
        """
        if self._loop is not None:
            raise RuntimeError(
                f"a {type(self).__name__} serves once; create another one to serve again"
            )
        self._loop = asyncio.get_running_loop()
        try:
            await self._serve()
        except BaseException as exc:
            self._failure = exc
            raise
        finally:
            self._is_ready = False
            self._settled.set()

    async def ready(self) -> None:
        """Wait until requests are accepted.

        Raises:
            DynamoError: the error with which `serve` ended.
            Draining: `serve` has ended without an error.
        """
        await self._settled.wait()
        if self._is_ready:
            return
        if isinstance(self._failure, Exception):
            raise self._failure
        raise Draining(f"the {type(self).__name__.lower()} was stopped; create another one")

    def stop(self) -> None:
        """End `serve` after the running requests. Callable from any thread; idempotent."""
        if self._loop is None:
            self._stop.set()
            return
        # RuntimeError: the event loop is closed, so `serve` has ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

    async def __aenter__(self) -> Self:
        self._block = asyncio.current_task()
        serving = asyncio.create_task(self.serve(), name=f"{type(self).__name__.lower()}-serve")
        self._serving = serving
        try:
            await self._settled.wait()
            if not self._is_ready:
                await serving  # raises its error
            await self.ready()
        except BaseException:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            raise
        serving.add_done_callback(self._cancel_block)
        return self

    def _cancel_block(self, serving: asyncio.Task[None]) -> None:
        """End the block if the server has failed."""
        has_failed = not serving.cancelled() and serving.exception() is not None
        if has_failed and self._block is not None:
            self._has_cancelled_block = True
            self._block.cancel()

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._serving is not None
        self._serving.remove_done_callback(self._cancel_block)
        if self._has_cancelled_block and self._block is not None:
            self._block.uncancel()
        elif isinstance(error, asyncio.CancelledError):
            self._serving.cancel()
        self.stop()
        # Raises the error of a server that failed. A cancel from outside ends it at once.
        await self._serving

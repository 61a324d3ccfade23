"""Start, readiness and stop of a server that runs on the event loop of its program."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from dynamo_trtllm.protocol.errors import ConfigError, Draining
from dynamo_trtllm.support import exit_limit
from dynamo_trtllm.support.standard_streams import open_standard_streams

log = logging.getLogger(__name__)

# The longest wait of `ready` until `serve` begins. `serve` may begin later on another thread.
_BEGIN_S: Final = 5.0


class Lifecycle(ABC):
    """The lifecycle of a worker or frontend.

    `async with` serves in a task of the running event loop. The block begins when requests are
    accepted. The end of the block stops the server after the running requests. If the server fails
    before, the block is cancelled, and the error is raised at its end. A program that does not use
    `async with` runs `serve()` in a task of its own, and calls `ready()` and `stop()`.
    """

    def __init__(self) -> None:
        self._stop_event = asyncio.Event()
        self._is_stopped = False  # `stop` was called
        self._is_ready = False
        # Other threads may wait for the next two events.
        self._serve_began = ThreadSafeEvent()
        self._ready_or_ended = ThreadSafeEvent()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of `serve`
        self._lock = threading.Lock()  # guards `_loop` and `_is_stopped`
        self._serving: asyncio.Task[None] | None = None  # the task of `async with`
        self._block: asyncio.Task[object] | None = None  # the task that runs the block
        self._has_cancelled_block = False
        self._exit_limit: exit_limit.ExitLimit | None = None  # None: `run` does not run
        self._is_exit_forced = False  # a second signal came

    @abstractmethod
    async def _serve(self) -> None:
        """Serve until `_stop_event` is set. Call `_note_ready` once requests are accepted."""

    def _stop_on_hangup(self) -> None:
        """Stop when the terminal is closed (SIGHUP), unless the program was started with nohup.

        The signal may arrive twice when a terminal closes, so a second one does not end the drain.
        """
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.stop)

    def _note_ready(self) -> None:
        self._is_ready = True
        self._ready_or_ended.set()

    async def serve(self) -> None:
        """Serve until `stop()`, and end after the running requests. Call this only once.

        If this call is cancelled, it ends without waiting for requests.

        Raises:
            ConfigError: a setting is invalid.
            DynamoError: a server or the engine failed.
            RuntimeError: this was called before.
        """
        self._begin()
        await self._run_once()

    def _begin(self) -> None:
        """Bind this object to the running event loop. Raises RuntimeError at the second call."""
        with self._lock:
            if self._loop is not None:
                raise RuntimeError(
                    f"a {self._kind} serves once, in `async with` or in serve(); create another one"
                    " to serve again"
                )
            self._loop = asyncio.get_running_loop()
        self._serve_began.set()

    async def _run_once(self) -> None:
        try:
            if not self._is_stopped:
                await self._serve()
        except BaseException as exc:
            self._failure = exc
            raise
        finally:
            self._is_ready = False
            self._ready_or_ended.set()
            self._limit_exit(0 if self._failure is None else 1)

    async def ready(self) -> None:
        """Wait until requests are accepted. Callable on the event loop of any thread.

        Raises:
            DynamoError: the error with which `serve` ended.
            Draining: `stop` was called, or `serve` has ended without an error.
            RuntimeError: neither `serve` nor `async with` has begun within 5 seconds.
        """
        if self._is_stopped and not self._serve_began.is_set():
            raise self._stopped_error()
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_S):
                await self._serve_began.wait()
        if not self._serve_began.is_set():
            raise RuntimeError(
                f"this {self._kind} does not serve, so it can't become ready: run serve() in a task"
                " first, or use `async with`"
            )
        await self._ready_or_ended.wait()
        if self._is_ready:
            return
        if isinstance(self._failure, Exception):
            raise self._failure
        raise self._stopped_error()

    def _prepare_run(self) -> None:
        """Prepare the process for `run`, which starts an event loop and handles signals.

        Raises:
            RuntimeError: this is not the main thread, or the thread runs an event loop already.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{self._kind}.run handles signals and needs the main thread; in other threads,"
                " await serve()"
            )
        if _is_in_event_loop():
            raise RuntimeError(
                f"{self._kind}.run starts an event loop, but one runs in this thread already (as in"
                " a notebook); await serve(), or use `async with`"
            )
        open_standard_streams()

    def _run_loop(self, work: Coroutine[Any, Any, None]) -> None:
        """Run an event loop of this process, for `run`. The end of the process does not hang."""
        import uvloop

        self._exit_limit = exit_limit.ExitLimit()
        status = 1
        try:
            uvloop.run(work)
            status = 0
        except ConfigError:
            status = 2
            raise
        except SystemExit as exc:
            if self._is_exit_forced:
                raise
            # The status may be 0, with which no supervisor starts the process again.
            log.exception("shutting down: an engine or a library called sys.exit(%r)", exc.code)
            raise SystemExit(status) from exc
        finally:
            self._exit_limit.cancel()
            exit_limit.limit_interpreter_exit(status)

    def _limit_exit(self, status: int) -> None:
        """In `run`, end this process with `status` if it still runs after EXIT_S."""
        if self._exit_limit is not None:
            self._exit_limit.begin(status, exit_limit.EXIT_S)

    def _force_exit(self) -> None:
        """In `run`, end this process with 1 if it still runs after FORCED_EXIT_S."""
        self._is_exit_forced = True
        if self._exit_limit is not None:
            self._exit_limit.begin(1, exit_limit.FORCED_EXIT_S)

    @property
    def _kind(self) -> str:
        return type(self).__name__

    def _stopped_error(self) -> Draining:
        return Draining(f"the {self._kind.lower()} was stopped; create another one")

    def stop(self) -> None:
        """End `serve` after the running requests. Callable from any thread. Idempotent.

        If `serve` has not begun, it will end at once.
        """
        with self._lock:
            self._is_stopped = True
            loop = self._loop
        if loop is not None:
            # RuntimeError: the event loop is closed, so `serve` has ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._stop_event.set)

    async def __aenter__(self) -> Self:
        self._begin()
        self._block = asyncio.current_task()
        serving = asyncio.create_task(self._run_once(), name=f"{self._kind.lower()}-serve")
        self._serving = serving
        try:
            await self._ready_or_ended.wait()
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
        # If the server has failed, this raises its error. If this call is cancelled, the server
        # ends at once.
        await self._serving


class ThreadSafeEvent:
    """An event that is set once. Event loops of any thread can wait for it."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        # A running future can't be cancelled. So a waiter that is cancelled does not cancel the
        # future for the other waiters.
        self._future.set_running_or_notify_cancel()

    def is_set(self) -> bool:
        return self._future.done()

    def set(self) -> None:
        """Wake all waiters. Only the first call has an effect."""
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        await asyncio.wrap_future(self._future)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

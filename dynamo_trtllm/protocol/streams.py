"""Define how the output of a request passes from engine to client, and adapt it to generators.

Engines and the worker service implement `Generator`. Each part of the program that has a token
calls `on_event` of the next part, on the event loop. All tokens of a stream take this path.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, ClassVar, Protocol, TypeAlias

from dynamo_trtllm.protocol.errors import DynamoError, EngineFailed, InternalError, Overloaded
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    ReleaseOutcome,
    token_ids,
)

log = logging.getLogger(__name__)

StreamEvent: TypeAlias = Chunk | DynamoError
"""A chunk, or the error that ended the stream.

An error is the last event of its stream, and so is a chunk with `finish_reason`. Such an event is
called terminal.
"""

OnEvent: TypeAlias = Callable[[StreamEvent], None]
"""A callback that receives the events of one stream on the event loop.

It must not block and must not raise.
"""


OnChunk: TypeAlias = Callable[[Chunk], bool]
"""A callback that receives the chunks of one stream.

If the callback returns False, the stream ends before its last chunk.
"""


class TokenChunks(dict[int, Chunk]):
    """The chunks that have one token and nothing else, by the id of the token.

    A chunk is made when it is first needed. Streams share the chunks, so a chunk must not be
    changed.

    Args:
        max_chunks: most chunks that are kept. With the default, they take 6.5 MB.
    """

    def __init__(self, max_chunks: int = 32_768) -> None:
        super().__init__()
        self._max_chunks = max_chunks

    def __missing__(self, token_id: int) -> Chunk:
        if len(self) >= self._max_chunks:
            self.clear()
        return self.setdefault(token_id, Chunk(token_ids=token_ids((token_id,))))


TOKEN_CHUNKS = TokenChunks()


class StreamHandle(Protocol):
    """One running stream."""

    def cancel(self) -> None:
        """End the stream and free what its source holds for it. No event follows. Idempotent.

        If a prefill call has already ended, this aborts the KV transfer that its last chunk has
        offered, unless the transfer has ended, too.
        """

    def stop(self) -> bool:
        """Ask the source to end the stream soon.

        The terminal event of the stream follows. It is an error, or a chunk that offers the KV that
        was computed by then.

        Returns:
            False if the source can't do this, or need not do it because `cancel` also frees the KV.
            Then the caller has to call `cancel`.
        """

    @property
    def holds_kv(self) -> bool:
        """True from the end of a prefill call until its KV transfer was fetched, aborted or
        expired.
        """


class KvHolder(Protocol):
    """The owner of KV transfers: an engine whose prefill calls return KV transfer parameters."""

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """Free the KV blocks of a transfer. Unknown and released transfers are ignored."""

    def is_pending(self, transfer_id: str) -> bool:
        """Return whether a transfer is neither released nor expired."""


class Generator(Protocol):
    """A source of streams."""

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        """Start a stream. Pass any number of chunks to `on_event`, then exactly one terminal event.

        The first event comes after this call has returned, so the caller has the handle by then. A
        rejected request also ends with an error event. This call raises only if there is a bug.
        """


async def run_stream(start: Callable[[OnEvent], StreamHandle], on_chunk: OnChunk) -> None:
    """Start a stream and wait for its end. Cancelling this call cancels the stream.

    Args:
        start: starts the stream and returns its handle.
        on_chunk: receives the chunks of the stream.

    Raises:
        DynamoError: the error that ended the stream.
        Exception: an exception of `on_chunk`, which cancels the stream.
    """
    # True: the stream has ended with its last chunk. False: `on_chunk` wants no more chunks.
    future: asyncio.Future[bool] | None = asyncio.get_running_loop().create_future()

    def on_event(event: StreamEvent) -> None:
        if future is None or future.done():
            return
        if not isinstance(event, Chunk):
            future.set_exception(event)
            return
        try:
            is_wanted = on_chunk(event)
        except Exception as exc:  # noqa: BLE001 - raised to the caller of `run_stream`
            if isinstance(exc, StopIteration):
                # A future does not accept StopIteration.
                future.set_exception(RuntimeError(repr(exc)))
            else:
                future.set_exception(exc)
            return
        is_last = event.finish_reason is not None
        if is_last or not is_wanted:
            future.set_result(is_last)

    handle = start(on_event)
    has_last_chunk = False
    try:
        assert future is not None
        has_last_chunk = await future
    finally:
        if not has_last_chunk:
            # This has no effect if the stream has ended with an error.
            handle.cancel()
        # The error of the future refers to this frame, by its traceback. If the frame still
        # referred to the future, this cycle would keep the request in memory.
        future = None


async def as_stream(generator: Generator, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a stream and raise its error.

    Consume the generator with `aclosing`, because closing it cancels the stream. This function is
    for programs that embed an engine, and for tests.
    """
    # The queue has no limit, but a request has a limited number of tokens.
    events: asyncio.Queue[StreamEvent] = asyncio.Queue()
    handle = generator.generate(request, events.put_nowait)
    has_ended = False
    try:
        while not has_ended:
            event = await events.get()
            if isinstance(event, DynamoError):
                try:
                    raise event
                finally:
                    # The traceback of the error refers to this frame. If the frame still referred
                    # to the error, this cycle would keep the request in memory.
                    del event
            has_ended = event.finish_reason is not None
            yield event
    finally:
        if not has_ended:
            handle.cancel()


def unexpected_error(exc: Exception, stream: str) -> DynamoError:
    """Log an exception that is a bug, and return the error that ends its stream.

    `stream` is the name of the stream, for the log.
    """
    if isinstance(exc, MemoryError):
        log.error("request failed: %s: out of memory", stream)  # a traceback would take more memory
        return Overloaded(
            "the process is out of memory for this request; try again later or send a shorter one"
        )
    log.error("request failed: %s", stream, exc_info=exc)
    error = InternalError(
        f"an unexpected error ended the request: {type(exc).__name__}; see the log"
    )
    error.__cause__ = exc
    return error


def _is_terminal(event: object) -> bool:
    """Return whether an event ends a stream."""
    if isinstance(event, Chunk):
        return event.finish_reason is not None
    return isinstance(event, DynamoError)


class Stream:
    """The common part of stream handles: pass events on until the terminal event or `cancel`.

    Args:
        on_event: receives the events.
        kv_holder: owner of the KV transfer with which the stream may end.
    """

    __slots__ = ("_kv_holder", "_on_event", "_transfer_id")

    def __init__(self, on_event: OnEvent, kv_holder: KvHolder | None = None) -> None:
        self._on_event: OnEvent | None = on_event  # None: the stream has ended
        self._kv_holder = kv_holder
        self._transfer_id = ""  # id of the transfer with which the stream has ended

    @property
    def has_ended(self) -> bool:
        return self._on_event is None

    def emit(self, event: StreamEvent) -> None:
        """Pass an event on.

        An event after the end is dropped. If such an event offers KV, the KV is freed.
        """
        on_event = self._on_event
        if on_event is None:
            if (
                isinstance(event, Chunk)
                and event.kv_params is not None
                and self._kv_holder is not None
            ):
                self._kv_holder.release(event.kv_params.transfer_id, ReleaseOutcome.ABORTED)
            return
        # Most events are chunks without a finish reason, which need only these two tests.
        if not isinstance(event, Chunk) or event.finish_reason is not None:
            self._on_event = None
            if isinstance(event, Chunk) and event.kv_params is not None:
                self._transfer_id = event.kv_params.transfer_id
            try:
                self._close(event)
            finally:
                on_event(event)
            return
        on_event(event)

    def redirect(self, on_event: OnEvent) -> None:
        """Pass later events to another receiver. Does nothing after the end."""
        if self._on_event is not None:
            self._on_event = on_event

    def cancel(self) -> None:
        """See `StreamHandle.cancel`."""
        if self._on_event is not None:
            self._on_event = None
            self._close(None)
        elif self._transfer_id and self._kv_holder is not None:
            self._kv_holder.release(self._transfer_id, ReleaseOutcome.ABORTED)

    def stop(self) -> bool:
        """See `StreamHandle.stop`."""
        return False

    @property
    def holds_kv(self) -> bool:
        """See `StreamHandle.holds_kv`."""
        return (
            bool(self._transfer_id)
            and self._kv_holder is not None
            and self._kv_holder.is_pending(self._transfer_id)
        )

    def _close(self, last: StreamEvent | None) -> None:
        """Free what the stream holds.

        Called once, before the terminal event `last` is passed on. None: the stream was cancelled.
        """


class TaskStream(Stream):
    """A stream that does a part of its work in a task, such as the fetch of its KV.

    A stream has at most one task at a time. It ends when the task has ended, unless a subclass says
    otherwise.

    Args:
        on_event: receives the events.
        tasks: the running tasks of the owner. The owner awaits them when it shuts down.
        kv_holder: see `Stream`.

    Attributes:
        continues_after_task: True in a subclass whose owner emits events after the task, such as a
            scheduler.
    """

    __slots__ = ("_context", "_task", "_tasks", "_work")

    continues_after_task: ClassVar[bool] = False

    def __init__(
        self, on_event: OnEvent, tasks: set[asyncio.Task[None]], kv_holder: KvHolder | None = None
    ) -> None:
        super().__init__(on_event, kv_holder)
        # Log lines of the task take the id of the request from this context. `run` may be called in
        # a step of the engine, which runs in another context.
        self._context = contextvars.copy_context()
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._work: Coroutine[Any, Any, StreamEvent | None] | None = None

    def run(self, work: Coroutine[Any, Any, StreamEvent | None], name: str) -> None:
        """Await `work` in a task, and emit the event that it returns.

        An error of `work` ends the stream. So does its end, with InternalError if the stream has no
        terminal event by then. Cancelling the stream cancels the task.
        """
        self._work = work
        task = asyncio.get_running_loop().create_task(
            self._await_work(work), name=name, context=self._context
        )
        self._task = task
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def _await_work(self, work: Coroutine[Any, Any, StreamEvent | None]) -> None:
        """Await the work, and emit its result or its error."""
        self._work = None
        event: StreamEvent | None = None
        try:
            event = await work
        except DynamoError as exc:
            event = exc
        except Exception as exc:  # noqa: BLE001 - logged, and the caller gets InternalError
            task = asyncio.current_task()
            event = unexpected_error(exc, task.get_name() if task else "-")
        if not self.continues_after_task and not self.has_ended and not _is_terminal(event):
            event = self._no_end_error(event)
        # This task has done its work, so the end of the stream must not cancel it.
        self._task = None
        try:
            # If the stream was cancelled while the work ended, `_close` has left `_free` to this
            # task.
            if self.has_ended:
                self._free()
            if event is not None:
                self.emit(event)
        finally:
            # The traceback of an error refers to this frame. If the frame still referred to the
            # error, this cycle would keep the request in memory.
            event = None

    def _no_end_error(self, returned: object) -> DynamoError:
        """Log that the task has returned no terminal event. Return the error that ends the stream.

        Without it, the client would wait until the deadline of its request.
        """
        task = asyncio.current_task()
        what = "None" if returned is None else f"a {type(returned).__name__}"
        if isinstance(returned, Chunk):
            what += " without finish_reason"
        text = f"the task of the stream returned {what}, and the stream has no end"
        name = task.get_name() if task else "-"
        log.error("request failed: %s: %s; return a Chunk with a finish_reason", name, text)
        return InternalError(f"{text}; see the log")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Free what the stream holds if its task was cancelled, or end the stream."""
        self._tasks.discard(task)
        if self._task is not task:
            return
        # `_await_work` has not set `_task` to None, so the task was cancelled.
        self._task = None
        if self._work is not None:
            # The task was cancelled before it began the work.
            self._work.close()
        if self.has_ended:
            self._free()
        else:
            self.emit(self._shutdown_error())

    def _shutdown_error(self) -> DynamoError:
        """Return the error for the end of a task that its owner cancelled."""
        return EngineFailed("the engine shut down during the request")

    def _close(self, last: StreamEvent | None) -> None:
        if self._task is None:
            self._free()
        else:
            # `_free` follows when the task has ended. Until then, the task may write to the memory.
            self._task.cancel()

    def _free(self) -> None:
        """Free what the stream holds. Called once, when no task of the stream is running."""

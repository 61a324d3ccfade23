"""Base class and helpers of engines that wrap an inference library (TensorRT-LLM, vLLM).

It holds the engine's life cycle (loading on a thread, warm-up, shutdown), the interface of the session that runs the
requests, and the conversion of the library's outputs and counters to messages.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from dynamo_trtllm.engines.base import EngineStats
from dynamo_trtllm.engines.external.pending_transfers import PendingTransfers
from dynamo_trtllm.errors import DynamoError, EngineFailed, EngineNotReady, RequestRejected
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    PhaseTimings,
    ReleaseOutcome,
    Sampling,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.streams import ChunkStream, OnEvent, StreamHandle, as_stream

# Finish reasons of the libraries that are successful ends.
ENDS: Mapping[str, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """The tokens that one result of the library added."""

    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None  # the library's finish reason

    @property
    def is_broken(self) -> bool:
        """True if the library ended the request with an error or an abort."""
        return self.finish is not None and self.finish not in ENDS


def chunk_of(step: EngineOutput, stats: PhaseTimings) -> Chunk:
    """Convert an output that is not broken. Only the last chunk carries `stats`."""
    if step.finish is None:
        return Chunk(token_ids=token_ids(step.token_ids), logprobs=step.logprobs)
    return Chunk(
        token_ids=token_ids(step.token_ids), logprobs=step.logprobs, finish_reason=ENDS[step.finish], stats=stats
    )


def transfer_chunk(kv_params: KvTransferParams, stats: PhaseTimings) -> Chunk:
    """Return the terminal chunk of a prefill call."""
    stats = msgspec.structs.replace(stats, kv_bytes=kv_params.kv_bytes, transport=kv_params.transport)
    return Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=kv_params, stats=stats)


def phase_timings(request: GenerateRequest, first_s: float, *, cached_tokens: int) -> PhaseTimings:
    """Return the timings of a call, measured outside the library.

    Args:
        request: the call.
        first_s: seconds until the first result. It includes the queue time of the library, which reports no split.
        cached_tokens: prompt tokens that came from the prefix cache.
    """
    kv_params = request.kv_params
    if kv_params is None:
        return PhaseTimings(prefill_s=first_s, cached_tokens=cached_tokens)
    return PhaseTimings(kv_transfer_s=first_s, kv_bytes=kv_params.kv_bytes, transport=kv_params.transport)


_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 2.0  # shortest time between two queries of the driver
_GIB = 1 << 30

T = TypeVar("T")


def run_in_daemon_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], None] | None = None
) -> asyncio.Future[T]:
    """Run `call` on a daemon thread. If it never returns, the event loop and the process can still end.

    Args:
        call: blocking function.
        name: name of the thread, for logs.
        unwanted: receives the result, on another thread, if the future was cancelled before `call` returned.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.cancelled():
            if error is not None:
                _log.debug("%s failed after its caller was cancelled: %s", name, error)
            elif unwanted is not None:
                threading.Thread(target=unwanted, args=(value,), name=f"{name}-unwanted", daemon=True).start()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = call()
        except BaseException as exc:  # noqa: BLE001 - raised again by the future
            error = exc
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed
            if error is None and unwanted is not None and value is not None:
                unwanted(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class EngineLoader(Generic[T]):
    """Builds one engine on a thread and reports the progress."""

    def __init__(
        self,
        build: Callable[[], T],
        *,
        discard: Callable[[T], None],
        gpu_bytes_used: Callable[[], int | None],
        weight_bytes: int,
    ) -> None:
        """Initialize the loader.

        Args:
            build: blocking function that builds the engine.
            discard: receives an engine that was built after `load` was cancelled.
            gpu_bytes_used: returns the bytes in use on the GPU, or None if unknown.
            weight_bytes: weights of one GPU. When more memory is in use, `progress` reports the next phase.
        """
        self._build = build
        self._discard = discard
        self._gpu_bytes_used = gpu_bytes_used
        self._weight_bytes = weight_bytes
        self._bytes_before = self._bytes_now = gpu_bytes_used()
        self._looked_at = time.monotonic()

    async def load(self) -> T:
        """Build the engine; raises the exceptions of `build`. A cancelled call returns at once."""
        return await run_in_daemon_thread(self._build, name="engine-load", unwanted=self._discard)

    def progress(self) -> str:
        """Describe the loading phase, derived from the GPU memory in use. Libraries do not report it."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._bytes_now = self._gpu_bytes_used()
        if self._bytes_now is None or self._bytes_before is None:
            return "building the engine"
        own = max(0, self._bytes_now - self._bytes_before)
        phase = "capturing CUDA graphs and warming up" if own >= self._weight_bytes else "loading weights"
        return f"{phase}, {own / _GIB:.1f} GiB of GPU memory used"


_SHUTDOWN_S = 60.0
_WARM_UP_S = 600.0
NO_STATS = EngineStats(running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0, tickets_held=0, ticket_kv_blocks=0)

V = TypeVar("V")


class Times(NamedTuple):
    """Time limits of a KV transfer."""

    ticket_ttl_s: float
    handoff_timeout_s: float


def construct(library: str, make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Construct one of the library's request objects.

    Args:
        library: name of the library, for error texts.
        make: class of the object.
        values: keyword arguments of the class.

    Raises:
        RequestRejected: the library rejected a value. Other exceptions are bugs of the adapter and are not caught.
    """
    try:
        return make(**values)
    except (ValueError, AssertionError) as exc:
        raise RequestRejected(f"{library} rejected the request: {exc}") from exc


class Counts(NamedTuple):
    """Counters that the library reports; 0 if it does not report one."""

    waiting: int = 0  # requests
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


def engine_stats(counts: Counts, calls: int, transfers: PendingTransfers) -> EngineStats:
    """Combine the library's counters with those of the session.

    Args:
        counts: counters of the library, which may be out of date.
        calls: number of calls in flight.
        transfers: pending KV transfers.
    """
    waiting = min(counts.waiting, calls)
    return EngineStats(
        running=calls - waiting,
        waiting=waiting,
        kv_blocks_used=counts.kv_blocks_used,
        kv_blocks_total=counts.kv_blocks_total,
        tickets_held=len(transfers),
        ticket_kv_blocks=transfers.kv_blocks,
    )


class EngineSession(Protocol):
    """Runs requests with a loaded library."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request; closing aborts it."""
        ...

    def check(self) -> None:
        """See `Engine.check`."""
        ...

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """See `KvHolder.release`."""
        ...

    def is_pending(self, transfer_id: str) -> bool:
        """See `KvHolder.is_pending`."""
        ...

    async def drain(self) -> None: ...

    async def aclose(self) -> None: ...


S = TypeVar("S", bound=EngineSession)


class ExternalEngine(ABC, Generic[S]):
    """Implementation of `Engine`, `KvHolder` and `HasProgress` without `start`."""

    def __init__(self, engine: str, library: str) -> None:
        """Initialize an engine that is not loaded.

        Args:
            engine: value of `--engine`.
            library: name of the library, for messages.
        """
        self._engine = engine
        self._library = library
        self._loading: EngineLoader[Any] | None = None
        self._llm: Any = None  # the library's own object
        self._session: S | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()  # of streams

    def progress(self) -> str:
        """See `HasProgress`."""
        loading = self._loading
        return "" if loading is None else loading.progress()

    async def _load(self, loading: EngineLoader[tuple[V, Any]]) -> V:
        """Return the library's bindings and store its engine object. Raises the exceptions of the builder."""
        self._loading = loading
        try:
            bindings, self._llm = await loading.load()
        finally:
            self._loading = None
        return bindings

    async def _warm_up(self, model: str) -> None:
        """Generate one token, without a KV transfer, so that `start` returns only when the library responds."""
        request = GenerateRequest(
            request_id="warm-up",
            model=model,
            token_ids=token_ids([0]),
            sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
            deadline=time.time() + _WARM_UP_S,
        )
        try:
            async with aclosing(as_stream(self, request)) as stream:
                async for _ in stream:
                    pass
        except DynamoError as exc:
            raise EngineFailed(f"{self._library} was loaded but the warm-up request failed: {exc.message}") from exc

    async def check(self) -> None:
        """See `Engine.check`."""
        self._ready().check()

    async def drain(self) -> None:
        if self._session is not None:
            await self._session.drain()

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await run_in_daemon_thread(partial(self._shut_down, llm), name=f"{self._engine}-shutdown")
        except TimeoutError:
            _log.error(
                "%s did not shut down within %g s; check that its processes have ended", self._library, _SHUTDOWN_S
            )

    @abstractmethod
    def _shut_down(self, llm: Any) -> None:
        """Shut the library down; called on a thread. Log the library's errors."""

    def _discard(self, built: tuple[Any, Any]) -> None:
        self._shut_down(built[1])

    # --- requests --------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        """See `Engine.generate`."""
        return ChunkStream(self._chunks(request), on_event, self._tasks, f"{self._engine}-{request.request_id}", self)

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._ready().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _ready(self) -> S:
        if self._session is None:
            if self._closed:
                raise EngineFailed("the engine is closed")
            raise EngineNotReady(f"the {self._engine} engine has not been started")
        return self._session

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """See `KvHolder.release`."""
        _log.debug("KV transfer %s released: %s", transfer_id, outcome)
        if self._session is not None:
            self._session.release(transfer_id, outcome)

    def is_pending(self, transfer_id: str) -> bool:
        """See `KvHolder.is_pending`."""
        return self._session is not None and self._session.is_pending(transfer_id)

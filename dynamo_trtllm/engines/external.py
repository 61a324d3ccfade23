"""The life of an engine around somebody else's library: loaded on a thread, asked once before it serves, closed once.

Knows no library: what is loaded is a subclass', what serves requests is its `serving`.
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
from dynamo_trtllm.engines.pending_transfers import PendingTransfers
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

# The libraries' words for an end that is an answer.
ENDS: Mapping[str, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one answer of the library added."""

    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None  # the library's word

    @property
    def is_broken(self) -> bool:
        """It ends the request, and is no end of an answer."""
        return self.finish is not None and self.finish not in ENDS


def chunk_of(step: EngineOutput, stats: PhaseTimings) -> Chunk:
    """Of one that is not broken. `stats` goes with the last one only."""
    if step.finish is None:
        return Chunk(token_ids=token_ids(step.token_ids), logprobs=step.logprobs)
    return Chunk(
        token_ids=token_ids(step.token_ids), logprobs=step.logprobs, finish_reason=ENDS[step.finish], stats=stats
    )


def transfer_chunk(ticket: KvTransferParams, stats: PhaseTimings) -> Chunk:
    """Return the terminal chunk of a prefill call."""
    stats = msgspec.structs.replace(stats, kv_bytes=ticket.kv_bytes, transport=ticket.transport)
    return Chunk(finish_reason=FinishReason.KV_TRANSFER, ticket=ticket, stats=stats)


def phase_timings(request: GenerateRequest, first_s: float, *, cached_tokens: int) -> PhaseTimings:
    """Seen from outside the library: `first_s`, to the first answer, holds queue and work, or queue and transfer."""
    ticket = request.ticket
    if ticket is None:
        return PhaseTimings(prefill_s=first_s, cached_tokens=cached_tokens)
    return PhaseTimings(kv_transfer_s=first_s, kv_bytes=ticket.kv_bytes, transport=ticket.transport)


_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 2.0  # the driver is not asked more often
_GIB = 1 << 30

T = TypeVar("T")


def run_in_daemon_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], None] | None = None
) -> asyncio.Future[T]:
    """Runs `call` on a daemon thread, so that one that never returns holds up neither the loop's end nor the process.

    `unwanted` gets the result, on that thread, when the future was cancelled meanwhile.
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
        except BaseException as exc:  # noqa: BLE001 - carried to the loop, where it is raised
            error = exc
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed
            if error is None and unwanted is not None and value is not None:
                unwanted(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class EngineLoader(Generic[T]):
    """Builds one engine. `discard` gets an engine that is finished after `load` was cancelled."""

    def __init__(
        self,
        build: Callable[[], T],
        *,
        discard: Callable[[T], None],
        gpu_bytes_used: Callable[[], int | None],
        weight_bytes: int,
    ) -> None:
        """`weight_bytes`: of one GPU; `progress` uses it to distinguish loading weights from the phase after it."""
        self._build = build
        self._discard = discard
        self._gpu_bytes_used = gpu_bytes_used
        self._weight_bytes = weight_bytes
        self._bytes_before = self._bytes_now = gpu_bytes_used()
        self._looked_at = time.monotonic()

    async def load(self) -> T:
        """Raises what `build` raises. Cancelled it lets go at once; what is still built then is discarded."""
        return await run_in_daemon_thread(self._build, name="engine-load", unwanted=self._discard)

    def progress(self) -> str:
        """What can be seen from outside: how much GPU memory is taken, and so which phase it is."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._bytes_now = self._gpu_bytes_used()
        if self._bytes_now is None or self._bytes_before is None:
            return "building the engine"
        own = max(0, self._bytes_now - self._bytes_before)
        phase = "capturing CUDA graphs and warming up" if own >= self._weight_bytes else "loading weights"
        return f"{phase}, {own / _GIB:.1f} GiB of GPU memory taken"


_SHUTDOWN_S = 60.0
_WARM_UP_S = 600.0
NO_STATS = EngineStats(running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0, tickets_held=0, ticket_kv_blocks=0)

V = TypeVar("V")


class Times(NamedTuple):
    """Longest times of a hand-off."""

    ticket_ttl_s: float
    handoff_timeout_s: float


def construct(library: str, make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Construct one of the library's request objects.

    `library`: its name for people. Raise RequestRejected, with the library's reason, for values that it refuses. Its
    other exceptions are bugs of this adapter and are not caught.
    """
    try:
        return make(**values)
    except (ValueError, AssertionError) as exc:
        raise RequestRejected(f"{library} refused the request: {exc}") from exc


class Counts(NamedTuple):
    """What the library tells of itself at one moment; 0 where it does not."""

    waiting: int = 0  # requests
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


def engine_stats(counts: Counts, calls: int, tickets: PendingTransfers) -> EngineStats:
    """`calls`: how many are under way here. The library's count may be older than them."""
    waiting = min(counts.waiting, calls)
    return EngineStats(
        running=calls - waiting,
        waiting=waiting,
        kv_blocks_used=counts.kv_blocks_used,
        kv_blocks_total=counts.kv_blocks_total,
        tickets_held=len(tickets),
        ticket_kv_blocks=tickets.kv_blocks,
    )


class EngineSession(Protocol):
    """What serves requests once the library is loaded."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """As `Engine.generate`."""
        ...

    def check(self) -> None:
        """Raises EngineFailed when it is not fit to serve."""
        ...

    def release(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """As `HasTickets.release`."""
        ...

    async def drain(self) -> None: ...

    async def aclose(self) -> None: ...


S = TypeVar("S", bound=EngineSession)


class ExternalEngine(ABC, Generic[S]):
    """`Engine` with `HasTickets` and `HasProgress`, but for `start`."""

    def __init__(self, engine: str, library: str) -> None:
        """`engine`: the kind, as in `--engine`. `library`: its name for people."""
        self._engine = engine
        self._library = library
        self._loading: EngineLoader[Any] | None = None
        self._llm: Any = None  # the library's own object
        self._session: S | None = None
        self._closed = False

    def progress(self) -> str:
        """See `HasProgress`."""
        loading = self._loading
        return "" if loading is None else loading.progress()

    async def _load(self, loading: EngineLoader[tuple[V, Any]]) -> V:
        """The vendor; the library's object is kept. Raises what building it raises."""
        self._loading = loading
        try:
            bindings, self._llm = await loading.load()
        finally:
            self._loading = None
        return bindings

    async def _warm_up(self, model: str) -> None:
        """One token, so that `start` returns only when the library answers. Moves no KV."""
        request = GenerateRequest(
            request_id="canary",
            model=model,
            token_ids=token_ids([0]),
            sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
            deadline=time.time() + _WARM_UP_S,
        )
        try:
            async with aclosing(self.generate(request)) as stream:
                async for _ in stream:
                    pass
        except DynamoError as exc:
            raise EngineFailed(f"{self._library} was loaded, and does not answer: {exc.message}") from exc

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
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await run_in_daemon_thread(partial(self._shut_down, llm), name=f"{self._engine}-shutdown")
        except TimeoutError:
            _log.error("%s did not shut down in %g s", self._library, _SHUTDOWN_S)

    @abstractmethod
    def _shut_down(self, llm: Any) -> None:
        """Blocks, on a thread. Logs the library's errors."""

    def _discard(self, built: tuple[Any, Any]) -> None:
        self._shut_down(built[1])

    # --- requests --------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        async with aclosing(self._ready().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _ready(self) -> S:
        if self._session is None:
            if self._closed:
                raise EngineFailed("the engine was closed")
            raise EngineNotReady(f"the {self._engine} engine has not been started")
        return self._session

    def release(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """See `HasTickets.release`."""
        _log.debug("ticket %s: %s", ticket_id, outcome)
        if self._session is not None:
            self._session.release(ticket_id, outcome)

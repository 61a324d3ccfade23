"""Serve an engine's streams and the control verbs on the request plane, within limits.

An unexpected exception of the engine is logged, here or by its stream's task, and becomes
InternalError.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec

from dynamo_trtllm import messages
from dynamo_trtllm.cost_model import CostModel, EngineWork
from dynamo_trtllm.engines.base import Engine, EngineStats
from dynamo_trtllm.errors import (
    DynamoError,
    EngineFailed,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from dynamo_trtllm.kv_events import KvEventPublisher
from dynamo_trtllm.messages import (
    Chunk,
    Control,
    GenerateRequest,
    Instance,
    LoadReport,
    Phase,
    Role,
    encode,
)
from dynamo_trtllm.observability.logging import request_id
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.streams import OnEvent, Stream, StreamEvent, StreamHandle
from dynamo_trtllm.worker import startup
from dynamo_trtllm.worker.cost_fit import CallSample, CostFit

log = logging.getLogger(__name__)

_SAME_LOAD_S = 0.01
_CHECK_EVERY_S = 2.0  # after which a failed engine is detected without a request
_UNFETCHED_S = 1.0  # KV above its share for this time shows that decode workers do not fetch it


@dataclass(eq=False)
class Admission:
    """Limits of the work of one worker: calls that run or wait in the engine, reserved decode
    slots, KV to transfer.

    A call beyond the limits is rejected before it reaches the engine, so that the frontend can try
    another worker.

    Args:
        max_active: limit of calls plus reserved slots; None: no limit.
        max_pending_transfer_fraction: share of the KV blocks that may await transfer; when more
            have for a second, new prompts are rejected.
        clock: returns seconds since the epoch, as the expiry of reservations.
    """

    max_active: int | None = None
    max_pending_transfer_fraction: float = 1.0
    clock: Callable[[], float] = time.time
    _num_active: int = field(default=0, init=False)
    # reservation id -> when it expires
    _reservations: dict[str, float] = field(default_factory=dict, init=False)
    # of KV to transfer, at every prefill call since then
    _above_share_since: float | None = field(default=None, init=False)

    def active(self) -> int:
        """Return the number of running calls."""
        return self._num_active

    def reserved_slots(self) -> int:
        """Return the number of reserved slots."""
        self._expire()
        return len(self._reservations)

    def reserve(self, reservation_id: str, expires_at: float) -> None:
        """Reserve a slot until a call uses it, it is released, or it expires.

        Args:
            reservation_id: id of the reservation; the call names it.
            expires_at: seconds since the epoch.

        Raises:
            Overloaded: no slot is free.
        """
        if reservation_id not in self._reservations:
            self._check_capacity()
        if self.max_active is not None:  # without a limit there is nothing to reserve
            self._reservations[reservation_id] = expires_at

    def unreserve(self, reservation_id: str) -> None:
        """Release a slot. Ignore an unknown reservation: a call has used it, or it has expired."""
        self._reservations.pop(reservation_id, None)

    @contextmanager
    def admit(self, request: GenerateRequest, stats: EngineStats | None) -> Iterator[None]:
        """Admit a call and count it while the context is open.

        Args:
            request: the call.
            stats: the engine's statistics for a prefill call; None: do not check KV that awaits
                transfer.

        Raises:
            Overloaded: a limit is reached.
        """
        if (
            request.reservation_id is None
            or self._reservations.pop(request.reservation_id, None) is None
        ):
            self._check_capacity()
        if stats is not None:
            self._check_pending_transfers(stats)
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1

    def _check_capacity(self) -> None:
        limit = self.max_active
        if limit is None or self._num_active + len(self._reservations) < limit:
            return
        self._expire()
        if self._num_active + len(self._reservations) >= limit:
            raise Overloaded(
                f"worker is full: {self._num_active} calls and {len(self._reservations)} reserved"
                f" slots of {limit}; retry later or start more workers"
            )

    def _check_pending_transfers(self, stats: EngineStats) -> None:
        """Reject prompts while decode workers do not fetch KV, because further KV would fill the
        cache.

        The KV of one long prompt may exceed the share until it is fetched, which is no reason to
        reject others.
        """
        total = stats.kv_blocks_total  # 0: not reported by the engine
        if not total or stats.ticket_kv_blocks <= self.max_pending_transfer_fraction * total:
            self._above_share_since = None
            return
        now = self.clock()
        if self._above_share_since is None:
            self._above_share_since = now
        if now - self._above_share_since >= _UNFETCHED_S:
            raise Overloaded(
                f"{stats.tickets_held} pending KV transfers hold {stats.ticket_kv_blocks} of"
                f" {total} KV blocks; retry later or start more decode workers"
            )

    def _expire(self) -> None:
        now = self.clock()
        for reservation_id in [
            name for name, expires_at in self._reservations.items() if expires_at <= now
        ]:
            del self._reservations[reservation_id]


class _ServiceStream(Stream):
    """The stream of one call: passes the engine's events on and counts tokens and the outcome."""

    __slots__ = (
        *("_arrived_s", "_calls", "_metrics", "_num_prompt_tokens", "_phase"),
        *("_is_stopped", "admission", "num_tokens", "request_id", "source", "work"),
    )

    def __init__(
        self,
        request: GenerateRequest,
        metrics: WorkerMetrics,
        on_event: OnEvent,
        calls: deque[CallSample],
    ) -> None:
        super().__init__(on_event)
        self._calls: deque[CallSample] | None = calls  # None: the first token was there
        self._arrived_s, self._num_prompt_tokens = time.monotonic(), len(request.token_ids)
        self.work = EngineWork()  # what the engine did before it got the call
        self.request_id = request.request_id
        self._phase = request.phase
        self._metrics = metrics
        self.num_tokens = 0  # output
        self.admission = ExitStack()
        self.source: StreamHandle | None = None  # None: the call was rejected
        self._is_stopped = False

    def emit(self, event: StreamEvent) -> None:
        if isinstance(event, Chunk):
            if not self.num_tokens and (event.token_ids or event.kv_params is not None):
                self._note_first(event)
            self.num_tokens += len(event.token_ids)
            if event.finish_reason is None:
                if self._on_event is not None:
                    self._on_event(event)
                return
        super().emit(event)

    def _note_first(self, chunk: Chunk) -> None:
        if chunk.token_ids:
            RECORDER.record(self.request_id, RecordedEvent.FIRST_TOKEN)
        if self._phase is Phase.DECODE and chunk.stats is not None:
            self._metrics.observe_transfer(chunk.stats)
        calls, self._calls = self._calls, None
        if calls is not None:
            tokens = self._num_prompt_tokens
            cached_tokens = 0 if chunk.stats is None else min(tokens, chunk.stats.cached_tokens)
            fetches_kv = self._phase is Phase.DECODE
            took_s = time.monotonic() - self._arrived_s
            calls.append(
                CallSample(took_s, tokens - cached_tokens, cached_tokens, self.work, fetches_kv)
            )

    def cancel(self) -> None:
        super().cancel()
        if self.source is not None:
            self.source.cancel()

    def stop(self) -> bool:
        if self.source is None or not self.source.stop():
            return False
        self._is_stopped = True
        self.admission.close()  # as for a cancelled call
        return True

    @property
    def holds_kv(self) -> bool:
        return self.source is not None and self.source.holds_kv

    def _close(self, last: StreamEvent | None) -> None:
        if isinstance(last, Chunk):
            code = "ok"
        else:
            code = "cancelled" if last is None or self._is_stopped else last.code
        RECORDER.unfollow(self)
        reason = (
            last.finish_reason
            if isinstance(last, Chunk) and last.finish_reason is not None
            else code
        )
        RECORDER.record(self.request_id, RecordedEvent.CALL_ENDED, self.num_tokens, reason=reason)
        # the engine may hold a cancelled call for longer: until its fetch has stopped
        self.admission.close()
        self._metrics.child("requests_total", self._phase, code).inc()
        self._metrics.child("output_tokens_total", self._phase).inc(self.num_tokens)


@dataclass(eq=False)
class WorkerService:
    """A request-plane `Service` over one engine.

    Args:
        engine: a started engine.
        instance: the worker's registered instance.
        admission: limits of the worker.
        files: paths of the card's files by content hash.
        metrics: metrics of the worker.
        max_leaked_kv_fraction: share of the KV blocks that the engine may be unable to free.
        kv_events: publisher of the engine's KV events, if the worker publishes them.
        cost_prior: what the configuration says about the time of steps.
    """

    engine: Engine
    instance: Instance
    admission: Admission
    _: KW_ONLY
    files: Mapping[str, Path]
    metrics: WorkerMetrics
    max_leaked_kv_fraction: float = 1.0
    kv_events: KvEventPublisher | None = None
    cost_prior: CostModel | None = None

    def __post_init__(self) -> None:
        engine, instance = self.engine, self.instance
        self.called = asyncio.Event()  # set by each call
        self._last_load: LoadReport | None = None
        self._load_read_at = 0.0  # of `time.monotonic()`
        self._new_tokens = self._new_requests = 0  # of prompts that came since
        self._cost = CostFit(self.cost_prior, engine.steps, self.metrics.observe_prediction)
        self._phases = {
            Phase[instance.role.name],
            *([Phase.AGGREGATED] if instance.can_aggregate else []),
        }
        self._restart_asked = asyncio.Event()
        self._restart_reason = ""
        self.metrics.watch(
            active_calls=self.admission.active, reserved=self.admission.reserved_slots
        )

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = _ServiceStream(request, self.metrics, on_event, self._cost.calls)
        name, tokens = request.request_id, len(request.token_ids)
        RECORDER.record(name, RecordedEvent.CALL_RECEIVED, tokens, reason=request.phase)
        self.called.set()
        context = contextvars.copy_context()  # of the stream's log lines
        context.run(request_id.set, request.request_id)
        try:
            self._check(request)
            stats = self.engine.stats() if request.phase is Phase.PREFILL else None
            stream.admission.enter_context(self.admission.admit(request, stats))
            if request.phase is not Phase.DECODE:
                stream.work = self._work(tokens)
            RECORDER.follow(stream)
            stream.source = context.run(self.engine.generate, request, stream.emit)
        except DynamoError as exc:
            asyncio.get_running_loop().call_soon(stream.emit, exc)
        except Exception as exc:  # noqa: BLE001 - logged, and the caller gets InternalError
            context.run(log.exception, "request %s failed", request.request_id)
            error = InternalError(f"the worker failed on this request: {type(exc).__name__}")
            asyncio.get_running_loop().call_soon(stream.emit, error)
        return stream

    def _check(self, request: GenerateRequest) -> None:
        model = self.instance.card.name
        if request.model != model:
            raise ModelNotFound(
                f"this worker serves {model!r}, not {request.model!r}", field="model"
            )
        if request.phase not in self._phases:
            raise InvalidRequest(
                f"a {self.instance.role} worker does not serve {request.phase} calls", field="phase"
            )
        if request.num_resumed_output_tokens > len(request.token_ids):
            raise InvalidRequest(
                f"{request.num_resumed_output_tokens} tokens are resumed, but the call has"
                f" {len(request.token_ids)}",
                field="resumed_tokens",
            )
        if (request.phase is Phase.DECODE) != (request.kv_params is not None):
            has = "no" if request.kv_params is None else "unexpected"
            raise InvalidRequest(f"the {request.phase} call has {has} KV transfer parameters")

    def load_report(self) -> LoadReport:
        """Return the load, at most _SAME_LOAD_S old: many callers get it, and engines count all
        requests for it.
        """
        now, last = time.monotonic(), self._last_load
        if last is not None and now - self._load_read_at < _SAME_LOAD_S:
            return last
        stats = self.engine.stats()
        work = stats.running, stats.waiting, stats.queued_prefill_tokens
        kv = stats.kv_blocks_used, stats.kv_blocks_total, stats.context_tokens
        load = LoadReport(self.instance.id, 1 if last is None else last.number + 1, *work, *kv)
        self._last_load, self._load_read_at = load, now
        self._new_tokens = self._new_requests = 0
        return load

    def load_report_with_cost(self) -> LoadReport:
        """Return the load with the cost model, which learns from the last steps and calls first."""
        cost = self._cost.learn(time.monotonic())
        self.metrics.set_cost(cost)
        return msgspec.structs.replace(self.load_report(), cost=cost)

    def _work(self, prompt_tokens: int) -> EngineWork:
        """Return what the engine does when a prompt arrives, and count the prompt for the next
        one.
        """
        load, decodes = self.load_report(), self.instance.role is not Role.PREFILL
        work = load.work(
            decodes=decodes, more_tokens=self._new_tokens, more_requests=self._new_requests
        )
        self._new_tokens += prompt_tokens
        self._new_requests += 1
        return work

    async def control(self, verb: Control) -> bytes:
        match verb:
            case messages.GetFile(sha256, offset):
                return encode(startup.file_chunk(self.files, sha256, offset))
            case messages.ReleaseKv(transfer_id, outcome):
                self.engine.release(transfer_id, outcome)
            case messages.ReserveSlot(reservation_id, expires_at, left_s):
                if self.instance.role is not Role.DECODE:
                    raise InvalidRequest(
                        f"a {self.instance.role} worker has no decode slots to reserve"
                    )
                self.admission.reserve(
                    reservation_id, time.time() + left_s if left_s else expires_at
                )
            case messages.ReleaseSlot(reservation_id):
                self.admission.unreserve(reservation_id)
            case messages.ResyncKvEvents():
                if self.kv_events is None:
                    raise InvalidRequest(
                        "this worker publishes no KV events; start it with --publish-kv-events"
                    )
                self.kv_events.resync()
            case messages.Restart(reason):
                self._restart_reason = reason
                self._restart_asked.set()
        return b""

    async def until_failed(self) -> None:
        """Wait until the engine fails, leaks too much KV, or a restart is requested: EngineFailed
        ends the worker.
        """
        while not self._restart_asked.is_set():
            await self.engine.check()
            stats = self.engine.stats()
            total = stats.kv_blocks_total  # 0: not reported by the engine
            if total and stats.leaked_kv_blocks > self.max_leaked_kv_fraction * total:
                raise EngineFailed(
                    f"{stats.leaked_kv_blocks} of {total} KV blocks were never fetched and can't be"
                    " freed (--max-leaked-kv-fraction); restarting"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY_S):
                    await self._restart_asked.wait()
        raise EngineFailed(f"restart requested: {self._restart_reason}")

"""Serve calls of an engine and control messages on the request plane.

An unexpected exception of the engine is logged, here or by the task of its stream, and becomes
InternalError.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

import msgspec

from dynamo_trtllm.engines.capabilities import ChecksHealth, MeasuresSteps, TransfersKv
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.kv_transfer.signer import AdmittedFetch, TransferSigner
from dynamo_trtllm.observability.logging import request_id
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol import messages
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS, Clocks
from dynamo_trtllm.protocol.cost_model import CostModel, EngineWork
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    EngineFailed,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    TransferExpired,
)
from dynamo_trtllm.protocol.kv_events import KvEventPublisher
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    GenerateRequest,
    Instance,
    KvTransferParams,
    LoadReport,
    Phase,
    Role,
    encode,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamEvent, StreamHandle
from dynamo_trtllm.worker.card import file_chunk
from dynamo_trtllm.worker.cost_fit import CallSample, CostFit
from dynamo_trtllm.worker.engine_events import EngineEvents, is_foreign
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming
from dynamo_trtllm.worker.worker_admission import WorkerAdmission

log = logging.getLogger(__name__)

# The largest part of the KV blocks that may be leaked. With more, the worker drains and restarts.
_MAX_LEAKED_KV_FRACTION = 0.5


class FetchingCalls:
    """The decode calls of a worker that have no first token yet."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # of all these calls
        self._calls: set[WorkerCall] = set()

    def add(self, call: WorkerCall) -> None:
        """Add a call."""
        self._calls.add(call)
        self.prompt_tokens += call.num_prompt_tokens

    def discard(self, call: WorkerCall) -> None:
        """Remove a call, if it is one of these."""
        if call in self._calls:
            self._calls.remove(call)
            self.prompt_tokens -= call.num_prompt_tokens


class WorkerCall(Stream):
    """One call to the engine. It passes the engine's events on, and counts tokens and outcomes."""

    __slots__ = (
        "_arrived_s",
        "_clock",
        "_fetching",
        "_generating",
        "_is_stopped",
        "_metrics",
        "_on_first_token",
        "_phase",
        "_receivers",
        "_signer",
        "admission",
        "fetch",
        "num_prompt_tokens",
        "num_tokens",
        "other_tokens",
        "request_id",
        "source",
        "work",
    )

    def __init__(
        self,
        request: GenerateRequest,
        metrics: WorkerMetrics,
        on_event: OnEvent,
        on_first_token: Callable[[CallSample], None],
        generating: set[WorkerCall],
        fetching: FetchingCalls,
        signer: TransferSigner,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(on_event)
        # All decode and aggregated calls of the worker that have their first token.
        self._generating = generating
        # All decode calls of the worker that have no first token yet.
        self._fetching = fetching
        self._clock = clock
        self._signer = signer
        self._receivers = request.kv_receivers
        # The fetch of a decode call whose KV transfer parameters are signed.
        self.fetch: AdmittedFetch | None = None
        # Called with the sample of this call at its first token.
        self._on_first_token = on_first_token
        self._arrived_s = clock()
        self.num_prompt_tokens = len(request.token_ids)
        self.work = EngineWork()  # what the engine had to do when the call arrived
        self.other_tokens = 0  # prompt tokens of the calls that fetched KV at that time
        self.request_id = request.request_id
        self._phase = request.phase
        self._metrics = metrics
        self.num_tokens = 0  # output tokens so far
        self.admission = ExitStack()  # closing it frees the slot of the call
        # The stream of the engine; None if the call was rejected.
        self.source: StreamHandle | None = None
        self._is_stopped = False

    def emit(self, event: StreamEvent) -> None:
        """Count the tokens of an event and pass the event on. The last event ends the stream."""
        if isinstance(event, Chunk):
            # The last chunk of a prefill call may have KV transfer parameters and no token.
            has_kv_params = event.finish_reason is not None and event.kv_params is not None
            if not self.num_tokens and (event.token_ids or has_kv_params):
                self._note_first(event)
            self.num_tokens += len(event.token_ids)
            if event.finish_reason is None:
                # Most events come here. `Stream.emit` would repeat the tests of their type.
                if self._on_event is not None:
                    self._on_event(event)
                return
            if event.kv_params is not None:
                event = self._signed(event, event.kv_params)
        super().emit(event)

    def _signed(self, chunk: Chunk, kv_params: KvTransferParams) -> Chunk:
        """Return the last chunk of a prefill call, with signed parameters if there is a key."""
        signed = self._signer.sign(kv_params, self.request_id, self._receivers)
        return msgspec.structs.replace(chunk, kv_params=signed)

    def _note_first(self, chunk: Chunk) -> None:
        """Note the first result of the call. Its time is a sample for the cost model."""
        if chunk.token_ids:
            RECORDER.record(self.request_id, RecordedEvent.FIRST_TOKEN)
        if self.fetch is not None:
            self.fetch.note_arrival()
        if self._phase is not Phase.PREFILL:
            self._generating.add(self)
        self._fetching.discard(self)
        if self._phase is Phase.DECODE and chunk.stats is not None:
            self._metrics.observe_transfer(chunk.stats)
        prompt_tokens = self.num_prompt_tokens
        cached_tokens = 0
        if chunk.stats is not None:
            cached_tokens = min(prompt_tokens, chunk.stats.cached_tokens)
        sample = CallSample(
            seconds=self._clock() - self._arrived_s,
            new_tokens=prompt_tokens - cached_tokens,
            cached_tokens=cached_tokens,
            work=self.work,
            fetches_kv=self._phase is Phase.DECODE,
            other_tokens=self.other_tokens,
        )
        self._on_first_token(sample)

    def cancel(self) -> None:
        super().cancel()
        if self.source is not None:
            self.source.cancel()

    def stop(self) -> bool:
        if self.source is None or not self.source.stop():
            return False
        self._is_stopped = True
        # Free the slot now, although the engine may hold the call a little longer.
        self.admission.close()
        return True

    @property
    def holds_kv(self) -> bool:
        return self.source is not None and self.source.holds_kv

    def _close(self, last: StreamEvent | None) -> None:
        finish_reason = None
        if isinstance(last, Chunk):
            code = "ok"
            finish_reason = last.finish_reason
        elif last is None or self._is_stopped:
            code = "cancelled"
        else:
            code = last.code
        RECORDER.unfollow(self)
        self._generating.discard(self)
        self._fetching.discard(self)
        if self.fetch is not None:
            self.fetch.end()
        reason = code if finish_reason is None else finish_reason
        RECORDER.record(self.request_id, RecordedEvent.CALL_ENDED, self.num_tokens, reason=reason)
        # Free the slot now, although the engine may hold a cancelled call until its fetch stops.
        self.admission.close()
        self._metrics.child("requests_total", self._phase, code).inc()
        self._metrics.child("output_tokens_total", self._phase).inc(self.num_tokens)


def phases_of(instance: Instance) -> frozenset[Phase]:
    """Return the phases whose calls a worker accepts."""
    if instance.role is Role.ELASTIC:
        return frozenset(Phase)
    # A worker of another role runs the phase of the same name.
    phases = {Phase[instance.role.name]}
    if instance.can_aggregate:
        phases.add(Phase.AGGREGATED)
    return frozenset(phases)


@dataclass(eq=False)
class WorkerService:
    """A request-plane `Service` over one engine.

    Args:
        engine: a started engine.
        instance: the worker's registered instance.
        admission: limits of the worker.
        files: paths of the card's files by content hash.
        metrics: metrics of the worker.
        signer: signs and checks KV transfer parameters; None without keys.
        kv_events: publisher of the engine's KV events, if the worker publishes them.
        cost_prior: estimate of the time of steps, for the time before steps are measured.
        timing: how long the worker waits.
        clocks: the clocks of the process.
    """

    engine: Engine
    instance: Instance
    admission: WorkerAdmission
    _: KW_ONLY
    files: Mapping[str, Path]
    metrics: WorkerMetrics
    signer: TransferSigner | None = None
    kv_events: KvEventPublisher | None = None
    cost_prior: CostModel | None = None
    timing: WorkerTiming = TIMING
    clocks: Clocks = SYSTEM_CLOCKS

    def __post_init__(self) -> None:
        self.called = asyncio.Event()  # set by each call
        self._is_foreign = is_foreign(self.engine)
        self._signer = self.signer or TransferSigner(self.instance.id)
        # The newest report, and when it was made.
        self._last_load: LoadReport | None = None
        self._load_read_at = 0.0
        # The prompts that arrived after the report: their tokens and their number.
        self._new_tokens = 0
        self._new_requests = 0
        steps = self.engine.steps if isinstance(self.engine, MeasuresSteps) else deque()
        self._cost = CostFit(self.cost_prior, steps, self.metrics.observe_prediction)
        self._generating: set[WorkerCall] = set()
        self._fetching = FetchingCalls()
        self._phases = phases_of(self.instance)
        self.metrics.watch(
            active_calls=self.admission.active, reserved=self.admission.reserved_slots
        )

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = WorkerCall(
            request,
            self.metrics,
            on_event,
            self._cost.add_call,
            self._generating,
            self._fetching,
            self._signer,
            self.clocks.monotonic,
        )
        prompt_tokens = len(request.token_ids)
        RECORDER.record(
            request.request_id, RecordedEvent.CALL_RECEIVED, prompt_tokens, reason=request.phase
        )
        self.called.set()
        # The log lines of the stream have this context.
        context = contextvars.copy_context()
        context.run(request_id.set, request.request_id)
        try:
            self._check(request)
            self._check_transfer(request, stream)
            stats = self.engine.stats() if request.phase is Phase.PREFILL else None
            stream.admission.enter_context(self.admission.admit(request, stats))
            if request.phase is Phase.DECODE:
                stream.other_tokens = self._fetching.prompt_tokens
                self._fetching.add(stream)
            else:
                stream.work = self._work(request)
            RECORDER.follow(stream)
            stream.source = context.run(self._start_call, request, stream)
        except DynamoError as exc:
            asyncio.get_running_loop().call_soon(stream.emit, exc)
        except Exception as exc:  # noqa: BLE001 - logged, and the caller gets InternalError
            context.run(log.exception, "request %s failed", request.request_id)
            error = InternalError(f"the worker failed on this request: {type(exc).__name__}")
            asyncio.get_running_loop().call_soon(stream.emit, error)
        return stream

    def _start_call(self, request: GenerateRequest, stream: WorkerCall) -> StreamHandle:
        """Start the call in the engine."""
        if not self._is_foreign:
            return self.engine.generate(request, stream.emit)
        name = type(self.engine).__qualname__
        events = EngineEvents(name, request.request_id, stream.emit)
        return events.start(partial(self.engine.generate, request))

    def _check(self, request: GenerateRequest) -> None:
        """Check that this worker serves the call. Raises DynamoError."""
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
        has_kv_params = request.kv_params is not None
        if request.phase is Phase.DECODE and not has_kv_params:
            raise InvalidRequest(f"the {request.phase} call has no KV transfer parameters")
        if request.phase is not Phase.DECODE and has_kv_params:
            raise InvalidRequest(f"the {request.phase} call has unexpected KV transfer parameters")

    def _check_transfer(self, request: GenerateRequest, stream: WorkerCall) -> None:
        """Check the KV transfer of a call, before it takes a slot or reaches the engine.

        Raises:
            TransferRejected: its parameters are not for this worker or request, or not signed.
            TransferExpired: its parameters have expired.
        """
        if request.phase is Phase.PREFILL:
            self._signer.check_prefill(request)
        elif request.kv_params is not None:
            stream.fetch = self._signer.admit_fetch(request.kv_params, request.request_id)

    def load_report(self) -> LoadReport:
        """Return the load, at most `timing.load_age_s` old.

        Many callers get the same report, because for each report the engine walks over all of its
        requests.
        """
        now = self.clocks.monotonic()
        last = self._last_load
        if last is not None and now - self._load_read_at < self.timing.load_age_s:
            return last
        stats = self.engine.stats()
        # Prefill and elastic workers count prefill calls in `stats.running`, too. So they also
        # report the calls that generate. In other roles, all running calls generate.
        has_prefill_calls = self.instance.role in (Role.PREFILL, Role.ELASTIC)
        generating = self._generating if has_prefill_calls else ()
        load = LoadReport(
            instance_id=self.instance.id,
            number=1 if last is None else last.number + 1,
            running=stats.running,
            waiting=stats.waiting,
            queued_prefill_tokens=stats.queued_prefill_tokens,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_total=stats.kv_blocks_total,
            context_tokens=stats.context_tokens,
            num_generating=len(generating),
            generating_tokens=sum(
                stream.num_prompt_tokens + stream.num_tokens for stream in generating
            ),
            computed_prompts=self._cost.computed_prompts,
            computed_tokens=self._cost.computed_tokens,
            fetching_tokens=self._fetching.prompt_tokens,
        )
        self._last_load = load
        self._load_read_at = now
        self._new_tokens = 0
        self._new_requests = 0
        return load

    def load_report_with_cost(self) -> LoadReport:
        """Let the cost model learn from the last steps and calls. Return the load with it."""
        cost = self._cost.learn(self.clocks.monotonic())
        self.metrics.set_cost(cost)
        return msgspec.structs.replace(self.load_report(), cost=cost)

    def _work(self, request: GenerateRequest) -> EngineWork:
        """Return what the engine has to do when a prompt arrives, without this prompt.

        Then count this prompt as a part of the work for later prompts.
        """
        # A new report sets `_new_tokens` and `_new_requests` to zero, so it is made first.
        load = self.load_report()
        work = load.work(self.instance.role, self._new_tokens, self._new_requests, request.slo)
        self._new_tokens += len(request.token_ids)
        self._new_requests += 1
        return work

    async def control(self, verb: Control) -> bytes:
        match verb:
            case messages.GetFile(sha256, offset):
                return encode(file_chunk(self.files, sha256, offset))
            case messages.ReleaseKv(transfer_id, outcome):
                if isinstance(self.engine, TransfersKv):
                    self.engine.release(transfer_id, outcome)
            case messages.ReissueKvParams(kv_params, receivers):
                return encode(self._reissued(kv_params, receivers))
            case messages.ReserveSlot(reservation_id, expires_at, left_s):
                if Phase.DECODE not in self._phases:
                    raise InvalidRequest(
                        f"a {self.instance.role} worker has no decode slots to reserve"
                    )
                # The clocks of two machines may differ, so the expiry is computed from the time
                # that is left. Older senders do not set this time.
                if left_s:
                    expires_at = self.clocks.epoch() + left_s
                self.admission.reserve(reservation_id, expires_at)
            case messages.ReleaseSlot(reservation_id):
                self.admission.unreserve(reservation_id)
            case messages.ResyncKvEvents():
                if self.kv_events is None:
                    raise InvalidRequest(
                        "this worker publishes no KV events; start it with --publish-kv-events"
                    )
                self.kv_events.resync()
        return b""

    def _reissued(
        self, kv_params: KvTransferParams, receivers: tuple[int, ...]
    ) -> KvTransferParams:
        """Return parameters signed for other receivers, while their KV is pending.

        Raises:
            TransferRejected: the parameters are not from this worker.
            TransferExpired: the KV is not pending any more.
        """
        reissued = self._signer.reissue(kv_params, receivers)
        transfer_id = kv_params.transfer_id
        if not isinstance(self.engine, TransfersKv) or not self.engine.is_pending(transfer_id):
            raise TransferExpired(
                f"KV transfer {transfer_id} is not pending any more; prefill again"
            )
        return reissued

    async def until_failed(self) -> None:
        """Wait until the engine fails or leaks too much KV, and raise EngineFailed."""
        while True:
            if isinstance(self.engine, ChecksHealth):
                await self.engine.check()
            stats = self.engine.stats()
            total = stats.kv_blocks_total  # 0: not reported by the engine
            if total and stats.leaked_kv_blocks > _MAX_LEAKED_KV_FRACTION * total:
                raise EngineFailed(
                    f"{stats.leaked_kv_blocks} of {total} KV blocks were never fetched and can't be"
                    " freed; restarting"
                )
            await asyncio.sleep(self.timing.engine_check_s)

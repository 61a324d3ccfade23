"""Route requests to workers: do what `generation_flow` decides, and pass it what happens.

Handles no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_trtllm.cluster.request_plane.background_control import BackgroundControl
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.receivers import StreamReceiver
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.early_token import DecodePauses
from dynamo_trtllm.frontend.routing.generation_events import (
    FlowEvent,
    RouterOptions,
    Signal,
)
from dynamo_trtllm.frontend.routing.generation_flow import GenerationFlow
from dynamo_trtllm.frontend.routing.kv_collection import KvCollector
from dynamo_trtllm.frontend.routing.pair_breakers import FleetHealth, PairBreakers
from dynamo_trtllm.frontend.routing.pairs import Pair, WorkerSelection
from dynamo_trtllm.frontend.routing.start_window import StartPlace
from dynamo_trtllm.frontend.routing.suspects import Suspects, TrackedCall
from dynamo_trtllm.frontend.routing.worker_load import PlacedRequest
from dynamo_trtllm.frontend.routing.worker_selection import WorkerSelector
from dynamo_trtllm.observability.line_limit import LineLimit
from dynamo_trtllm.observability.logging import short_id
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS, Clocks
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    DynamoError,
    QueryOfDeath,
)
from dynamo_trtllm.protocol.messages import (
    MAX_RESERVATION_S,
    Chunk,
    ClientShare,
    GenerateRequest,
    Instance,
    KvTransferParams,
    Phase,
    ReissueKvParams,
    ReleaseKv,
    ReleaseSlot,
    RequestSlo,
    ReserveSlot,
    Role,
    decode,
)
from dynamo_trtllm.protocol.streams import (
    OnEvent,
    Stream,
    StreamEvent,
    StreamHandle,
    unexpected_error,
)

log = logging.getLogger(__name__)

_RESERVE_TIMEOUT_S = 2.0
_REISSUE_TIMEOUT_S = 2.0
# Overloaded workers can make thousands of calls fail in a second. Each period has at most
# _MAX_FAILURE_LINES log lines about them, and a line with the number of the others.
_MAX_FAILURE_LINES = 100
_FAILURE_LINES_PERIOD_S = 10.0


def _log_failures_left_out(count: int) -> None:
    calls = counted(count, "more call")
    log.warning("%s failed and had another attempt, within %g s", calls, _FAILURE_LINES_PERIOD_S)


@dataclass(eq=False)
class RequestRouter:
    """Routes requests to prefill and decode workers. Close it after the last stream.

    Args:
        view: the known workers.
        plane: carries the calls to them.
        options: limits and fallbacks.
        breakers: record the KV transfers; the breaker of a failing pair opens.
        placement: selects workers by cost; None: they are selected round robin or at random.
        on_kv_collected: called with the outcome of each collection of KV, see `KvCollector`.
        suspects: finds requests that end workers.
        clocks: the clocks of the process.
        seed: of random choices of workers. None: they differ from run to run.
    """

    view: ClusterView
    plane: RequestPlane
    options: RouterOptions = field(default_factory=RouterOptions)
    breakers: PairBreakers = field(default_factory=PairBreakers)
    placement: Placement | None = None
    on_kv_collected: Callable[[str], None] = lambda outcome: None
    suspects: Suspects = field(default_factory=Suspects)
    clocks: Clocks = SYSTEM_CLOCKS
    seed: int | None = None

    def __post_init__(self) -> None:
        options = self.options
        self.health = FleetHealth(self.view, self.breakers, has_probes=options.has_probes)
        self.selector = WorkerSelector(
            self.view,
            self.health,
            self.placement,
            selects_at_random=options.selects_at_random,
            decode_fallback=options.decode_fallback,
            seed=self.seed,
        )
        self.failure_lines = LineLimit(
            _MAX_FAILURE_LINES, _FAILURE_LINES_PERIOD_S, report=_log_failures_left_out
        )
        self.pauses = DecodePauses()
        self.background_control = BackgroundControl(self.plane.client)
        self.kv_collector = KvCollector(
            self.plane.client, self.background_control, self.on_kv_collected
        )

    def generate(
        self,
        request: GenerateRequest,
        timeline: ChoiceTimeline,
        on_event: OnEvent,
        selection: WorkerSelection | None = None,
    ) -> StreamHandle:
        """Start a request as `streams.Generator.generate` does.

        Failed calls are retried or continued by other workers.

        The last event is the error if there is no worker (NoInstances, TransferMismatch), if the
        stream broke and its rest cannot be generated by another worker (MigrationFailed), or if a
        call failed and is not retried.

        Args:
            request: the request of the client, with its whole prompt.
            timeline: filled while the request runs.
            on_event: receives the events of the stream.
            selection: the workers of a probe; None: the request is no probe. A probe is one
                attempt, which is not retried. A failed KV transfer is recorded by this class. The
                caller records whether the answer is right.
        """
        return RoutedRequest(self, request, timeline, on_event, selection)

    async def aclose(self) -> None:
        """Wait a bounded time for the collections of KV and the control requests in progress."""
        # The KV collector sends control requests, so it is closed first.
        await self.kv_collector.aclose()
        await self.background_control.aclose()


class RoutedRequest(Stream):
    """One request on its way to workers and back: the driver of its flow.

    At most one call, reservation or wait is in progress.

    A request whose calls ended workers is a suspect (see `suspects`). It may wait for its turn to
    be tried on workers where no other suspect runs. A trial ends when its call has enough tokens.
    """

    __slots__ = (
        "_attempt",
        "_attempt_begun_s",
        "_call",
        "_context",
        "_flow",
        "_placed",
        "_round_robin_index",
        "_router",
        "_task",
        "_timeline",
        "_tracked_call",
    )

    def __init__(
        self,
        router: RequestRouter,
        request: GenerateRequest,
        timeline: ChoiceTimeline,
        on_event: OnEvent,
        selection: WorkerSelection | None,
    ) -> None:
        super().__init__(on_event)
        self._router = router
        self._timeline = timeline
        self._flow = GenerationFlow(self, request, timeline, router.options, selection)
        # Log lines take the ids of the request from the current context. Events arrive in the
        # context of the transport, so the flow runs in this one.
        self._context = contextvars.copy_context()
        self._call: StreamReceiver | None = None
        # What `suspects` knows of the current call.
        self._tracked_call = TrackedCall(timeline.suspicion, self._flow.progress)
        # Waits for what the flow needs beside calls, such as a decode slot or other workers.
        self._task: asyncio.Task[None] | None = None
        # The current attempt: its number, when it began, and its index for round robin.
        self._attempt = -1
        self._attempt_begun_s = 0.0
        self._round_robin_index = 0
        # Counts the request in the loads of its workers.
        self._placed: PlacedRequest | None = None
        asyncio.get_running_loop().call_soon(self._handle, Signal.START)

    def _handle(self, event: FlowEvent) -> None:
        """Pass an event to the flow, and pass its answer to the client."""
        try:
            # Nearly all events are chunks of this kind.
            if isinstance(event, Chunk) and self._flow.try_forward(event):
                if self._on_event is not None:
                    self._on_event(event)
                return
            answer = self._context.run(self._flow.handle, event)
            if answer is not None:
                self.emit(answer)
        except Exception as exc:  # noqa: BLE001 - a bug: logged, and the client gets InternalError
            error = unexpected_error(exc, self._flow.request.request_id)
            if event is not Signal.CANCEL:
                # The flow frees its KV and its slot.
                self._handle(Signal.CANCEL)
            self._stop()
            self.emit(error)

    def _on_event_of_scored_prompt(self, event: StreamEvent) -> None:
        """Take an event of a call that computes the log-probabilities of its prompt.

        These go to the timeline, and all other events to the flow.
        """
        if isinstance(event, Chunk) and event.prompt_logprobs:
            self._timeline.prompt_logprobs += event.prompt_logprobs
        else:
            self._handle(event)

    # --- the driver of the flow, see `FlowDriver` -------------------------------------------------

    def select(
        self, attempt: int, excluded: frozenset[int], avoid: int | None, is_last_resort: bool
    ) -> WorkerSelection | DynamoError:
        request = self._flow.request
        placement = self._router.placement
        if attempt != self._attempt:
            self._attempt = attempt
            self._attempt_begun_s = self._router.clocks.monotonic()
            self._timeline.attempt_began()
            self._round_robin_index = self._router.selector.new_round_robin_index(request.model)
        # The workers of the last attempt or selection do not run this request any more.
        self._end_placed()
        self.end_trial()
        self._router.suspects.end(self._tracked_call)
        try:
            self._router.suspects.check(request)
            if is_last_resort:
                # Requests may use the model's new pairs, which were not probed yet.
                self._router.breakers.allow_unprobed(self._router.view.model(request.model))
            selection = self._select_workers(excluded, avoid, is_first=attempt == 0)
        except DynamoError as exc:
            # Its frames refer to this stream, and the flow may keep the error.
            return exc.with_traceback(None)
        if placement is not None:
            self._placed = placement.start(selection, request, self._router.clocks.monotonic())
            self._timeline.selected(request, selection, placement.mode)
        shares = self._router.view.model(request.model).shares
        self._timeline.placed(request, selection, shares)
        return selection

    def _select_workers(
        self, excluded: frozenset[int], avoid: int | None, *, is_first: bool
    ) -> WorkerSelection:
        """Select the workers of an attempt.

        They are the workers of the prompt's other choices if possible, else those that the router
        mode selects. The router mode may reject the first attempt of a request.
        """
        router = self._router
        suspicion = self._timeline.suspicion
        if self._flow.awaits_trial:
            # Workers on which other suspects are tried are not free for this one.
            excluded |= router.suspects.workers_of_other_trials(suspicion)
        selector = router.selector
        now = self._router.clocks.monotonic()
        # All choices of a prompt run on the same workers. Otherwise one request could end all
        # workers at once. They have one suspicion: the first choice that selects workers stores its
        # selection there, and the others use it.
        selection = suspicion.selection
        is_usable = (
            suspicion.is_shared
            and selection is not None
            and selector.is_usable(selection, now, excluded=excluded, avoid=avoid)
        )
        if selection is None or not is_usable:
            selection = selector.select(
                self._flow.request,
                self._round_robin_index,
                now,
                excluded=excluded,
                avoid=avoid,
                waited_s=self._timeline.waited_s(now),
                may_reject=is_first,
            )
        suspicion.selection = selection
        if suspicion.unexplained_deaths():
            router.suspects.begin_trial(
                self._tracked_call, selection, is_prime=self._flow.is_prime_suspect
            )
        return selection

    def select_other_decode(self, prefill: Instance, tried: frozenset[int]) -> Instance | None:
        return self._router.selector.select_other_decode(
            self._flow.request, prefill, tried, self._router.clocks.monotonic()
        )

    def wait_for_workers(self, limit_s: float) -> None:
        router = self._router
        request = self._flow.request
        wait_left_s = self._attempt_begun_s + limit_s - self._router.clocks.monotonic()
        request_left_s = request.deadline - self._router.clocks.epoch()
        left_s = min(wait_left_s, request_left_s)
        if left_s <= 0:
            asyncio.get_running_loop().call_soon(self._handle, Signal.WAIT_TIMED_OUT)
            return
        model_view = router.view.model(request.model)
        quarantined_pair = model_view.first_pair_of(router.breakers.quarantined)
        self._timeline.waiting_for_workers(request, quarantined_pair)
        self._run(_wait(router.view.changed, left_s))

    def reserve_decode_slot(self, decode: Instance, reservation_id: str) -> None:
        self._timeline.reserving_slot(self._flow.request, decode)
        self._run(self._reserve(decode, reservation_id))

    def reissue_params(self, prefill: Instance, message: ReissueKvParams) -> None:
        self._run(self._reissue(prefill, message))

    def check_worker(self, worker: Instance) -> None:
        self._run(self._check(worker))

    def call_worker(self, worker: Instance, request: GenerateRequest) -> None:
        # A decode call with KV transfer parameters computes no prompt.
        computes_prompt = request.kv_params is None
        scores_prompt = computes_prompt and request.sampling.prompt_logprobs is not None
        if scores_prompt:
            self._timeline.prompt_logprobs.clear()
        phase = request.phase
        place = self._timeline.place
        if place is not None:
            request = _among_clients(request, place)
        if worker.role is Role.ELASTIC:
            request = _with_itl_limit(request, self._router.options.itl_s)
        self._timeline.calling(request, worker)
        if self._placed is not None:
            self._placed.on_sent(worker.id, phase, self._router.clocks.monotonic())
        on_event = self._on_event_of_scored_prompt if scores_prompt else self._handle
        # The previous call has ended. If `generate` raises, no call is in progress.
        self._call = None
        kv_holder = self._timeline.prefill_instance if phase is Phase.DECODE else None
        self._router.suspects.begin(self._tracked_call, worker.id, kv_holder)
        self._call = self._router.plane.client.generate(worker.subject, request, on_event)

    def is_pause_short(self, decode: Instance) -> bool:
        options = self._router.options
        placement = self._router.placement
        if placement is not None and placement.loads.get(decode.id).queued_prefill_tokens:
            # It computes prompts. So its steps may be longer than in the pauses that are known.
            return False
        limit_s = options.early_token_pause_s
        slo = self._flow.request.slo
        if slo is not None and slo.itl_s is not None:
            limit_s = options.early_token_part * slo.itl_s
        return self._router.pauses.is_short(decode.id, limit_s)

    def cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def collect_kv(self, prefill: Instance, decode: Instance, request: GenerateRequest) -> None:
        call = self._call
        self._call = None
        self._router.kv_collector.collect(call, prefill, decode, request)

    def send_control(self, worker: Instance, message: ReleaseKv | ReleaseSlot) -> None:
        self._router.background_control.send(worker, message)

    def record_transfer(self, pair: Pair, error: DynamoError | None = None) -> None:
        if error is None:
            # The first chunk of the decode call has shown that the KV arrived.
            self._router.suspects.kv_arrived(self._tracked_call)
            self._note_pause(pair)
            self._timeline.decode_began()
            if self._placed is not None:
                self._placed.on_prefill_done()
        self._router.health.record_transfer(pair, error, self._router.clocks.monotonic())

    def _note_pause(self, pair: Pair) -> None:
        """Note how long the decode worker took to answer."""
        prefill_id, decode_id = pair
        called_s = self._timeline.called_s
        if prefill_id is not None and called_s is not None:
            self._router.pauses.note(decode_id, self._timeline.clock() - called_s)

    def record_death(self, worker: Instance) -> QueryOfDeath | None:
        router = self._router
        error = router.suspects.record_death(self._tracked_call, worker.id, self._flow.request)
        if error is not None:
            # Other requests that wait are no suspects any more.
            router.view.notify_changed()
        return error

    def is_death_explained(self, worker: Instance) -> bool:
        return self._router.suspects.is_explained(worker.id)

    def end_trial(self) -> None:
        if self._tracked_call.trial_workers:
            self._router.suspects.end_trial(self._tracked_call)
            # Other suspects may wait for these workers.
            self._router.view.notify_changed()

    def record_failure(self, worker: Instance, error: DynamoError, next_step: str | None) -> None:
        self._router.health.record_failed_call(worker.id, error, self._router.clocks.monotonic())
        self._router.suspects.end(self._tracked_call)
        request = self._flow.request
        goes_on = next_step is not None
        self._timeline.call_failed(request, worker, error, goes_on=goes_on)
        if goes_on and self._router.failure_lines.admits():
            log.warning(
                "request %s: call to worker %x failed, %s (%s): %s",
                short_id(request.request_id),
                worker.id,
                next_step,
                error.code,
                error.message,
            )

    def _end_placed(self, *, is_done: bool = False) -> None:
        if self._placed is not None:
            self._placed.end(is_done=is_done)
            self._placed = None

    def _run(self, work: Coroutine[Any, Any, FlowEvent]) -> None:
        name = f"request-{self._flow.request.request_id}"
        self._task = asyncio.get_running_loop().create_task(self._await_answer(work), name=name)

    async def _await_answer(self, work: Coroutine[Any, Any, FlowEvent]) -> None:
        try:
            answer = await work
        except DynamoError as exc:
            # Its frames refer to this stream, and the flow may keep the error.
            answer = exc.with_traceback(None)
        except Exception as exc:  # noqa: BLE001 - logged, and the client gets InternalError
            answer = unexpected_error(exc, self._flow.request.request_id)
        self._task = None
        self._handle(answer)

    async def _reserve(self, decode: Instance, reservation_id: str) -> Signal:
        deadline = self._flow.request.deadline
        now = self._router.clocks.epoch()
        if deadline <= now:
            raise DeadlineExceeded(
                "the request's deadline passed before a decode slot was reserved"
            )
        left_s = min(deadline - now, MAX_RESERVATION_S)
        message = ReserveSlot(reservation_id, now + left_s, left_s)
        timeout_s = min(deadline - now, _RESERVE_TIMEOUT_S)
        await self._router.plane.client.control(decode.subject, message, timeout_s=timeout_s)
        return Signal.SLOT_RESERVED

    async def _reissue(self, prefill: Instance, message: ReissueKvParams) -> KvTransferParams:
        reply = await self._router.plane.client.control(
            prefill.subject, message, timeout_s=_REISSUE_TIMEOUT_S
        )
        return decode(reply, KvTransferParams)

    async def _check(self, worker: Instance) -> Signal:
        await self._router.plane.client.check_listener(worker.subject, num_pings=2)
        return Signal.WORKER_LISTENS

    def _stop(self) -> None:
        """End what is in progress."""
        if self._call is not None:
            # Nothing happens if the call has ended.
            self._call.cancel()
        if self._task is not None:
            self._task.cancel()

    def _close(self, last: StreamEvent | None) -> None:
        is_done = isinstance(last, Chunk)
        self._timeline.ended(self._flow.request)
        self._end_placed(is_done=is_done)
        if is_done:
            self._router.suspects.completed(self._flow.request)
        self._router.suspects.end(self._tracked_call)
        self.end_trial()
        is_cancelled = last is None
        if is_cancelled:
            # The flow may pass the call to the KV collector. Then `_stop` finds no call.
            self._handle(Signal.CANCEL)
            self._stop()


async def _wait(changed: asyncio.Event, limit_s: float) -> Signal:
    try:
        async with asyncio.timeout(limit_s):
            await changed.wait()
    except TimeoutError:
        return Signal.WAIT_TIMED_OUT
    return Signal.WORKERS_CHANGED


def _with_itl_limit(request: GenerateRequest, itl_s: float | None) -> GenerateRequest:
    """Return a call with the limit between tokens of the frontend, if the request sets none.

    The steps of an elastic engine follow the limits of its streams.
    """
    own = request.slo
    if itl_s is None or (own is not None and own.itl_s is not None):
        return request
    slo = RequestSlo(ttft_s=None if own is None else own.ttft_s, itl_s=itl_s)
    return msgspec.structs.replace(request, slo=slo)


def _among_clients(request: GenerateRequest, place: StartPlace) -> GenerateRequest:
    """Return a call with the share and the priority that it has among the calls of all clients.

    Workers order all calls by these; lower priorities come first. A priority that only orders the
    requests of one client has had its effect in the queue of the frontend, so the rank counts here.
    """
    # A place that was left has the rank 0.
    priority = max(request.priority, place.rank)
    if place.share is ClientShare.EVEN and priority == request.priority:
        return request
    return msgspec.structs.replace(request, client_share=place.share, priority=priority)

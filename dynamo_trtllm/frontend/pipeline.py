"""Runs one request as a prefill call and a decode call. Only this module knows both; it handles no HTTP and no text.

Steps: select workers → (decode_first: reserve a decode slot) → prefill call (one chunk with a ticket) → decode call
(all tokens) → release the ticket at the prefill worker. A prefill call that finishes the request needs no decode call.
When a call fails, `retry_state` decides what follows. Closing the stream closes the current call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dynamo_trtllm.errors import (
    DeadlineExceeded,
    Disconnected,
    Draining,
    DynamoError,
    NoInstances,
    Overloaded,
    StreamIncomplete,
    TransferFailed,
    TransferTimeout,
    Unreachable,
)
from dynamo_trtllm.frontend.background_control import BackgroundControl
from dynamo_trtllm.frontend.retry_state import Cooldown, RecoveryLimits, RetryState, is_not_accepted
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Instance,
    Phase,
    PhaseTimings,
    ReleaseOutcome,
    ReserveSlot,
)
from dynamo_trtllm.request_plane.base import Plane, Sink
from dynamo_trtllm.router.pair_breakers import Pair, PairBreakers, PairState, format_pair, pairs_of
from dynamo_trtllm.router.policy import WorkerSelection, select
from dynamo_trtllm.router.view import ClusterView, pairing_key

_log = logging.getLogger(__name__)

_RESERVE_TIMEOUT_S = 2.0
_RESERVED_S = 60.0  # longest that a slot outlives a frontend that died; a decode call after it queues like any other


@dataclass(slots=True)
class RouteTrace:
    """Who served a request and where its time went; filled while the stream runs. Of several attempts, the last."""

    prefill_instance: int | None = None
    decode_instance: int | None = None
    prefill_stats: PhaseTimings | None = None
    decode_stats: PhaseTimings | None = None
    retries: int = 0
    migrations: int = 0


class _Out(NamedTuple):
    """Where the calls of one attempt write their results."""

    trace: RouteTrace
    sink: Sink | None
    is_probe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What a request may cost when workers fail it or are missing."""

    limits: RecoveryLimits = field(default_factory=RecoveryLimits)
    hold_s: float = 0.0  # longest wait for a role that has no instance
    decode_fallback: bool = False  # decode workers do whole requests while there is no prefill worker
    # Canaries test new and quarantined pairs. Without canaries, requests do: quarantined pairs get them after a while.
    has_probes: bool = False


class Pipeline:
    """Close it after the last stream."""

    def __init__(
        self,
        view: ClusterView,
        plane: Plane,
        options: PipelineOptions | None = None,
        breakers: PairBreakers | None = None,
    ) -> None:
        """`breakers` gets the outcome of every hand-off, and keeps requests off the pairs it has shut."""
        self._view = view
        self._breakers = breakers or PairBreakers()
        self._plane = plane
        self._options = options or PipelineOptions()
        self._round_robin: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._cooldown = Cooldown()
        self._background_control = BackgroundControl(plane)
        self._withheld_at: asyncio.Event | None = None  # the view's change up to which new pairs are withheld

    async def generate(
        self, request: GenerateRequest, trace: RouteTrace, sink: Sink | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of the whole request, exactly one of them terminal. Consume with `aclosing`.

        `sink`: may be given chunks that are not yielded then, as in `Plane.generate`.

        Raises NoInstances, TransferMismatch, MigrationFailed, and errors of a call after which there is no retry.
        """
        retry_state = RetryState(request=request, limits=self._options.limits)
        sink = sink and retry_state.count_tokens(sink)
        while not retry_state.is_complete:
            selection = await self._select_or_wait(retry_state)
            trace.prefill_instance = trace.decode_instance = None
            try:
                attempt = self.attempt(selection, retry_state.remaining(), trace, sink)
                async with aclosing(attempt) as chunks:
                    async for chunk in chunks:
                        retry_state.on_chunk(chunk)
                        yield chunk
                return
            except DynamoError as exc:
                at, card = self.record_unreachable(trace, exc), selection.decode.card
                retry_state.record_failure(exc, at=at, prefill=trace.prefill_instance, card=card)
                trace.retries, trace.migrations = retry_state.retries, retry_state.migrations
                _log.warning("request %s: a call failed, retrying (%s): %s", request.request_id, exc.code, exc.message)
        yield Chunk(finish_reason=FinishReason.LENGTH)

    async def _select_or_wait(self, retry_state: RetryState) -> WorkerSelection:
        """Where the next attempt runs; waits a bounded time for an instance that is not there yet."""
        loop = asyncio.get_running_loop()
        begun_s, hold_s = loop.time(), self._options.hold_s
        round_robin_index = next(self._round_robin[retry_state.request.model])
        while True:
            changed = self._view.changed
            try:
                return self._select(retry_state, round_robin_index)
            except NoInstances as missing:
                pause_s = retry_state.pause_s(hold_s) if retry_state.excluded else hold_s
                untried = pairs_of(self._view.model(retry_state.request.model))
                if pause_s is None or not retry_state.is_worth_waiting:
                    if self._breakers.admit(untried):
                        continue  # a pair that no canary has tried yet is better than none
                    raise retry_state.error or missing from None
                left_s = min(pause_s - (loop.time() - begun_s), retry_state.request.deadline - time.time())
                if await _happens(changed, left_s):
                    continue
                if self._breakers.admit(untried):
                    continue
                if not retry_state.excluded:
                    raise retry_state.error or missing from None
                retry_state.next_round()

    def _select(self, retry_state: RetryState, round_robin_index: int) -> WorkerSelection:
        self._update_breakers()
        cooling_down = self._cooldown.ids(time.monotonic())
        if cooling_down:
            try:
                return self._select_excluding(
                    cooling_down | retry_state.excluded if retry_state.excluded else cooling_down,
                    retry_state,
                    round_robin_index,
                )
            except NoInstances:
                pass  # better one that may be back than none
        return self._select_excluding(frozenset(retry_state.excluded), retry_state, round_robin_index)

    def _update_breakers(self) -> None:
        """Update which pairs get no requests; called before a pair is chosen."""
        if not self._options.has_probes:
            if self._breakers.any_open:
                self._breakers.half_open(time.monotonic())
        elif self._withheld_at is not self._view.changed:
            self._withheld_at = self._view.changed
            for name in self._view.models():
                self._breakers.withhold(pairs_of(self._view.model(name)))

    def _select_excluding(
        self, ids: frozenset[int], retry_state: RetryState, round_robin_index: int
    ) -> WorkerSelection:
        model = retry_state.request.model
        view = self._view.model(model).excluding(ids)
        fallback = self._options.decode_fallback
        return select(view, model, round_robin_index, self._breakers, avoid=retry_state.avoid, decode_fallback=fallback)

    def record_unreachable(self, trace: RouteTrace, error: DynamoError) -> int | None:
        """Note a failed attempt; return the id of the instance whose call failed."""
        at = trace.prefill_instance if trace.decode_instance is None else trace.decode_instance
        if at is not None:
            self._record_unreachable(at, error)
        return at

    def _record_unreachable(self, instance_id: int, error: DynamoError) -> None:
        """Skip an instance for a while if it did not accept a call. None of its pairs is known to work any more."""
        now = time.monotonic()
        if is_not_accepted(error):
            self._cooldown.start(instance_id, now)
        if is_not_accepted(error) or isinstance(error, Disconnected):
            reason = f"{error.code}: {error.message}"
            worked = [
                pair
                for pair in self._breakers.pairs_with(instance_id)
                if self._breakers.record_unreachable(pair, reason, now)
            ]
            if worked:
                self._view.notify_changed()  # canaries try them soon

    def attempt(
        self,
        selection: WorkerSelection,
        request: GenerateRequest,
        trace: RouteTrace,
        sink: Sink | None = None,
        *,
        is_probe: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """One attempt on the given instances, with no recovery; as `generate` otherwise. With `is_probe` no other
        decode instance gets its ticket, and whether the pair works is for the caller to note: it knows at the end."""
        out = _Out(trace, sink, is_probe)
        if selection.prefill is None:
            return self._run_aggregated(selection.decode, request, out)
        return self._run_pair(selection.prefill, selection.decode, request, out)

    async def _run_aggregated(
        self, instance: Instance, request: GenerateRequest, out: _Out
    ) -> AsyncGenerator[Chunk, None]:
        trace = out.trace
        trace.decode_instance = instance.id
        is_recorded = out.is_probe
        async with aclosing(self._plane.generate(instance.subject, request, out.sink)) as chunks:
            async for chunk in chunks:
                if not is_recorded:
                    is_recorded = True
                    self.record_success((None, instance.id))
                trace.decode_stats = chunk.stats or trace.decode_stats
                yield chunk

    async def _run_pair(
        self, prefill: Instance, decode: Instance, request: GenerateRequest, out: _Out
    ) -> AsyncGenerator[Chunk, None]:
        trace = out.trace
        slot = await self._reserve(decode, request, trace) if decode.strategy == "decode_first" else None
        begun, ticket, tried = False, None, {decode.id}
        try:
            last = await self._prefill(prefill, request, trace)
            ticket = last.ticket
            if ticket is None:
                yield last
                return
            call = msgspec.structs.replace(request, phase=Phase.DECODE, ticket=ticket, reservation_id=slot)
            while not begun:
                try:
                    async with aclosing(self._decode(prefill, decode, call, out)) as chunks:
                        async for chunk in chunks:
                            begun = True
                            yield chunk
                except (Draining, Unreachable, Overloaded) as exc:
                    other = self._other_decode(prefill, tried) if not (out.is_probe or begun) else None
                    if other is None:
                        raise
                    self._record_unreachable(decode.id, exc)
                    _log.info("instance %x decodes %s instead (%s)", other.id, request.request_id, exc.code)
                    self._background_control.release_slot(decode, slot)
                    call, slot = msgspec.structs.replace(call, reservation_id=None), None
                    decode = other
                    tried.add(decode.id)
        finally:
            if not begun:
                self._background_control.release_slot(decode, slot)  # the call may never have arrived
                if ticket is not None:
                    self._background_control.release(prefill, ticket, ReleaseOutcome.ABORTED)

    async def _decode(
        self, prefill: Instance, decode: Instance, call: GenerateRequest, out: _Out
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a decode call. The first one means that the KV has arrived, so its ticket is released."""
        trace = out.trace
        trace.decode_instance = decode.id
        ticket = call.ticket
        try:
            async with aclosing(self._plane.generate(decode.subject, call, out.sink)) as chunks:
                async for chunk in chunks:
                    if ticket is not None:
                        self._background_control.release(prefill, ticket, ReleaseOutcome.FETCHED)
                        if not out.is_probe:
                            self.record_success((prefill.id, decode.id))
                        ticket = None
                    trace.decode_stats = chunk.stats or trace.decode_stats
                    yield chunk
        except (TransferFailed, TransferTimeout) as exc:
            self._record_failure((prefill.id, decode.id), exc)
            raise

    def _other_decode(self, prefill: Instance, tried: set[int]) -> Instance | None:
        """Another one that can redeem this prefill instance's tickets."""
        self._update_breakers()
        model = prefill.card.name
        view, key = (
            self._view.model(model).excluding(self._cooldown.ids(time.monotonic()) | tried),
            pairing_key(prefill),
        )
        candidates = [
            d for d in view.decode if view.keys[d.id] == key and not self._breakers.is_open((prefill.id, d.id))
        ]
        return candidates[next(self._round_robin[model]) % len(candidates)] if candidates else None

    async def _reserve(self, decode: Instance, request: GenerateRequest, trace: RouteTrace) -> str:
        """Reserve a slot for this request's decode call and return its id. Raises Overloaded when there is none."""
        slot = secrets.token_hex(8)
        trace.decode_instance = decode.id  # what fails here is the decode instance's
        left_s = request.deadline - time.time()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before a decode slot was kept for it")
        command = ReserveSlot(slot, min(request.deadline, time.time() + _RESERVED_S))
        try:
            await self._plane.control(decode.subject, command, timeout_s=min(left_s, _RESERVE_TIMEOUT_S))
        except Overloaded:
            raise
        except BaseException:  # cancelled too: the worker may have kept it
            self._background_control.release_slot(decode, slot)
            raise
        trace.decode_instance = None
        return slot

    def record_success(self, pair: Pair, *, is_probe: bool = False, note: str = "") -> None:
        """Note that KV was read at the other end; arguments as of `PairBreakers.record_success`."""
        for instance_id in filter(None, pair):
            self._cooldown.forget(instance_id)
        if self._breakers.record_success(pair, time.monotonic(), is_probe=is_probe, note=note):
            self._view.notify_changed()  # requests may wait for it
            _log.info("%s works", format_pair(pair))

    def _record_failure(self, pair: Pair, error: DynamoError) -> None:
        worked = self._breakers.status(pair).state is PairState.WORKING
        opened = self._breakers.record_failure(pair, f"{error.code}: {error.message}", time.monotonic())
        if worked or opened:
            self._view.notify_changed()  # a canary tries it when that is due
        if opened:
            _log.error("%s is quarantined (%s): %s", format_pair(pair), error.code, error.message)

    async def _prefill(self, instance: Instance, request: GenerateRequest, trace: RouteTrace) -> Chunk:
        """Return the terminal chunk of the prefill call, with a ticket or with the whole answer."""
        trace.prefill_instance = instance.id
        call = msgspec.structs.replace(request, phase=Phase.PREFILL)
        async with aclosing(self._plane.generate(instance.subject, call)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is None:
                    continue
                if (chunk.finish_reason is FinishReason.KV_TRANSFER) != (chunk.ticket is not None):
                    raise StreamIncomplete(f"prefill instance {instance.id:x} ended with no ticket; restart it")
                trace.prefill_stats = chunk.stats
                return chunk
        raise StreamIncomplete(f"prefill instance {instance.id:x} ended without a terminal chunk")

    async def aclose(self) -> None:
        """Waits a bounded time for the verbs under way."""
        await self._background_control.aclose()


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    """Whether `event` is set in time."""
    try:
        async with asyncio.timeout(max(0.0, within_s)):
            await event.wait()
    except TimeoutError:
        return False
    return True

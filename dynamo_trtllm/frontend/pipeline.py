"""One request through its legs. The only file that knows there are two; knows no HTTP and no text.

place → (decode_first: keep a decode slot) → prefill leg (one chunk with a ticket) → decode leg (all tokens) → tell the
prefill worker that the ticket is done with. A prefill leg that finishes the request has no decode leg. When a leg
fails, `recovery` says what follows. Closing the stream closes the leg that runs.
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

import msgspec

from dynamo_trtllm.errors import (
    DeadlineExceeded,
    DynamoError,
    HandoffTimeout,
    NoInstances,
    Overloaded,
    StreamIncomplete,
    TransferFailed,
)
from dynamo_trtllm.frontend.recovery import Recovery, RecoveryLimits
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    HandoffTicket,
    Instance,
    LegStats,
    Phase,
    Release,
    ReleaseOutcome,
    Reserve,
    Unreserve,
)
from dynamo_trtllm.plane.base import Plane
from dynamo_trtllm.router.pairs import Pair, PairBook, spelled
from dynamo_trtllm.router.policy import Placement, place
from dynamo_trtllm.router.view import ClusterView

_log = logging.getLogger(__name__)

_VERB_TIMEOUT_S = 5.0
_RESERVE_TIMEOUT_S = 2.0
_RESERVED_S = 60.0  # longest that a slot outlives a frontend that died; a leg that comes later queues as any other


@dataclass(slots=True)
class Trace:
    """Who served a request and where its time went; filled while the stream runs. Of several attempts, the last."""

    prefill_instance: int | None = None
    decode_instance: int | None = None
    prefill_stats: LegStats | None = None
    decode_stats: LegStats | None = None
    retries: int = 0
    migrations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What a request may cost when workers fail it or are missing."""

    limits: RecoveryLimits = field(default_factory=RecoveryLimits)
    hold_s: float = 0.0  # longest wait for a role that has no instance
    decode_fallback: bool = False  # decode workers do whole requests while there is no prefill worker


class Pipeline:
    """Owns the verbs it posts; close it after the last stream."""

    def __init__(
        self,
        view: ClusterView,
        plane: Plane,
        options: PipelineOptions | None = None,
        book: PairBook | None = None,
    ) -> None:
        """`book` gets the outcome of every hand-off, and keeps requests off the pairs it has shut."""
        self._view = view
        self._book = book or PairBook()
        self._plane = plane
        self._options = options or PipelineOptions()
        self._turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._posted: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, trace: Trace) -> AsyncGenerator[Chunk, None]:
        """The chunks of the whole request, exactly one of them terminal. Consume with `aclosing`.

        Raises NoInstances, TicketMismatch, NotMigratable and whatever a leg raises that `recovery` does not mend.
        """
        recovery = Recovery(request=request, limits=self._options.limits)
        while not recovery.is_complete:
            placement = await self._placed(recovery)
            trace.prefill_instance = trace.decode_instance = None
            try:
                async with aclosing(self.legs(placement, recovery.remaining(), trace)) as chunks:
                    async for chunk in chunks:
                        recovery.took(chunk)
                        yield chunk
                return
            except DynamoError as exc:
                at = trace.prefill_instance if trace.decode_instance is None else trace.decode_instance
                card = placement.decode.card
                recovery.failed(exc, at=at, prefill=trace.prefill_instance, card=card)
                trace.retries, trace.migrations = recovery.retries, recovery.migrations
                _log.warning(
                    "a leg of %s failed, going on elsewhere (%s): %s", request.request_id, exc.code, exc.message
                )
        yield Chunk(finish_reason=FinishReason.LENGTH)

    async def _placed(self, recovery: Recovery) -> Placement:
        """Where the next attempt runs; waits a bounded time for an instance that is not there yet."""
        model = recovery.request.model
        held_s = min(self._options.hold_s, recovery.request.deadline - time.time())
        give_up_at = asyncio.get_running_loop().time() + held_s
        turn = next(self._turns[model])
        while True:
            changed = self._view.changed
            try:
                return self._place(recovery, turn)
            except NoInstances as missing:
                if recovery.is_worth_waiting and await _happens(changed, give_up_at):
                    continue
                if not recovery.gone or not recovery.is_worth_waiting:
                    raise recovery.error or missing from None
                recovery.gone.clear()  # nobody else came: perhaps it was the way there that failed, not they

    def _place(self, recovery: Recovery, turn: int) -> Placement:
        model = recovery.request.model
        view = self._view.model(model).without(recovery.gone)
        fallback = self._options.decode_fallback
        return place(view, model, turn, self._book, avoid=recovery.shunned, decode_fallback=fallback)

    def legs(self, placement: Placement, request: GenerateRequest, trace: Trace) -> AsyncGenerator[Chunk, None]:
        """One attempt on the given instances, with no recovery; as `generate` otherwise."""
        if placement.prefill is None:
            return self._whole(placement.decode, request, trace)
        return self._pair(placement.prefill, placement.decode, request, trace)

    async def _whole(self, instance: Instance, request: GenerateRequest, trace: Trace) -> AsyncGenerator[Chunk, None]:
        trace.decode_instance = instance.id
        noted = False
        async with aclosing(self._plane.generate(instance.subject, request)) as chunks:
            async for chunk in chunks:
                if not noted:
                    noted = True
                    self._note_passed((None, instance.id))
                trace.decode_stats = chunk.stats or trace.decode_stats
                yield chunk

    async def _pair(
        self, prefill: Instance, decode: Instance, request: GenerateRequest, trace: Trace
    ) -> AsyncGenerator[Chunk, None]:
        slot = await self._reserve(decode, request, trace) if decode.strategy == "decode_first" else None
        try:
            last = await self._prefill(prefill, request, trace)
        except BaseException:
            self._post_unreserve(decode, slot)
            raise
        if last.ticket is None:
            self._post_unreserve(decode, slot)
            yield last
            return
        outcome = ReleaseOutcome.REFUSED
        trace.decode_instance = decode.id
        leg = msgspec.structs.replace(request, phase=Phase.DECODE, ticket=last.ticket, reservation_id=slot)
        try:
            async with aclosing(self._plane.generate(decode.subject, leg)) as chunks:
                async for chunk in chunks:
                    if outcome is ReleaseOutcome.REFUSED:
                        outcome = ReleaseOutcome.REDEEMED  # a first chunk means that the KV has arrived
                        self._post_release(prefill, last.ticket, outcome)
                        self._note_passed((prefill.id, decode.id))
                    trace.decode_stats = chunk.stats or trace.decode_stats
                    yield chunk
        except (TransferFailed, HandoffTimeout) as exc:
            self._note_failed((prefill.id, decode.id), exc)
            raise
        finally:
            if outcome is ReleaseOutcome.REFUSED:
                self._post_release(prefill, last.ticket, outcome)
                self._post_unreserve(decode, slot)  # the leg may never have arrived

    async def _reserve(self, decode: Instance, request: GenerateRequest, trace: Trace) -> str:
        """The id of a slot that is kept for this request's decode leg. Raises Overloaded when there is none."""
        slot = secrets.token_hex(8)
        trace.decode_instance = decode.id  # what fails here is the decode instance's
        left_s = request.deadline - time.time()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before a decode slot was kept for it")
        verb = Reserve(slot, min(request.deadline, time.time() + _RESERVED_S))
        try:
            await self._plane.control(decode.subject, verb, timeout_s=min(left_s, _RESERVE_TIMEOUT_S))
        except Overloaded:
            raise
        except BaseException:  # cancelled too: the worker may have kept it
            self._post_unreserve(decode, slot)
            raise
        trace.decode_instance = None
        return slot

    def _note_passed(self, pair: Pair) -> None:
        if self._book.passed(pair, time.monotonic()):
            _log.info("%s works", spelled(pair))

    def _note_failed(self, pair: Pair, error: DynamoError) -> None:
        if self._book.failed(pair, f"{error.code}: {error.message}", time.monotonic()):
            _log.error("%s is quarantined (%s): %s", spelled(pair), error.code, error.message)

    async def _prefill(self, instance: Instance, request: GenerateRequest, trace: Trace) -> Chunk:
        """The terminal chunk of the prefill leg: with a ticket, or with the whole answer."""
        trace.prefill_instance = instance.id
        leg = msgspec.structs.replace(request, phase=Phase.PREFILL)
        async with aclosing(self._plane.generate(instance.subject, leg)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is None:
                    continue
                if (chunk.finish_reason is FinishReason.HANDOFF) != (chunk.ticket is not None):
                    raise StreamIncomplete(f"prefill instance {instance.id:x} ended with no ticket; restart it")
                trace.prefill_stats = chunk.stats
                return chunk
        raise StreamIncomplete(f"prefill instance {instance.id:x} ended without a terminal chunk")

    def _post_release(self, holder: Instance, ticket: HandoffTicket, outcome: ReleaseOutcome) -> None:
        self._post(holder, Release(ticket.ticket_id, outcome), f"ticket {ticket.ticket_id} was not released")

    def _post_unreserve(self, decode: Instance, slot: str | None) -> None:
        if slot is not None:
            self._post(decode, Unreserve(slot), f"decode slot {slot} was not given back")

    def _post(self, instance: Instance, verb: Release | Unreserve, complaint: str) -> None:
        """Posts and returns: it also runs while a cancelled stream is closed, where nothing may be awaited."""
        task = asyncio.get_running_loop().create_task(self._tell(instance, verb, complaint))
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)

    async def _tell(self, instance: Instance, verb: Release | Unreserve, complaint: str) -> None:
        try:
            await self._plane.control(instance.subject, verb, timeout_s=_VERB_TIMEOUT_S)
        except DynamoError as exc:  # it expires at the worker then
            _log.warning("%s (%s): %s", complaint, exc.code, exc.message)

    async def aclose(self) -> None:
        """Waits for the verbs under way, each of which is bounded."""
        await asyncio.gather(*self._posted)


async def _happens(event: asyncio.Event, before: float) -> bool:
    """Whether `event` is set before the loop's clock shows `before`."""
    try:
        async with asyncio.timeout_at(before):
            await event.wait()
    except TimeoutError:
        return False
    return True

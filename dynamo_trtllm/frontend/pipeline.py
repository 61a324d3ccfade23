"""One request through its legs. The only file that knows there are two; knows no HTTP and no text.

place → prefill leg (one chunk with a ticket) → decode leg (all tokens) → tell the prefill worker that the ticket is
done with. A prefill leg that finishes the request has no decode leg. Closing the stream closes the leg that runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from dynamo_trtllm.errors import DynamoError, HandoffError, StreamIncomplete
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
)
from dynamo_trtllm.plane.base import Plane
from dynamo_trtllm.router.policy import Placement, place
from dynamo_trtllm.router.view import ClusterView

_log = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Trace:
    """Who served a request and where its time went; filled while the stream runs."""

    prefill_instance: int | None = None
    decode_instance: int | None = None
    prefill_stats: LegStats | None = None
    decode_stats: LegStats | None = None


class Pipeline:
    """Owns the releases it sends; close it after the last stream."""

    def __init__(self, view: ClusterView, plane: Plane) -> None:
        self._view = view
        self._plane = plane
        self._turns: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._releases: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, trace: Trace) -> AsyncGenerator[Chunk, None]:
        """The chunks of the whole request, exactly one of them terminal. Consume with `aclosing`.

        Raises NoInstances, TicketMismatch and whatever a leg raises. A hand-off that fails before a token left is
        tried once more from the prefill leg on, elsewhere if there is an elsewhere: its KV is gone, the request is not.
        """
        placement = self._place(request.model)
        started = False
        try:
            async with aclosing(self._legs(placement, request, trace)) as chunks:
                async for chunk in chunks:
                    started = True
                    yield chunk
                return
        except HandoffError as exc:
            if started or placement.prefill is None:
                raise
            _log.warning("hand-off failed (%s), prefilling once more: %s", exc.code, exc.message)
        placement = self._place(request.model, avoid=placement.prefill.id)
        async with aclosing(self._legs(placement, request, trace)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _place(self, model: str, avoid: int | None = None) -> Placement:
        return place(self._view.model(model), model, next(self._turns[model]), avoid=avoid)

    def _legs(self, placement: Placement, request: GenerateRequest, trace: Trace) -> AsyncGenerator[Chunk, None]:
        if placement.prefill is None:
            return self._whole(placement.decode, request, trace)
        return self._pair(placement.prefill, placement.decode, request, trace)

    async def _whole(self, instance: Instance, request: GenerateRequest, trace: Trace) -> AsyncGenerator[Chunk, None]:
        trace.decode_instance = instance.id
        async with aclosing(self._plane.generate(instance.subject, request)) as chunks:
            async for chunk in chunks:
                trace.decode_stats = chunk.stats or trace.decode_stats
                yield chunk

    async def _pair(
        self, prefill: Instance, decode: Instance, request: GenerateRequest, trace: Trace
    ) -> AsyncGenerator[Chunk, None]:
        last = await self._prefill(prefill, request, trace)
        if last.ticket is None:
            yield last
            return
        outcome = ReleaseOutcome.REFUSED
        trace.decode_instance = decode.id
        leg = msgspec.structs.replace(request, phase=Phase.DECODE, ticket=last.ticket)
        try:
            async with aclosing(self._plane.generate(decode.subject, leg)) as chunks:
                async for chunk in chunks:
                    if outcome is ReleaseOutcome.REFUSED:
                        outcome = ReleaseOutcome.REDEEMED  # a first chunk means that the KV has arrived
                        self._post_release(prefill, last.ticket, outcome)
                    trace.decode_stats = chunk.stats or trace.decode_stats
                    yield chunk
        finally:
            if outcome is ReleaseOutcome.REFUSED:
                self._post_release(prefill, last.ticket, outcome)

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
        """Posts and returns: it also runs while a cancelled stream is closed, where nothing may be awaited."""
        task = asyncio.get_running_loop().create_task(self._release(holder, ticket, outcome))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, holder: Instance, ticket: HandoffTicket, outcome: ReleaseOutcome) -> None:
        try:
            verb = Release(ticket.ticket_id, outcome)
            await self._plane.control(holder.subject, verb, timeout_s=_RELEASE_TIMEOUT_S)
        except DynamoError as exc:  # the ticket's expiry frees the blocks then
            _log.warning("ticket %s was not released (%s): %s", ticket.ticket_id, exc.code, exc.message)

    async def aclose(self) -> None:
        """Waits for the releases under way, each of which is bounded."""
        await asyncio.gather(*self._releases)

"""Limits the work of one worker: calls that run or wait in the engine, reserved decode slots, and KV under tickets.

Rejects a call before the engine sees it, so that the frontend can ask another worker. Owns no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dynamo_trtllm.engines.base import EngineStats
from dynamo_trtllm.errors import Overloaded
from dynamo_trtllm.messages import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """None: as many as come."""

    active: int | None = None  # kept slots included
    ticket_kv_fraction: float = 1.0  # of the KV blocks, that tickets may hold while further prompts are taken


class Admission:
    """`clock`: seconds since the epoch, in which reservations expire."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._num_active = 0
        self._kept: dict[str, float] = {}  # reservation id -> when it expires

    def active(self) -> int:
        """Requests that are here now."""
        return self._num_active

    def reserved(self) -> int:
        """Slots that are kept now."""
        self._expire()
        return len(self._kept)

    def reserve(self, reservation_id: str, expires_at: float) -> None:
        """Reserve a slot until a call takes it, it is released or it expires. Raises Overloaded when there is none."""
        if reservation_id not in self._kept:
            self._check_capacity()
        if self._limits.active is not None:  # without a limit there is nothing to reserve
            self._kept[reservation_id] = expires_at

    def unreserve(self, reservation_id: str) -> None:
        """Release a slot. An unknown reservation is no error: a call has taken it, or it has expired."""
        self._kept.pop(reservation_id, None)

    @contextmanager
    def entered(self, request: GenerateRequest, stats: EngineStats | None) -> Iterator[None]:
        """Count a call while it runs. `stats`: the engine's, for a call that leaves KV behind. Raises Overloaded."""
        if request.reservation_id is None or self._kept.pop(request.reservation_id, None) is None:
            self._check_capacity()
        if stats is not None:
            self._check_tickets(stats)
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1

    def _check_capacity(self) -> None:
        limit = self._limits.active
        if limit is None or self._num_active + len(self._kept) < limit:
            return
        self._expire()
        if self._num_active + len(self._kept) >= limit:
            raise Overloaded(
                f"{self._num_active} requests are here and {len(self._kept)} places kept, of at most {limit}; "
                "try again later or start more workers"
            )

    def _check_tickets(self, stats: EngineStats) -> None:
        """Where decode stands still, prompts are not processed on: their KV would have no place to go."""
        total = stats.kv_blocks_total  # 0: the engine does not tell
        if total and stats.ticket_kv_blocks > self._limits.ticket_kv_fraction * total:
            raise Overloaded(
                f"{stats.tickets_held} hand-offs that no decode worker has fetched hold {stats.ticket_kv_blocks} of "
                f"{total} KV blocks; try again later or start more decode workers"
            )

    def _expire(self) -> None:
        now = self._clock()
        for reservation_id in [name for name, expires_at in self._kept.items() if expires_at <= now]:
            del self._kept[reservation_id]

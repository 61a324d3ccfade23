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
    max_pending_transfer_fraction: float = (
        1.0  # of the KV blocks, that tickets may hold while further prompts are taken
    )


class Admission:
    """`clock`: seconds since the epoch, in which reservations expire."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._num_active = 0
        self._reservations: dict[str, float] = {}  # reservation id -> when it expires

    def active(self) -> int:
        """Requests that are here now."""
        return self._num_active

    def reserved_slots(self) -> int:
        """Slots that are kept now."""
        self._expire()
        return len(self._reservations)

    def reserve(self, reservation_id: str, expires_at: float) -> None:
        """Reserve a slot until a call takes it, it is released or it expires. Raises Overloaded when there is none."""
        if reservation_id not in self._reservations:
            self._check_capacity()
        if self._limits.active is not None:  # without a limit there is nothing to reserve
            self._reservations[reservation_id] = expires_at

    def unreserve(self, reservation_id: str) -> None:
        """Release a slot. An unknown reservation is no error: a call has taken it, or it has expired."""
        self._reservations.pop(reservation_id, None)

    @contextmanager
    def admit(self, request: GenerateRequest, stats: EngineStats | None) -> Iterator[None]:
        """Count a call while it runs. `stats`: the engine's, for a call that leaves KV behind. Raises Overloaded."""
        if request.reservation_id is None or self._reservations.pop(request.reservation_id, None) is None:
            self._check_capacity()
        if stats is not None:
            self._check_pending_transfers(stats)
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1

    def _check_capacity(self) -> None:
        limit = self._limits.active
        if limit is None or self._num_active + len(self._reservations) < limit:
            return
        self._expire()
        if self._num_active + len(self._reservations) >= limit:
            raise Overloaded(
                f"{self._num_active} requests are here and {len(self._reservations)} places kept, of at most {limit}; "
                "try again later or start more workers"
            )

    def _check_pending_transfers(self, stats: EngineStats) -> None:
        """Where decode stands still, prompts are not processed on: their KV would have no place to go."""
        total = stats.kv_blocks_total  # 0: the engine does not tell
        if total and stats.ticket_kv_blocks > self._limits.max_pending_transfer_fraction * total:
            raise Overloaded(
                f"{stats.tickets_held} hand-offs that no decode worker has fetched hold {stats.ticket_kv_blocks} of "
                f"{total} KV blocks; try again later or start more decode workers"
            )

    def _expire(self) -> None:
        now = self._clock()
        for reservation_id in [name for name, expires_at in self._reservations.items() if expires_at <= now]:
            del self._reservations[reservation_id]

"""Limit the work of one worker: calls that run or wait in the engine, reserved decode slots, and KV awaiting transfer.

A call beyond the limits is rejected before it reaches the engine, so that the frontend can try another worker.
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
    """Limits of `Admission`."""

    active: int | None = None  # calls plus reserved slots; None: no limit
    # share of the KV blocks that may await transfer; above it, new prompts are rejected
    max_pending_transfer_fraction: float = 1.0


class Admission:
    """Admission control of one worker. `clock` returns seconds since the epoch, as the expiry of reservations."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._num_active = 0
        self._reservations: dict[str, float] = {}  # reservation id -> when it expires

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
        if self._limits.active is not None:  # without a limit there is nothing to reserve
            self._reservations[reservation_id] = expires_at

    def unreserve(self, reservation_id: str) -> None:
        """Release a slot. Ignore an unknown reservation: a call has used it, or it has expired."""
        self._reservations.pop(reservation_id, None)

    @contextmanager
    def admit(self, request: GenerateRequest, stats: EngineStats | None) -> Iterator[None]:
        """Admit a call and count it while the context is open.

        Args:
            request: the call.
            stats: the engine's statistics for a prefill call; None: do not check KV that awaits transfer.

        Raises:
            Overloaded: a limit is reached.
        """
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
                f"worker is full: {self._num_active} calls and {len(self._reservations)} reserved slots of {limit}; "
                "retry later or start more workers"
            )

    def _check_pending_transfers(self, stats: EngineStats) -> None:
        """Reject prompts while decode workers do not fetch KV, because further KV would fill the cache."""
        total = stats.kv_blocks_total  # 0: not reported by the engine
        if total and stats.ticket_kv_blocks > self._limits.max_pending_transfer_fraction * total:
            raise Overloaded(
                f"{stats.tickets_held} pending KV transfers hold {stats.ticket_kv_blocks} of {total} KV blocks; retry "
                "later or start more decode workers"
            )

    def _expire(self) -> None:
        now = self._clock()
        for reservation_id in [name for name, expires_at in self._reservations.items() if expires_at <= now]:
            del self._reservations[reservation_id]

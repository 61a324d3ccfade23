"""Limit what one worker takes on: its calls, its reserved decode slots, and KV to transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dynamo_trtllm.engines.engine_interface import EngineStats
from dynamo_trtllm.protocol.errors import KvTransfersFull, Overloaded
from dynamo_trtllm.protocol.messages import MAX_RESERVATION_S, GenerateRequest
from dynamo_trtllm.protocol.number_types import ceil_div
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming


@dataclass(eq=False)
class WorkerAdmission:
    """The limits of one worker: of calls that run or wait in the engine, of reserved decode slots,
    and of KV to transfer.

    A call beyond the limits is rejected before it reaches the engine, so that the frontend can try
    another worker.

    Args:
        max_active: most calls and reserved slots together; None without a limit.
        max_pending_kv_fraction: share of the KV blocks that may await transfer. If more blocks
            await transfer for `timing.unfetched_kv_s`, new prompts are rejected.
        max_transfer_blocks: most KV blocks of prefill calls and pending KV transfers together; None
            without a limit. Elastic workers need this limit. Without it, two of them could wait for
            each other's blocks for ever: each holds KV for decode calls that wait at the other one.
        block_tokens: tokens in a KV block.
        clock: returns seconds since the epoch, in which the expiry of reservations is given.
        timing: how long the worker waits.
    """

    max_active: int | None = None
    max_pending_kv_fraction: float = 1.0
    max_transfer_blocks: int | None = None
    block_tokens: int = 1
    clock: Callable[[], float] = time.time
    timing: WorkerTiming = TIMING
    _num_active: int = field(default=0, init=False)
    # KV blocks of the prefill calls that run or wait.
    _prefill_blocks: int = field(default=0, init=False)
    # Reservation id -> when it expires.
    _reservations: dict[str, float] = field(default_factory=dict, init=False)
    # When the KV to transfer began to exceed its share. At each prefill call since then, it was
    # above the share.
    _above_share_since: float | None = field(default=None, init=False)

    def active(self) -> int:
        """Return the number of calls that run or wait in the engine."""
        return self._num_active

    def reserved_slots(self) -> int:
        """Return the number of reserved slots."""
        self._expire()
        return len(self._reservations)

    def reserve(self, reservation_id: str, expires_at: float) -> None:
        """Reserve a slot until a call uses it, it is released, or it expires.

        Args:
            reservation_id: id of the reservation; the call names it.
            expires_at: seconds since the epoch. It is capped at MAX_RESERVATION_S from now.

        Raises:
            Overloaded: no slot is free.
        """
        if reservation_id not in self._reservations:
            self._check_capacity()
        # Without a limit, there is nothing to reserve.
        if self.max_active is not None:
            latest = self.clock() + MAX_RESERVATION_S
            self._reservations[reservation_id] = min(expires_at, latest)

    def unreserve(self, reservation_id: str) -> None:
        """Release a slot. Ignore an unknown reservation: a call has used it, or it has expired."""
        self._reservations.pop(reservation_id, None)

    @contextmanager
    def admit(self, request: GenerateRequest, stats: EngineStats | None) -> Iterator[None]:
        """Admit a call and count it while the context is open.

        Args:
            request: the call.
            stats: the engine's statistics, for a prefill call; None for other calls, for which the
                KV that awaits transfer is not checked.

        Raises:
            KvTransfersFull: with this call, KV to transfer would take too many blocks.
            Overloaded: another limit is reached.
        """
        # A call with a reservation uses its slot. If the reservation has expired, it needs a free
        # slot, like other calls.
        has_slot = False
        if request.reservation_id is not None:
            has_slot = self._reservations.pop(request.reservation_id, None) is not None
        if not has_slot:
            self._check_capacity()
        blocks = 0
        if stats is not None and self.max_transfer_blocks is not None:
            blocks = ceil_div(len(request.token_ids), self.block_tokens)
            self._check_transfer_blocks(stats, blocks, self.max_transfer_blocks)
        elif stats is not None:
            self._check_pending_transfers(stats)
        self._num_active += 1
        self._prefill_blocks += blocks
        try:
            yield
        finally:
            self._num_active -= 1
            self._prefill_blocks -= blocks

    def _check_capacity(self) -> None:
        limit = self.max_active
        if limit is None or self._num_active + len(self._reservations) < limit:
            return
        # To save time, expired reservations are removed only when the worker seems full.
        self._expire()
        if self._num_active + len(self._reservations) >= limit:
            raise Overloaded(
                f"worker is full: {self._num_active} calls and {len(self._reservations)} reserved"
                f" slots of {limit}; retry later or start more workers"
            )

    def _check_transfer_blocks(self, stats: EngineStats, blocks: int, limit: int) -> None:
        """Reject a prompt whose KV would take blocks that decode calls need to go on.

        The KV of prefill calls that run or wait counts as KV to transfer.
        """
        taken = self._prefill_blocks + stats.pending_kv_blocks
        if taken + blocks > limit:
            raise KvTransfersFull(
                f"the prompt needs {blocks} KV blocks, and KV for other workers takes {taken} of at"
                f" most {limit}; retry on another worker, or raise"
                " --max-transfer-kv-fraction"
            )

    def _check_pending_transfers(self, stats: EngineStats) -> None:
        """Reject prompts while decode workers do not fetch KV: more KV would fill the cache.

        The KV of one long prompt may exceed the share until it is fetched, which is no reason to
        reject other prompts. So prompts are rejected only if the share is exceeded for some time.
        """
        total = stats.kv_blocks_total  # 0: not reported by the engine
        if not total or stats.pending_kv_blocks <= self.max_pending_kv_fraction * total:
            self._above_share_since = None
            return
        now = self.clock()
        if self._above_share_since is None:
            self._above_share_since = now
        if now - self._above_share_since >= self.timing.unfetched_kv_s:
            raise Overloaded(
                f"{stats.pending_kv_transfers} pending KV transfers hold"
                f" {stats.pending_kv_blocks} of {total} KV blocks; retry later or start more decode"
                " workers"
            )

    def _expire(self) -> None:
        now = self.clock()
        expired = [
            reservation_id
            for reservation_id, expires_at in self._reservations.items()
            if expires_at <= now
        ]
        for reservation_id in expired:
            del self._reservations[reservation_id]

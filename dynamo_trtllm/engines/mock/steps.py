"""Simulate the steps of an engine: queue requests, account for KV blocks, and generate a token per step."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_trtllm.engines.base import EngineStats
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.errors import ContextTooLong, Overloaded, RequestRejected
from dynamo_trtllm.messages import GenerateRequest

_OPENING = (200005, 17196, 200008)  # <|channel|>final<|message|> of the Harmony format; tokens after it are content


@dataclass(slots=True, eq=False)
class MockSequence:
    """One request in the simulated batch."""

    request: GenerateRequest
    on_token: Callable[[int, bool], None]  # receives each token, and whether it is the last
    on_stop: Callable[[], None]  # called when no further step follows
    blocks: int
    seed: int
    prefill_left: int
    num_output_tokens: int = 0
    wanted: int = 0
    created_at: float = field(default_factory=time.monotonic)
    started: float | None = None

    def step(self) -> None:
        """Generate one token."""
        self.wanted -= 1
        self.on_token(self.next_token(), not self.wanted)

    def next_token(self) -> int:
        """Return the next output token: the Harmony prefix first, then a function of seed and index."""
        at = self.request.num_resumed_output_tokens + self.num_output_tokens
        self.num_output_tokens += 1
        return _OPENING[at] if at < len(_OPENING) else 1000 + (self.seed + at * 7919) % 4000


class MockScheduler:
    """The waiting queue, the batch and the KV blocks. Call it on the event loop only."""

    def __init__(self, args: MockArgs) -> None:
        self._args = args
        self._waiting: deque[MockSequence] = deque()
        self._running: dict[MockSequence, None] = {}
        self._free_blocks = args.kv_cache_blocks
        self._work = asyncio.Event()

    def add(self, sequence: MockSequence) -> None:
        """Queue a sequence.

        Raises:
            ContextTooLong: Prompt and output exceed max_seq_len.
            RequestRejected: The request needs more KV blocks than exist.
            Overloaded: The queue is full.
        """
        total = len(sequence.request.token_ids) + sequence.request.sampling.max_tokens
        if total > self._args.max_seq_len:
            raise ContextTooLong(f"{total} prompt and output tokens exceed the context of {self._args.max_seq_len}")
        if sequence.blocks > self._args.kv_cache_blocks:
            raise RequestRejected(
                f"the request needs {sequence.blocks} KV blocks, and the engine has {self._args.kv_cache_blocks}"
            )
        if len(self._waiting) >= self._args.max_queue:
            raise Overloaded(f"{len(self._waiting)} requests are queued; try again later")
        self._waiting.append(sequence)
        self._work.set()

    def schedule(self, sequence: MockSequence, num_tokens: int) -> None:
        """Let a sequence generate `num_tokens` tokens, one per step, from the next step on."""
        sequence.wanted = num_tokens
        self._work.set()

    def remove(self, sequence: MockSequence) -> None:
        """Remove a sequence in any state and free its blocks."""
        if sequence.started is not None:
            self._running.pop(sequence, None)
            self.free_blocks(sequence.blocks)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def transfer_ownership(self, sequence: MockSequence, blocks: int) -> None:
        """Keep `blocks` of a running sequence reserved for a KV transfer, until `free_blocks`."""
        sequence.blocks -= blocks

    def free_blocks(self, blocks: int) -> None:
        """Return blocks to the pool."""
        self._free_blocks += blocks
        self._work.set()

    def stats(self, tickets_held: int, ticket_kv_blocks: int) -> EngineStats:
        """Return the statistics. `ticket_kv_blocks`: KV blocks of the `tickets_held` pending KV transfers."""
        total = self._args.kv_cache_blocks
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=total - self._free_blocks,
            kv_blocks_total=total,
            tickets_held=tickets_held,
            ticket_kv_blocks=ticket_kv_blocks,
        )

    async def run(self) -> None:
        """Run steps forever; sleep when there is nothing to do. When this ends, each request fails.

        A step starts when the time of the step before it is over, so other work on the event loop does not lengthen
        steps.
        """
        begun_s = 0.0
        try:
            while True:
                self._admit()
                if not any(sequence.wanted for sequence in self._running):
                    self._work.clear()
                    await self._work.wait()
                    begun_s = time.monotonic()
                    continue
                await asyncio.sleep(begun_s + self._args.step_s - time.monotonic())
                # Catch up on at most one missed step.
                begun_s = max(begun_s + self._args.step_s, time.monotonic() - self._args.step_s)
                self._step()
        finally:
            for sequence in (*self._waiting, *self._running):
                sequence.on_stop()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._args.max_batch_size:
            if self._waiting[0].blocks > self._free_blocks:
                return
            sequence = self._waiting.popleft()
            self._free_blocks -= sequence.blocks
            sequence.started = time.monotonic()
            self._running[sequence] = None

    def _step(self) -> None:
        prefill_budget = self._args.prefill_tokens_per_step
        for sequence in list(self._running):
            if sequence.prefill_left > 0:
                taken = min(prefill_budget, sequence.prefill_left)
                prefill_budget -= taken
                sequence.prefill_left -= taken
            if sequence.prefill_left == 0 and sequence.wanted > 0:
                sequence.step()

"""The seam between a worker and whatever computes tokens. Engines know neither tokenizers nor the network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from dynamo_trtllm.messages import Chunk, GenerateRequest, KvLayout, Limits, ReleaseOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself once it can serve."""

    engine: str  # kind, as in `--engine`
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    renderer: str  # "harmony" or "chat_template"
    layout: KvLayout
    limits: Limits
    files: Mapping[str, Path] = field(default_factory=dict)  # tokenizer and template files, for frontends


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot, cheap enough to take at every scrape."""

    running: int  # requests in the batch
    waiting: int  # requests that wait for KV blocks or a slot
    kv_blocks_used: int  # blocks under a ticket included
    kv_blocks_total: int
    tickets_held: int  # hand-offs not yet released


class Engine(Protocol):
    """Every consumption of `generate` is `async with aclosing(stream)`; closing it is the abort and frees the KV."""

    async def start(self) -> EngineInfo:
        """Load and warm up. After it returns `generate` works. Raises EngineFailed or ConfigError."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Zero or more chunks, then exactly one with `finish_reason`. Safe to call concurrently.

        PREFILL ends with HANDOFF and a ticket, or with STOP or LENGTH and the tokens when the request is finished
        after its first token. DECODE emits the ticket's first token as its own. Raises EngineRefused for a request
        this engine can't serve, Overloaded when its queue is full, HandoffError when the KV can't be fetched.
        """
        ...

    async def check(self) -> None:
        """Raises EngineFailed when not fit to serve."""
        ...

    async def drain(self) -> None:
        """Returns when no request runs and no ticket is held. The caller bounds the wait."""
        ...

    async def aclose(self) -> None:
        """Idempotent; safe after a failed `start`. Running streams end in EngineFailed."""
        ...


@runtime_checkable
class HasTickets(Protocol):
    """Engines whose prefill leg hands out tickets."""

    def release(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """The ticket is done with: its blocks may go. Unknown or released tickets are no error."""
        ...


@runtime_checkable
class HasStats(Protocol):
    def stats(self) -> EngineStats: ...

"""The interface between a worker and its inference engine. Engines know neither tokenizers nor the network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from dynamo_trtllm.messages import Chunk, GenerateRequest, Instance, KvLayout, Limits, ReleaseOutcome


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
    kv_compat: Mapping[str, str] = field(default_factory=dict)  # what else both roles must share to hand KV over
    # Fields of Sampling, "cache_salt", and "resumed_tokens" that it can't honor. The last: it takes an answer that
    # another worker began for a prompt, which is the same only for greedy requests without form and penalties.
    unsupported_features: tuple[str, ...] = ()
    can_aggregate: bool = False  # in every role it can do a request of Phase.AGGREGATED too
    files: Mapping[str, Path] = field(default_factory=dict)  # tokenizer and template files, for frontends


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot, cheap enough to take at every scrape."""

    running: int  # requests in the batch
    waiting: int  # requests that wait for KV blocks or a slot
    kv_blocks_used: int  # blocks under a ticket included
    kv_blocks_total: int
    tickets_held: int  # hand-offs not yet released
    ticket_kv_blocks: int  # blocks that they hold
    kv_checksum_mismatches: int = 0  # fetches whose KV differed from what was sent; always 0 without checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check before loading found. An error keeps the worker from starting."""

    severity: Literal["error", "warning", "note"]
    rule: str  # stable name, as in docs/preflight.md
    field: str  # the argument at fault, dotted
    value: str  # what it is, and where it comes from
    other: str = ""  # what it disagrees with: another argument, the other role, the GPU, the model
    why: str
    cure: str  # what to change


class Engine(Protocol):
    """Every consumption of `generate` is `async with aclosing(stream)`; closing it is the abort and frees the KV."""

    async def start(self) -> EngineInfo:
        """Load and warm up. After it returns `generate` works. Raises EngineFailed or ConfigError."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Zero or more chunks, then exactly one with `finish_reason`. Safe to call concurrently.

        PREFILL ends with KV_TRANSFER and a ticket, or with STOP or LENGTH and the tokens when the request is finished
        after its first token. DECODE emits the ticket's first token as its own. Raises RequestRejected for a request
        this engine can't serve, Overloaded when its queue is full, KvTransferError when the KV can't be fetched.
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


Push: TypeAlias = Callable[[Chunk], None]
"""Takes a chunk within the call, on the event loop. Never raises."""


@runtime_checkable
class Pushes(Protocol):
    """Engines that can hand over what a step made within that step: no task wakes for it."""

    def generate_into(self, request: GenerateRequest, push: Push) -> AsyncGenerator[Chunk, None]:
        """As `generate`, less the chunks that `push` takes. The terminal one is always yielded; nothing is pushed
        while something that was yielded before it waits to be consumed, or once the stream is closed."""
        ...


@runtime_checkable
class HasTickets(Protocol):
    """Engines whose prefill calls return tickets."""

    def release(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """The ticket is done with: its blocks may go. Unknown or released tickets are no error."""
        ...


@runtime_checkable
class HasStats(Protocol):
    def stats(self) -> EngineStats: ...


@runtime_checkable
class HasPreflight(Protocol):
    """Engines that can judge their arguments before they load anything."""

    def preflight(self, peers: Sequence[Instance]) -> Sequence[Finding]:
        """Called once before `start`. `peers`: live instances of the same model in the other role."""
        ...


@runtime_checkable
class HasProgress(Protocol):
    def progress(self) -> str:
        """What `start` is doing now, in a few words; "" when it is not running. Cheap; from any thread."""
        ...

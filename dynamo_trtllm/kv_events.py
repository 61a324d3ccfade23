"""Define the events of a worker's prefix cache, and publish them without waiting: which KV blocks can be reused there.

A reader indexes the blocks of each worker by their tokens. It can miss events: when the numbers of two messages leave
a gap, it forgets what it knows of that worker, and learns again from then on. Blocks whose parent it does not know have
no place in its index until the engine stores the parent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import msgspec

from dynamo_trtllm.messages import TokenIds, encode

_log = logging.getLogger(__name__)

MAX_EVENT_TOKENS: Final = 32 << 10  # an engine reports more tokens in several events
_MAX_BATCH_BYTES = 256 << 10
_MAX_PENDING_BYTES = 16 << 20  # not published yet
_BLOCK_BYTES = 24  # of a block without its tokens, and of an event without its blocks
_TOKEN_BYTES = 4
_INTERVAL_S = 0.02


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """One full KV block. `hash` is the engine's own name of it, of up to 64 bits; it depends on all tokens before."""

    hash: int
    token_ids: TokenIds


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stored"):
    """Consecutive blocks can be reused from now on."""

    blocks: tuple[KvBlock, ...]  # in the order of the prompt
    parent: int | None = None  # hash of the block before the first one; None: the prompt begins with it
    cache_group: int = 0  # attention window in tokens of the layers that share the blocks; 0: all layers
    dp_rank: int = 0  # attention-DP rank
    cache_salt: str | None = None  # of the requests that can reuse them


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="removed"):
    """Blocks can't be reused any more. Some may be unknown to a reader."""

    hashes: tuple[int, ...]
    cache_group: int = 0
    dp_rank: int = 0


class BlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """A reader forgets all blocks of this worker: they are gone, or events were lost."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared
OnKvEvents: TypeAlias = Callable[[Sequence[KvEvent]], None]


class KvEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive events of one worker. The number of its first event is 0; a repeated message has known numbers."""

    instance_id: int
    first: int  # number of the first of `events`
    events: tuple[KvEvent, ...]


def kv_events_subject(subject: str) -> str:
    """Return the request-plane subject at which the instance with this `generate` subject publishes `KvEvents`."""
    return f"{subject}.kv_events"


class KvEventPublisher:
    """Numbers the events of one worker and publishes them in batches. Its memory is limited.

    Args:
        instance_id: id of the worker.
        publish: send a message, if possible at once; False: it was not accepted now.
    """

    def __init__(self, instance_id: int, publish: Callable[[bytes], bool]) -> None:
        self._instance_id = instance_id
        self._publish = publish
        self._pending: list[KvEvent] = []
        self._pending_bytes = 0
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    def on_events(self, events: Iterable[KvEvent]) -> None:
        """Publish events soon. When too many wait, drop all and tell readers to forget this worker's blocks."""
        for event in events:
            self._pending.append(event)
            self._pending_bytes += _size(event)
        if self._pending_bytes > _MAX_PENDING_BYTES:
            _log.warning("KV events dropped: %d could not be published; check the load of NATS", len(self._pending))
            self._pending, self._pending_bytes = [BlocksCleared()], 0
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        while self._pending:
            count, size = 0, 0
            while count < len(self._pending) and (count == 0 or size < _MAX_BATCH_BYTES):
                size += _size(self._pending[count])
                count += 1
            batch = tuple(self._pending[:count])
            if not self._publish(encode(KvEvents(instance_id=self._instance_id, first=self._next, events=batch))):
                self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._flush)
                return
            del self._pending[:count]
            self._pending_bytes = max(0, self._pending_bytes - size)
            self._next += count

    def close(self) -> None:
        """Publish nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _size(event: KvEvent) -> int:
    """Return about how many bytes an event takes."""
    if isinstance(event, BlocksStored):
        tokens = sum(len(block.token_ids) for block in event.blocks)
        return _BLOCK_BYTES * (1 + len(event.blocks)) + _TOKEN_BYTES * tokens
    return _BLOCK_BYTES + (9 * len(event.hashes) if isinstance(event, BlocksRemoved) else 0)

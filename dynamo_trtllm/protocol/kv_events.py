"""Define the events of a worker's prefix cache, and publish the changes of the cache.

The updates say which prompt prefixes the worker can reuse. Engines name KV blocks by hashes of
their own. The publisher replaces these names by prefix hashes, which frontends can compute from the
tokens of a prompt. Updates contain neither tokens nor text.

The updates of a worker are numbered. A reader that is new, or that has missed an update, asks the
worker with the control verb `ResyncKvEvents` to publish everything again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo_trtllm.protocol.messages import TokenIds, encode, packed
from dynamo_trtllm.protocol.number_types import Count, Number

log = logging.getLogger(__name__)

MAX_UPDATE_BLOCKS: Final = 4096  # a frontend reads so many blocks in about 2 ms
_EARLY_S = 0.001  # a timer of uvloop may end too early by this time


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """One full KV block.

    `hash` is the engine's own name of the block, of up to 64 bits. The name also depends on all
    tokens before the block.
    """

    hash: int
    token_ids: TokenIds


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stored"):
    """Consecutive blocks can be reused from now on."""

    blocks: tuple[KvBlock, ...]  # the blocks in the order of the prompt
    # The engine's name of the block before the first block. None: the prompt begins with the first
    # block.
    parent: int | None = None
    # Attention window in tokens of the layers that share the blocks. 0: all layers.
    cache_group: int = 0
    dp_rank: int = 0  # attention-DP rank
    cache_salt: str | None = None  # the salt of requests that can reuse the blocks


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="removed"):
    """Blocks can't be reused any more. A reader may not know some of them."""

    hashes: tuple[int, ...]
    cache_group: int = 0
    dp_rank: int = 0


class BlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Readers forget blocks, because the blocks are gone or events were lost."""

    # The attention-DP rank whose blocks are forgotten. None: all blocks of the worker.
    dp_rank: int | None = None


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared
OnKvEvents: TypeAlias = Callable[[Sequence[KvEvent]], None]
"""A callback that receives the changes of a prefix cache on the event loop."""


class KvCacheUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of one worker's prefix cache since the last update, or a part of a snapshot.

    A reader applies the changes in this order: forget all blocks if `cleared`, remove `removed`,
    add `stored`. A reader that is in sync ignores snapshots. Other readers apply a snapshot from
    its first part on, which is `cleared`. After the last part, the reader is in sync.
    """

    instance_id: Number
    number: Number  # 0 for the worker's first update; a gap means that an update was lost
    block_tokens: Count = 0  # tokens in each block; 0: no block was stored yet
    cleared: bool = False
    removed: bytes = b""  # prefix hashes of 64 bits, little endian; a reader may not know some
    stored: bytes = b""  # prefix hashes in the same form
    # 0: the update has changes. Otherwise it is a part of a snapshot, and the number counts the
    # parts that are left, including this part.
    snapshot: Count = 0


def kv_events_subject(namespace: str) -> str:
    """Return the subject at which all workers of a namespace publish `KvCacheUpdate`."""
    return f"{namespace}.kv_events"


def root_hash(cache_salt: str | None) -> int:
    """Return the hash that takes the place of a parent for the first block of a prompt.

    Each salt has another hash, so that the blocks of different tenants never match.
    """
    if not cache_salt:
        return 0
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def prefix_hashes(ids: TokenIds, block_tokens: int, parent: int) -> list[int]:
    """Return a hash of 64 bits for each full block. It also depends on all tokens before the block.

    Two prompts with equal hashes are treated as equal. If they differ, only the choice of a worker
    is wrong, because engines find KV by their own keys.

    Args:
        ids: tokens that follow `parent`.
        parent: hash of the block before `ids`, or `root_hash`.
    """
    data = packed(ids)
    block_bytes = 4 * block_tokens
    hashes: list[int] = []
    for begin in range(0, len(data) - block_bytes + 1, block_bytes):
        block = data[begin : begin + block_bytes]
        # The hash of the block before is the seed.
        parent = xxh3_64_intdigest(block, parent)
        hashes.append(parent)
    return hashes


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Return prefix hashes as they are sent."""
    return array("Q", hashes).tobytes()


def unpack_hashes(data: bytes) -> list[int]:
    """Return the prefix hashes that `pack_hashes` packed.

    Raises:
        ValueError: the last hash is incomplete.
    """
    return array("Q", data).tolist()


class _KnownBlock(NamedTuple):
    """One block of the prefix cache."""

    prefix: int  # prefix hash
    parent: int | None  # the engine's name of the block before; None: a prompt begins here


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventLimits:
    """When a `KvEventPublisher` sends, and how much it stores. Only tests change these limits."""

    interval_s: float = 0.02  # time between two updates
    resync_interval_s: float = 1.0  # shortest time between two snapshots
    # This time after the last change, an empty update is sent. Its number shows readers whether
    # they have missed an update.
    idle_s: float = 0.5
    heartbeat_s: float = 10.0  # time between two empty updates while nothing changes
    max_removals: int = 256 << 10  # most blocks whose removal is not published yet
    max_cleared: int = 256 << 10  # most blocks that were cleared and may still be in the cache


LIMITS = KvEventLimits()


class KvEventPublisher:
    """Publishes the changes of one worker's prefix cache as prefix hashes, without waiting.

    The engine reuses a prefix only as far as the layers with the largest attention window have it.
    Therefore blocks of layers with a smaller window are not published. The ranks of attention DP
    count as one cache. If the parent of a block was never stored, the block has no prefix hash, and
    is skipped.

    After lost events, the engine clears all blocks. But blocks that stay in its cache, such as
    those of a system prompt, are not reported as stored again. They are published again when a
    block that follows them is stored.

    Args:
        instance_id: id of the worker.
        publish: sends a message if this is possible at once. It returns False if the message was
            not accepted.
        limits: when to send, and how much to store.
    """

    def __init__(
        self,
        instance_id: int,
        publish: Callable[[bytes], bool],
        limits: KvEventLimits = LIMITS,
    ) -> None:
        self._instance_id = instance_id
        self._publish = publish
        self._limits = limits
        self._window = 0  # the largest attention window so far
        self._block_tokens = 0
        # The blocks of the cache, by rank and by the engine's name.
        self._known: defaultdict[int, dict[int, _KnownBlock]] = defaultdict(dict)
        # The blocks that were cleared and may still be in the cache, by rank and name.
        self._was_cleared: defaultdict[int, dict[int, _KnownBlock]] = defaultdict(dict)
        self._copies: dict[int, int] = {}  # how many blocks of `_known` have a hash, by hash
        # The changes since the last update, by prefix hash. True: stored. False: removed.
        self._changes: dict[int, bool] = {}
        self._cleared = False  # all blocks were cleared before `_changes`
        self._is_resync_due = False
        # The times are those of the event loop.
        self._resync_at = 0.0  # earliest time of the next snapshot
        self._unsent: deque[bytes] = deque()
        self._next_number = 0
        self._idle_at = 0.0  # time of the next empty update if nothing changes until then
        self._timer: asyncio.Handle | None = None
        self._due_at = 0.0  # time at which the timer ends
        self._is_closed = False
        self.num_skipped = 0  # number of blocks that could not be published

    def on_events(self, events: Iterable[KvEvent]) -> None:
        """Publish changes soon. Until they can be sent, only their total effect is stored."""
        for event in events:
            match event:
                case BlocksStored():
                    self._on_stored(event)
                case BlocksRemoved():
                    self._on_removed(event)
                case BlocksCleared():
                    self._on_cleared(event)
        if len(self._changes) > len(self._copies) + self._limits.max_removals:
            # It takes less space to clear all blocks and store those that are in the cache.
            self._changes = dict.fromkeys(self._copies, True)
            self._cleared = True
        self._flush_at(asyncio.get_running_loop().time() + self._limits.interval_s)

    def resync(self) -> None:
        """Publish all blocks again, at most once per second for all readers together."""
        self._is_resync_due = True
        next_at = asyncio.get_running_loop().time() + self._limits.interval_s
        self._flush_at(max(next_at, self._resync_at))

    def _on_removed(self, event: BlocksRemoved) -> None:
        if not self._note_window(event.cache_group):
            return
        known = self._known[event.dp_rank]
        was_cleared = self._was_cleared[event.dp_rank]
        for name in event.hashes:
            was_cleared.pop(name, None)
            block = known.pop(name, None)
            if block is not None:
                self._remove(block.prefix)

    def _on_stored(self, event: BlocksStored) -> None:
        if not event.blocks or not self._note_window(event.cache_group):
            return
        rank = event.dp_rank
        parent = event.parent
        prefix = root_hash(event.cache_salt) if parent is None else self._prefix_of(rank, parent)
        # All blocks must have the size of the first block that was ever stored.
        if not self._block_tokens:
            self._block_tokens = len(event.blocks[0].token_ids)
        for index, block in enumerate(event.blocks):
            if prefix is None or len(block.token_ids) != self._block_tokens:
                self._skip(len(event.blocks) - index)
                return
            (prefix,) = prefix_hashes(block.token_ids, self._block_tokens, prefix)
            self._add(rank, block.hash, _KnownBlock(prefix, parent))
            parent = block.hash

    def _skip(self, num_blocks: int) -> None:
        """Count blocks that can't be published, and log the first time."""
        if not self.num_skipped:
            log.info(
                "KV blocks are not published: the block before them is unknown, or they"
                " differ in size"
            )
        self.num_skipped += num_blocks

    def _prefix_of(self, rank: int, name: int) -> int | None:
        """Return the prefix hash of the parent of a block. None: the parent was never stored.

        If the parent was cleared, it is still in the cache, because the engine has just stored a
        block behind it. Then it is added again, with the cleared blocks before it.
        """
        known = self._known[rank]
        was_cleared = self._was_cleared[rank]
        # The cleared blocks, from this one back towards the start of the prompt.
        chain: list[tuple[int, _KnownBlock]] = []
        ancestor: int | None = name
        while ancestor is not None and ancestor not in known:
            block = was_cleared.pop(ancestor, None)
            if block is None:
                return None
            chain.append((ancestor, block))
            ancestor = block.parent
        for cleared_name, block in reversed(chain):
            self._add(rank, cleared_name, block)
        return known[name].prefix

    def _add(self, rank: int, name: int, block: _KnownBlock) -> None:
        known = self._known[rank]
        before = known.get(name)
        if before is not None:
            if before.prefix == block.prefix:
                return
            self._remove(before.prefix)
        known[name] = block
        num_copies = self._copies.get(block.prefix, 0) + 1
        self._copies[block.prefix] = num_copies
        if num_copies == 1:
            self._changes[block.prefix] = True

    def _note_window(self, window: int) -> bool:
        """Return whether blocks of layers with this window are published.

        They are published if no block with a larger window has come yet. When a larger window comes
        for the first time, the blocks with smaller windows are cleared.
        """
        # 0: all layers share the blocks.
        if window == 0:
            window = sys.maxsize
        if window > self._window:
            if self._known:
                self._clear()
            # The cleared blocks belong to other layers, so they are never published again.
            self._was_cleared.clear()
            self._window = window
        return window == self._window

    def _remove(self, prefix: int) -> None:
        self._copies[prefix] -= 1
        if not self._copies[prefix]:
            del self._copies[prefix]
            self._changes[prefix] = False

    def _on_cleared(self, event: BlocksCleared) -> None:
        rank = event.dp_rank
        has_other_ranks = any(other != rank for other in self._known)
        if rank is None or not has_other_ranks:
            self._clear()
            return
        self._note_cleared(rank)
        for block in self._known.pop(rank, {}).values():
            self._remove(block.prefix)

    def _note_cleared(self, rank: int) -> None:
        """Remember the blocks of a rank. After lost events, some may still be in the cache."""
        was_cleared = self._was_cleared[rank]
        was_cleared.update(self._known[rank])
        num_too_many = max(0, len(was_cleared) - self._limits.max_cleared)
        oldest = list(islice(was_cleared, num_too_many))
        for name in oldest:
            del was_cleared[name]

    def _clear(self) -> None:
        for rank in self._known:
            self._note_cleared(rank)
        self._known.clear()
        self._copies.clear()
        self._changes.clear()
        self._cleared = True

    def _flush_at(self, time_s: float) -> None:
        """Send what is pending at this time of the event loop, or earlier."""
        if self._is_closed:
            return
        if self._timer is not None:
            if self._due_at <= time_s:
                return
            self._timer.cancel()
        # The time is stored here, because some timers do not have it: for less than 0.5 ms, uvloop
        # returns a handle without `when`.
        self._due_at = time_s
        self._timer = asyncio.get_running_loop().call_at(time_s, self._flush)

    def _flush(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time() + _EARLY_S
        while self._unsent or self._encode_pending(now):
            if not self._publish(self._unsent[0]):
                self._flush_at(now + self._limits.interval_s)
                return
            self._unsent.popleft()
        next_at = self._idle_at
        if self._is_resync_due:
            next_at = min(next_at, self._resync_at)
        self._flush_at(next_at)

    def _encode_pending(self, now: float) -> bool:
        """Encode the changes, and then a snapshot if it is due.

        If nothing has changed for some time, encode an empty update. Its number shows readers
        whether they have missed an update. Return True if there is an update to send.
        """
        self._encode_changes()
        if self._is_resync_due and now >= self._resync_at:
            self._encode_snapshot()
            self._is_resync_due = False
            self._resync_at = now + self._limits.resync_interval_s
        if self._unsent:
            self._idle_at = now + self._limits.idle_s
        elif now >= self._idle_at:
            self._encode()
            self._idle_at = now + self._limits.heartbeat_s
        return bool(self._unsent)

    def _encode_changes(self) -> None:
        changes = iter(self._changes.items())
        while True:
            part = list(islice(changes, MAX_UPDATE_BLOCKS))
            # An update without changes may still be needed to say that all blocks were cleared.
            if not part and not self._cleared:
                break
            removed = pack_hashes(prefix for prefix, is_stored in part if not is_stored)
            stored = pack_hashes(prefix for prefix, is_stored in part if is_stored)
            self._encode(cleared=self._cleared, removed=removed, stored=stored)
            self._cleared = False
        self._changes.clear()

    def _encode_snapshot(self) -> None:
        # Even the snapshot of an empty cache has one part.
        num_parts = max(1, math.ceil(len(self._copies) / MAX_UPDATE_BLOCKS))
        prefixes = iter(self._copies)
        for parts_left in range(num_parts, 0, -1):
            stored = pack_hashes(islice(prefixes, MAX_UPDATE_BLOCKS))
            is_first = parts_left == num_parts
            self._encode(cleared=is_first, stored=stored, snapshot=parts_left)

    def _encode(self, **changes: Any) -> None:
        """Number an update with these fields, and queue it."""
        update = KvCacheUpdate(
            instance_id=self._instance_id,
            number=self._next_number,
            block_tokens=self._block_tokens,
            **changes,
        )
        self._next_number += 1
        self._unsent.append(encode(update))

    def close(self) -> None:
        """Publish nothing more. Idempotent."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

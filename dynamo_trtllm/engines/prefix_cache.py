"""Find full KV blocks of earlier requests that a prompt begins with, and evict those that no request uses.

A block is found by its tokens and the block before it, and the first one by its tokens and the cache salt. These are
compared, not a hash of them, so KV of another prompt is never reused. The engine owns the memory, of which this module
knows block numbers only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamo_trtllm.kv_events import BlocksRemoved, BlocksStored, KvBlock, OnKvEvents
from dynamo_trtllm.messages import TokenIds

_Key = tuple[int | str | None, bytes]  # hash of the block before, or the cache salt; the tokens


class CachedBlock:
    """A full KV block that can be reused."""

    __slots__ = ("hash", "is_forgotten", "key", "number", "users")

    def __init__(self, hash_: int, key: _Key, number: int) -> None:
        self.hash = hash_
        self.key = key
        self.number = number
        self.users = 1  # requests
        self.is_forgotten = False


class ReservedBlocks(NamedTuple):
    """What `PrefixCache.reserve` found for a request."""

    reused: list[CachedBlock]  # the beginning of its prompt
    evicted: list[int]  # numbers of blocks that are free now


class PrefixCache:
    """The full KV blocks of one engine whose content is known. Not thread-safe.

    The hash of a block stands for all tokens up to its end. It is a number that no other block of this engine gets.

    Args:
        block_tokens: tokens in a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.on_events: OnKvEvents | None = None  # called with each change
        self._block_tokens = block_tokens
        self._blocks: dict[_Key, CachedBlock] = {}
        self._unused: OrderedDict[int, CachedBlock] = OrderedDict()  # by hash, the least recently used first
        self._last_hash = 0

    @property
    def num_unused(self) -> int:
        """The number of blocks that no request uses. They can be evicted."""
        return len(self._unused)

    def reserve(self, prompt: TokenIds, salt: str | None, num_blocks: int, num_free: int) -> ReservedBlocks | None:
        """Begin to use the cached blocks of a prompt, and evict others if blocks are short.

        Args:
            prompt: its tokens. The last one is never reused, because the engine needs its logits.
            salt: blocks of requests with another salt are not reused.
            num_blocks: blocks that the request needs, the reused ones included.
            num_free: blocks that the engine has without eviction.

        Returns:
            None if too few blocks are free or unused.
        """
        reused = self._match(prompt, salt)
        self._use(reused)
        missing = max(0, num_blocks - len(reused) - num_free)
        if missing > len(self._unused):
            self.release(reused)
            return None
        evicted = [self._unused.popitem(last=False)[1] for _ in range(missing)]
        for block in evicted:
            del self._blocks[block.key]
        self._report_removed(evicted)
        return ReservedBlocks(reused, [block.number for block in evicted])

    def store(self, tokens: TokenIds, salt: str | None, chain: list[CachedBlock], numbers: Iterable[int]) -> int:
        """Cache the full blocks of a request, which continues to use them.

        If a block with the same content is cached, the request uses that one, too, and its own one stays its own.

        Args:
            tokens: the first tokens of the request, whose KV is in its blocks.
            salt: its cache salt.
            chain: its first blocks, as far as they are cached; the next ones are appended.
            numbers: numbers of the blocks after those of `chain`.

        Returns:
            How many of them the cache owns now.
        """
        size, width, data = self._block_tokens, tokens.itemsize, tokens.tobytes()
        num_new, parent = 0, chain[-1].hash if chain else None
        runs: list[tuple[int | None, list[KvBlock]]] = []  # new blocks that follow each other, and the one before
        for begin, number in zip(range(len(chain) * size, len(tokens) - size + 1, size), numbers, strict=False):
            key = (salt if parent is None else parent, data[begin * width : (begin + size) * width])
            block = self._blocks.get(key)
            if block is None:
                self._last_hash += 1
                block = self._blocks[key] = CachedBlock(self._last_hash, key, number)
                num_new += 1
                if self.on_events is not None:
                    if not runs or runs[-1][1][-1].hash != parent:
                        runs.append((parent, []))
                    runs[-1][1].append(KvBlock(block.hash, tokens[begin : begin + size]))
            else:
                self._use((block,))
            chain.append(block)
            parent = block.hash
        if self.on_events is not None and runs:
            self.on_events([BlocksStored(blocks=tuple(run), parent=first, cache_salt=salt) for first, run in runs])
        return num_new

    def release(self, chain: Sequence[CachedBlock]) -> list[int]:
        """End the use of a request's blocks. Return the numbers of those that are free, because they were forgotten."""
        free = []
        for block in reversed(chain):  # so that the last ones are evicted first: nothing finds them without the others
            block.users -= 1
            if block.users:
                continue
            if block.is_forgotten:
                free.append(block.number)
            else:
                self._unused[block.hash] = block
        return free

    def forget(self, chain: Sequence[CachedBlock]) -> None:
        """Let no further request reuse these blocks, which a request uses."""
        known = [block for block in chain if not block.is_forgotten]
        for block in known:
            block.is_forgotten = True
            del self._blocks[block.key]
        self._report_removed(known)

    def _match(self, prompt: TokenIds, salt: str | None) -> list[CachedBlock]:
        found: list[CachedBlock] = []
        size, data = self._block_tokens * prompt.itemsize, prompt.tobytes()
        before: int | str | None = salt
        for begin in range(0, len(data) - size, size):
            block = self._blocks.get((before, data[begin : begin + size]))
            if block is None:
                break
            found.append(block)
            before = block.hash
        return found

    def _use(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            if not block.users:
                del self._unused[block.hash]
            block.users += 1

    def _report_removed(self, blocks: Sequence[CachedBlock]) -> None:
        if self.on_events is not None and blocks:
            self.on_events([BlocksRemoved(hashes=tuple(block.hash for block in blocks))])

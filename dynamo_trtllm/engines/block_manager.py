"""Reserve the KV blocks of requests, reuse full blocks of earlier requests, and evict blocks that
no request uses.

The key of a block consists of its tokens and of the block before it. The first block of a prompt
has the cache salt in place of a block before it. Keys are compared themselves, not by a hash, so KV
of another prompt is never reused. The engine owns the memory of the blocks. This module knows only
their numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamo_trtllm.protocol.kv_events import BlocksRemoved, BlocksStored, KvBlock, OnKvEvents
from dynamo_trtllm.protocol.messages import TokenIds

# The serial number of the block before (for the first block of a prompt, the cache salt), and the
# tokens of the block.
_Key = tuple[int | str | None, bytes]


class CachedBlock:
    """A full KV block that can be reused."""

    __slots__ = ("is_forgotten", "key", "num_users", "number", "serial")

    def __init__(self, serial: int, key: _Key, number: int) -> None:
        # A number that no other block of the engine gets. In KV events it is the block's hash.
        self.serial = serial
        self.key = key
        self.number = number  # place of the block in the engine's memory
        self.num_users = 1  # requests that use the block
        self.is_forgotten = False  # set by `BlockManager.forget`


class BlockTable:
    """The KV blocks of one request. `BlockManager` changes it."""

    __slots__ = ("chain", "numbers", "refused_at")

    def __init__(self) -> None:
        self.numbers: list[int] = []  # numbers of its blocks, in the order of its tokens
        # The cached blocks with the same content as the first blocks of the request. If another
        # request stored the same content earlier, the cached block is the block of that request,
        # and its number differs from the number at the same place in `numbers`.
        self.chain: list[CachedBlock] = []
        # The manager's `_num_changes` when the manager last had too few blocks for the request.
        self.refused_at = -1

    def uncached_blocks(self) -> list[int]:
        """Return the numbers of the blocks that the cache does not have."""
        num_cached = len(self.chain)
        pairs = zip(self.numbers[:num_cached], self.chain, strict=True)
        copies = [number for number, cached in pairs if number != cached.number]
        return copies + self.numbers[num_cached:]


class _StoredRun(NamedTuple):
    """Blocks that `store` has added to the cache and that follow each other in a prompt."""

    parent: int | None  # serial number of the block before the first one
    blocks: list[KvBlock]

    @property
    def last_serial(self) -> int:
        return self.blocks[-1].hash  # in events, the serial number is the hash


class BlockManager:
    """The KV blocks of one engine. Not thread-safe.

    The most recently freed blocks are reserved first, so that the operating system maps no more
    memory than was used. The serial number of a full block stands for all tokens up to its end.

    Args:
        num_blocks: number of blocks.
        block_tokens: tokens in a block.
        has_prefix_cache: False if no blocks are reused.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, has_prefix_cache: bool) -> None:
        self.on_events: OnKvEvents | None = None  # called with each change of what can be reused
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._has_prefix_cache = has_prefix_cache
        self._free = list(range(num_blocks))  # the last ones are reserved first
        self._blocks: dict[_Key, CachedBlock] = {}
        # Cached blocks without users, by serial number. The least recently used one is the first.
        self._unused: OrderedDict[int, CachedBlock] = OrderedDict()
        self._last_serial = 0
        # The number of changes after which a request that got too few blocks may get enough.
        self._num_changes = 0

    @property
    def num_used(self) -> int:
        """The number of blocks that requests use."""
        return self._num_blocks - len(self._free) - len(self._unused)

    def reserve(
        self, table: BlockTable, prompt: TokenIds | None, salt: str | None, num_blocks: int
    ) -> bool:
        """Reserve the blocks of a request.

        Cached blocks with which its prompt begins are reused. Other cached blocks that no request
        uses are evicted if the request needs their place.

        Engines call this method before each step for the first waiting request. To save time, the
        answer to a request that got no blocks stays False, without a search, until blocks were
        freed or stored.

        Args:
            table: the request's table, without blocks.
            prompt: its tokens; None reuses nothing. The block of the last token is never reused,
                because the engine has to compute the logits of this token.
            salt: blocks of requests with another salt are not reused.
            num_blocks: blocks that the request needs, the reused ones included.

        Returns:
            False if too few blocks are free or unused. The table is unchanged then.
        """
        if table.refused_at == self._num_changes:
            return False
        reused: list[CachedBlock] = []
        if prompt is not None and self._blocks:
            reused = self._match(prompt, salt)
        self._use(reused)
        num_new = num_blocks - len(reused)
        if num_new > len(self._free) + len(self._unused):
            self._release(reused)
            table.refused_at = self._num_changes
            return False
        if num_new > len(self._free):
            self._evict(num_new - len(self._free))
        begin = len(self._free) - num_new
        table.chain = reused
        table.numbers = [block.number for block in reused] + self._free[begin:]
        del self._free[begin:]
        return True

    def store(self, table: BlockTable, tokens: TokenIds, salt: str | None) -> None:
        """Let later requests reuse the full blocks of a request, which continues to use them.

        If another request has stored a block with the same content, that block stays in the cache,
        and this request counts as one of its users. Later requests do not find this request's own
        block.

        Args:
            table: the request's table.
            tokens: its first tokens, whose KV is in its blocks.
            salt: its cache salt.
        """
        if not self._has_prefix_cache:
            return
        # A waiting request may reuse these blocks, and then needs fewer new blocks.
        self._num_changes += 1
        size = self._block_tokens
        width = tokens.itemsize
        data = tokens.tobytes()
        chain = table.chain
        parent = table.chain[-1].serial if table.chain else None
        numbers = table.numbers[len(chain) :]
        runs: list[_StoredRun] = []
        begins = range(len(chain) * size, len(tokens) - size + 1, size)
        for begin, number in zip(begins, numbers, strict=False):
            block_data = data[begin * width : (begin + size) * width]
            key = (salt if parent is None else parent, block_data)
            block = self._blocks.get(key)
            if block is None:
                self._last_serial += 1
                block = CachedBlock(self._last_serial, key, number)
                self._blocks[key] = block
                if self.on_events is not None:
                    if not runs or runs[-1].last_serial != parent:
                        runs.append(_StoredRun(parent, []))
                    runs[-1].blocks.append(KvBlock(block.serial, tokens[begin : begin + size]))
            else:
                self._use((block,))
            chain.append(block)
            parent = block.serial
        if self.on_events is not None and runs:
            self.on_events(
                [
                    BlocksStored(blocks=tuple(run.blocks), parent=run.parent, cache_salt=salt)
                    for run in runs
                ]
            )

    def forget(self, table: BlockTable) -> None:
        """Remove the blocks of a request from the cache, so that no other request reuses them.

        The request itself continues to use them.
        """
        cached = [block for block in table.chain if not block.is_forgotten]
        for block in cached:
            block.is_forgotten = True
            del self._blocks[block.key]
        self._report_removed(cached)

    def free(self, table: BlockTable) -> None:
        """End the use of a request's blocks. Idempotent."""
        self._free += table.uncached_blocks()
        self._free += self._release(table.chain)
        if table.numbers:
            self._num_changes += 1
        table.numbers = []
        table.chain = []

    def _match(self, prompt: TokenIds, salt: str | None) -> list[CachedBlock]:
        """Return the cached blocks with which a prompt begins, without that of its last token."""
        found: list[CachedBlock] = []
        size = self._block_tokens * prompt.itemsize  # bytes of the tokens of a block
        data = prompt.tobytes()
        before: int | str | None = salt
        for begin in range(0, len(data) - size, size):
            block = self._blocks.get((before, data[begin : begin + size]))
            if block is None:
                break
            found.append(block)
            before = block.serial
        return found

    def _use(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            if not block.num_users:
                del self._unused[block.serial]
            block.num_users += 1

    def _release(self, chain: Sequence[CachedBlock]) -> list[int]:
        """End the use of cached blocks.

        Return the numbers of the blocks that are free now. Those are the blocks without users that
        were forgotten.
        """
        free = []
        # Blocks that become unused first are evicted first. The last blocks of the chain should be
        # evicted before the others, because they can't be found without the others.
        for block in reversed(chain):
            block.num_users -= 1
            if block.num_users:
                continue
            if block.is_forgotten:
                free.append(block.number)
            else:
                self._unused[block.serial] = block
        return free

    def _evict(self, count: int) -> None:
        """Free the least recently used blocks of the cache."""
        evicted: list[CachedBlock] = []
        for _ in range(count):
            _, block = self._unused.popitem(last=False)
            del self._blocks[block.key]
            evicted.append(block)
        self._free += [block.number for block in evicted]
        self._report_removed(evicted)

    def _report_removed(self, blocks: Sequence[CachedBlock]) -> None:
        if self.on_events is not None and blocks:
            self.on_events([BlocksRemoved(hashes=tuple(block.serial for block in blocks))])

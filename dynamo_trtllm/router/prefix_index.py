"""Know which prompt prefixes the workers' caches have: from their KV events, or from what this frontend sent. Pure.

A prefix hash stands for a block of tokens and all blocks before it, see `kv_events`. Each hash has a bit mask of the
instances that have the block. Engines free a prefix from its end, so the masks of a prompt's blocks only lose bits from
block to block, and a binary search finds where. Callers pass the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from dynamo_trtllm.kv_events import KvCacheUpdate, prefix_hashes, root_hash, unpack_hashes
from dynamo_trtllm.messages import GenerateRequest, Instance, Role

MAX_SENT_BLOCKS: Final = 1 << 20  # as Dynamo's --router-max-tree-size
_EXPIRED_AT_ONCE = 64  # blocks, so that no request waits for the expiry of many
_EXPIRED_PER_SENT = 4  # blocks per recorded block, so that more expire than come
_MOST_LEVELS = 16  # searched for one prompt; a thousand instances may all have different depths

Level: TypeAlias = tuple[int, int]
"""A number of blocks, and the mask of the instances that have at least so many of a prompt's first blocks."""


class PrefixIndex:
    """The blocks of instances whose blocks have equal sizes. A block of one instance takes about 150 bytes.

    An instance that reports a block without those before it is taken to have those, too.
    """

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}  # prefix hash -> mask of slots
        self.slots: dict[int, int] = {}  # instance id -> slot
        self.bits: list[int] = []  # mask of each slot, shared by the many blocks that one instance has
        self._blocks: list[set[int]] = []  # prefix hashes of each slot
        self._ids: list[int] = []  # instance id of each slot
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.masks)

    def add(self, instance_id: int) -> None:
        """Add an instance without blocks. An instance that is there keeps its blocks."""
        if instance_id in self.slots:
            return
        if self._free:
            slot = self._free.pop()
            self._ids[slot] = instance_id
        else:
            slot = len(self._ids)
            self._ids.append(instance_id)
            self.bits.append(1 << slot)
            self._blocks.append(set())
        self.slots[instance_id] = slot

    def remove(self, instance_id: int) -> None:
        """Remove an instance and its blocks, in time linear in their number. Unknown ids are ignored."""
        if instance_id in self.slots:
            self.clear(instance_id)
            self._free.append(self.slots.pop(instance_id))

    def clear(self, instance_id: int) -> None:
        """Remove all blocks of an instance."""
        self.discard(instance_id, tuple(self._blocks[self.slots[instance_id]]))

    def store(self, instance_id: int, hashes: Iterable[int]) -> None:
        """Add blocks of an instance."""
        slot, masks = self.slots[instance_id], self.masks
        bit, own = self.bits[slot], self._blocks[slot]
        new = set(hashes) - own
        own |= new
        for prefix in new:
            mask = masks.get(prefix)
            masks[prefix] = bit if mask is None else mask | bit

    def discard(self, instance_id: int, hashes: Iterable[int]) -> None:
        """Remove blocks of an instance. Unknown ones are ignored."""
        slot, masks = self.slots[instance_id], self.masks
        bit, own = self.bits[slot], self._blocks[slot]
        for prefix in hashes:
            if prefix in own:
                own.discard(prefix)
                if rest := masks[prefix] ^ bit:
                    masks[prefix] = rest
                else:
                    del masks[prefix]

    def num_blocks(self, instance_id: int) -> int:
        return len(self._blocks[self.slots[instance_id]])

    def has_any_of(self, hashes: Sequence[int]) -> bool:
        """Return whether any instance has the beginning of a prompt."""
        return bool(hashes) and (hashes[0] in self.masks or hashes[-1] in self.masks)

    def levels(self, hashes: Sequence[int]) -> Iterator[Level]:
        """Yield how deep instances match a prompt, the deepest first. Each mask includes the one before it."""
        masks = self.masks
        depth, mask = len(hashes), masks.get(hashes[-1], 0)
        if mask:
            yield depth, mask
        first = masks.get(hashes[0], 0) | mask
        while mask != first:  # further instances have less: search for the deepest block that one of them has
            low, low_mask, high = 1, first, depth
            while high - low > 1:
                middle = (low + high) // 2
                middle_mask = masks.get(hashes[middle - 1], 0) | mask
                if middle_mask == mask:
                    high = middle
                else:
                    low, low_mask = middle, middle_mask
            depth, mask = low, low_mask
            yield depth, mask
            first |= mask

    def ids_of(self, mask: int, limit: int, turn: int) -> list[int]:
        """Return ids of at most `limit` instances of a mask. Another `turn` begins at another instance."""
        ids = self._ids
        found: list[int] = []
        start = turn % len(ids)
        above = mask >> start << start
        for part in (above, mask ^ above):
            left = part
            while left and len(found) < limit:
                bit = left & -left
                found.append(ids[bit.bit_length() - 1])
                left ^= bit
        return found


def _first_lacking(hashes: Sequence[int], lacks: Callable[[int], bool]) -> int:
    """Return how many hashes come before the first one that `lacks` is true of."""
    return len(hashes) if not lacks(hashes[-1]) else bisect_left(hashes, True, key=lacks)


class PromptHashes:
    """The prefix hashes of one request's prompt, computed once per block size."""

    __slots__ = ("_hashes", "_request")

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._hashes: dict[int, list[int]] = {}

    @property
    def model(self) -> str:
        return self._request.model

    def of(self, block_tokens: int) -> list[int]:
        """Return the hashes of the blocks that an engine may reuse: it computes at least the last token."""
        hashes = self._hashes.get(block_tokens)
        if hashes is None:
            request = self._request
            is_scored = request.sampling.prompt_logprobs is not None  # engines then compute the whole prompt
            ids = request.token_ids[:0] if is_scored else request.token_ids[:-1]
            hashes = self._hashes[block_tokens] = prefix_hashes(ids, block_tokens, root_hash(request.cache_salt))
        return hashes


class _IndexMatch:
    """How deep the instances of an index match a prompt. Only what is asked for is searched."""

    __slots__ = ("_found", "_others", "block_tokens", "blocks", "hashes")

    def __init__(self, blocks: PrefixIndex, block_tokens: int, hashes: Sequence[int]) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.hashes = hashes
        self._found: list[Level] = []
        self._others = blocks.levels(hashes)

    def levels(self) -> Iterator[Level]:
        yield from self._found
        for level in self._others:
            self._found.append(level)
            yield level

    def depth(self, slot: int) -> int:
        """Return how many of the prompt's first blocks the instance of a slot has."""
        found, bit = self._found, self.blocks.bits[slot]
        for depth, mask in found:
            if mask & bit:
                return depth
        while len(found) < _MOST_LEVELS:
            if (level := next(self._others, None)) is None:
                return 0
            found.append(level)
            if level[1] & bit:
                return level[0]
        masks = self.blocks.masks
        return _first_lacking(self.hashes, lambda prefix: not masks.get(prefix, 0) & bit)


class PrefixOverlaps:
    """How many tokens at the start of a prompt the instances of one role have in their caches.

    It can be read until the next change of what is known.
    """

    __slots__ = ("_expires", "_matches", "_now", "_turn")

    def __init__(
        self, matches: Sequence[_IndexMatch], expires: Mapping[int, Mapping[int, float]], now: float, turn: int
    ) -> None:
        self._matches = matches
        self._expires = expires
        self._now = now
        self._turn = turn

    def get(self, instance_id: int, default: int = 0, /) -> int:
        """Return the overlap of an instance, or `default` if it has none."""
        for match in self._matches:
            slot = match.blocks.slots.get(instance_id)
            if slot is not None:
                depth = match.depth(slot)
                if depth and instance_id in self._expires:
                    depth = self._unexpired(match, depth, self._expires[instance_id])
                return depth * match.block_tokens or default
        return default

    def _unexpired(self, match: _IndexMatch, depth: int, expires: Mapping[int, float]) -> int:
        """Return how many of the blocks have not expired. The others are removed later."""
        now = self._now
        if expires.get(match.hashes[depth - 1], now) > now:
            return depth
        return _first_lacking(match.hashes, lambda prefix: expires.get(prefix, now) <= now)

    def deepest(self, limit: int) -> list[int]:
        """Return at most `limit` instances per block size, those with the longest overlaps first.

        Of equal ones, others come first with each request, so that they share the load. Those whose prompts have just
        expired may be among them.
        """
        found: list[int] = []
        for match in self._matches:
            before, left = 0, limit
            for _, mask in match.levels():
                ids = match.blocks.ids_of(mask ^ before, left, self._turn)
                found += ids
                before, left = mask, left - len(ids)
                if not left:
                    break
        return found


@dataclass(slots=True, kw_only=True)
class _Cache:
    """What is known of one instance's prefix cache."""

    model: str
    role: Role
    block_tokens: int
    has_events: bool
    next_number: int = -1  # of the instance's next update
    is_synced: bool = False
    reads_snapshot: bool = False


class _Sent(NamedTuple):
    expires_s: float
    instance_id: int
    hashes: Sequence[int]


class KnownPrefixes:
    """The prefix caches of all instances, as far as this frontend knows them.

    Args:
        reads_events: use the KV events of instances that publish them. Of the other instances, the prompts count that
            this frontend sent them.
        ttl_s: for how long those count.
    """

    def __init__(self, *, reads_events: bool = True, ttl_s: float = 120.0) -> None:
        self.reads_events = reads_events
        self._ttl_s = ttl_s
        self._caches: dict[int, _Cache] = {}
        self._indexes: dict[str, dict[Role, dict[int, PrefixIndex]]] = {}  # by model, role and block size
        self._sent: deque[_Sent] = deque()
        self._num_sent = 0  # blocks in `_sent`
        self._expires: dict[int, dict[int, float]] = {}  # instance id -> prefix hash -> when it expires
        self._turn = 0
        self.unsynced: set[int] = set()  # instances that must publish everything again

    def add_instance(self, instance: Instance) -> None:
        """Add an instance. One that publishes KV events is out of sync until it has published a snapshot."""
        self.remove_instance(instance.id)
        has_events = self.reads_events and instance.publishes_kv_events
        self._caches[instance.id] = _Cache(
            model=instance.card.name,
            role=instance.role,
            block_tokens=instance.layout.block_tokens,
            has_events=has_events,
        )
        self._index_of(instance.id).add(instance.id)
        if has_events:
            self.unsynced.add(instance.id)
        else:
            self._expires[instance.id] = {}

    def remove_instance(self, instance_id: int) -> None:
        """Remove an instance and what is known of its cache. Unknown ids are ignored."""
        if instance_id in self._caches:
            self._index_of(instance_id).remove(instance_id)
            del self._caches[instance_id]
            self.unsynced.discard(instance_id)
            self._expires.pop(instance_id, None)

    def num_blocks(self) -> dict[int, int]:
        """Return the number of known blocks by instance id."""
        return {name: self._index_of(name).num_blocks(name) for name in self._caches}

    def forget(self, instance_id: int) -> None:
        """Remove all blocks of an instance."""
        self._index_of(instance_id).clear(instance_id)

    def on_update(self, update: KvCacheUpdate) -> None:
        """Apply an update of an instance. If one before it is missing, the instance is out of sync until a snapshot.

        Raises:
            ValueError: the update is malformed. The instance is out of sync.
        """
        cache = self._caches.get(update.instance_id)
        if cache is None or not cache.has_events:
            return
        if update.number != cache.next_number:
            cache.is_synced = cache.reads_snapshot = False
            self.unsynced.add(update.instance_id)
        cache.next_number = update.number + 1
        if not update.snapshot:
            self._apply(cache, update)
        elif not cache.is_synced:
            cache.reads_snapshot |= update.cleared
            if cache.reads_snapshot:
                self._apply(cache, update)
                if update.snapshot == 1:
                    cache.is_synced, cache.reads_snapshot = True, False
                    self.unsynced.discard(update.instance_id)

    def _apply(self, cache: _Cache, update: KvCacheUpdate) -> None:
        name, expected, cache.next_number = update.instance_id, cache.next_number, -1  # until all of it is applied
        if update.block_tokens not in (0, cache.block_tokens):
            self._index_of(name).remove(name)
            cache.block_tokens = update.block_tokens
            self._index_of(name).add(name)
        index = self._index_of(name)
        if update.cleared:
            index.clear(name)
        index.discard(name, unpack_hashes(update.removed))
        index.store(name, unpack_hashes(update.stored))
        cache.next_number = expected

    def record_sent(self, prompt: PromptHashes, instance_id: int, now: float) -> None:
        """Count a prompt as cached by the instance that it was sent to, unless that instance publishes KV events."""
        expires = self._expires.get(instance_id)
        if expires is None:
            return
        if not (hashes := prompt.of(self._caches[instance_id].block_tokens)):
            return
        self._expire(now, MAX_SENT_BLOCKS - len(hashes), max(_EXPIRED_AT_ONCE, _EXPIRED_PER_SENT * len(hashes)))
        self._index_of(instance_id).store(instance_id, hashes)
        expires.update(dict.fromkeys(hashes, now + self._ttl_s))
        self._sent.append(_Sent(now + self._ttl_s, instance_id, hashes))
        self._num_sent += len(hashes)

    def _expire(self, now: float, limit: int, budget: int) -> None:
        """Remove the oldest prompts: all above a limit of blocks, and about `budget` blocks of expired ones."""
        while self._sent and (self._num_sent > limit or (budget > 0 and self._sent[0].expires_s <= now)):
            sent = self._sent.popleft()
            self._num_sent -= len(sent.hashes)
            budget -= len(sent.hashes) + 1
            if (expires := self._expires.get(sent.instance_id)) is not None:  # the instance is still there
                old = [each for each in sent.hashes if expires.get(each, now) <= sent.expires_s]
                for each in old:
                    expires.pop(each, None)
                self._index_of(sent.instance_id).discard(sent.instance_id, old)

    def overlaps(self, prompt: PromptHashes, now: float) -> dict[Role, PrefixOverlaps]:
        """Return what the instances of the prompt's model have of it, by role. Roles without any are left out."""
        self._expire(now, self._num_sent, _EXPIRED_AT_ONCE)  # maybe nothing is recorded any more
        self._turn += 1
        found = {}
        for role, indexes in self._indexes.get(prompt.model, {}).items():
            matches = [
                _IndexMatch(index, block_tokens, prompt.of(block_tokens))
                for block_tokens, index in indexes.items()
                if len(index) and index.has_any_of(prompt.of(block_tokens))
            ]
            if matches:
                found[role] = PrefixOverlaps(matches, self._expires, now, self._turn)
        return found

    def _index_of(self, instance_id: int) -> PrefixIndex:
        cache = self._caches[instance_id]
        indexes = self._indexes.setdefault(cache.model, {}).setdefault(cache.role, {})
        if cache.block_tokens not in indexes:
            indexes[cache.block_tokens] = PrefixIndex()
        return indexes[cache.block_tokens]

"""Know which prompt prefixes the workers' caches have. Pure.

This knowledge comes from the workers' KV events, and from the prompts that this frontend sent. A
prefix hash stands for a block of tokens and all blocks before it, see `kv_events`. Each hash has a
bit mask of the instances that have the block. Engines free a prefix from its end, so the masks of a
prompt's blocks only lose bits from block to block. Therefore a binary search finds the blocks at
which they do. Callers pass the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.protocol.kv_events import KvCacheUpdate, prefix_hashes, root_hash, unpack_hashes
from dynamo_trtllm.protocol.messages import GenerateRequest, Instance, Role

MAX_SENT_BLOCKS: Final = 1 << 20  # the value of Dynamo's --router-max-tree-size
# About how many expired blocks one request removes, so that no request waits long for removals:
# this many, or _EXPIRED_PER_SENT for each block that is recorded, if that is more. Thus more blocks
# can be removed than are recorded.
_EXPIRED_AT_ONCE = 64
_EXPIRED_PER_SENT = 4
# Limit of the levels of one prompt, because a thousand instances may all have different depths.
_MAX_LEVELS = 16

# A number of blocks, and the mask of the instances that have at least this number.
Level: TypeAlias = tuple[int, int]


class _InstanceMasks(dict[int, int]):
    """The mask of the instances that have a block, by its prefix hash."""

    # Called with the hash of a block that no instance has. The mask of such a block is 0, and 0
    # times the hash is 0. The call is frequent, and a function written in Python would take twice
    # as long.
    __missing__ = (0).__mul__


class PrefixIndex:
    """The blocks of instances whose blocks have equal sizes.

    A block of one instance takes about 150 bytes.

    Searches expect that an instance with a block of a prompt has all blocks before it, too. For an
    instance of which this is not true, they may find too few blocks or too many.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.masks = _InstanceMasks()
        self.roles = dict.fromkeys(Role, 0)  # the mask of the instances of each role
        self._ids: list[int] = []  # instance id of each bit
        self._free: list[int] = []  # bits of removed instances, for new ones

    def add(self, instance: Instance) -> int:
        """Add an instance without blocks. Return its bit of the masks."""
        if self._free:
            bit = self._free.pop()
            self._ids[bit.bit_length() - 1] = instance.id
        else:
            bit = 1 << len(self._ids)
            self._ids.append(instance.id)
        # Elastic instances compute prompts and fetch KV.
        roles = [instance.role]
        if instance.role is Role.ELASTIC:
            roles = [Role.PREFILL, Role.DECODE]
        for role in roles:
            self.roles[role] |= bit
        return bit

    def remove(self, bit: int) -> None:
        """Remove an instance that has no blocks any more."""
        self._free.append(bit)
        self.roles = {role: mask & ~bit for role, mask in self.roles.items()}

    def levels(self, hashes: Sequence[int]) -> list[Level]:
        """Return how deep instances match a prompt, at most _MAX_LEVELS, the deepest first.

        Each mask includes the one before it.
        """
        masks = self.masks
        levels: list[Level] = []
        # `hashes` begins with the last block of the prompt. All instances that match any of the
        # prompt have its first block.
        matching = masks[hashes[-1]]
        mask = masks[hashes[0]]  # instances that have all blocks
        if mask:
            levels.append((len(hashes), mask))
        # The mask of a block has the bits of the block after it, and maybe more. With more of them,
        # it is the larger number. So the masks are sorted, and a binary search finds the next block
        # that has more bits. The loop ends when `mask` has all bits of `matching`.
        index = 0
        while (matching | mask) != mask and len(levels) < _MAX_LEVELS:
            index = bisect_right(hashes, mask, index, key=masks.__getitem__)
            if index == len(hashes):
                break
            mask |= masks[hashes[index]]
            levels.append((len(hashes) - index, mask))
        return levels

    def ids_of(self, mask: int, limit: int, start_at: int) -> list[int]:
        """Return ids of at most `limit` instances of a mask.

        They begin with instance number `start_at`, modulo the number of instances.
        """
        found: list[int] = []
        start = start_at % len(self._ids)
        while mask and len(found) < limit:
            # The bits from `start` on come first, then those before it.
            rest = mask >> start << start
            if not rest:
                rest = mask
            lowest_bit = rest & -rest
            found.append(self._ids[lowest_bit.bit_length() - 1])
            mask ^= lowest_bit
        return found


class PromptHashes:
    """The prefix hashes of one request's prompt, computed once per block size."""

    __slots__ = ("_hashes", "request")

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._hashes: dict[int, list[int]] = {}

    def of(self, block_tokens: int) -> list[int]:
        """Return the hashes of the blocks that an engine may reuse, the last block first.

        An engine always computes the last token itself.
        """
        hashes = self._hashes.get(block_tokens)
        if hashes is None:
            request = self.request
            reusable = request.token_ids[:-1]
            # For log-probabilities of the prompt, an engine computes all of it.
            if request.sampling.prompt_logprobs is not None:
                reusable = request.token_ids[:0]
            hashes = prefix_hashes(reusable, block_tokens, root_hash(request.cache_salt))
            hashes.reverse()
            self._hashes[block_tokens] = hashes
        return hashes


@dataclass(slots=True, kw_only=True, eq=False)
class _InstancePrefixes:
    """What is known of one instance's prefix cache."""

    instance: Instance
    has_events: bool  # the instance publishes KV events, and they are used
    index: PrefixIndex = field(init=False)
    bit: int = field(init=False)  # the bit of the instance in the masks of the index
    blocks: set[int] = field(init=False, default_factory=set)  # prefix hashes
    # When a block expires, by its prefix hash. Blocks that the instance has reported do not expire.
    expires: dict[int, float] = field(init=False, default_factory=dict)
    next_number: int = -1  # the number that the next update of the instance should have
    is_synced: bool = False
    reads_snapshot: bool = False  # the first part of a snapshot was applied, but not yet the last

    def leave(self) -> None:
        """Remove the instance from its index, with its blocks, in time linear in their number."""
        self.clear()
        self.expires.clear()
        self.index.remove(self.bit)

    def clear(self) -> None:
        """Remove all blocks."""
        self.discard(tuple(self.blocks))

    def store(self, hashes: Iterable[int]) -> set[int]:
        """Add blocks. Return the blocks that the instance did not have."""
        bit = self.bit
        masks = self.index.masks
        new = set(hashes) - self.blocks
        self.blocks |= new
        for prefix in new:
            mask = masks.get(prefix)
            # Most blocks are at one instance only. Their mask is the `int` object of the instance's
            # bit, of which no copies are made. This saves memory.
            masks[prefix] = bit if mask is None else mask | bit
        return new

    def discard(self, hashes: Iterable[int]) -> None:
        """Remove blocks. Unknown ones are ignored."""
        masks = self.index.masks
        for prefix in hashes:
            if prefix not in self.blocks:
                continue
            self.blocks.discard(prefix)
            others = masks[prefix] ^ self.bit
            if others:
                masks[prefix] = others
            else:
                del masks[prefix]


class _IndexMatch(msgspec.Struct):  # created in a third of the time of a named tuple
    """How deep the instances of an index match a prompt."""

    index: PrefixIndex
    hashes: Sequence[int]
    levels: list[Level]

    def depth(self, bit: int) -> int:
        """Return how many of the prompt's first blocks an instance has."""
        for depth, mask in self.levels:
            if mask & bit:
                return depth
        return self.search(bit)

    def search(self, bit: int) -> int:
        """Return how many of the prompt's first blocks an instance has, if it is in no level."""
        # With fewer levels than the limit, each instance that has blocks of the prompt is in a
        # level.
        if len(self.levels) < _MAX_LEVELS:
            return 0
        masks = self.index.masks

        def has_block(prefix: int) -> bool:
            return masks[prefix] & bit != 0

        # `hashes` begins with the last block, so the blocks that the instance lacks come first.
        num_lacking = bisect_left(self.hashes, True, key=has_block)
        return len(self.hashes) - num_lacking


class PrefixOverlaps(msgspec.Struct):
    """How many tokens at the start of a prompt the instances of a model have in their caches.

    It is valid until the next change of the caches.
    """

    matches: Sequence[_IndexMatch]
    caches: Mapping[int, _InstancePrefixes]
    now: float
    start_at: int  # another number for each prompt: where `deepest` begins among equal instances

    def of(self, instance_ids: Collection[int]) -> list[int]:
        """Return the overlap of each instance."""
        found = [0] * len(instance_ids)
        for match in self.matches:
            for index, instance_id in enumerate(instance_ids):
                cache = self.caches.get(instance_id)
                # The blocks of other indexes have another size.
                if cache is None or cache.index is not match.index:
                    continue
                depth = match.depth(cache.bit)
                if depth and cache.expires:
                    depth = self._unexpired(match, depth, cache.expires)
                found[index] = depth * match.index.block_tokens
        return found

    def _unexpired(self, match: _IndexMatch, depth: int, expires: Mapping[int, float]) -> int:
        """Return how many of the blocks have not expired. Expired blocks are removed later."""
        hashes = match.hashes
        # The last block of the prompt comes first in `hashes`. This is the index of the last block
        # that the instance has.
        index = len(hashes) - depth
        if expires.get(hashes[index], math.inf) > self.now:
            return depth

        # The instance publishes no KV events: otherwise, its blocks would not expire. So each of
        # its blocks has a time.
        def is_unexpired(prefix: int) -> bool:
            return expires.get(prefix, 0.0) > self.now

        # The first blocks of a prompt are in later prompts as well, and expire last.
        return len(hashes) - bisect_left(hashes, True, index, key=is_unexpired)

    def deepest(self, role: Role, limit: int) -> list[int]:
        """Return the instances of a role with the longest overlaps, the longest one first.

        There are at most `limit` instances per block size. Instances with equal overlaps take turns
        in coming first, so that they share the load. Instances whose blocks have just expired may
        be among the result.
        """
        found: list[int] = []
        for match in self.matches:
            num_left = limit
            candidates = match.index.roles[role]
            for _, mask in match.levels:
                deepest = mask & candidates
                if not deepest:
                    continue
                ids = match.index.ids_of(deepest, num_left, self.start_at)
                found += ids
                num_left -= len(ids)
                if not num_left:
                    break
                candidates ^= deepest
        return found


@dataclass(slots=True)
class SentPrompt:
    """The blocks that an instance will have because a prompt was sent to it.

    Call `end` when the request ends.
    """

    _cache: _InstancePrefixes | None  # None: the instance is not known
    _blocks: Iterable[int]
    is_computed: bool = False  # the instance has computed the prompt

    def end(self) -> None:
        """Stop counting the blocks.

        They still count if the instance has computed the prompt and publishes no KV events.
        """
        cache = self._cache
        if cache is None:
            return
        if self.is_computed and not cache.has_events:
            return
        # Blocks without an expiry stay: the instance has reported them.
        unreported = [prefix for prefix in self._blocks if prefix in cache.expires]
        for prefix in unreported:
            del cache.expires[prefix]
        cache.discard(unreported)


class _Sent(NamedTuple):
    """The blocks of a prompt that was sent to an instance without KV events."""

    expires_at: float
    cache: _InstancePrefixes
    hashes: Sequence[int]


class ClusterPrefixes:
    """The prefix caches of all instances, as far as this frontend knows them.

    Args:
        reads_events: use the KV events of instances that publish them. A prompt that this frontend
            sends to such an instance counts, too, until its request ends.
        ttl_s: for how long a prompt counts that this frontend sends to one of the other instances.
    """

    def __init__(self, *, reads_events: bool = True, ttl_s: float = 120.0) -> None:
        self.reads_events = reads_events
        self._ttl_s = ttl_s
        self._caches: dict[int, _InstancePrefixes] = {}
        # The indexes by model and block size.
        self._indexes: defaultdict[str, dict[int, PrefixIndex]] = defaultdict(dict)
        self._sent: deque[_Sent] = deque()
        self._num_sent = 0  # how many blocks `_sent` has
        self._turn = 0  # counts prompts, so that equal instances take turns, see `deepest`
        self.unsynced: set[int] = set()  # instances that must publish everything again

    def add_instance(self, instance: Instance) -> None:
        """Add an instance, unless it is known.

        An instance with KV events is out of sync until it has published a snapshot.
        """
        known = self._caches.get(instance.id)
        if known is not None and known.instance == instance:
            return
        self.remove_instance(instance.id)
        has_events = self.reads_events and instance.publishes_kv_events
        cache = _InstancePrefixes(instance=instance, has_events=has_events)
        self._join_index(cache, instance.layout.block_tokens)
        self._caches[instance.id] = cache
        if has_events:
            self.unsynced.add(instance.id)

    def _join_index(self, cache: _InstancePrefixes, block_tokens: int) -> None:
        indexes = self._indexes[cache.instance.card.name]
        index = indexes.setdefault(block_tokens, PrefixIndex(block_tokens))
        cache.index = index
        cache.bit = index.add(cache.instance)

    def remove_instance(self, instance_id: int) -> None:
        """Remove an instance and what is known of its cache. Unknown ids are ignored."""
        cache = self._caches.pop(instance_id, None)
        if cache is not None:
            cache.leave()
            self.unsynced.discard(instance_id)

    def num_blocks(self) -> dict[int, int]:
        """Return the number of known blocks by instance id."""
        return {instance_id: len(cache.blocks) for instance_id, cache in self._caches.items()}

    def forget(self, instance_id: int) -> None:
        """Remove all blocks of an instance."""
        self._caches[instance_id].clear()

    def on_update(self, update: KvCacheUpdate) -> None:
        """Apply an update of an instance.

        If the update before it is missing, the instance is out of sync until a snapshot.

        Raises:
            ValueError: the update is malformed. The instance gets out of sync with its next update.
        """
        cache = self._caches.get(update.instance_id)
        if cache is None or not cache.has_events:
            return
        if update.number != cache.next_number:
            cache.is_synced = False
            cache.reads_snapshot = False
            self.unsynced.add(update.instance_id)
        cache.next_number = update.number + 1
        if not update.snapshot:
            self._apply(cache, update)
        elif not cache.is_synced:
            # The first part of a snapshot is `cleared`, and the last one has the number 1.
            if update.cleared:
                cache.reads_snapshot = True
            if cache.reads_snapshot:
                self._apply(cache, update)
                if update.snapshot == 1:
                    cache.is_synced = True
                    cache.reads_snapshot = False
                    self.unsynced.discard(update.instance_id)

    def _apply(self, cache: _InstancePrefixes, update: KvCacheUpdate) -> None:
        # A malformed update raises when a part of it may be applied already. It leaves -1 as the
        # expected number, which no update has. So the next update shows that one is missing.
        expected = cache.next_number
        cache.next_number = -1
        if update.block_tokens not in (0, cache.index.block_tokens):
            cache.leave()
            self._join_index(cache, update.block_tokens)
        if update.cleared:
            cache.clear()
        cache.discard(unpack_hashes(update.removed))
        stored = unpack_hashes(update.stored)
        cache.store(stored)
        if cache.expires:
            for prefix in stored:
                cache.expires.pop(prefix, None)
        cache.next_number = expected

    def record_sent(self, prompt: PromptHashes, instance_id: int, now: float) -> SentPrompt:
        """Count a prompt as cached by the instance that it is sent to.

        It does not count at a decode instance that publishes KV events, nor at an instance that
        reuses no prefixes.
        """
        cache = self._caches.get(instance_id)
        if cache is None or not cache.instance.reuses_prefixes:
            return SentPrompt(None, ())
        if cache.has_events and cache.instance.role is Role.DECODE:
            return SentPrompt(cache, ())
        hashes = prompt.of(cache.index.block_tokens)
        if not hashes:
            return SentPrompt(cache, ())
        new = cache.store(hashes)
        if cache.has_events:
            # The new blocks count until the instance reports them or the request ends.
            cache.expires.update(dict.fromkeys(new, math.inf))
            return SentPrompt(cache, new)
        expires_at = now + self._ttl_s
        cache.expires.update(dict.fromkeys(hashes, expires_at))
        self._sent.append(_Sent(expires_at, cache, hashes))
        self._num_sent += len(hashes)
        budget = max(_EXPIRED_AT_ONCE, _EXPIRED_PER_SENT * len(hashes))
        # This prompt stays, however long it is.
        limit = max(MAX_SENT_BLOCKS, len(hashes))
        self._expire(now, limit, budget)
        return SentPrompt(cache, new)

    def _expire(self, now: float, limit: int, budget: int) -> None:
        """Remove prompts until `limit` blocks are left, and about `budget` blocks of expired ones.

        The oldest prompts go first.
        """
        while self._sent:
            is_above_limit = self._num_sent > limit
            is_expired = budget > 0 and self._sent[0].expires_at <= now
            if not is_above_limit and not is_expired:
                break
            expires_at, cache, hashes = self._sent.popleft()
            self._num_sent -= len(hashes)
            budget -= len(hashes) + 1  # 1 for the prompt itself
            # Blocks that a later prompt has as well expire with that one.
            expired = [
                prefix for prefix in hashes if cache.expires.get(prefix, math.inf) <= expires_at
            ]
            for prefix in expired:
                del cache.expires[prefix]
            cache.discard(expired)

    def overlaps(self, prompt: PromptHashes, now: float) -> PrefixOverlaps:
        """Return how much of a prompt the instances of its model have."""
        if self._sent:
            # `record_sent` also removes expired prompts, but it may not be called any more.
            self._expire(now, self._num_sent, _EXPIRED_AT_ONCE)
        self._turn += 1
        matches = []
        for block_tokens, index in self._indexes.get(prompt.request.model, {}).items():
            if not index.masks:
                continue
            hashes = prompt.of(block_tokens)
            levels = index.levels(hashes) if hashes else []
            if levels:
                matches.append(_IndexMatch(index, hashes, levels))
        return PrefixOverlaps(matches, self._caches, now, self._turn)

"""Know which prompt prefixes the workers' caches have: from their KV events, and from what this
frontend sent. Pure.

A prefix hash stands for a block of tokens and all blocks before it, see `kv_events`. Each hash has
a bit mask of the instances that have the block. Engines free a prefix from its end, so the masks of
a prompt's blocks only lose bits from block to block, and a binary search finds where. Callers pass
the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.kv_events import KvCacheUpdate, prefix_hashes, root_hash, unpack_hashes
from dynamo_trtllm.messages import GenerateRequest, Instance, Role

MAX_SENT_BLOCKS: Final = 1 << 20  # as Dynamo's --router-max-tree-size
_EXPIRED_AT_ONCE = 64  # blocks, so that no request waits for the expiry of many
_EXPIRED_PER_SENT = 4  # blocks per recorded block, so that more expire than come
_MOST_LEVELS = 16  # searched for one prompt; a thousand instances may all have different depths

# a number of blocks, and the mask of the instances that have at least so many
Level: TypeAlias = tuple[int, int]


class _Masks(dict[int, int]):
    """The mask of the instances that have a block, by its prefix hash."""

    # of blocks that no instance has. A function of Python would take twice as long
    __missing__ = (0).__mul__


class PrefixIndex:
    """The blocks of instances whose blocks have equal sizes.

    A block of one instance takes about 150 bytes.

    An instance that reports a block without those before it is taken to have those, too.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.masks = _Masks()
        self.roles = dict.fromkeys(Role, 0)  # masks of the instances
        self._ids: list[int] = []  # instance id of each bit
        self._free: list[int] = []  # bits

    def add(self, instance: Instance) -> int:
        """Add an instance without blocks. Return its bit of the masks."""
        if self._free:
            bit = self._free.pop()
            self._ids[bit.bit_length() - 1] = instance.id
        else:
            bit = 1 << len(self._ids)
            self._ids.append(instance.id)
        self.roles[instance.role] |= bit
        return bit

    def remove(self, bit: int) -> None:
        """Remove an instance that has no blocks any more."""
        self._free.append(bit)
        self.roles = {role: mask & ~bit for role, mask in self.roles.items()}

    def levels(self, hashes: Sequence[int]) -> list[Level]:
        """Return how deep instances match a prompt, at most _MOST_LEVELS, the deepest first.

        Each mask includes the one before it.
        """
        block_mask, found = self.masks.__getitem__, list[Level]()
        every, at, mask = block_mask(hashes[-1]), 0, block_mask(hashes[0])
        if mask:
            found.append((len(hashes), mask))
        # Each block has the bits of the block after it, and maybe more, so that the masks are
        # sorted as numbers, too.
        while every | mask != mask and len(found) < _MOST_LEVELS:
            at = bisect_right(hashes, mask, at, key=block_mask)
            if at == len(hashes):
                break
            mask |= block_mask(hashes[at])
            found.append((len(hashes) - at, mask))
        return found

    def ids_of(self, mask: int, limit: int, turn: int) -> list[int]:
        """Return ids of at most `limit` instances of a mask.

        Another `turn` begins at another instance.
        """
        ids = self._ids
        found: list[int] = []
        start = turn % len(ids)
        while mask and len(found) < limit:
            left = mask >> start << start or mask
            bit = left & -left
            found.append(ids[bit.bit_length() - 1])
            mask ^= bit
        return found


class PromptHashes:
    """The prefix hashes of one request's prompt, computed once per block size."""

    __slots__ = ("_hashes", "request")

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._hashes: dict[int, list[int]] = {}

    def of(self, block_tokens: int) -> list[int]:
        """Return the hashes of the blocks that an engine may reuse, the last block first.

        It computes at least the last token.
        """
        hashes = self._hashes.get(block_tokens)
        if hashes is None:
            request = self.request
            # engines then compute the whole prompt
            is_scored = request.sampling.prompt_logprobs is not None
            ids = request.token_ids[:0] if is_scored else request.token_ids[:-1]
            hashes = self._hashes[block_tokens] = prefix_hashes(
                ids, block_tokens, root_hash(request.cache_salt)
            )
            hashes.reverse()
        return hashes


@dataclass(slots=True, kw_only=True, eq=False)
class _Cache:
    """What is known of one instance's prefix cache."""

    instance: Instance
    has_events: bool
    index: PrefixIndex = field(init=False)
    bit: int = field(init=False)  # of the masks, shared by its many blocks
    blocks: set[int] = field(init=False, default_factory=set)  # prefix hashes
    # prefix hash -> when it expires
    expires: dict[int, float] = field(init=False, default_factory=dict)
    next_number: int = -1  # of the instance's next update
    is_synced: bool = False
    reads_snapshot: bool = False

    def leave(self) -> None:
        """Remove the instance from its index, with its blocks, in time linear in their number."""
        self.clear()
        self.expires.clear()
        self.index.remove(self.bit)

    def clear(self) -> None:
        """Remove all blocks."""
        self.discard(tuple(self.blocks))

    def store(self, hashes: Iterable[int]) -> set[int]:
        """Add blocks. Return those that are new."""
        bit, masks = self.bit, self.index.masks
        new = set(hashes) - self.blocks
        self.blocks |= new
        for prefix in new:
            mask = masks.get(prefix)
            # most blocks are of one instance and share its number
            masks[prefix] = bit if mask is None else mask | bit
        return new

    def discard(self, hashes: Iterable[int]) -> None:
        """Remove blocks. Unknown ones are ignored."""
        bit, own, masks = self.bit, self.blocks, self.index.masks
        for prefix in hashes:
            if prefix in own:
                own.discard(prefix)
                if rest := masks[prefix] ^ bit:
                    masks[prefix] = rest
                else:
                    del masks[prefix]


class _IndexMatch(msgspec.Struct):  # made in a third of the time of a named tuple
    """How deep the instances of an index match a prompt."""

    index: PrefixIndex
    hashes: Sequence[int]
    levels: list[Level]

    def search(self, bit: int) -> int:
        """Return how many of the prompt's first blocks an instance has that is in none of the
        levels.
        """
        if len(self.levels) < _MOST_LEVELS:
            return 0
        masks = self.index.masks
        return len(self.hashes) - bisect_left(
            self.hashes, True, key=lambda prefix: bool(masks[prefix] & bit)
        )


class PrefixOverlaps(msgspec.Struct):
    """How many tokens at the start of a prompt the instances of a model have in their caches.

    It can be read until the next change of what is known.
    """

    matches: Sequence[_IndexMatch]
    caches: Mapping[int, _Cache]
    now: float
    turn: int

    def of(self, instance_ids: Collection[int]) -> list[int]:
        """Return the overlap of each instance."""
        found, caches = [0] * len(instance_ids), self.caches
        for match in self.matches:
            match_index, levels = match.index, match.levels
            for index, instance_id in enumerate(instance_ids):
                if (cache := caches.get(instance_id)) is None or cache.index is not match_index:
                    continue  # its blocks have another size
                bit = cache.bit
                for depth, mask in levels:  # noqa: B007 - read below
                    if mask & bit:
                        break
                else:
                    depth = match.search(bit)
                if depth and cache.expires:
                    depth = self._unexpired(match, depth, cache.expires)
                found[index] = depth * match_index.block_tokens
        return found

    def _unexpired(self, match: _IndexMatch, depth: int, expires: Mapping[int, float]) -> int:
        """Return how many of the blocks have not expired. The others are removed later."""
        now, hashes, get = self.now, match.hashes, expires.get
        if get(hashes[-depth], math.inf) > now:
            return depth
        return len(hashes) - bisect_left(
            hashes, True, len(hashes) - depth, key=lambda prefix: get(prefix, 0.0) > now
        )

    def deepest(self, role: Role, limit: int) -> list[int]:
        """Return at most `limit` instances of a role per block size, those with the longest
        overlaps first.

        Of equal ones, others come first with each request, so that they share the load. Those whose
        prompts have just expired may be among them.
        """
        found: list[int] = []
        for match in self.matches:
            of_role, left = match.index.roles[role], limit
            for _, mask in match.levels:
                if others := mask & of_role:
                    ids = match.index.ids_of(others, left, self.turn)
                    found += ids
                    of_role, left = of_role ^ others, left - len(ids)
                    if not left:
                        break
        return found


@dataclass(slots=True)
class SentPrompt:
    """The blocks that an instance will have because a prompt was sent to it.

    End it when the request ends.
    """

    _cache: _Cache | None  # None: the instance is not known
    _blocks: Iterable[int]
    is_computed: bool = False

    def end(self) -> None:
        """Stop counting the blocks, unless the instance has computed the prompt and publishes no KV
        events.
        """
        cache = self._cache
        if cache is not None and (cache.has_events or not self.is_computed):
            cache.discard([each for each in self._blocks if cache.expires.pop(each, None)])


class _Sent(NamedTuple):
    expires_s: float
    cache: _Cache
    hashes: Sequence[int]


class KnownPrefixes:
    """The prefix caches of all instances, as far as this frontend knows them.

    Args:
        reads_events: use the KV events of instances that publish them. A prompt that this frontend
            sends to such an instance counts, too, until its request ends.
        ttl_s: for how long a prompt counts that this frontend sends to one of the other instances.
    """

    def __init__(self, *, reads_events: bool = True, ttl_s: float = 120.0) -> None:
        self.reads_events = reads_events
        self._ttl_s = ttl_s
        self._caches: dict[int, _Cache] = {}
        # by model and block size
        self._indexes: defaultdict[str, dict[int, PrefixIndex]] = defaultdict(dict)
        self._sent: deque[_Sent] = deque()
        self._num_sent = 0  # blocks in `_sent`
        self._turn = 0
        self.unsynced: set[int] = set()  # instances that must publish everything again

    def add_instance(self, instance: Instance) -> None:
        """Add an instance, unless it is known.

        One with KV events is out of sync until it has published a snapshot.
        """
        known = self._caches.get(instance.id)
        if known is not None and known.instance == instance:
            return
        self.remove_instance(instance.id)
        has_events = self.reads_events and instance.publishes_kv_events
        cache = _Cache(instance=instance, has_events=has_events)
        self._join_index(cache, instance.layout.block_tokens)
        self._caches[instance.id] = cache
        if has_events:
            self.unsynced.add(instance.id)

    def _join_index(self, cache: _Cache, block_tokens: int) -> None:
        index = self._indexes[cache.instance.card.name].setdefault(
            block_tokens, PrefixIndex(block_tokens)
        )
        cache.index, cache.bit = index, index.add(cache.instance)

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

        If one before it is missing, the instance is out of sync until a snapshot.

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
        expected, cache.next_number = cache.next_number, -1  # until all of it is applied
        if update.block_tokens not in (0, cache.index.block_tokens):
            cache.leave()
            self._join_index(cache, update.block_tokens)
        if update.cleared:
            cache.clear()
        cache.discard(unpack_hashes(update.removed))
        cache.store(stored := unpack_hashes(update.stored))
        if cache.expires:
            for prefix in stored:
                cache.expires.pop(prefix, None)
        cache.next_number = expected

    def record_sent(self, prompt: PromptHashes, instance_id: int, now: float) -> SentPrompt:
        """Count a prompt as cached where it is sent to, but not by a decode instance that publishes
        KV events.
        """
        cache = self._caches.get(instance_id)
        is_reported = cache is not None and cache.has_events and cache.instance.role is Role.DECODE
        if cache is None or is_reported or not (hashes := prompt.of(cache.index.block_tokens)):
            return SentPrompt(cache, ())
        new, expires_s = cache.store(hashes), now + self._ttl_s
        cache.expires.update(
            dict.fromkeys(new, math.inf) if cache.has_events else dict.fromkeys(hashes, expires_s)
        )
        if not cache.has_events:
            self._sent.append(_Sent(expires_s, cache, hashes))
            self._num_sent += len(hashes)
            budget = max(_EXPIRED_AT_ONCE, _EXPIRED_PER_SENT * len(hashes))
            self._expire(now, max(MAX_SENT_BLOCKS, len(hashes)), budget)
        return SentPrompt(cache, new)

    def _expire(self, now: float, limit: int, budget: int) -> None:
        """Remove the oldest prompts: all above a limit of blocks, and about `budget` blocks of
        expired ones.
        """
        while self._sent and (
            self._num_sent > limit or (budget > 0 and self._sent[0].expires_s <= now)
        ):
            expires_s, cache, hashes = self._sent.popleft()
            self._num_sent -= len(hashes)
            budget -= len(hashes) + 1
            old = [each for each in hashes if cache.expires.get(each, math.inf) <= expires_s]
            for each in old:
                del cache.expires[each]
            cache.discard(old)

    def overlaps(self, prompt: PromptHashes, now: float) -> PrefixOverlaps:
        """Return what the instances of the prompt's model have of it."""
        if self._sent:
            # maybe nothing is recorded any more
            self._expire(now, self._num_sent, _EXPIRED_AT_ONCE)
        self._turn += 1
        matches = []
        for block_tokens, index in self._indexes.get(prompt.request.model, {}).items():
            if (
                index.masks
                and (hashes := prompt.of(block_tokens))
                and (levels := index.levels(hashes))
            ):
                matches.append(_IndexMatch(index, hashes, levels))
        return PrefixOverlaps(matches, self._caches, now, self._turn)

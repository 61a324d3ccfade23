"""Read the events of vLLM's prefix cache: subscribe to them on a thread, and convert them.

vLLM's engine process publishes the changes of each step over ZeroMQ
(vllm/distributed/kv_events.py), with one publisher per data-parallel rank. Its sockets are files in
a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dynamo_trtllm.protocol.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    KvEvent,
    OnKvEvents,
)
from dynamo_trtllm.protocol.messages import token_ids

log = logging.getLogger(__name__)

# The number of steps that vLLM queues, and the number that it stores for a replay. vLLM's defaults
# of 100,000 and 10,000 would take too much memory: a step of 16384 prompt tokens takes 80 kB per KV
# cache group.
_QUEUED_STEPS = 1000
_REPLAY_S = 5.0  # longest wait for the next batch of a replay
# Kinds of layers whose prefix can be reused as long as it is cached: those that see all tokens.
_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_DEVICE = "GPU"  # vLLM's name of the engine's own KV pool, also on CPUs
_END_OF_REPLAY: Final = (1 << 64) - 1  # -1 in 8 bytes

BlockHash = int | bytes  # bytes if VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0
# Called with a rank and the number of a batch. Yields the numbers and the payloads of this batch
# and of all later batches that vLLM still has.
Replay = Callable[[int, int], Iterable[tuple[int, bytes]]]


class VllmBlocksStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Consecutive blocks of one KV cache group."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    # For each block, the keys on which its hash depends besides the tokens; None if it has none.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class VllmBlocksRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """Blocks of one KV cache group. vLLM reports each copy of a block."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class VllmCacheReset(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """All blocks of one rank."""


class VllmEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one step of one rank."""

    ts: float
    events: list[VllmBlocksStored | VllmBlocksRemoved | VllmCacheReset]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(VllmEventBatch)


class _CacheOfRank:
    """What is known about the prefix cache of one rank."""

    def __init__(self) -> None:
        self.next_number = 0  # number of the next batch
        self.last_ts = 0.0  # time of the last batch
        self.group: int | None = None  # the KV cache group that is reported
        # The number of copies of each block: several requests may compute a prompt at once.
        self.copies: dict[int, int] = {}
        # The cache salt of each block. vLLM reports it only with the first block of a prompt.
        self.salts: dict[int, str] = {}

    def forget(self) -> None:
        self.copies.clear()
        self.salts.clear()


class VllmEventConverter:
    """Converts numbered batches of vLLM's events.

    The converter asks for batches that were lost, and drops batches that it has converted before.

    If there are several KV cache groups, only the first group with full attention is reported. If a
    prompt's prefix is cached in this group, the other groups have all of the prefix that their
    layers see.
    """

    def __init__(self, block_tokens: int, replay: Replay) -> None:
        """Initialize for empty caches.

        Args:
            block_tokens: tokens in a block.
            replay: yields the batches of a rank that vLLM still has, from a number on.
        """
        self._block_tokens = block_tokens
        self._replay = replay
        self._ranks: dict[int, _CacheOfRank] = {}
        self._has_warned = False

    def catch_up(self, rank: int) -> Iterator[KvEvent]:
        """Yield the events of a rank that vLLM has published and this process has not received."""
        cache = self._ranks.setdefault(rank, _CacheOfRank())
        for number, payload in self._replay(rank, cache.next_number):
            if number >= cache.next_number:
                yield from self._advance(cache, number, rank, _decoder.decode(payload))

    def read(self, number: int, payload: bytes) -> Iterator[KvEvent]:
        """Yield the events of a batch, after those of batches that were lost before it.

        Raises msgspec.ValidationError.
        """
        batch = _decoder.decode(payload)
        rank = batch.data_parallel_rank or 0
        cache = self._ranks.setdefault(rank, _CacheOfRank())
        if number < cache.next_number:
            if batch.ts <= cache.last_ts:
                return  # a replay had this batch
            log.warning("vLLM's KV events begin again: its engine process was restarted")
            cache = _CacheOfRank()
            self._ranks[rank] = cache
            yield BlocksCleared(dp_rank=rank)
        if number > cache.next_number:
            yield from self.catch_up(rank)
        # The replayed batches may include this batch.
        if number >= cache.next_number:
            yield from self._advance(cache, number, rank, batch)

    def _advance(
        self, cache: _CacheOfRank, number: int, rank: int, batch: VllmEventBatch
    ) -> Iterator[KvEvent]:
        """Yield the events of the next batch. If batches before it are lost, all blocks count as
        removed.
        """
        if number > cache.next_number:
            log.warning(
                "vLLM lost %d batches of KV events of rank %d; readers forget its blocks",
                number - cache.next_number,
                rank,
            )
            cache.forget()
            yield BlocksCleared(dp_rank=rank)
        cache.next_number = number + 1
        cache.last_ts = batch.ts
        removed: list[int] = []  # collected, because vLLM sends an event for each block
        for event in batch.events:
            if isinstance(event, VllmBlocksRemoved):
                removed += self._removed(cache, event)
                continue
            if removed:
                yield BlocksRemoved(hashes=tuple(removed), dp_rank=rank)
                removed = []
            if isinstance(event, VllmCacheReset):
                cache.forget()
                yield BlocksCleared(dp_rank=rank)
            else:
                yield from self._stored(cache, event, rank)
        if removed:
            yield BlocksRemoved(hashes=tuple(removed), dp_rank=rank)
        self._warn_if_unreported(cache, batch)

    def _warn_if_unreported(self, cache: _CacheOfRank, batch: VllmEventBatch) -> None:
        """Warn once if there are blocks, but none of a group that is reported."""
        has_blocks = any(isinstance(event, VllmBlocksStored) for event in batch.events)
        if cache.group is None and has_blocks and not self._has_warned:
            self._has_warned = True
            log.warning(
                "no KV events: this model has no layers with full attention and KV blocks of %d"
                " tokens",
                self._block_tokens,
            )

    @staticmethod
    def _removed(cache: _CacheOfRank, event: VllmBlocksRemoved) -> Iterator[int]:
        """Yield the blocks of which no copy is left."""
        if event.group_idx != cache.group or event.medium != _DEVICE:
            return
        for block_hash in event.block_hashes:
            number = _number(block_hash)
            # The result is -1 for a block that was never reported, see `_stored`.
            copies_left = cache.copies.pop(number, 0) - 1
            if copies_left > 0:
                cache.copies[number] = copies_left
            elif copies_left == 0:
                cache.salts.pop(number, None)
                yield number

    def _stored(
        self, cache: _CacheOfRank, event: VllmBlocksStored, rank: int
    ) -> Iterator[BlocksStored]:
        """Yield the stored blocks, if they are whole blocks of the group that is reported."""
        size = self._block_tokens
        hashes = [_number(block_hash) for block_hash in event.block_hashes]
        num_tokens = len(event.token_ids)
        is_whole = event.block_size == size and num_tokens == size * len(hashes)
        if num_tokens == 0 or not is_whole or event.medium != _DEVICE:
            return
        if event.kv_cache_spec_kind not in _FULL_ATTENTION:
            return
        if cache.group is None:
            cache.group = event.group_idx
        if event.group_idx != cache.group:
            return
        extra_keys: list[list[Any] | None] = event.extra_keys or []
        if event.parent_block_hash is not None:
            parent = _number(event.parent_block_hash)
            salt = cache.salts.get(parent)
        else:
            parent = None
            salt = _salt_in(extra_keys[0]) if extra_keys else None
            if salt is not None:
                extra_keys = extra_keys[1:]
        # Blocks with other keys depend on more than tokens and salt, for example on an image. They
        # are not reported.
        if any(extra_keys):
            return
        for number in hashes:
            cache.copies[number] = cache.copies.get(number, 0) + 1
            if salt is not None:
                cache.salts[number] = salt
        ids = token_ids(event.token_ids)
        blocks = tuple(
            KvBlock(number, ids[index * size : (index + 1) * size])
            for index, number in enumerate(hashes)
        )
        yield BlocksStored(blocks=blocks, parent=parent, dp_rank=rank, cache_salt=salt)


def _salt_in(keys: list[Any] | None) -> str | None:
    """Return the cache salt in the extra keys of a prompt's first block; None if there are no keys,
    or other keys, too.
    """
    if keys is not None and len(keys) == 1 and isinstance(keys[0], str):
        return keys[0]
    return None


def _number(block: BlockHash) -> int:
    if isinstance(block, int):
        return block
    return int.from_bytes(block[-8:], "big")


class KvEventSubscriber:
    """Subscribes to vLLM's publishers on a thread, and passes their events to the event loop.

    Create it before the engine, which gets `config`.
    """

    def __init__(self, ranks: int, library: Any) -> None:
        """Create the folder of the sockets.

        Args:
            ranks: the number of data-parallel ranks.
            library: the module `zmq`.
        """
        self._ranks = range(ranks)
        self._zmq = library
        # The path of a socket has at most 107 characters. The paths that vLLM chooses are longer.
        self._folder = Path(tempfile.mkdtemp(prefix="dynamo-"))
        # vLLM appends the rank to an endpoint with "inproc" in its name. It has no rule for other
        # endpoints of the kind ipc, so this name is used.
        self._endpoint = f"ipc://{self._folder}/inproc"
        self._replay_endpoint = f"{self._endpoint}-replay"
        self._context = library.Context()
        self._thread: threading.Thread | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The endpoints and limits, as fields of vLLM's `KVEventsConfig`."""
        return {
            "endpoint": self._endpoint,
            "replay_endpoint": self._replay_endpoint,
            "hwm": _QUEUED_STEPS,
            "buffer_steps": _QUEUED_STEPS,
        }

    def start(self, block_tokens: int, on_events: OnKvEvents) -> None:
        """Start the thread.

        The thread calls `on_events` on the running event loop, first with the blocks that are
        cached already.
        """
        loop = asyncio.get_running_loop()
        converter = VllmEventConverter(block_tokens, self._replay)
        self._thread = threading.Thread(
            target=self._run, args=(loop, converter, on_events), name="vllm-kv-events", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, wait for that, and remove the folder. Idempotent."""
        self._context.term()  # the thread's calls raise ContextTerminated
        if self._thread is not None:
            self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(
        self, loop: asyncio.AbstractEventLoop, converter: VllmEventConverter, on_events: OnKvEvents
    ) -> None:
        def post(events: Sequence[KvEvent]) -> None:
            if events and not loop.is_closed():
                loop.call_soon_threadsafe(on_events, events)

        try:
            with self._context.socket(self._zmq.SUB) as subscription:
                subscription.linger = 0
                subscription.rcvhwm = _QUEUED_STEPS
                subscription.subscribe(b"")
                for rank in self._ranks:
                    subscription.connect(_of_rank(self._endpoint, rank))
                for rank in self._ranks:
                    post(list(converter.catch_up(rank)))
                while True:
                    # From vLLM 0.26 on, a topic comes before the number and the payload.
                    number, payload = subscription.recv_multipart()[-2:]
                    post(list(converter.read(int.from_bytes(number, "big"), payload)))
        except self._zmq.ContextTerminated:
            return
        except Exception:
            # A message has a form or size that no supported release sends.
            log.exception("no more KV events from vLLM, because one can't be read")
            post([BlocksCleared()])

    def _replay(self, rank: int, first: int) -> Iterator[tuple[int, bytes]]:
        """Ask a rank's publisher for its batches from a number on; see `Replay`."""
        with self._context.socket(self._zmq.DEALER) as question:
            question.linger = 0
            # 0 means no limit. If there were a limit, vLLM would drop what exceeds it.
            question.rcvhwm = 0
            question.rcvtimeo = int(1000 * _REPLAY_S)
            question.connect(_of_rank(self._replay_endpoint, rank))
            question.send_multipart((b"", first.to_bytes(8, "big")))
            try:
                while True:
                    encoded_number, payload = question.recv_multipart()[-2:]
                    number = int.from_bytes(encoded_number, "big")
                    if number == _END_OF_REPLAY:
                        return
                    yield number, payload
            except self._zmq.Again:
                log.warning("vLLM did not replay KV events within %g s", _REPLAY_S)


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank, as vLLM's `ZmqEventPublisher.offset_endpoint_port` does."""
    return f"{endpoint}_dp{rank}" if rank > 0 else endpoint

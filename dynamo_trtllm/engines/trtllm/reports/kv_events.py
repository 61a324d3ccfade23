"""Poll the events of TensorRT-LLM's prefix cache on a thread, and convert them.

Only the buffer is read (`LLM.get_kv_cache_events`, all releases). Builds of 2026 reject the ZeroMQ
publisher, `kv_cache_config.kv_events_config` (docs/source/features/kvcache.md, main of 2026-11),
unless the variable TLLM_KV_CACHE_MANAGER_V2_BACKEND is "python" (Dynamo 1.7). The form of the
events is that of `KVCacheEventSerializer` in tensorrt_llm/_utils.py, 1.1 to main, and with the
second KV cache manager that of runtime/kv_cache_manager_v2/_event_manager.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dynamo_trtllm.engines.trtllm.bindings import TrtllmBindings
from dynamo_trtllm.engines.trtllm.preflight.facts import BLOCK_SIZE, RoleFacts
from dynamo_trtllm.engines.trtllm.reports.polling import Poller
from dynamo_trtllm.protocol.errors import ConfigError
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

_HASH_ALGORITHM = "kv_cache_event_hash_algo"  # the field of kv_cache_config
# With this algorithm, the second KV cache manager names blocks by numbers, as the first KV cache
# manager always does. Later release candidates of 2026 use it by default, and earlier candidates
# use text (runtime/kv_cache_hash.py was read in one of each).
_NUMBERS = "v1_block_key"
_BUFFER = "kv_cache_config.event_buffer_max_size"
_BLOCK_REUSE = "kv_cache_config.enable_block_reuse"
MAX_BLOCKS_AT_ONCE = 4096  # limit of the blocks that the event loop gets in one callback
_HASH_BYTES = 8


def check_kv_events(facts: RoleFacts) -> None:
    """Check that TensorRT-LLM reports KV events with these arguments. Raises ConfigError."""
    for key, needed, is_set in (
        (_BUFFER, "1 or more", (facts.number(_BUFFER) or 0) > 0),
        (_BLOCK_REUSE, "true", facts.args.get(_BLOCK_REUSE) is not False),
    ):
        if not is_set:
            raise ConfigError(
                f"--publish-kv-events needs {key} of {needed}; it is"
                f" {facts.value_with_source(key)}. Set it, or remove the flag.",
                field=key,
            )


def with_hash_algorithm(values: Mapping[str, Any], bindings: TrtllmBindings) -> dict[str, Any]:
    """Return the arguments of `LLM`, with numbers as the names of blocks in KV events, which need
    no conversion.

    Nothing changes if the user has chosen an algorithm, or if the installed package has no such
    argument.

    Args:
        values: the arguments.
        bindings: the installed package.
    """
    kv_cache = values.get("kv_cache_config") or {}
    if _HASH_ALGORITHM in kv_cache or not bindings.has_argument("KvCacheConfig", _HASH_ALGORITHM):
        return dict(values)
    log.info(
        "kv_cache_config.%s was set to %s: KV events have numbers then", _HASH_ALGORITHM, _NUMBERS
    )
    return {**values, "kv_cache_config": {**kv_cache, _HASH_ALGORITHM: _NUMBERS}}


def block_hash(name: int | str) -> int:
    """Return the engine's name of a block as a number of 64 bits.

    A text is the hexadecimal digits of a SHA-256 hash. The first 8 bytes of the hash are returned,
    as in the library's algorithm v2_sha256_64 (`truncate_sha256_hash_to_int64` in
    runtime/kv_cache_hash.py). Any other text is hashed.

    Raises:
        TypeError: the name is neither a number nor text.
    """
    if isinstance(name, int):
        return name
    if not isinstance(name, str):
        raise TypeError(f"the name of a KV block is {name!r}")
    try:
        return int(name[: 2 * _HASH_BYTES], 16)
    except ValueError:
        return int.from_bytes(
            hashlib.blake2b(name.encode(), digest_size=_HASH_BYTES).digest(), "big"
        )


class _Place(NamedTuple):
    """Where the blocks of an event are."""

    rank: int  # attention-DP rank
    window: int  # attention window in tokens; 0: not reported
    # Group of layers in the second KV cache manager; None with the first manager, which has no
    # groups.
    layer_group: int | None


class KvEventConverter:
    """Converts the events of one engine in the order in which they were read. Used on one thread.

    A gap in the numbers of events means that the buffer was full and events were lost. Lost events,
    and events that can't be read, may have removed blocks. So readers then have to forget all
    blocks.

    Layers with the same attention window can be in several layer groups, such as those of a draft
    model. A block is reported as long as one of these groups has it.
    """

    def __init__(self, block_tokens: int) -> None:
        """Initialize for an empty cache.

        Args:
            block_tokens: tokens in a full block. If consecutive blocks have another size, this
                other size is used from then on.
        """
        self.num_gaps = 0
        self.num_unreadable = 0  # events that could not be read
        self._block_tokens = block_tokens
        self._is_size_seen = False  # True once a full block has had `_block_tokens` tokens
        self._last_ids: dict[int, int] = {}  # the last id of an event, by attention-DP rank
        # By rank and window: for each block, a bit for each layer group that has the block.
        self._holders: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)

    def convert(self, events: Sequence[Mapping[str, Any]]) -> list[KvEvent]:
        """Convert TensorRT-LLM's events."""
        converted: list[KvEvent] = []
        for event in events:
            try:
                converted += self._convert(event)
            except Exception as exc:  # noqa: BLE001 - events may have any form; the others are read
                self.num_unreadable += 1
                if self.num_unreadable == 1:
                    log.warning(
                        "A KV event can't be read, so readers forget this worker's blocks (%s: %s)."
                        " Further ones are counted in the metric"
                        " dynamo_trtllm_kv_events_unreadable_total",
                        type(exc).__name__,
                        exc,
                    )
                converted.append(self._cleared())
        return converted

    def _convert(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        """Convert one event. If events before it are lost, all blocks count as removed."""
        rank = int(event.get("attention_dp_rank") or 0)
        number = int(event["event_id"])
        last = self._last_ids.get(rank)
        self._last_ids[rank] = number
        if last is not None and number != last + 1:
            self.num_gaps += 1
            log.warning("TensorRT-LLM lost KV events; raise kv_cache_config.event_buffer_max_size")
            yield self._cleared()
        data = event["data"]
        place = _Place(rank, int(event.get("window_size") or 0), event.get("layer_group_id"))
        if data["type"] == "removed":
            yield from self._removed(data, place)
        elif data["type"] == "stored":
            yield from self._stored(data, place)
        # Other types change nothing here: "created" reports the size of the pools, and "updated"
        # that a block moved between GPU and host memory.

    def _cleared(self) -> BlocksCleared:
        self._holders.clear()
        return BlocksCleared()

    def _removed(self, data: Mapping[str, Any], place: _Place) -> Iterator[BlocksRemoved]:
        names = [block_hash(name) for name in data["block_hashes"]]
        if place.layer_group is not None:
            names = [name for name in names if self._note_removed(name, place)]
        if names:
            yield BlocksRemoved(hashes=tuple(names), cache_group=place.window, dp_rank=place.rank)

    def _note_removed(self, name: int, place: _Place) -> bool:
        """Note that a layer group has removed a block.

        Return True if no other layer group of the same window has the block.
        """
        assert place.layer_group is not None
        holders = self._holders[place.rank, place.window]
        others = holders.pop(name, 0) & ~(1 << place.layer_group)
        if others:
            holders[name] = others
        return others == 0

    def _stored(self, data: Mapping[str, Any], place: _Place) -> Iterator[BlocksStored]:
        """Yield the event of the full blocks. Only the last block of a prompt is not full."""
        parent = data["parent_hash"]
        blocks = data["blocks"]
        full: list[KvBlock] = []
        salt: str | None = None
        for index, block in enumerate(blocks):
            ids = [token["token_id"] for token in block["tokens"]]
            if not all(isinstance(token, int) for token in ids):
                # From here on, KV depends on an image: its tokens have the hash of the image, which
                # is a text, in place of an id.
                break
            if index < len(blocks) - 1:
                self._check_size(len(ids))
            if len(ids) != self._block_tokens:
                break
            full.append(KvBlock(block_hash(block["block_hash"]), token_ids(ids)))
            salt = block.get("cache_salt", salt)
        if not full:
            return
        if place.layer_group is not None:
            holders = self._holders[place.rank, place.window]
            group_bit = 1 << place.layer_group
            for block in full:
                holders[block.hash] = holders.get(block.hash, 0) | group_bit
        yield BlocksStored(
            blocks=tuple(full),
            parent=None if parent is None else block_hash(parent),
            cache_group=place.window,
            dp_rank=place.rank,
            cache_salt=salt,
        )

    def _check_size(self, num_tokens: int) -> None:
        """Learn the size of full blocks from a block that is followed by another block. Such a
        block is full.

        Raises:
            ValueError: earlier full blocks had another size.
        """
        if num_tokens != self._block_tokens:
            if self._is_size_seen or not num_tokens:
                raise ValueError(
                    f"a full KV block has {num_tokens} tokens and not {self._block_tokens}"
                )
            log.warning(
                "KV events have blocks of %d tokens and not %d; set %s to %d on prefill and decode"
                " workers",
                num_tokens,
                self._block_tokens,
                BLOCK_SIZE,
                num_tokens,
            )
            self._block_tokens = num_tokens
        self._is_size_seen = True


class KvEventPoller(Poller):
    """Polls the buffer of KV events, and passes them to the event loop.

    Args:
        get_events: `LLM.get_kv_cache_events`, see `TrtllmBindings.reader`.
        block_tokens: tokens in a full block.
    """

    pause_s = 0.05
    timeout_s = 0.5

    def __init__(
        self, get_events: Callable[..., Sequence[Mapping[str, Any]] | None], block_tokens: int
    ) -> None:
        super().__init__("trtllm-kv-events", failure="no KV events from TensorRT-LLM")
        self.converter = KvEventConverter(block_tokens)
        self._get_events = get_events

    def start(self, on_events: OnKvEvents) -> None:
        """Start the thread.

        `on_events` is called on the running event loop, each time with a part of the events.
        """
        loop = asyncio.get_running_loop()

        def poll() -> None:
            events = self.converter.convert(self._get_events(timeout=self.timeout_s) or ())
            for part in _parts(events):
                self._deliver(loop, on_events, part)

        self._start(poll)

    def _deliver(
        self, loop: asyncio.AbstractEventLoop, on_events: OnKvEvents, events: Sequence[KvEvent]
    ) -> None:
        """Call `on_events` on the loop, and wait until it has returned or this thread is
        stopped.
        """
        has_returned = threading.Event()

        def call() -> None:
            try:
                on_events(events)
            finally:
                has_returned.set()

        if loop.is_closed():
            return
        loop.call_soon_threadsafe(call)
        while not (has_returned.wait(self.pause_s) or self._stop.is_set() or loop.is_closed()):
            pass


def _parts(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Yield the events in parts with about MAX_BLOCKS_AT_ONCE blocks.

    The buffer may have events of a hundred times as many blocks.
    """
    part: list[KvEvent] = []
    num_blocks = 0
    for event in events:
        part.append(event)
        if isinstance(event, BlocksStored):
            num_blocks += len(event.blocks)
        elif isinstance(event, BlocksRemoved):
            num_blocks += len(event.hashes)
        if num_blocks >= MAX_BLOCKS_AT_ONCE:
            yield part
            part = []
            num_blocks = 0
    if part:
        yield part

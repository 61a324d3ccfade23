"""Poll the events of TensorRT-LLM's prefix cache on a thread.

Only the buffer is read (`LLM.get_kv_cache_events`, all releases): builds reject `kv_cache_config.kv_events_config`, the
ZeroMQ publisher, because it has no implementation (docs/source/features/kvcache.md, main of 2026-11). The form of the
events is that of `KVCacheEventSerializer` in tensorrt_llm/_utils.py, 1.1 to main.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dynamo_trtllm.engines.trtllm.reports.polling import Poller
from dynamo_trtllm.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvBlock, KvEvent, OnKvEvents
from dynamo_trtllm.messages import token_ids

_log = logging.getLogger(__name__)

BUFFER_EVENTS = 1024  # as Dynamo sets it; more are lost between two polls


class KvEventPoller(Poller):
    """Polls the buffer of KV events, and passes them to the event loop.

    Args:
        get_events: `LLM.get_kv_cache_events`, see `TrtllmBindings.reader`.
        block_tokens: tokens in a full block.
    """

    pause_s = 0.05
    timeout_s = 0.5

    def __init__(self, get_events: Callable[..., Sequence[Mapping[str, Any]] | None], block_tokens: int) -> None:
        super().__init__("trtllm-kv-events", failure="no KV events from TensorRT-LLM")
        self._get_events = get_events
        self._block_tokens = block_tokens
        self._last_ids: dict[int, int] = {}  # by attention-DP rank

    def start(self, on_events: OnKvEvents) -> None:
        """Start the thread. `on_events` is called on the running event loop."""
        loop = asyncio.get_running_loop()

        def poll() -> None:
            read = self._get_events(timeout=self.timeout_s) or ()
            events: list[KvEvent] = [BlocksCleared()]  # for readers if those that were read are lost
            try:
                events = [event for each in read for event in self.convert(each)]
            finally:
                if events and read and not loop.is_closed():
                    loop.call_soon_threadsafe(on_events, events)

        self._start(poll)

    def convert(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        """Yield what one event of TensorRT-LLM means. A gap in their numbers means that its buffer was full."""
        rank, number = int(event.get("attention_dp_rank") or 0), int(event["event_id"])
        last, self._last_ids[rank] = self._last_ids.get(rank), number
        if last is not None and number != last + 1:
            _log.warning("TensorRT-LLM lost KV events; raise kv_cache_config.event_buffer_max_size")
            yield BlocksCleared()
        data, group = event["data"], int(event.get("window_size") or 0)
        if data["type"] == "removed":
            yield BlocksRemoved(hashes=tuple(map(int, data["block_hashes"])), cache_group=group, dp_rank=rank)
        elif data["type"] == "stored":
            yield from self._stored(data, group, rank)
        # "created" tells the size of the pools, and "updated" that a block moved between GPU and host memory.

    def _stored(self, data: Mapping[str, Any], group: int, rank: int) -> Iterator[BlocksStored]:
        """Yield the event of the full blocks. Only the last blocks of a prompt are not full."""
        parent, blocks = data["parent_hash"], []
        salt: str | None = None
        for block in data["blocks"]:
            if len(block["tokens"]) < self._block_tokens:
                break
            ids = token_ids(int(token["token_id"]) for token in block["tokens"])
            blocks.append(KvBlock(int(block["block_hash"]), ids))
            salt = block.get("cache_salt", salt)
        if blocks:
            first = None if parent is None else int(parent)
            yield BlocksStored(blocks=tuple(blocks), parent=first, cache_group=group, dp_rank=rank, cache_salt=salt)

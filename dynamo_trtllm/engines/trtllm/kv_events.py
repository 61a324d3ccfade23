"""Read the events of TensorRT-LLM's prefix cache: poll its buffer on a thread, and convert what it has.

Only the buffer is read (`LLM.get_kv_cache_events`, all releases): builds reject `kv_cache_config.kv_events_config`, the
ZeroMQ publisher, because it has no implementation (docs/source/features/kvcache.md, main of 2026-11). The form of the
events is that of `KVCacheEventSerializer` in tensorrt_llm/_utils.py, 1.1 to main.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dynamo_trtllm.kv_events import (
    MAX_EVENT_TOKENS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    KvEvent,
    OnKvEvents,
)
from dynamo_trtllm.messages import token_ids

_log = logging.getLogger(__name__)

BUFFER_EVENTS = 1024  # as Dynamo sets it; more are lost between two polls
_MOST_HASHES = 8192  # in one event
_TIMEOUT_S = 0.5
_PAUSE_S = 0.05


class KvEventPoller:
    """Polls the buffer of events on a thread, and passes them to the event loop.

    Args:
        get_events: `LLM.get_kv_cache_events`.
        block_tokens: tokens in a full block.
    """

    def __init__(self, get_events: Callable[..., Sequence[Mapping[str, Any]] | None], block_tokens: int) -> None:
        self._get_events = get_events
        self._block_tokens = block_tokens
        self._last_ids: dict[int, int] = {}  # by attention-DP rank
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure = ""  # the last one

    def start(self, on_events: OnKvEvents) -> None:
        """Start the thread. `on_events` is called on the running event loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._poll, args=(loop, on_events), name="trtllm-kv-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its current call, which has a time limit. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=4 * _TIMEOUT_S)

    def _poll(self, loop: asyncio.AbstractEventLoop, on_events: OnKvEvents) -> None:
        while not self._stop.wait(_PAUSE_S):
            read: Iterable[Mapping[str, Any]] = ()
            try:
                read = self._get_events(timeout=_TIMEOUT_S) or ()
                events = [event for each in read for event in self.convert(each)]
            except Exception as exc:  # noqa: BLE001 - logged, and tried again
                # Of any class, as for statistics: 1.0 and 1.1 raise TypeError when there are none.
                self._note_failure(f"{type(exc).__name__}: {exc}")
                events = [BlocksCleared()] if read else []  # those that were read are lost
            if events and not loop.is_closed():
                loop.call_soon_threadsafe(on_events, events)

    def convert(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        """Yield what one event of TensorRT-LLM means. A gap in their numbers means that its buffer was full."""
        rank, number = int(event.get("attention_dp_rank") or 0), int(event["event_id"])
        last, self._last_ids[rank] = self._last_ids.get(rank), number
        if last is not None and number != last + 1:
            _log.warning("TensorRT-LLM lost KV events; raise kv_cache_config.event_buffer_max_size")
            yield BlocksCleared()
        data, group = event["data"], int(event.get("window_size") or 0)
        if data["type"] == "removed":
            hashes = tuple(map(int, data["block_hashes"]))
            for begin in range(0, len(hashes), _MOST_HASHES):
                yield BlocksRemoved(hashes=hashes[begin : begin + _MOST_HASHES], cache_group=group, dp_rank=rank)
        elif data["type"] == "stored":
            yield from self._stored(data, group, rank)
        # "created" tells the size of the pools, and "updated" that a block moved between GPU and host memory.

    def _stored(self, data: Mapping[str, Any], group: int, rank: int) -> Iterator[BlocksStored]:
        """Yield the full blocks, in events of a limited size. Only the last blocks of a prompt are not full."""
        parent, blocks = data["parent_hash"], []
        salt: str | None = None
        for block in data["blocks"]:
            if len(block["tokens"]) < self._block_tokens:
                break
            ids = token_ids(int(token["token_id"]) for token in block["tokens"])
            blocks.append(KvBlock(int(block["block_hash"]), ids))
            salt = block.get("cache_salt", salt)
        most = max(1, MAX_EVENT_TOKENS // self._block_tokens)
        for begin in range(0, len(blocks), most):
            part = tuple(blocks[begin : begin + most])
            yield BlocksStored(
                blocks=part,
                parent=None if parent is None else int(parent),
                cache_group=group,
                dp_rank=rank,
                cache_salt=salt,
            )
            parent = part[-1].hash

    def _note_failure(self, failure: str) -> None:
        if failure != self._failure and not self._stop.is_set():
            level = logging.INFO if failure.startswith("TypeError") else logging.WARNING
            _log.log(level, "no KV events from TensorRT-LLM: %s", failure)
        self._failure = failure

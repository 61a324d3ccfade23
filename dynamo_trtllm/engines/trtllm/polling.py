"""Poll what TensorRT-LLM reports on threads: the executor's statistics, and the events of its prefix cache.

Of KV events only the buffer is read (`LLM.get_kv_cache_events`, all releases): builds reject
`kv_cache_config.kv_events_config`, the ZeroMQ publisher, because it has no implementation
(docs/source/features/kvcache.md, main of 2026-11). The form of the events is that of `KVCacheEventSerializer` in
tensorrt_llm/_utils.py, 1.1 to main.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dynamo_trtllm.engines.external.library import Counts
from dynamo_trtllm.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvBlock, KvEvent, OnKvEvents
from dynamo_trtllm.messages import token_ids

_log = logging.getLogger(__name__)

BUFFER_EVENTS = 1024  # as Dynamo sets it; more are lost between two polls


class Poller:
    """A thread that polls TensorRT-LLM until `stop`.

    Args:
        name: of the thread.
        failure: what a log line says about a poll that failed.
    """

    pause_s: float
    timeout_s: float  # of one poll

    def __init__(self, name: str, *, failure: str) -> None:
        self._name = name
        self._failure_text = failure
        self._failure = ""  # the last one
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _start(self, poll: Callable[[], None]) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(poll,), name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its current call, which has a time limit. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self.timeout_s)

    def _run(self, poll: Callable[[], None]) -> None:
        while not self._stop.wait(self.pause_s):
            try:
                poll()
            except Exception as exc:  # noqa: BLE001 - logged, and tried again
                # 1.0 and 1.1 raise TypeError when there is nothing: their queue returns None, which is parsed as JSON
                # (llmapi/utils.py, _SyncQueue.get). Remote calls raise RPCError (executor/rpc/rpc_common.py), a plain
                # Exception.
                failure = f"{type(exc).__name__}: {exc}"
                if failure != self._failure and not self._stop.is_set():
                    level = logging.INFO if isinstance(exc, TypeError) else logging.WARNING
                    _log.log(level, "%s: %s", self._failure_text, failure)
                self._failure = failure


class StatsPoller(Poller):
    """Polls the executor's statistics."""

    pause_s = 0.5
    timeout_s = 2.0

    def __init__(self, get_stats: Callable[..., Sequence[Mapping[str, Any]]], num_ranks: int = 1) -> None:
        """Initialize without a thread.

        Args:
            get_stats: `LLM.get_stats`.
            num_ranks: attention-DP ranks, each with its own KV blocks; 1 without attention DP.
        """
        super().__init__(
            "trtllm-stats", failure="no statistics from TensorRT-LLM; KV metrics stay at their last values"
        )
        self._get_stats = get_stats
        self._num_ranks = num_ranks
        self._rows: dict[int, Mapping[str, Any]] = {}  # the last one of each rank
        self.counts = Counts()
        self.changed_at = time.monotonic()

    @property
    def has_reported(self) -> bool:
        """True once statistics came: from then on, requests that wait without any show that the executor stands."""
        return bool(self._rows)

    def start(self) -> None:
        """Start the thread. Idempotent. Some releases have no statistics before their first request."""
        self._start(self._poll)

    def _poll(self) -> None:
        if rows := self._get_stats(timeout=self.timeout_s):
            self._rows |= {int(row.get("attentionDpRank") or 0): row for row in rows}
            self.counts = counts_of(list(self._rows.values()), self._num_ranks)
            self.changed_at = time.monotonic()


def counts_of(rows: Sequence[Mapping[str, Any]], num_ranks: int = 1) -> Counts:
    """Convert the statistics of one iteration; a missing value counts as 0.

    The KV blocks are those of one rank: before 1.3 only rank 0 reports, and since then the rows of the other ranks have
    copies of its KV statistics (_torch/pyexecutor/adp_iter_stats.py, main at 0cedd9a0). So with attention DP the number
    of used blocks is an estimate. The queue is reported by rank 0 for all ranks.

    Args:
        rows: one per rank that reports.
        num_ranks: ranks that have KV blocks of their own.
    """
    kv = [row.get("kvCacheStats") or {} for row in rows]
    return Counts(
        waiting=sum(int(row.get("numQueuedRequests") or 0) for row in rows),
        kv_blocks_used=sum(int(each.get("usedNumBlocks") or 0) for each in kv) * num_ranks // len(rows),
        kv_blocks_total=sum(int(each.get("maxNumBlocks") or 0) for each in kv) * num_ranks // len(rows),
    )


class KvEventPoller(Poller):
    """Polls the buffer of KV events, and passes them to the event loop.

    Args:
        get_events: `LLM.get_kv_cache_events`.
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

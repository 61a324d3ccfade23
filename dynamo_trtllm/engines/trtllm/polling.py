"""Poll what TensorRT-LLM reports on threads: the executor's statistics, and the events of its prefix cache.

Of KV events only the buffer is read (`LLM.get_kv_cache_events`, all releases): builds reject
`kv_cache_config.kv_events_config`, the ZeroMQ publisher, because it has no implementation
(docs/source/features/kvcache.md, main of 2026-11). The form of the events is that of `KVCacheEventSerializer` in
tensorrt_llm/_utils.py, 1.1 to main.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dynamo_trtllm.cost_model import StepSample
from dynamo_trtllm.engines.base import MOST_STEPS
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
                # Remote calls raise RPCError (executor/rpc/rpc_common.py), a plain Exception.
                failure = f"{type(exc).__name__}: {exc}"
                if failure != self._failure and not self._stop.is_set():
                    _log.warning("%s: %s", self._failure_text, failure)
                self._failure = failure


class StatsPoller(Poller):
    """Polls the executor's statistics."""

    pause_s = 0.5
    timeout_s = 2.0

    def __init__(self, get_stats: Callable[..., Sequence[Mapping[str, Any]]], num_ranks: int = 1) -> None:
        """Initialize without a thread.

        Args:
            get_stats: `LLM.get_stats`, see `TrtllmBindings.reader`.
            num_ranks: attention-DP ranks, each with its own KV blocks; 1 without attention DP.
        """
        super().__init__(
            "trtllm-stats", failure="no statistics from TensorRT-LLM; KV metrics stay at their last values"
        )
        self._get_stats = get_stats
        self._num_ranks = num_ranks
        self._rows: dict[int, Mapping[str, Any]] = {}  # the last one of each rank
        self.step_reader: StepReader | None = None  # None: steps are not read
        self.counts = Counts()
        self.changed_at = time.monotonic()

    @property
    def has_reported(self) -> bool:
        """True once statistics came: from then on, requests that wait without any show that the executor stands."""
        return bool(self._rows)

    @property
    def last_rows(self) -> Sequence[Mapping[str, Any]]:
        """The last row of each rank that has reported."""
        return list(self._rows.values())

    def start(self) -> None:
        """Start the thread. Idempotent. Some releases have no statistics before their first request."""
        self._start(self._poll)

    def _poll(self) -> None:
        if rows := self._get_stats(timeout=self.timeout_s):
            self._rows |= {int(row.get("attentionDpRank") or 0): row for row in rows}
            self.counts = counts_of(list(self._rows.values()), self._num_ranks)
            self.changed_at = time.monotonic()
            if self.step_reader is not None:
                self.step_reader.read(rows)


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


class _Iteration:
    """One iteration of the executor, as its row tells it. Times are seconds of the executor's clock.

    Raises:
        KeyError, TypeError, ValueError: the row lacks a value, or a count is negative.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        batch = row["inflightBatchingStats"]
        self.number = int(row["iter"])
        self.rank = int(row.get("attentionDpRank") or 0)
        self.num_ranks = 1  # that have reported
        # The time after it had fetched requests.
        self.begun = (datetime.strptime(row["timestamp"], "%m-%d-%Y %H:%M:%S.%f") - _EPOCH).total_seconds()
        # When its results were read, or later by as long as it waited for requests.
        self.read = self.begun + float(row["iterLatencyMS"]) / 1000
        # No request was active before: it may have waited for one.
        self.was_idle = row["numNewActiveRequests"] >= row["numActiveRequests"]
        self.forward_s = float(row.get("gpuForwardTimeMS") or 0.0) / 1000  # GPU time of the forward pass; 0: unknown
        self.requests = int(batch["numGenRequests"])  # decode requests
        self.context = int(batch.get("numGenKvTokens") or 0)  # their tokens; 0: not reported
        self.tokens = int(batch["numCtxTokens"])  # prompt tokens
        self.prompts = int(batch["numContextRequests"])
        cached = batch.get("numCtxKvTokens")
        self.cached = None if cached is None else int(cached)  # prompt tokens before those; None: not reported
        if min(self.requests, self.context, self.tokens, self.cached or 0, self.prompts) < 0:
            raise ValueError("a count is negative")

    def add_rank(self, other: _Iteration) -> None:
        """Add what another rank computed in this iteration."""
        for name in ("num_ranks", "requests", "context", "tokens", "prompts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if self.cached is not None:
            self.cached += other.cached or 0


_EPOCH = datetime(2020, 1, 1)  # in local time, as the rows: only differences count
_SLACK_S = 0.002  # which an iteration may take to fetch requests without having waited for one


class StepReader:
    """Reads from rows of statistics what each step computed, and how long it took. Used on one thread.

    From copies of _torch/pyexecutor/py_executor.py that have no release tag, of about 1.2 and of main of 2026-10. It
    was never run with TensorRT-LLM. Each iteration that computed something has a row. No field is the time of the step:

    * `iterLatencyMS` is the time from the begin of the iteration until its results were read. That includes a wait for
      requests at its begin. With the overlap scheduler, the next iteration reads the results: it spans two steps.
    * `hostStepTimeMS` (1.3 candidates), with the overlap scheduler, is mostly the time of the step before.
    * `gpuForwardTimeMS` (likewise) is without sampling and the executor's own work.

    So a step begins when it is launched and the step before has ended. It ends when its results are read. That is the
    earlier of two times: `timestamp`, which follows the wait, plus the latency, which includes the wait; and the begin
    of the iteration after the read, which includes the wait after the step. These give no samples:

    * steps next to a gap: rows are missing or damaged, or an iteration computed nothing;
    * steps between two waits, and with the overlap scheduler steps before one. If there is a `gpuForwardTimeMS`, steps
      with prompt tokens take it instead;
    * with the overlap scheduler, decode steps before one with prompt tokens, whose launch can delay the read. The next
      step is assumed to begin as if this one had taken as long as the decode step before;
    * steps of the warm-up.

    What rows of 1.2 do not have is approximated: the context of decode requests by the mean of those that run when the
    rows are read (KV blocks would count a shared prefix once), and the place of a chunk in its prompt by the full steps
    before it; tokens in the prefix cache are not counted there. Several prompts of one step count as equally long.
    Attention-DP ranks without rows are assumed to compute what the others do.

    Args:
        steps: receives the samples.
        running: returns the mean number of context tokens of the requests in the batch, and the number of tokens of the
            longest prompt; 0 without any.
        num_ranks: attention-DP ranks; 1 without attention DP.
        full_step: tokens from which a step of a rank cuts its last prompt; 0: prompts are not cut.
    """

    def __init__(
        self,
        steps: deque[StepSample],
        running: Callable[[], tuple[float, int]],
        num_ranks: int = 1,
        full_step: int = 0,
    ) -> None:
        self._steps = steps
        self._running = running
        self._num_ranks = num_ranks
        self._full_step = full_step or math.inf
        self._cut = 0.0  # tokens computed of the prompt that the last step cut, if rows do not report them
        self._overlaps = True  # the overlap scheduler is on, by the last two rows that show it
        self._context = 0.0  # the last mean
        self._longest = self._longest_now = 0  # prompt, of the last two polls and of the last one
        self._pending: list[_Iteration] = []  # the oldest is the next one to become a sample
        self._ended: float | None = None  # the step before it
        self._decode_s = 0.0  # the last decode step; 0: not known
        self._is_warm_up = True

    def read(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of one poll, the oldest first."""
        context, longest = self._running()
        self._context = context or self._context
        self._longest, self._longest_now = max(longest, self._longest_now), longest
        for row in rows[-MOST_STEPS:]:
            try:
                self._add(_Iteration(row))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self._restart()
        if self._is_warm_up:
            self._steps.clear()
            self._restart()
        self._is_warm_up = False

    def _restart(self) -> None:
        self._pending, self._ended, self._cut = [], None, 0.0

    def _add(self, new: _Iteration) -> None:
        last = self._pending[-1] if self._pending else None
        if last is not None and new.number == last.number and new.rank != last.rank:
            last.add_rank(new)
            return
        if last is not None and (new.number != last.number + 1 or new.begun <= last.begun):
            self._restart()
        elif last is not None and (overlaps := self._overlap(last, new)) is not self._overlaps:
            self._overlaps = overlaps
            if len(self._pending) > 1:  # or the executor's first two rows say it
                self._restart()
        self._pending.append(new)
        while len(self._pending) > (3 if self._overlaps else 1):
            seconds = self._overlapped_s() if self._overlaps else self._seconds()
            step = self._pending.pop(0)
            if not seconds and step.tokens:
                seconds = step.forward_s
            cached = self._cached(step)
            if seconds > 0:
                self._take(step, seconds, cached)

    def _overlap(self, last: _Iteration, new: _Iteration) -> bool:
        """Return whether the overlap scheduler is on. With it, an iteration reads the results of the one before.

        A change of the clock can look like the other scheduler, until the next two rows.
        """
        if last.read < new.begun:
            return False
        # The latency of an iteration that has waited for requests says nothing: it includes the wait.
        return self._overlaps or (not last.was_idle and last.read - new.begun > _SLACK_S)

    def _seconds(self) -> float:
        """Return how long the oldest pending step took, without the overlap scheduler. 0: not known."""
        step, after = self._pending[:2]
        # 1.2 repeats the counts of the last step in an iteration that computes nothing, as one that waits for KV.
        if step.was_idle and (after.was_idle or not step.tokens):
            return 0.0
        return min(step.read, after.begun) - step.begun

    def _overlapped_s(self) -> float:
        """Return the same, with the overlap scheduler. Remember when the step ended."""
        step, reader, after, last = self._pending[:4]  # `reader` is the iteration that read the results of `step`
        before, ended = self._ended, min(step.read, after.begun)
        self._ended = None if step.was_idle and after.was_idle else ended
        if reader.was_idle or reader.read - last.begun > _SLACK_S:  # it waited, while the results were there
            self._ended = reader.begun
            return 0.0
        if before is None or self._ended is None:
            return 0.0
        started = max(before, step.begun)
        if reader.tokens and not step.tokens:
            self._ended = min(ended, started + (self._decode_s or ended - started))
            return 0.0
        if not step.tokens:
            self._decode_s = ended - started
        return ended - started

    def _cached(self, step: _Iteration) -> float:
        """Return the number of prompt tokens before those of a step. Each step is passed once, in order."""
        if step.cached is not None:
            return step.cached
        before = self._cut if self._cut + step.tokens / max(1, step.prompts) <= self._longest else 0.0
        self._cut = 0.0
        if step.tokens + step.requests >= self._full_step:
            self._cut = step.tokens / max(1, step.prompts) + (before if step.prompts <= 1 else 0.0)
        return before

    def _take(self, step: _Iteration, seconds: float, cached: float) -> None:
        """Add a sample, unless it is not known what the step computed."""
        context = step.context or step.requests * self._context
        if not (step.requests or step.tokens) or (step.requests and not context):
            return
        share = self._num_ranks / step.num_ranks
        pairs = step.tokens * (cached + step.tokens / 2) / max(1, step.prompts)
        requests, context, tokens = (round(each * share) for each in (step.requests, context, step.tokens))
        self._steps.append(StepSample(seconds, requests, context, tokens, pairs * share))


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

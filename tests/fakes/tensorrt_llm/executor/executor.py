"""The executor: takes requests from any thread, serves each on the engine's loop, answers through
its result.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.protocol.messages import ReleaseOutcome
from tensorrt_llm.executor.kv_events import EventBuffer
from tensorrt_llm.executor.request import LONG_TOKENS, Served
from tensorrt_llm.executor.result import GenerationResult, Response
from tensorrt_llm.executor.utils import RequestError, RPCError
from tensorrt_llm.standin import traps
from tensorrt_llm.standin.core import Core
from tensorrt_llm.standin.kv_transfer import PythonTransceiver
from tensorrt_llm.standin.release import LINE

_SLOW_ABORT_S = 0.3
_SLOW_SHUTDOWN_S = 0.5
_STATS_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The request that `generate_async` passes to the engine."""

    prompt_token_ids: list[int]
    sampling: Any
    streaming: bool
    disaggregated_params: Any
    cache_salt: str | None
    scheduling: Any
    conversation: Any
    priority: int  # lower values first


class GenerationExecutor:
    def __init__(
        self, core: Core, args: dict[str, Any], transceiver: PythonTransceiver | None
    ) -> None:
        self.doing_shutdown = self._has_shut_down = False
        self.transceiver = transceiver
        self.core = core
        core.die = self.die
        self.args = args
        self._ids = itertools.count(1 << 62 if traps.is_on("big_ids") else 1)
        self._served: dict[int, Served] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # context requests whose KV was not fetched: the engine's transfer ids
        self.held: dict[int, str] = {}
        self._error: Exception | None = None
        self._error_queue: queue.Queue[Exception] = queue.Queue()  # of threads and ranks
        if LINE >= (1, 3):
            self._fatal_error: Exception | None = None
        self._stats: collections.deque[dict[str, Any]] = collections.deque(maxlen=_STATS_KEPT)
        self._news = threading.Condition()
        self._iteration = 0
        self.kv_events = EventBuffer(args)
        self.asleep: set[str] = set()  # kinds of GPU memory that were released

    def next_id(self) -> int:
        return next(self._ids)

    def is_shutdown(self) -> bool:
        return self.doing_shutdown

    # --- from any thread --------------------------------------------------------------------------

    def submit(self, submission: Submission, result: GenerationResult) -> None:
        if traps.is_on("submit_blocks") and submission.sampling.max_tokens > LONG_TOKENS:
            self._record(RuntimeError("MPI worker exited unexpectedly"))
            threading.Event().wait()
        self.core.post(lambda: self._begin(submission, result))

    def abort_request(self, request_id: int) -> None:
        if traps.is_on("abort_fails"):
            raise RPCError("a test made the stand-in fail at a remote call")
        self.core.post(lambda: self._abort(request_id))

    def handle_background_error(self, error: Exception) -> None:
        """In the thread that reads a result: an error that is no request's own shuts the executor
        down there.
        """
        if not isinstance(error, RequestError) and traps.is_on("error_shuts_down"):
            self.shutdown()

    def change_memory(self, method: str, tags: set[str]) -> None:
        """A request that runs without its memory reads what is no longer there."""
        if method == "sleep":
            self.asleep |= tags
        elif traps.is_on("wakeup_fails"):
            raise RuntimeError("CUDA error: out of memory")
        elif method == "wakeup":
            self.asleep -= tags
        else:
            raise AttributeError(method)

    def shutdown(self) -> None:
        if self._has_shut_down:
            return
        self.doing_shutdown = True
        if traps.is_on("shutdown_hangs"):
            time.sleep(_SLOW_SHUTDOWN_S)
        if self.transceiver is not None:
            self.transceiver.close()
        self.core.call(self._end_all(RuntimeError("Executor is shutting down")))
        self._has_shut_down = True

    def die(self, reason: str) -> None:
        """As when a rank is lost: nothing is answered any more."""
        self.core.post(lambda: self.on_fatal(reason))

    def get_stats(self, timeout: float, most: int = _STATS_KEPT) -> list[dict[str, Any]]:
        if traps.is_on("stats_fail"):
            raise RuntimeError("a test made the stand-in fail at statistics")
        if traps.is_on("stats_rpc_fails"):
            raise RPCError("a test made the stand-in fail at a remote call")
        deadline = time.monotonic() + timeout
        with self._news:
            while (
                not self._stats
                and not self.doing_shutdown
                and (left := deadline - time.monotonic()) > 0
            ):
                self._news.wait(left)
            return [self._stats.popleft() for _ in range(min(most, len(self._stats)))]

    # --- on the engine's loop ---------------------------------------------------------------------

    def _begin(self, submission: Submission, result: GenerationResult) -> None:
        if self.doing_shutdown:
            result._put(Response(error=self._error or RuntimeError("Executor is shutting down")))
            return
        served = Served(self, submission, result)
        self._served[result._id] = served
        task = asyncio.get_running_loop().create_task(served.run())
        self._tasks[result._id] = task
        task.add_done_callback(lambda _: self._ended(result._id))

    def _ended(self, request_id: int) -> None:
        self._served.pop(request_id, None)
        self._tasks.pop(request_id, None)
        if not traps.is_on("stats_stale"):
            self.note_step()
            # the engine frees blocks a moment later
            self.core.loop.call_later(0.02, self.note_step)

    def _abort(self, request_id: int) -> None:
        served = self._served.get(request_id)
        task = self._tasks.get(request_id)
        transfer_id = self.held.get(request_id)
        if transfer_id is not None and not traps.is_on("abort_keeps_context"):
            self.let_go(request_id)
        if served is None or task is None or traps.is_on("abort_lost"):
            return
        waits = not served.has_begun and self.core.stats().waiting > 0
        served.is_silent = traps.is_on("abort_never_answers") or (
            waits and traps.is_on("abort_drops_waiting")
        )
        if traps.is_on("abort_slow"):
            self.core.loop.call_later(_SLOW_ABORT_S, task.cancel)
        else:
            task.cancel()

    def let_go(self, request_id: int) -> None:
        transfer_id = self.held.pop(request_id, None)
        if transfer_id is not None:
            self.core.engine.release(transfer_id, ReleaseOutcome.ABORTED)

    def note_step(self) -> None:
        """One row of statistics, as after an iteration."""
        if not self.args["enable_iter_perf_stats"] or self.core.loop.is_closed():
            return
        now = self.core.stats()
        self._iteration += 1
        ranks = self.args["tensor_parallel_size"] if self.args["enable_attention_dp"] else 1
        row = {
            "iter": self._iteration,
            "iterLatencyMS": 1.0,
            "numActiveRequests": now.running + now.waiting,
            "numQueuedRequests": now.waiting,
            "maxNumActiveRequests": self.args["max_batch_size"] or 2048,
            "kvCacheStats": {
                "maxNumBlocks": now.kv_blocks_total // ranks,
                "freeNumBlocks": (now.kv_blocks_total - now.kv_blocks_used) // ranks,
                "usedNumBlocks": now.kv_blocks_used // ranks,
                "tokensPerBlock": (
                    None if traps.is_on("no_block_size") else self.core.info.layout.block_tokens
                ),
            },
            "inflightBatchingStats": {"numScheduledRequests": now.running, "numPausedRequests": 0},
        }
        rows = [row]
        # one row per rank; those of the others are copies of rank 0's, without its queue
        if LINE >= (1, 3):
            rows = [row | {"attentionDpRank": 0}]
            rows += [
                row | {"attentionDpRank": rank, "numQueuedRequests": 0} for rank in range(1, ranks)
            ]
        with self._news:
            self._stats.extend(rows)
            self._news.notify_all()

    def on_step_failed(self, message: str) -> None:
        """All active requests of the rank fail with one message; the executor goes on."""
        self._fail_active(lambda: RequestError(message))

    def _record(self, error: Exception) -> None:
        """As a thread does that watches the ranks; until 1.2 the next call raises it, if there is
        one.
        """
        self._error = error
        if LINE >= (1, 3):
            self._fatal_error = error
        else:
            self._error_queue.put(error)

    def on_fatal(self, message: str) -> None:
        self._record(RuntimeError(message))
        self.doing_shutdown = True
        self._fail_active(lambda: RuntimeError(message))

    def _fail_active(self, error: Any) -> None:
        for request_id, task in list(self._tasks.items()):
            served = self._served.get(request_id)
            if served is not None:
                served.fail(error())
            task.cancel()

    async def _end_all(self, error: Exception) -> None:
        tasks = list(self._tasks.values())
        self._fail_active(lambda: error)
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_id in list(self.held):
            self.let_go(request_id)

"""Extend vLLM's NixlConnector and patch vLLM's scheduler to fix two faults of KV transfers in vLLM 0.24.0.

vLLM loads this module by name in the processes of prefill and decode engines.

Lost keys: a decode engine reads the whole prompt and then steps back by one token, so that it has one token to compute
(`_update_waiting_for_remote_kv`). By then, layers with a sliding window have freed, at both engines, a key that this
token still sees, if a KV block ends just there. Without an error, prompts of one length in `block_size` lose a key in
each such layer. Layers with chunked attention lose a whole chunk if it ends with the prompt. Also, a token after the
prompt would need a block that the prefill engine does not have if the prompt fills its last block.

Failed reads: a failed read does not end its request if layers are in several KV groups (sliding window and full
attention, as in gpt-oss). `_handle_failed_transfer` marks no block there, so the request counts as received, is
answered from memory that was never written, and that memory enters the prefix cache. Here the worker half reports
failed requests with each step, and the scheduler ends them before anything is computed or cached from their blocks. A
read that ends after the KV transfer has expired counts as failed, because the blocks may hold another request's KV.

Times: a read waits for several steps of the engine. Both halves note when, on the host's monotonic clock, and the last
output of the request returns it.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.engines.vllm.bindings import PACKAGE
from dynamo_trtllm.engines.vllm.requests import EXPIRES_AT, READ_TIMES, num_remote_tokens
from dynamo_trtllm.engines.vllm.steps import measure_steps
from dynamo_trtllm.engines.vllm.transfers import listen_there

_log = logging.getLogger(__name__)
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_Base: Any = PACKAGE.find("NixlPullConnector", f"{_V1}.nixl.connector")  # of the engine that reads KV
_WorkerMetadata: Any = PACKAGE.find("KVConnectorWorkerMetadata", f"{_V1}.base")  # from workers to the scheduler
_RequestStatus = PACKAGE.find("RequestStatus", "vllm.v1.request")
_Output = PACKAGE.find("EngineCoreOutput", "vllm.v1.engine")  # of one request in one step
_Outputs = PACKAGE.find("EngineCoreOutputs", "vllm.v1.engine")  # of one client in one step


@dataclass
class EndedReads(_WorkerMetadata):  # type: ignore[misc]
    """The requests whose reads of KV have ended since the last step, of one rank or of all ranks."""

    failed: frozenset[str]  # ids
    times: dict[str, tuple[float, float]]  # by id: when the read was posted, and when its end was seen

    def aggregate(self, other: EndedReads) -> EndedReads:
        """Return the reads of both ranks. The last rank counts."""
        times = self.times | other.times
        for request_id in self.times.keys() & other.times.keys():
            (posted, seen), (posted_too, seen_too) = self.times[request_id], other.times[request_id]
            times[request_id] = max(posted, posted_too), max(seen, seen_too)
        return EndedReads(self.failed | other.failed, times)


class NixlConnector(_Base):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's connector with both fixes.

    It has the same name, so that vLLM's checks and logs of the connector's name stay correct.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            listen_there(self.connector_scheduler, vllm_config)
        self._failed: queue.SimpleQueue[str] = queue.SimpleQueue()  # handshakes run on another thread
        self._posted: dict[str, float] = {}  # when, by request
        self._times: dict[str, tuple[float, float]] = {}  # of reads that have ended since the last step
        if self.connector_worker is not None:
            self._watch_reads(self.connector_worker)

    def _watch_reads(self, worker: Any) -> None:
        """Record a failed read before vLLM does: the step that counts it as received must also report it."""
        handle, read = worker._handle_failed_transfer, worker._read_blocks_for_req

        @functools.wraps(handle)
        def recording(req_id: str, *args: Any, **keywords: Any) -> None:
            self._failed.put(req_id)
            handle(req_id, *args, **keywords)

        @functools.wraps(read)
        def posting(req_id: str, *args: Any, **keywords: Any) -> None:
            read(req_id, *args, **keywords)
            self._posted[req_id] = time.monotonic()

        worker._handle_failed_transfer, worker._read_blocks_for_req = recording, posting

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose KV was sent, and those whose read has ended. vLLM calls it in each step."""
        sent, received = super().get_finished(finished_req_ids)
        now = time.monotonic()
        self._times |= {request_id: (self._posted.pop(request_id, now), now) for request_id in received}
        return sent, received

    def build_connector_worker_meta(self) -> EndedReads | None:
        """Return the reads that ended since the last call. vLLM calls it after each step, in each rank."""
        failed = set()
        while not self._failed.empty():
            failed.add(self._failed.get())
        times, self._times = self._times, {}
        return EndedReads(frozenset(failed), times) if failed or times else None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note when the blocks for a read of KV were allocated; the read begins with the next step."""
        params = request.kv_transfer_params or {}
        if num_external_tokens and params.get("do_remote_prefill"):
            params[READ_TIMES] = [time.monotonic()]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return whether blocks stay for another engine, and what goes out with the request's last output."""
        stays, params = super().request_finished_all_groups(request, block_ids)
        times = (request.kv_transfer_params or {}).get(READ_TIMES)
        return stays, {READ_TIMES: times} if params is None and times else params

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens beyond those computed here are read, and whether they are read between steps."""
        count, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params or {}
        if not (between_steps and params.get("do_remote_prefill")):
            return count, between_steps
        wanted = num_remote_tokens(
            num_computed_tokens + count, params.get("remote_num_tokens") or 0, self.connector_scheduler.block_size
        )
        # vLLM handles 0 tokens in another way. In that case read the last block as vLLM does; it is overwritten later.
        return max(wanted - num_computed_tokens, 0) or count, between_steps


def _retain_window_of_last_token(manager: Any) -> None:
    """Make a KV cache manager free a block one token later than vLLM does."""
    skipped = manager.get_num_skipped_tokens
    manager.get_num_skipped_tokens = lambda self, num_computed_tokens: skipped(self, max(0, num_computed_tokens - 1))


def _end_failed_reads(scheduler: Any) -> None:
    """Make a scheduler end requests with `FINISHED_ERROR` whose KV could not be read in time.

    This matches `kv_load_failure_policy: fail`. It happens in the step that reports the requests as received: their
    blocks are freed and were not cached. Requests that vLLM has ended or aborted are skipped.
    """
    update = scheduler.update_from_output

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        _note_times(self.requests, model_runner_output.kv_connector_output)
        for request_id in _failed_reads(self.requests, model_runner_output.kv_connector_output):
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            _log.warning(
                "request %s: ending it, because its KV could not be read before the KV transfer expired", request_id
            )
            self.finish_requests(request_id, _RequestStatus.FINISHED_ERROR)
            ended = _Output(request_id=request_id, new_token_ids=[], finish_reason=request.get_finished_reason())
            outputs.setdefault(request.client_index, _Outputs()).outputs.append(ended)
        return outputs

    scheduler.update_from_output = update_from_output


def _failed_reads(requests: Any, report: Any) -> Iterable[str]:
    """Return the ids of requests whose reads failed or ended too late.

    `requests`: vLLM's requests by id. `report`: vLLM's KVConnectorOutput, or None.
    """
    if report is None:
        return ()
    now = time.time()
    known = [(each, requests[each]) for each in report.finished_recving or () if each in requests]
    late = {each for each, request in known if (request.kv_transfer_params or {}).get(EXPIRES_AT, math.inf) <= now}
    meta = report.kv_connector_worker_meta
    return late | meta.failed if isinstance(meta, EndedReads) else late


def _note_times(requests: Any, report: Any) -> None:
    """Note the times of each request whose read has ended. See `_failed_reads` for the arguments.

    Ranks may report in different steps: the last one counts.
    """
    meta = None if report is None else report.kv_connector_worker_meta
    for request_id, times in meta.times.items() if isinstance(meta, EndedReads) else ():
        if request_id in requests:
            noted = (requests[request_id].kv_transfer_params or {}).get(READ_TIMES, [])
            noted[1:] = (*times, time.monotonic())


for _name in ("SlidingWindowManager", "ChunkedLocalAttentionManager"):
    _retain_window_of_last_token(PACKAGE.find(_name, "vllm.v1.core.single_type_kv_cache_manager"))
_Scheduler: Any = PACKAGE.find("Scheduler", "vllm.v1.core.sched.scheduler")
_end_failed_reads(_Scheduler)
measure_steps(_Scheduler)

"""NixlConnector, and what vLLM's scheduler must do otherwise for a hand-off to lose nothing. vLLM loads this by name,
in the processes of engines that hand over or take.

A decode engine reads a whole prompt and then steps back by one token, to have one to compute (0.24.0,
`_update_waiting_for_remote_kv`). By then layers with a sliding window have freed, on both sides, a key that this token
still sees, if a KV block ends just there: prompts of one length in `block_size` lose a key in each such layer, without
an error. Layers with chunked attention lose a whole chunk, if it ends with the prompt. And a token after the prompt
would need a block that the prefill engine does not have, if the prompt fills its last one. Knows requests only by
vLLM's own records of them.

A read that fails does not end its request in 0.24.0 where layers are in several KV groups (sliding window and full
attention, as in gpt-oss): `_handle_failed_transfer` marks no block there, so the request counts as received, is
answered from memory that was never written, and that memory enters the prefix cache. Here the worker half reports the
failed requests with each step and the scheduler ends them before anything is computed or cached from their blocks. A
read that ends after the ticket has expired counts as failed: the blocks may hold another request's KV by then.
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

from dynamo_trtllm.engines.vllm import bindings, settings
from dynamo_trtllm.engines.vllm.requests import EXPIRES_AT, num_remote_tokens

_log = logging.getLogger(__name__)
_Base: Any = bindings.nixl_connector()
_parts = bindings.scheduler_parts()


@dataclass
class FailedReads(_parts.worker_metadata):  # type: ignore[misc,name-defined]
    """The ids of requests whose KV could not be read since the last step, of one rank or of all ranks."""

    request_ids: frozenset[str]

    def aggregate(self, other: FailedReads) -> FailedReads:
        """Return the failed reads of both ranks."""
        return FailedReads(self.request_ids | other.request_ids)


class NixlConnector(_Base):  # type: ignore[misc]  # of a vendor that is not typed here
    """Under the name that vLLM's own has, so that what says which connector is used stays true."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            settings.listen_there(self.connector_scheduler, vllm_config)
        self._failed: queue.SimpleQueue[str] = queue.SimpleQueue()  # handshakes fail on another thread
        if self.connector_worker is not None:
            self._watch_reads(self.connector_worker)

    def _watch_reads(self, worker: Any) -> None:
        """Note each failed read before vLLM does: every step that counts it as received must also report it here."""
        handle = worker._handle_failed_transfer

        @functools.wraps(handle)
        def noted(req_id: str, *args: Any, **keywords: Any) -> None:
            self._failed.put(req_id)
            handle(req_id, *args, **keywords)

        worker._handle_failed_transfer = noted

    def build_connector_worker_meta(self) -> FailedReads | None:
        """Return what failed since the last call; vLLM calls it after each step, in each rank."""
        found = set()
        while not self._failed.empty():
            found.add(self._failed.get())
        return FailedReads(frozenset(found)) if found else None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond those computed here are read, and whether that happens between steps."""
        count, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params or {}
        if not (between_steps and params.get("do_remote_prefill")):
            return count, between_steps
        wanted = num_remote_tokens(
            num_computed_tokens + count, params.get("remote_num_tokens") or 0, self.connector_scheduler.block_size
        )
        # Nothing to read would be another path of vLLM's: then the last block is read as vLLM has it, and written over.
        return max(wanted - num_computed_tokens, 0) or count, between_steps


def _keep_what_the_last_token_sees(manager: Any) -> None:
    """Such layers let go of a block when the token after the next one no longer sees it."""
    skipped = manager.get_num_skipped_tokens
    manager.get_num_skipped_tokens = lambda self, num_computed_tokens: skipped(self, max(0, num_computed_tokens - 1))


def _end_failed_reads(scheduler: Any) -> None:
    """End requests whose KV could not be read in time with `FINISHED_ERROR`, as with `kv_load_failure_policy: fail`.

    This happens in the step that reports them as received: their blocks are freed and were not cached. A request that
    vLLM has ended itself, or that was aborted, is not found any more.
    """
    update = scheduler.update_from_output

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        for request_id in _failed_reads(self.requests, model_runner_output.kv_connector_output):
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            _log.warning("request %s ends: its KV could not be read before its ticket expired", request_id)
            self.finish_requests(request_id, _parts.request_status.FINISHED_ERROR)
            ended = _parts.output(request_id=request_id, new_token_ids=[], finish_reason=request.get_finished_reason())
            outputs.setdefault(request.client_index, _parts.outputs()).outputs.append(ended)
        return outputs

    scheduler.update_from_output = update_from_output


def _failed_reads(requests: Any, report: Any) -> Iterable[str]:
    """Return the ids of requests whose reads have failed or ended too late. `report`: KVConnectorOutput or None."""
    if report is None:
        return ()
    now = time.time()
    known = [(each, requests[each]) for each in report.finished_recving or () if each in requests]
    late = {each for each, request in known if (request.kv_transfer_params or {}).get(EXPIRES_AT, math.inf) <= now}
    meta = report.kv_connector_worker_meta
    return late | meta.request_ids if isinstance(meta, FailedReads) else late


for each in bindings.windowed_cache_managers():
    _keep_what_the_last_token_sees(each)
_end_failed_reads(_parts.scheduler)

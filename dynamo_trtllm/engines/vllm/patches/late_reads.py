"""End requests whose KV was read after its transfer had expired, and requests whose reads have
failed.

The prefill engine may use the blocks of an expired transfer for another request, so the KV may be
wrong. The worker half of the connector reports with each step which reads have ended or failed. The
scheduler ends these requests before anything is computed or cached from their blocks.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply
from dynamo_trtllm.engines.vllm.releases import PACKAGE
from dynamo_trtllm.engines.vllm.requests import EXPIRES_AT, READ_TIMES

PATCH = Patch(
    name="late_reads",
    fault="a request whose KV was read too late may be answered from another request's KV",
    upstream="none known",
    needed_in="all",
    detection="always on; the expiry is this project's own",
    goes="when vLLM checks the expiry of what it has read",
    is_vital=True,
)

log = logging.getLogger(__name__)
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
# vLLM's class for data that workers send to the scheduler.
_WorkerMetadata: Any = PACKAGE.find("KVConnectorWorkerMetadata", f"{_V1}.base")
_RequestStatus = PACKAGE.find("RequestStatus", "vllm.v1.request")
# The output of one request in one step.
_Output = PACKAGE.find("EngineCoreOutput", "vllm.v1.engine")
# The outputs of one client in one step.
_Outputs = PACKAGE.find("EngineCoreOutputs", "vllm.v1.engine")


@dataclass
class EndedReads(_WorkerMetadata):  # type: ignore[misc]
    """The requests whose reads of KV have ended since the last step, of one rank or of all."""

    failed: frozenset[str]  # ids
    # When each read was posted, and when its end was seen, by id.
    times: dict[str, tuple[float, float]]

    def aggregate(self, other: EndedReads) -> EndedReads:
        """Return the reads of both ranks, each with the later times of the two."""
        times = self.times | other.times
        for request_id in self.times.keys() & other.times.keys():
            posted, seen = self.times[request_id]
            posted_there, seen_there = other.times[request_id]
            times[request_id] = (max(posted, posted_there), max(seen, seen_there))
        return EndedReads(self.failed | other.failed, times)


def install() -> None:
    """Make vLLM's scheduler in this process end these requests.

    Raises EngineFailed if this release's scheduler has another form.
    """

    def change() -> None:
        _end_failed_reads(PACKAGE.find("Scheduler", "vllm.v1.core.sched.scheduler"))

    apply(PATCH, lambda: True, change)


def _end_failed_reads(scheduler: Any) -> None:
    """Make a scheduler end requests with `FINISHED_ERROR` whose KV could not be read in time.

    This matches `kv_load_failure_policy: fail`. The requests end in the step that reports them as
    received, so their blocks are freed before they are cached. Requests that vLLM has ended or
    aborted are skipped.
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
            log.warning(
                "request %s: ending it, because its KV could not be read, or only after the KV"
                " transfer had expired",
                request_id,
            )
            self.finish_requests(request_id, _RequestStatus.FINISHED_ERROR)
            ended = _Output(
                request_id=request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
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
    failed: set[str] = set()
    for request_id in report.finished_recving or ():
        if request_id in requests and _expiry(requests[request_id]) <= now:
            failed.add(request_id)
    meta = report.kv_connector_worker_meta
    if isinstance(meta, EndedReads):
        failed |= meta.failed
    return failed


def _expiry(request: Any) -> float:
    """Return when the KV transfer of one of vLLM's requests expires, in seconds since the epoch."""
    params = request.kv_transfer_params or {}
    expires_at: float = params.get(EXPIRES_AT, math.inf)
    return expires_at


def _note_times(requests: Any, report: Any) -> None:
    """Note the times of each request whose read has ended. See `_failed_reads` for the arguments.

    Ranks may report in different steps. The times of the last report count.
    """
    meta = None if report is None else report.kv_connector_worker_meta
    if not isinstance(meta, EndedReads):
        return
    for request_id, times in meta.times.items():
        if request_id in requests:
            params = requests[request_id].kv_transfer_params or {}
            noted = params.get(READ_TIMES, [])
            # The first time is when the blocks were allocated.
            noted[1:] = (*times, time.monotonic())

"""Tell vLLM's scheduler that the KV of a request was read, before it schedules the next step.

vLLM looks for ended reads after it has launched a step. Its scheduler learns of them with the
results of this step, one to two steps later. On two H200 with gpt-oss-120b's shape, this wait
(`kv_transfer.notice`) was 10 of the 19 ms of a transfer of 8,192 tokens.

If an engine has one rank, the worker runs in the engine's process. There the scheduler itself looks
for ended reads. If an engine has several ranks, a read has ended when it has ended in all ranks, so
vLLM's own way is used.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from typing import Any

from dynamo_trtllm.engines.vllm.patches.patch import MISFITS
from dynamo_trtllm.engines.vllm.releases import PACKAGE
from dynamo_trtllm.engines.vllm.requests import EXPIRES_AT, READ_TIMES

# The processes of vLLM configure the logger "vllm", and this one with it.
log = logging.getLogger("vllm.dynamo_trtllm")
# The worker half of the connector in this process, if the engine has one rank; otherwise empty.
_worker_half: list[Any] = []


def note_worker_half(connector: Any, vllm_config: Any) -> None:
    """Note the worker half that this process has created."""
    if vllm_config.parallel_config.world_size == 1:
        _worker_half[:] = [connector]


def install() -> None:
    """Make vLLM's scheduler in this process look for ended reads before each step."""
    try:
        scheduler = PACKAGE.find("Scheduler", "vllm.v1.core.sched.scheduler")
        output = PACKAGE.find("KVConnectorOutput", "vllm.v1.outputs")
        _look_before(scheduler, output)
    except MISFITS as exc:
        log.warning(
            "ended reads of KV are noticed a step later, because this vLLM has another scheduler"
            " (%s)",
            exc,
        )


def _look_before(scheduler: Any, output: Any) -> None:
    """Wrap `schedule`.

    Args:
        scheduler: vLLM's class.
        output: vLLM's class of a report of workers about their transfers.
    """
    schedule = scheduler.schedule
    report = scheduler._update_from_kv_xfer_finished

    @functools.wraps(schedule)
    def schedule_what_was_read(self: Any, *args: Any, **keywords: Any) -> Any:
        if _worker_half:
            received = _received_in_time(self.requests, _worker_half[0])
            if received:
                report(self, output(finished_recving=received))
        return schedule(self, *args, **keywords)

    scheduler.schedule = schedule_what_was_read


def _received_in_time(requests: Any, half: Any) -> set[str]:
    """Return the requests whose KV has been read before the KV transfer expired.

    The next step reports the other requests whose KV has been read.

    Args:
        requests: vLLM's requests by id.
        half: the worker half of the connector.
    """
    now = time.time()
    in_time = set()
    for request_id, times in half.take_well_received().items():
        params = None
        if request_id in requests:
            params = requests[request_id].kv_transfer_params
        if params is None or params.get(EXPIRES_AT, math.inf) <= now:
            half.put_back(request_id, times)
            continue
        read_times = params.get(READ_TIMES, [])
        # The first time is when the blocks were allocated.
        read_times[1:] = (*times, time.monotonic())
        in_time.add(request_id)
    return in_time

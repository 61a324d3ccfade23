"""Measure the steps of vLLM's scheduler, in its engine process, and send them with vLLM's own statistics.

vLLM reports neither the time of a step nor what it computed. A step begins when it is scheduled and the one before it
has ended: with asynchronous scheduling, vLLM schedules a step while the one before runs.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Final

from dynamo_trtllm.cost_model import StepSample

_KEY: Final = "dynamo_step"  # in `SchedulerStats.kv_connector_stats`, which is free-form
_BEGUN = "dynamo_begun_s"
_Composition = tuple[int, int, int, float]  # the fields of a `StepSample` after its time


def measure_steps(scheduler: Any) -> None:
    """Make a scheduler class measure its steps. Repeated calls are allowed."""
    if hasattr(scheduler, "dynamo_last_s"):
        return
    schedule, update, make_stats = scheduler.schedule, scheduler.update_from_output, scheduler.make_stats
    scheduler.dynamo_last_s = 0.0  # the end of the last step
    scheduler.dynamo_composition = 0, 0, 0, 0.0  # of the step that was scheduled last
    scheduler.dynamo_sample = None

    @functools.wraps(schedule)
    def measured_schedule(self: Any, *args: Any, **keywords: Any) -> Any:
        begun_s = time.monotonic()
        output = schedule(self, *args, **keywords)
        self.dynamo_composition = composition = _composition(self, output)
        setattr(output, _BEGUN, (begun_s, composition))
        return output

    @functools.wraps(update)
    def measured_update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = time.monotonic()
        begun_s, composition = getattr(scheduler_output, _BEGUN, (now, (0, 0, 0, 0.0)))
        if composition[0] or composition[2]:
            self.dynamo_sample = [now - max(begun_s, self.dynamo_last_s), *composition]
        self.dynamo_last_s = now
        return update(self, scheduler_output, model_runner_output)

    @functools.wraps(make_stats)
    def stats_with_step(self: Any, *args: Any, **keywords: Any) -> Any:
        stats, sample = make_stats(self, *args, **keywords), self.dynamo_sample
        if stats is not None and sample is not None:
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: sample}
            self.dynamo_sample = None
        return stats

    scheduler.schedule, scheduler.update_from_output = measured_schedule, measured_update
    scheduler.make_stats = stats_with_step


def _composition(scheduler: Any, output: Any) -> _Composition:
    """Return what a step computes. Most steps give the requests of the step before one more token each."""
    counts, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
    decoding, context, tokens, _ = scheduler.dynamo_composition
    is_same = total == len(counts) == decoding and not tokens
    if is_same and not (output.finished_req_ids or output.scheduled_new_reqs or output.preempted_req_ids):
        return decoding, context + decoding, 0, 0.0
    decoding = context = tokens = 0
    pairs = 0.0
    for request_id, count in counts.items():
        request = scheduler.requests[request_id]
        before = request.num_computed_tokens - count
        if count == 1 or before >= request.num_prompt_tokens:
            decoding += 1
            context += before
        else:
            tokens += count
            pairs += count * (before + count / 2)
    return decoding, context, tokens, pairs


def step_of(stats: Any) -> StepSample | None:
    """Return the step that vLLM's `SchedulerStats` report, if they do."""
    values = (getattr(stats, "kv_connector_stats", None) or {}).get(_KEY)
    return None if values is None else StepSample(*values)

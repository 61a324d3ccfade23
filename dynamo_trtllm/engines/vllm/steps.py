"""Measure the steps of vLLM's scheduler, in vLLM's engine process.

vLLM reports neither the time of a step nor what it computed. This module is loaded there by the
connector, or by the name of `MeasuredScheduler`.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Final

from dynamo_trtllm.cost_model import StepSample
from dynamo_trtllm.engines.vllm.releases import PACKAGE

_KEY: Final = "dynamo_step"  # in `SchedulerStats.kv_connector_stats`, which is free-form
_SCHED = "vllm.v1.core.sched"
_BEGUN = "dynamo_begun_s"
# in the results of a step: they were there before the engine asked for them
_LATE = "dynamo_is_late"
_Composition = tuple[int, int, int, float]  # the fields of a `StepSample` after its time


def measure_steps(scheduler: Any) -> None:
    """Make a scheduler class measure its steps. Repeated calls are allowed.

    A step begins when it is scheduled and the one before it has ended: with asynchronous
    scheduling, vLLM schedules a step while the one before runs. The time is sent with vLLM's own
    statistics.

    If the launch of a step with prompt tokens takes longer than the step before it, the end of that
    step is not known (see `note_late_results`). A decode step is then assumed to take as long as
    the last one, and is no sample. Of steps with prompt tokens, those are samples whose begin and
    end are late alike.
    """
    if hasattr(scheduler, "dynamo_last_s"):
        return
    future = PACKAGE.find_optional("AsyncOutputFuture", "vllm.v1.executor.uniproc_executor")
    if future is not None:
        note_late_results(future)
    schedule, update, make_stats = (
        scheduler.schedule,
        scheduler.update_from_output,
        scheduler.make_stats,
    )
    scheduler.dynamo_last_s = 0.0  # the end of the last step
    scheduler.dynamo_composition = 0, 0, 0, 0.0  # of the step that was scheduled last
    scheduler.dynamo_sample = None
    scheduler.dynamo_was_late = False  # the end of the last step was before `dynamo_last_s`
    scheduler.dynamo_decode_s = 0.0  # time of the last step without prompt tokens; 0: not known

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
        start_s, self.dynamo_last_s = max(begun_s, self.dynamo_last_s), now
        # of the step that was launched since, if it is another one
        latest = self.dynamo_composition
        is_late = (
            getattr(model_runner_output, _LATE, False)
            and latest is not composition
            and latest[2] > 0
        )
        was_late, self.dynamo_was_late = self.dynamo_was_late, is_late
        decodes = composition[0] and not composition[2]
        if is_late and decodes and self.dynamo_decode_s:
            self.dynamo_last_s = min(now, start_s + self.dynamo_decode_s)
            self.dynamo_was_late = False
        elif (composition[0] or composition[2]) and is_late == was_late:
            self.dynamo_sample = [now - start_s, *composition]
            if decodes:
                self.dynamo_decode_s = now - start_s
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


def note_late_results(future: Any) -> None:
    """Make a class of futures note if the results of a step were there before the engine asked for
    them.

    An engine in one process with its worker asks for them after it has launched the next step.
    Repeated calls are allowed.
    """
    result = future.result
    if hasattr(result, "__wrapped__"):
        return

    @functools.wraps(result)
    def noted_result(self: Any, timeout: float | None = None) -> Any:
        results = self.async_output
        event = getattr(results, "async_copy_ready_event", None) or getattr(
            results, "copy_event", None
        )
        query = getattr(event, "query", None)
        is_late = query is not None and query()
        output = result(self, timeout)
        if is_late and hasattr(output, "__dict__"):
            setattr(output, _LATE, True)
        return output

    future.result = noted_result


class MeasuredScheduler:
    """The scheduler that vLLM would take, with measured steps. vLLM creates it by this name."""

    def __new__(cls, vllm_config: Any, **parts: Any) -> Any:
        """Create a scheduler of vLLM's own class. vLLM's warning of a class that is not its own
        does not apply.
        """
        is_async = vllm_config.scheduler_config.async_scheduling
        measure_steps(PACKAGE.find("Scheduler", f"{_SCHED}.scheduler"))
        name, module = (
            ("AsyncScheduler", "async_scheduler") if is_async else ("Scheduler", "scheduler")
        )
        return PACKAGE.find(name, f"{_SCHED}.{module}")(vllm_config=vllm_config, **parts)


def _composition(scheduler: Any, output: Any) -> _Composition:
    """Return what a step computes.

    Most steps give the requests of the step before one more token each.
    """
    counts, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
    decoding, context, tokens, _ = scheduler.dynamo_composition
    is_same = total == len(counts) == decoding and not tokens
    if is_same and not (
        output.finished_req_ids or output.scheduled_new_reqs or output.preempted_req_ids
    ):
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

"""Measure the steps of vLLM's scheduler, in vLLM's engine process.

vLLM reports neither the time of a step nor what it computed. This module is loaded there by the
connector, or by the name of `MeasuredScheduler`.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Final, NamedTuple

from dynamo_trtllm.engines.vllm.releases import PACKAGE
from dynamo_trtllm.protocol.cost_model import StepSample

# A key of `SchedulerStats.kv_connector_stats`, which may have any keys.
_KEY: Final = "dynamo_step"
_SCHED = "vllm.v1.core.sched"
# Attribute of a step's plan (vLLM's `SchedulerOutput`): a `_BegunStep`.
_BEGUN = "dynamo_begun_s"
# Attribute of a step's results: True if they were there before the engine asked for them.
_LATE = "dynamo_is_late"


class _Composition(NamedTuple):
    """What a step computes: the fields of a `StepSample` after its time."""

    decode_requests: int = 0
    context_tokens: int = 0
    prefill_tokens: int = 0
    attention_pairs: float = 0.0


class _BegunStep(NamedTuple):
    begun_s: float
    composition: _Composition
    planned_tokens: int = 0  # how many prompt tokens it might have had; 0: there is no limit


class OutputGap(NamedTuple):
    """The time between the outputs of two steps, for which streams waited.

    An engine in one process with its worker launches the next step before it takes the output of
    the last one, and the launch of a step with prompt tokens may take as long as its computation.
    So the streams wait for the step that has ended or for the one that was launched meanwhile.
    """

    seconds: float
    planned_tokens: int  # how many prompt tokens the larger one of both might have had
    # If the step that has ended had as many prompt tokens as it might have: this number, and the
    # longer one of the times for which streams waited for its launch and for its computation.
    full_tokens: int = 0
    full_s: float = 0.0


_NOTHING = _Composition()


def measure_steps(scheduler: Any) -> None:
    """Make a scheduler class measure its steps. Idempotent.

    A step begins when it is scheduled and the one before it has ended: with asynchronous
    scheduling, vLLM schedules a step while the one before runs. The time is sent with vLLM's own
    statistics.

    If the launch of a step with prompt tokens takes longer than the step before it, the end of that
    step is not known (see `note_late_results`). A decode step is then assumed to take as long as
    the last one, and is no sample. A step with prompt tokens is a sample if its begin and its end
    are both known, or both too late.
    """
    if hasattr(scheduler, "dynamo_last_s"):
        return
    future = PACKAGE.find_optional("AsyncOutputFuture", "vllm.v1.executor.uniproc_executor")
    if future is not None:
        note_late_results(future)
    schedule = scheduler.schedule
    update = scheduler.update_from_output
    make_stats = scheduler.make_stats
    _set_initial_state(scheduler)

    @functools.wraps(schedule)
    def measured_schedule(self: Any, *args: Any, **keywords: Any) -> Any:
        begun_s = time.monotonic()
        output = schedule(self, *args, **keywords)
        self.dynamo_composition = _composition(self, output)
        begun = _BegunStep(begun_s, self.dynamo_composition, self.dynamo_planned_tokens)
        self.dynamo_latest_step = begun
        setattr(output, _BEGUN, begun)
        return output

    @functools.wraps(update)
    def measured_update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        _note_end(self, scheduler_output, model_runner_output)
        return update(self, scheduler_output, model_runner_output)

    @functools.wraps(make_stats)
    def stats_with_step(self: Any, *args: Any, **keywords: Any) -> Any:
        stats = make_stats(self, *args, **keywords)
        sample = self.dynamo_sample
        if stats is not None and sample is not None:
            other_stats = stats.kv_connector_stats or {}
            stats.kv_connector_stats = {**other_stats, _KEY: sample}
            self.dynamo_sample = None
        return stats

    scheduler.schedule = measured_schedule
    scheduler.update_from_output = measured_update
    scheduler.make_stats = stats_with_step


def _set_initial_state(scheduler: Any) -> None:
    """Give a scheduler class the attributes in which its steps are measured."""
    scheduler.dynamo_last_s = 0.0  # the end of the last step
    # The composition of the step that was scheduled last.
    scheduler.dynamo_composition = _NOTHING
    scheduler.dynamo_sample = None  # a step that is not sent yet
    scheduler.dynamo_latest_step = _BegunStep(0.0, _NOTHING)  # the one that was scheduled last
    scheduler.dynamo_output_s = 0.0  # when the output of the last step was taken
    scheduler.dynamo_output_gap = None  # the last `OutputGap` with prompt tokens
    # The time between two outputs in which the latest step was launched.
    scheduler.dynamo_launch_s = 0.0
    # Prompt tokens that the next step may have; 0: there is no limit.
    scheduler.dynamo_planned_tokens = 0
    scheduler.dynamo_was_late = False  # the end of the last step was before `dynamo_last_s`
    scheduler.dynamo_decode_s = 0.0  # time of the last step without prompt tokens; 0: not known


def _note_end(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> None:
    """Note the end of a step, and keep it as a sample if its time is known."""
    now = time.monotonic()
    begun: _BegunStep = getattr(scheduler_output, _BEGUN, _BegunStep(now, _NOTHING))
    _note_gap(scheduler, begun, now)
    composition = begun.composition
    start_s = max(begun.begun_s, scheduler.dynamo_last_s)
    scheduler.dynamo_last_s = now
    # The composition of the newest step, which may have been launched since.
    latest: _Composition = scheduler.dynamo_composition
    is_late = (
        getattr(model_runner_output, _LATE, False)
        and latest is not composition
        and latest.prefill_tokens > 0
    )
    was_late = scheduler.dynamo_was_late
    scheduler.dynamo_was_late = is_late
    has_decodes = composition.decode_requests > 0
    has_prefills = composition.prefill_tokens > 0
    is_empty = not has_decodes and not has_prefills
    is_decode_step = has_decodes and not has_prefills
    if is_late and is_decode_step and scheduler.dynamo_decode_s > 0:
        # The end of the step is not known. Assume that it took as long as the last one.
        scheduler.dynamo_last_s = min(now, start_s + scheduler.dynamo_decode_s)
        scheduler.dynamo_was_late = False
    elif not is_empty and is_late == was_late:
        scheduler.dynamo_sample = [now - start_s, *composition]
        if is_decode_step:
            scheduler.dynamo_decode_s = now - start_s


def _note_gap(scheduler: Any, ended: _BegunStep, now: float) -> None:
    """Keep the time since the last output, if streams waited for a limited step in it."""
    # After a pause, the time begins with the step.
    seconds = now - max(scheduler.dynamo_output_s, ended.begun_s)
    scheduler.dynamo_output_s = now
    launched: _BegunStep = scheduler.dynamo_latest_step
    launch_s = scheduler.dynamo_launch_s
    scheduler.dynamo_launch_s = 0.0 if launched is ended else seconds
    limited = [
        step.planned_tokens
        for step in (ended, launched)
        if step.planned_tokens and step.composition.prefill_tokens
    ]
    if not limited or not ended.composition.decode_requests:
        return
    gap = OutputGap(seconds, max(limited))
    if 0 < ended.planned_tokens <= ended.composition.prefill_tokens:
        gap = gap._replace(full_tokens=ended.planned_tokens, full_s=max(seconds, launch_s))
    scheduler.dynamo_output_gap = gap


def note_late_results(future: Any) -> None:
    """Make a class of futures note if results were there before the engine asked for them.

    An engine in one process with its worker asks for them after it has launched the next step.
    Idempotent.
    """
    result = future.result
    if hasattr(result, "__wrapped__"):
        return

    @functools.wraps(result)
    def noted_result(self: Any, timeout: float | None = None) -> Any:
        results = self.async_output
        # The name depends on the model runner.
        event = getattr(results, "async_copy_ready_event", None)
        if not event:
            event = getattr(results, "copy_event", None)
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
        """Create a scheduler of vLLM's own class.

        vLLM's warning of a class that is not its own does not apply.
        """
        scheduler = PACKAGE.find("Scheduler", f"{_SCHED}.scheduler")
        measure_steps(scheduler)
        if vllm_config.scheduler_config.async_scheduling:
            scheduler = PACKAGE.find("AsyncScheduler", f"{_SCHED}.async_scheduler")
        return scheduler(vllm_config=vllm_config, **parts)


def _composition(scheduler: Any, output: Any) -> _Composition:
    """Return what a step computes.

    Most steps give the requests of the step before one more token each.
    """
    counts = output.num_scheduled_tokens
    last: _Composition = scheduler.dynamo_composition
    num_decoding = last.decode_requests
    has_one_token_each = output.total_num_scheduled_tokens == len(counts) == num_decoding
    if has_one_token_each and last.prefill_tokens == 0:
        has_changed = (
            output.finished_req_ids or output.scheduled_new_reqs or output.preempted_req_ids
        )
        if not has_changed:
            return _Composition(num_decoding, last.context_tokens + num_decoding)
    num_decoding = 0
    context_tokens = 0
    prefill_tokens = 0
    attention_pairs = 0.0
    for request_id, count in counts.items():
        request = scheduler.requests[request_id]
        before = request.num_computed_tokens - count
        if count == 1 or before >= request.num_prompt_tokens:
            num_decoding += 1
            context_tokens += before
        else:
            prefill_tokens += count
            attention_pairs += count * (before + count / 2)
    return _Composition(num_decoding, context_tokens, prefill_tokens, attention_pairs)


def step_of(stats: Any) -> StepSample | None:
    """Return the step that vLLM's `SchedulerStats` report, if they do."""
    connector_stats = getattr(stats, "kv_connector_stats", None) or {}
    values = connector_stats.get(_KEY)
    return None if values is None else StepSample(*values)

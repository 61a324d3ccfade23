"""Limit the prompt tokens of a step of an elastic engine while it has streams.

vLLM gives the tokens of a step to its requests in the order of their admission, and a long prompt
may take all of them: running streams then wait for long steps, and a decode call whose KV has
arrived does not begin. Before each step, the scheduler reads how many tokens the step may have
(`max_num_scheduled_tokens`), and how many of them one prompt may have
(`long_prefill_token_threshold`). So both can follow what the engine has to do.

vLLM loads this module in the process of its scheduler.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.protocol.cost_model import StepSample

# In `kv_connector_extra_config`: whether the engine is elastic.
IS_ELASTIC: Final = "dynamo_is_elastic"


def follow_streams(scheduler: Any) -> None:
    """Let a class of schedulers of vLLM set these limits before each step.

    Its steps are measured, see `steps.measure_steps`. Nothing changes for engines that are not
    elastic. Repeated calls are allowed.
    """
    schedule = scheduler.schedule
    if getattr(schedule, "dynamo_follows_streams", False):
        return

    @functools.wraps(schedule)
    def following_schedule(self: Any, *args: Any, **keywords: Any) -> Any:
        limits = _limits_of(self)
        if limits is not None:
            limits.set_for_next_step()
        return schedule(self, *args, **keywords)

    following_schedule.dynamo_follows_streams = True  # type: ignore[attr-defined]
    scheduler.schedule = following_schedule


class _StepLimits:
    """The limits of the steps of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._max_tokens = int(scheduler.max_num_scheduled_tokens)
        self._chunk_size = ChunkSize(self._max_tokens)
        self._last_sample: Any = None

    def set_for_next_step(self) -> None:
        """Set the limits by what the engine has to do now."""
        scheduler = self._scheduler
        self._learn()
        max_tokens = self._max_tokens
        prompt_tokens = 0  # no limit
        requests = scheduler.requests.values()
        num_streams = sum(map(_is_stream, requests))
        if num_streams:
            num_running_streams = sum(map(_is_stream, scheduler.running))
            if num_running_streams < num_streams:
                # A decode call may have its KV in this step. It comes after the prompts that wait
                # before it, so all prompts together leave tokens for it.
                num_prompts = sum(map(_is_prompt, requests))
                prompt_tokens = self._share(num_prompts)
            else:
                # Prompts that run share the tokens. Others begin in the order of their arrival,
                # once there are tokens left: if each began with a few, all would end late.
                num_prompts = max(1, len(scheduler.running) - num_running_streams)
                prompt_tokens = self._share(num_prompts)
                stream_tokens = num_streams * (1 + scheduler.num_spec_tokens)
                max_tokens = min(max_tokens, num_prompts * prompt_tokens + stream_tokens)
        scheduler.max_num_scheduled_tokens = max_tokens
        scheduler.scheduler_config.long_prefill_token_threshold = prompt_tokens

    def _share(self, num_prompts: int) -> int:
        """Return how many tokens of a step each of some prompts may have."""
        return max(1, self._chunk_size.tokens // max(1, num_prompts))

    def _learn(self) -> None:
        """Take the time of the last step, if it had prompt tokens beside streams."""
        sample = self._scheduler.dynamo_last_sample
        if sample is None or sample is self._last_sample:
            return
        self._last_sample = sample
        step = StepSample(*sample)
        if step.prefill_tokens and step.decode_requests:
            self._chunk_size.measured(step.seconds, step.prefill_tokens)


def _limits_of(scheduler: Any) -> _StepLimits | None:
    """Return the limits of an elastic engine; None: the engine is not elastic."""
    if not hasattr(scheduler, "dynamo_step_limits"):
        transfer = scheduler.vllm_config.kv_transfer_config
        extra = {} if transfer is None else transfer.kv_connector_extra_config
        is_elastic = bool(extra.get(IS_ELASTIC))
        scheduler.dynamo_step_limits = _StepLimits(scheduler) if is_elastic else None
    limits: _StepLimits | None = scheduler.dynamo_step_limits
    return limits


def _is_prompt(request: Any) -> bool:
    """Return whether a request waits for its prompt to be computed."""
    is_computed = request.num_computed_tokens >= request.num_prompt_tokens
    return not is_computed and not _is_stream(request)


def _is_stream(request: Any) -> bool:
    """Return whether a request generates tokens, or will when it has fetched the KV of its prompt.

    vLLM computes the last token of a fetched prompt again. A prefill call generates no more tokens,
    but stays among the requests until its KV is fetched.
    """
    params = request.kv_transfer_params or {}
    if params.get("do_remote_decode"):
        return False
    if request.num_computed_tokens >= request.num_prompt_tokens - 1:
        return True
    return bool(params.get("do_remote_prefill"))

"""Limit the prompt tokens of a step of an elastic engine while it has streams.

vLLM gives the tokens of a step to its requests in the order of their admission, and a long prompt
may take all of them: running streams then wait for long steps, and a decode call whose KV has
arrived does not begin. Before each step, its scheduler reads how many tokens the step may have
(`max_num_scheduled_tokens`), and how many of them one prompt may have
(`long_prefill_token_threshold`). So both can follow what the engine has to do.

vLLM loads this module in the process of its scheduler.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, Final

from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.engines.vllm.steps import OutputGap

# In `kv_connector_extra_config`: whether the engine is elastic.
IS_ELASTIC: Final = "dynamo_is_elastic"
# In a request's `extra_args`: its limit of the time between two tokens, in seconds.
ITL_LIMIT_S: Final = "dynamo_itl_limit_s"


def follow_streams(scheduler: Any) -> None:
    """Let a class of schedulers of vLLM set these limits before each step.

    Call `steps.measure_steps` with the class, too: the limits follow the times of its steps.
    Nothing changes for engines that are not elastic. Repeated calls are allowed.
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
        self._last_gap: OutputGap | None = None

    def set_for_next_step(self) -> None:
        """Set the limits by what the engine has to do now."""
        self._learn()
        scheduler = self._scheduler
        streams: list[Any] = []
        others: list[Any] = []
        for request in scheduler.running:
            if _is_stream(request):
                streams.append(request)
            else:
                others.append(request)
        decode_calls = self._waiting_decode_calls()
        num_waiting = len(scheduler.requests) - len(scheduler.running)
        has_prompts = bool(others) or num_waiting > len(decode_calls)
        if has_prompts and (streams or decode_calls):
            # Streams come before prompts, which take all that is left.
            scheduler.running[:] = streams + others
            prompts = [request for request in others if _is_prompt(request)]
            self._limit(streams, prompts, decode_calls)
        else:
            # 0: one prompt may have all tokens of the step, and no chunk is planned.
            self._set(prompt_tokens=0, step_tokens=self._max_tokens, planned_tokens=0)

    def _limit(self, streams: list[Any], prompts: list[Any], decode_calls: list[Any]) -> None:
        """Let the step have one chunk of prompts, beside the tokens of streams.

        Args:
            streams: the running requests that generate tokens.
            prompts: the running requests whose prompt is not computed yet.
            decode_calls: the decode calls that do not run yet.
        """
        stream_tokens = sum(map(_tokens_of_stream, streams))
        self._chunk_size.follow(map(_limit_s, (*streams, *decode_calls)))
        beginning = [call for call in decode_calls if self._may_begin(call)]
        planned_tokens = self._chunk_size.tokens
        # The first prompt may take the whole chunk: if prompts shared it, all would end late.
        share = planned_tokens
        if beginning and prompts:
            # Prompts that run come before the decode calls that begin. So all of them go on, and
            # none can take the tokens that are left for these calls.
            share = max(1, planned_tokens // len(prompts))
            planned_tokens = share * len(prompts)
        self._put_first(beginning)
        step_tokens = planned_tokens + stream_tokens + len(beginning)
        self._set(share, min(self._max_tokens, step_tokens), planned_tokens)

    def _set(self, prompt_tokens: int, step_tokens: int, planned_tokens: int) -> None:
        scheduler = self._scheduler
        scheduler.scheduler_config.long_prefill_token_threshold = prompt_tokens
        scheduler.max_num_scheduled_tokens = step_tokens
        scheduler.dynamo_planned_tokens = planned_tokens

    def _waiting_decode_calls(self) -> list[Any]:
        """Return the decode calls that wait for a step, or for their KV."""
        scheduler = self._scheduler
        if len(scheduler.requests) == len(scheduler.running):
            return []
        # The queues in which they wait have other names in other releases.
        running = {request.request_id for request in scheduler.running}
        return [
            request
            for id_, request in scheduler.requests.items()
            if id_ not in running and _is_stream(request)
        ]

    def _may_begin(self, decode_call: Any) -> bool:
        """Return whether the next step may do something for a decode call that waits.

        It does not if the read of its KV is under way.
        """
        name = getattr(decode_call.status, "name", "")
        is_reading = name == "WAITING_FOR_REMOTE_KVS"
        has_arrived = decode_call.request_id in self._scheduler.finished_recving_kv_req_ids
        return has_arrived or not is_reading

    def _put_first(self, decode_calls: list[Any]) -> None:
        """Put decode calls before the prompts that wait. vLLM begins their reads then.

        A queue that is no deque is ordered by priority, and stays as it is.
        """
        waiting = self._scheduler.waiting
        if not isinstance(waiting, deque) or not decode_calls:
            return
        ids = {call.request_id for call in decode_calls}
        ordered = sorted(waiting, key=lambda request: request.request_id not in ids)
        waiting.clear()
        waiting.extend(ordered)

    def _learn(self) -> None:
        """Take the time for which streams have waited last, if it is new."""
        gap: OutputGap | None = self._scheduler.dynamo_output_gap
        if gap is not None and gap is not self._last_gap:
            self._last_gap = gap
            # The step may be the larger or the smaller one of two. The larger one may have been too
            # large; only one that was measured itself may be too small.
            self._chunk_size.measured(gap.seconds, gap.planned_tokens, is_full=False)
            if gap.full_tokens:
                self._chunk_size.measured(gap.full_s, gap.full_tokens, is_full=True)


def _limits_of(scheduler: Any) -> _StepLimits | None:
    """Return the limits of an elastic engine; None: it is not elastic, or needs larger chunks."""
    if not hasattr(scheduler, "dynamo_step_limits"):
        transfer = scheduler.vllm_config.kv_transfer_config
        extra = {} if transfer is None else transfer.kv_connector_extra_config
        is_elastic = bool(extra.get(IS_ELASTIC))
        # Chunks of some models with Mamba layers have to be whole blocks, which are long.
        has_whole_blocks = getattr(scheduler, "need_mamba_block_aligned_split", False)
        has_limits = is_elastic and not has_whole_blocks
        scheduler.dynamo_step_limits = _StepLimits(scheduler) if has_limits else None
    limits: _StepLimits | None = scheduler.dynamo_step_limits
    return limits


def _limit_s(stream: Any) -> float | None:
    """Return the limit of a stream's time between two tokens. None: it has no limit."""
    extra: dict[str, Any] = stream.sampling_params.extra_args or {}
    return extra.get(ITL_LIMIT_S)


def _is_prompt(request: Any) -> bool:
    """Return whether a request waits for its prompt to be computed.

    This is also so for a preempted stream: its prompt and its output are computed again.
    """
    is_computed = request.num_computed_tokens >= request.num_tokens
    return not is_computed and not _is_stream(request)


def _is_stream(request: Any) -> bool:
    """Return whether a request generates tokens, or will once the KV of its prompt is fetched."""
    params = request.kv_transfer_params or {}
    # A prefill call stays among the requests until its KV is fetched, although it has its token.
    if params.get("do_remote_decode"):
        return False
    # vLLM computes the last token of a fetched prompt again.
    if request.num_computed_tokens >= request.num_tokens - 1:
        return True
    return bool(params.get("do_remote_prefill"))


def _tokens_of_stream(request: Any) -> int:
    """Return how many tokens of a step a running stream takes."""
    wanted = request.num_tokens_with_spec + request.num_output_placeholders
    return max(0, int(wanted) - int(request.num_computed_tokens))

"""Limit the prompt tokens of a step of an elastic engine while it has streams.

vLLM gives the tokens of a step to its requests in the order of their admission, and a long prompt
may take all of them: running streams then wait for long steps, and a decode call whose KV has
arrived does not begin. The scheduler reads `long_prefill_token_threshold`, the most tokens of one
prompt in a step, before each step, so it can follow what the engine has to do.

vLLM loads this module in the process of its scheduler.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from dynamo_trtllm.protocol.cost_model import tokens_beside_streams

# In `kv_connector_extra_config`: whether the engine is elastic.
IS_ELASTIC: Final = "dynamo_is_elastic"


def follow_streams(scheduler: Any) -> None:
    """Let a class of schedulers of vLLM set the threshold before each step.

    Nothing changes for engines that are not elastic. Repeated calls are allowed.
    """
    schedule = scheduler.schedule
    if getattr(schedule, "dynamo_follows_streams", False):
        return

    @functools.wraps(schedule)
    def following_schedule(self: Any, *args: Any, **keywords: Any) -> Any:
        limit = _limit_of(self)
        if limit:
            has_streams = any(map(_is_stream, self.requests.values()))
            self.scheduler_config.long_prefill_token_threshold = limit if has_streams else 0
        return schedule(self, *args, **keywords)

    following_schedule.dynamo_follows_streams = True  # type: ignore[attr-defined]
    scheduler.schedule = following_schedule


def _limit_of(scheduler: Any) -> int:
    """Return the limit of an elastic engine; 0: the engine is not elastic."""
    limit: int | None = getattr(scheduler, "dynamo_tokens_beside_streams", None)
    if limit is None:
        transfer = scheduler.vllm_config.kv_transfer_config
        extra = {} if transfer is None else transfer.kv_connector_extra_config
        limit = 0
        if extra.get(IS_ELASTIC):
            limit = tokens_beside_streams(int(scheduler.scheduler_config.max_num_batched_tokens))
        scheduler.dynamo_tokens_beside_streams = limit
    return limit


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

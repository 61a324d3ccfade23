"""Predict the times of a request at one worker, from the load and cost model that it reports.

Callers pass the time.
"""

from __future__ import annotations

from typing import Final

from dynamo_trtllm.frontend.routing.worker_load import InstanceLoad
from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    EngineWork,
    decode_step_s,
)
from dynamo_trtllm.protocol.messages import Instance, Role
from dynamo_trtllm.protocol.mixed_steps import mixed_step_target_s

# In Python 3.11, each access to a member of an enum takes 150 ns.
_PREFILL: Final = Role.PREFILL
_ELASTIC: Final = Role.ELASTIC
# If a prefill worker runs a whole request, each step that generates a token of this request is
# assumed to compute this many prompts, too: while one is computed, another may arrive for the next
# step.
_PROMPTS_OF_STEP: Final = 2


class WorkerForecast:
    """What is predicted for one request at one instance. Each time is computed when it is read.

    Args:
        instance: the instance.
        load: its load, with a report.
        cost: its complete cost model.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that the instance has in its prefix cache.
        role: the role in which an elastic instance would run the request. None: that of the
            instance.
        share: the instance's share of the work of this role.
        itl_s: the limit of the time between two tokens of the requests there. None: there is none.
        takes_streams: whether the instance has a share of decode calls, or its role is fixed.
        takes_prompts: whether it has a share of prefill calls, or its role is fixed.
    """

    __slots__ = (
        "_cost",
        "_load",
        "_prompt_tokens",
        "_role",
        "_work",
        "cached_tokens",
        "instance",
        "share",
        "takes_prompts",
        "takes_streams",
    )

    def __init__(
        self,
        instance: Instance,
        load: InstanceLoad,
        cost: CostModel,
        prompt_tokens: int,
        cached_tokens: int,
        *,
        role: Role | None = None,
        itl_s: float | None = None,
        share: float = 1.0,
        takes_streams: bool = True,
        takes_prompts: bool = True,
    ) -> None:
        self.instance = instance
        self.cached_tokens = cached_tokens
        self.takes_streams = takes_streams
        self.takes_prompts = takes_prompts
        # A share of 0 counts as 1: this instance is then compared with others without a share.
        self.share = share or 1.0
        self._role = instance.role if role is None else role
        self._load = load
        self._cost = cost
        self._prompt_tokens = prompt_tokens
        report = load.report
        assert report is not None
        # `report.running` of these workers includes prefill calls, which are no streams.
        has_prefill_calls = instance.role is _PREFILL or instance.role is _ELASTIC
        streams = load.unseen_requests - load.unseen_prefills
        if has_prefill_calls:
            streams += report.num_generating
            context = report.generating_tokens
        else:
            # The calls that wait will run beside this one.
            streams += report.running + report.waiting
            context = report.context_tokens + load.unseen_kv_tokens
        self._work = EngineWork(
            streams,
            context,
            load.queued_prefill_tokens,
            report.waiting + load.unseen_requests,
            mixed_step_s=mixed_step_target_s(itl_s) if instance.role is _ELASTIC else 0.0,
        )

    @property
    def has_streams(self) -> bool:
        """Return whether other requests generate tokens there, or will before this one does."""
        return self._work.decode_requests > 0

    @property
    def is_slowed_by_streams(self) -> bool:
        """Return whether the worker computes prompts, in smaller steps while it has streams."""
        return self.instance.role is _ELASTIC and self.takes_prompts

    def first_token_s(self) -> float:
        """Return the time until the first token, if the instance computes the prompt."""
        new_tokens = self._prompt_tokens - self.cached_tokens
        return self._cost.first_token_s(new_tokens, self.cached_tokens, self._work)

    def prompt_gap_s(self) -> float:
        """Return for how long the streams there get no token while the prompt is computed.

        0: no stream is there.
        """
        if not self._work.decode_requests:
            return 0.0
        new_tokens = self._prompt_tokens - self.cached_tokens
        return self._cost.longest_step_s(new_tokens, self.cached_tokens, self._work)

    def decode_gap_s(self) -> float:
        """Return the time between two tokens while the request and the streams there generate.

        The gap is longer if steps also compute prompts. On a prefill worker, further prompts are
        assumed to follow that are as long as this one. On an elastic worker in another role, the
        prompts that wait there follow.
        """
        work = self._work
        assert self._cost.decode is not None
        context = work.context_tokens + self._prompt_tokens
        gap_s = decode_step_s(self._cost.decode, work.decode_requests + 1, context)
        with_request = work._replace(
            decode_requests=work.decode_requests + 1, context_tokens=context
        )
        if self._role is _PREFILL:
            tokens = _PROMPTS_OF_STEP * self._prompt_tokens
            gap_s = max(gap_s, self._cost.longest_step_s(tokens, 0, with_request))
        elif work.mixed_step_s and work.queued_tokens:
            gap_s = max(gap_s, self._cost.longest_step_s(0, 0, with_request))
        return gap_s

    def num_delayed(self, gap_s: float, limit_s: float) -> int:
        """Return how many streams there would have gaps above a limit because of the request.

        Streams that already have such gaps are not among them. The present gaps are computed
        without the prompts that were sent since the last report, because the report may include
        them, too. If such a prompt counted twice, streams would seem to be late already, and
        further requests could be sent there although they really delay these streams.

        Args:
            gap_s: the gaps with the request.
            limit_s: the limit.
        """
        work = self._work
        if gap_s <= limit_s or not work.decode_requests:
            return 0
        assert self._cost.decode is not None
        present_gap_s = decode_step_s(self._cost.decode, work.decode_requests, work.context_tokens)
        report = self._load.report
        assert report is not None
        if report.queued_prefill_tokens:
            reported = work._replace(queued_tokens=report.queued_prefill_tokens)
            present_gap_s = max(present_gap_s, self._cost.longest_step_s(0, 0, reported))
        return work.decode_requests if present_gap_s <= limit_s else 0

    def transfer_s(self, prefill_s: float) -> float:
        """Return the time from the end of the prefill until the KV is fetched. 0: not known yet.

        The KV of prompts that came before is fetched first, some of it during the prefill.

        Args:
            prefill_s: the time until the prefill worker has computed the prompt.
        """
        other_tokens = self._load.fetching_tokens
        return self._cost.kv_transfer_s(self._prompt_tokens, other_tokens, prefill_s)

    def has_space(self) -> bool:
        """Return whether the request can run at once: the batch and the KV cache have space."""
        load = self._load
        report = load.report
        assert report is not None
        max_streams = self.instance.limits.max_batch_size  # 0: not reported
        if 0 < max_streams <= self._work.decode_requests:
            return False
        block_tokens = self.instance.layout.block_tokens
        used_tokens = report.kv_blocks_used * block_tokens + load.unseen_kv_tokens
        total_tokens = report.kv_blocks_total * block_tokens  # 0: not reported
        return total_tokens == 0 or used_tokens + self._prompt_tokens <= total_tokens

"""Know the load of the workers: what they report, and what this frontend has sent since.

`instance_cost` is the one place that says what it costs to run a request on an instance. Callers
pass the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.prefix_index import SentPrompt
from dynamo_trtllm.protocol.cost_model import FIRST_TOKEN_PRIOR, CostModel, prior_fit
from dynamo_trtllm.protocol.messages import GenerateRequest, Instance, LoadReport, Phase, Role

STALE_S: Final = 25.0  # workers report at least every 10 s
_SEEN_AFTER_S = 0.1  # a report includes the calls that were sent this long before it arrived
# The same for KV transfers. It is shorter, because a transfer that is counted twice for a moment
# makes pairs look late, and one that is not counted for a moment does less harm.
_FETCH_SEEN_AFTER_S = 0.02
# What a prompt token to compute costs, compared with one that waits: it also delays the requests
# after it, and its KV evicts other prompts. In simulated replays of a trace, hits were 0.77 of an
# oracle's with a cost of 1, 0.90 with 4 and 0.93 with 8, with the time to first token lower at p50
# and equal at p99. Replays with mock workers: 0.96 with 8, 0.97 with 12.
NEW_TOKEN_COST: Final = 12
# More tokens of a prompt cost 1 each. Else a burst with one long prefix waits for the worker that
# has it while others are idle: in a simulation with eight workers and a prefix of 30,000 tokens,
# p99 was 3.5 times as high without a limit.
COSTLY_TOKENS: Final = 2560
# Python 3.11 looks up a member of an enum in 150 ns.
_PREFILL = Role.PREFILL
_DECODE = Role.DECODE
# What a request costs in a decode step besides its context. A rough value, not measured.
REQUEST_TOKENS: Final = 256


@dataclass(slots=True, eq=False)
class PlacedCall:
    """The part of one request that one instance runs, until the instance has done it."""

    load: InstanceLoad
    prefill_tokens: int
    kv_tokens: int
    fetched_tokens: int  # prompt tokens whose KV the instance fetches
    is_prefill: bool  # the instance only computes the prompt
    sent_at: float = math.inf  # inf: the call was not sent yet
    is_unseen: bool = True  # no report of the worker includes the call
    is_fetch_unseen: bool = True  # no report of the worker includes `fetched_tokens`

    def on_sent(self, now: float) -> None:
        """Record that the call was sent to the instance."""
        self.sent_at = now
        self.load.sent[self] = None

    def on_prefill_done(self) -> None:
        """Record that the instance has computed the prompt, or fetched its KV."""
        if self.is_unseen:
            self.load.unseen_prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0
        self._end_fetch()

    def on_fetch_reported(self) -> None:
        """Record that a report of the instance includes the KV transfer."""
        if self.is_fetch_unseen:
            self.is_fetch_unseen = False
            self.load.unseen_fetched_tokens -= self.fetched_tokens

    def _end_fetch(self) -> None:
        """Record that the instance does not fetch KV for the call any more."""
        if not self.is_fetch_unseen:
            # The last report still counts these tokens.
            self.load.fetched_since_report += self.fetched_tokens
        self.on_fetch_reported()
        self.fetched_tokens = 0

    def on_reported(self) -> None:
        """Record that a report of the instance includes the call."""
        self.on_fetch_reported()
        if self.is_unseen:
            self.is_unseen = False
            self.load.unseen_requests -= 1
            if self.is_prefill:
                self.load.unseen_prefills -= 1
            self.load.unseen_prefill_tokens -= self.prefill_tokens
            self.load.unseen_kv_tokens -= self.kv_tokens
        self.load.sent.pop(self, None)

    def end(self) -> None:
        """Record that the instance does not run the call any more."""
        self._end_fetch()
        self.on_reported()
        self.load.requests -= 1


@dataclass(slots=True, eq=False)
class InstanceLoad:
    """What a frontend knows of the load of one instance."""

    requests: int = 0  # requests of this frontend
    unseen_requests: int = 0  # requests that no report includes
    unseen_prefills: int = 0  # those of them of which the instance only computes the prompt
    unseen_prefill_tokens: int = 0  # prompt tokens of these requests that are not computed yet
    # Prompt tokens whose KV the instance fetches for requests of this frontend, now or after their
    # prefill. No report includes them yet.
    unseen_fetched_tokens: int = 0
    # Prompt tokens whose KV was fetched since the last report, which still includes them.
    fetched_since_report: int = 0
    unseen_kv_tokens: int = 0  # tokens of the context of these requests
    # The calls of this frontend that were sent, the oldest first.
    sent: dict[PlacedCall, None] = field(default_factory=dict)
    report: LoadReport | None = None
    reported_at: float = -math.inf
    cost: CostModel | None = None  # the last one that was reported
    # `cost` is complete without measurements of equal workers.
    cost_suffices_alone: bool = False
    token_s: float = 0.0  # seconds per token, to compare instances of one role; 0: not known

    @property
    def fetching_tokens(self) -> int:
        """Return the prompt tokens whose KV the instance fetches, now or after their prefill."""
        if self.report is None:
            return self.unseen_fetched_tokens
        reported_tokens = max(0, self.report.fetching_tokens - self.fetched_since_report)
        return reported_tokens + self.unseen_fetched_tokens

    @property
    def queued_prefill_tokens(self) -> int:
        """Return the prompt tokens that wait at the instance, or are being computed."""
        reported_tokens = 0 if self.report is None else self.report.queued_prefill_tokens
        return reported_tokens + self.unseen_prefill_tokens

    def is_fresh(self, now: float) -> bool:
        """Return whether the instance has reported lately. `now`: of a monotonic clock."""
        return self.report is not None and now - self.reported_at <= STALE_S

    def completed_cost(self, of_equals: CostModel) -> CostModel:
        """Return the cost model of the instance; that of equal ones adds what it lacks."""
        if self.cost is None:
            return of_equals
        return self.cost if self.cost_suffices_alone else self.cost.completed_by(of_equals)

    def place(
        self,
        prefill_tokens: int,
        kv_tokens: int,
        *,
        fetched_tokens: int = 0,
        is_prefill: bool = False,
    ) -> PlacedCall:
        """Count a part of a request, which is going to be sent to the instance.

        Args:
            prefill_tokens: prompt tokens that the instance computes.
            kv_tokens: tokens of the context.
            fetched_tokens: prompt tokens whose KV the instance fetches.
            is_prefill: the instance only computes the prompt.
        """
        self.requests += 1
        self.unseen_requests += 1
        if is_prefill:
            self.unseen_prefills += 1
        self.unseen_prefill_tokens += prefill_tokens
        self.unseen_fetched_tokens += fetched_tokens
        self.unseen_kv_tokens += kv_tokens
        return PlacedCall(self, prefill_tokens, kv_tokens, fetched_tokens, is_prefill)


_UNKNOWN = InstanceLoad()
_PRIOR: Final = CostModel(first_token=prior_fit(FIRST_TOKEN_PRIOR))


def cost_of_equals(loads: Iterable[InstanceLoad]) -> CostModel | None:
    """Return the cost model that equal instances have measured together.

    A prefill worker measures no decode steps, and a decode worker no prompts, until they run
    aggregated requests.

    Returns:
        None: none of them has measured one of the kinds of steps.
    """
    known = CostModel()
    for load in loads:
        if load.cost_suffices_alone:
            return load.cost
        if load.cost is not None:
            known = known.completed_by(load.cost)
            if known.suffices_alone:
                return known
    known = known.completed_by(_PRIOR)
    return known if known.is_complete else None


class ClusterLoad:
    """The load of all instances, as one frontend knows it.

    It is the last report of each instance, and the frontend's own requests since then.

    An instance that stops reporting counts as it last reported. For instances of releases that
    report no load, only this frontend's requests count.
    """

    def __init__(self) -> None:
        self._loads: dict[int, InstanceLoad] = {}

    def on_report(self, report: LoadReport, now: float) -> None:
        """Take a report. A broadcast one may arrive after a newer one, and is ignored then."""
        load = self.of(report.instance_id)
        if report.cost is not None and report.cost != load.cost:
            load.cost = report.cost.readable()
            load.token_s = load.cost.token_s
            load.cost_suffices_alone = load.cost.suffices_alone
        if load.report is not None and report.number <= load.report.number:
            return
        load.report = report
        load.reported_at = now
        load.fetched_since_report = 0
        for call in load.sent:
            if call.sent_at < now - _FETCH_SEEN_AFTER_S:
                call.on_fetch_reported()
        seen = [call for call in load.sent if call.sent_at < now - _SEEN_AFTER_S]
        for call in seen:
            call.on_reported()

    def of(self, instance_id: int) -> InstanceLoad:
        """Return the load of an instance, without work if it is not known yet."""
        load = self._loads.get(instance_id)
        if load is None:
            load = InstanceLoad()
            self._loads[instance_id] = load
        return load

    def get(self, instance_id: int) -> InstanceLoad:
        """Return the load of an instance to read it."""
        return self._loads.get(instance_id, _UNKNOWN)

    def remove(self, instance_id: int) -> None:
        """Drop an instance. Unknown ids are ignored."""
        self._loads.pop(instance_id, None)

    def requests(self) -> dict[int, int]:
        """Return the number of this frontend's requests by instance id."""
        return {instance_id: load.requests for instance_id, load in self._loads.items()}


def instance_cost(
    load: InstanceLoad,
    instance: Instance,
    prompt_tokens: int,
    overlap_tokens: int,
    role: Role | None = None,
) -> int:
    """Return what it costs to run a request on an instance, in tokens.

    Compare it with instances of the same role.

    The form is that of Dynamo's router: prompt tokens to compute plus tokens of context, with this
    request. New prompt tokens weigh more. The work is that of the last report, and what was sent
    since.

    * prefill: prompt tokens that wait or are being computed, plus the tokens of the request that
      are not in the cache. The first COSTLY_TOKENS of these count NEW_TOKEN_COST times. So at most
      (NEW_TOKEN_COST - 1) * COSTLY_TOKENS more tokens wait where the prefix is cached than on a
      worker that would have to compute it.
    * decode: tokens in used KV blocks, plus those of the request that are not in the cache and so
      must be fetched and stored; plus REQUEST_TOKENS per request. An instance without space for the
      request costs all of its KV more.
    * aggregated: the sum of both.

    Args:
        load: the load of the instance.
        instance: the instance.
        prompt_tokens: the prompt tokens of the request.
        overlap_tokens: the tokens of them that the instance has in its cache.
        role: the role in which an elastic instance runs the request. None: that of the instance.
    """
    report = load.report
    if role is None:
        role = instance.role
    new_tokens = prompt_tokens - overlap_tokens
    cost = new_tokens
    if role is not _DECODE:
        costly_tokens = new_tokens if new_tokens < COSTLY_TOKENS else COSTLY_TOKENS
        cost += (NEW_TOKEN_COST - 1) * costly_tokens
        cost += load.queued_prefill_tokens
        if role is _PREFILL:
            return cost
        # An aggregated instance also stores their KV.
        cost += new_tokens
    kv_tokens = load.unseen_kv_tokens
    cost += REQUEST_TOKENS * load.unseen_requests
    if report is not None:
        cost += REQUEST_TOKENS * (report.running + report.waiting)
        block_tokens = instance.layout.block_tokens
        kv_total = report.kv_blocks_total * block_tokens
        kv_tokens += report.kv_blocks_used * block_tokens if kv_total else report.context_tokens
        # The cached tokens count as well: their blocks may be evicted before the request begins.
        if 0 < kv_total < kv_tokens + prompt_tokens:
            cost += kv_total
    return cost + kv_tokens


class PlacedRequest:
    """What one request adds to the loads of its instances. End it."""

    def __init__(
        self,
        loads: ClusterLoad,
        selection: WorkerSelection,
        request: GenerateRequest,
        new_tokens: int,
        prompts: Sequence[SentPrompt] = (),
    ) -> None:
        """Count the request at the selected instances.

        Args:
            loads: the loads of all instances.
            selection: the instances.
            request: the request.
            new_tokens: the tokens of its prompt that are not computed yet.
            prompts: what is counted in the instances' caches, in the order of the calls.
        """
        self._loads = loads
        self._prompts = prompts
        self._tokens = len(request.token_ids)
        prefill = selection.prefill
        decode = selection.decode
        self._prefill: PlacedCall | None = None
        if prefill is None:
            self._decode = loads.of(decode.id).place(new_tokens, self._tokens)
        else:
            self._prefill = loads.of(prefill.id).place(new_tokens, self._tokens, is_prefill=True)
            self._decode = self._place_fetch(decode.id)
        self._decode_id = decode.id

    def on_sent(self, instance_id: int, phase: Phase, now: float) -> None:
        """Record that a call was sent. The decode instance may be another one than selected."""
        if phase is Phase.PREFILL:
            if self._prefill is not None:
                self._prefill.on_sent(now)
            return
        if self._prefill is not None and self._prompts:
            # The first one is of the prefill instance.
            self._prompts[0].is_computed = True
        self._end_prefill()
        if instance_id != self._decode_id:
            # The selected decode instance does not fetch the KV.
            for prompt in self._prompts[1:]:
                prompt.end()
            self._prompts = self._prompts[:1]
            self._decode.end()
            self._decode = self._place_fetch(instance_id)
            self._decode_id = instance_id
        self._decode.on_sent(now)

    def on_prefill_done(self) -> None:
        """Record that the decode or aggregated instance has sent its first chunk."""
        self._decode.on_prefill_done()
        if self._prompts:
            self._prompts[-1].is_computed = True

    def _place_fetch(self, instance_id: int) -> PlacedCall:
        """Count the decode call at the instance that fetches the KV."""
        load = self._loads.of(instance_id)
        return load.place(0, self._tokens, fetched_tokens=self._tokens)

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.end()
            self._prefill = None

    def end(self, *, is_done: bool = False) -> None:
        """Stop counting the request. `is_done`: it succeeded, maybe without a decode call."""
        self._end_prefill()
        self._decode.end()
        for index, prompt in enumerate(self._prompts):
            # The first one is of the instance that computes the prompt.
            if is_done and index == 0:
                prompt.is_computed = True
            prompt.end()

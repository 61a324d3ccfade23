"""Limit how many choices of a model are at its workers, so that the others wait in the frontend.

Workers have queues of their own, in order of arrival: what waits there delays all clients alike. In
the frontend's queue, clients take turns. So a frontend sends only what keeps the workers busy. It
has three limits:

1. prompts that are not computed: as many as fill the step that a prefill worker runs, and the next
2. choices that no worker decodes yet: as many as limit 1 allows, and those whose KV is transferred
3. choices that have not ended: as many as fill the batches of the decode workers, and a few more,
   which use the slots that become free

Limits 1 and 2 are twice as high for clients below their share, because their prompts go first.

The events of a choice let other ones start: no worker has to be asked.

The module does no I/O.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView, ModelView
from dynamo_trtllm.frontend.routing.recent_durations import RecentDurations
from dynamo_trtllm.frontend.routing.worker_capacity import FREE, WINDOW, ChoiceCosts, capacity
from dynamo_trtllm.protocol.messages import ClientShare, Instance, Phase, Role

GROUP: Final = 8  # choices of one request that start together
# The part of prompt tokens that is cached is an average over about this number of recent prompts.
_RECENT_PROMPTS: Final = 50


class Stage(IntEnum):
    """What a choice waits for at the workers.

    The value is the index of the first limit for which the choice counts. It counts for all later
    limits, too. So a choice that waits for its prompt counts for all three, and one that waits for
    its end only for the last.
    """

    PREFILL = 0  # its prompt
    START = 1  # the first answer of its decode call
    RUN = 2  # its end
    NONE = 3  # it is at no worker


# The stages in the order of the limits, which `usages` and `ChoiceCosts` have, too.
_STAGES: Final = (Stage.PREFILL, Stage.START, Stage.RUN)


class _LimitUsage:
    """What all choices use of one limit of the workers."""

    __slots__ = ("by_worker", "limit", "total")

    def __init__(self) -> None:
        self.total = 0
        self.limit = WINDOW  # less while other frontends take a part
        # By id of the worker. Workers without choices stay, because to remove them for each request
        # would take longer.
        self.by_worker: defaultdict[int, int] = defaultdict(int)


class StartPlace:
    """The place of one choice in the window, until its end.

    Args:
        request: the places of its request, where the choice counts already.
    """

    __slots__ = ("_begun_s", "_has_begun", "_has_token", "_request", "_stage", "_worker_id")

    def __init__(self, request: RequestPlaces) -> None:
        self._request: RequestPlaces | None = request  # None: it has left
        self._stage = Stage.PREFILL
        self._worker_id: int | None = None  # of the worker that is called
        self._has_token = False
        self._has_begun = False  # a worker has generated tokens of it
        self._begun_s = request.group_begun_s

    @property
    def share(self) -> ClientShare:
        """What the client of the choice has got of the workers, compared with other clients."""
        return ClientShare.EVEN if self._request is None else self._request.share

    @property
    def rank(self) -> int:
        """The priority of the choice among those of all clients. Lower values first."""
        return 0 if self._request is None else self._request.rank

    def called(self, worker: Instance, phase: Phase) -> None:
        """Note that a worker is called with the choice."""
        if self._has_begun:
            stage = Stage.RUN
        elif phase is Phase.DECODE:
            stage = Stage.START
        else:
            stage = Stage.PREFILL
        self._move(stage, worker.id)

    def waits_for_workers(self) -> None:
        """Note that there are no workers for the choice now. Others may take its place."""
        self._move(Stage.NONE, None)

    def first_token(self) -> None:
        """Note the first token of the choice."""
        request = self._request
        if request is not None and not self._has_token:
            request.window.note_first_token(request.window.clock() - self._begun_s)
        self._has_token = True

    def decode_began(self) -> None:
        """Note that a worker generates the tokens of the choice, which has its first one by now."""
        self.first_token()
        self._has_begun = True
        self._move(Stage.RUN, self._worker_id)

    def prompt_done(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Note that the prompt is computed, and how many of its tokens were in a prefix cache."""
        if self._request is not None:
            self._request.window.note_cached(prompt_tokens, cached_tokens)

    def leave(self) -> None:
        """Note the end of the choice. Idempotent."""
        self._move(Stage.NONE, None)
        self._request = None

    def _move(self, stage: Stage, worker_id: int | None) -> None:
        request = self._request
        if request is None:
            return
        before = self._stage
        has_only_advanced = worker_id == self._worker_id and stage >= before
        if has_only_advanced:
            # It only stops counting for the limits of the stages that are over.
            request.count(-1, before, worker_id, until=stage)
        else:
            request.count(-1, before, self._worker_id)
            request.count(1, stage, worker_id)
        self._stage = stage
        self._worker_id = worker_id
        if stage > before:
            request.window.changed()


class RequestPlaces:
    """The places of the choices of one request.

    Choices of a request start in groups, and all of them run on the same workers. What other
    requests may do while the next group waits depends on the reason:

    - It waits for capacity of the window. Then no further request of the model begins, because it
      would use the capacity that becomes free.
    - It waits for its workers. Then others go on, because these workers may hang.

    Args:
        window: that of the model.
        costs: of one choice.
        num_choices: of the request.
        rank: its priority among the requests of all clients.
        late_at_s: if it begins after this time, its first token is expected too late.
    """

    __slots__ = (
        "_num_counted",
        "_num_left",
        "_num_reserved",
        "_places",
        "_waiting",
        "costs",
        "group_begun_s",
        "late_at_s",
        "rank",
        "share",
        "window",
    )

    def __init__(
        self,
        window: StartWindow,
        costs: ChoiceCosts,
        num_choices: int,
        rank: int = 0,
        late_at_s: float = math.inf,
    ) -> None:
        self.window = window
        self.late_at_s = late_at_s
        self.group_begun_s = 0.0  # when the last group could start
        self.costs = costs
        self.rank = rank
        self.share = ClientShare.EVEN  # known when the request begins
        self._num_left = num_choices  # choices without a place
        self._num_reserved = 0  # places that no choice has taken yet
        self._num_counted = [0, 0, 0]  # choices and reserved places that count, one per limit
        self._places: list[StartPlace] = []
        self._waiting: asyncio.Future[None] | None = None  # until the next group may start

    @property
    def model(self) -> str:
        """The model of the request."""
        return self.window.model

    def may_begin(self, share: ClientShare) -> bool:
        """Return whether the request may begin.

        Args:
            share: what its client has got of the workers, compared with other clients. If it is
                less than its share, the request does not wait for further groups of others.
        """
        if not self.window.has_capacity(self.costs, share):
            return False
        return share is ClientShare.BELOW or not self.window.is_reserved()

    def begin(self, share: ClientShare) -> None:
        """Reserve the places of the first group. `share`: as for `may_begin`."""
        self.share = share
        self._reserve()
        if self._num_left:
            self.window.starting.append(self)

    async def wait_for_group(self) -> None:
        """Wait until the next group may start."""
        if self._num_reserved:
            return  # `begin` has reserved the first group
        while not self._may_start_group():
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self._reserve()
        if not self._num_left:
            self._end_starting()

    def workers_have_capacity(self) -> bool:
        """Return whether the workers of the request can begin a further group.

        One worker per role runs all of its choices, so their cost is compared with one worker's
        part of each limit.
        """
        parts = self.window.smallest_parts()
        return all(
            num_choices * cost < part
            for num_choices, cost, part in zip(self._num_counted, self.costs, parts, strict=True)
        )

    def changed(self) -> None:
        """Look again whether the next group may start."""
        waiting = self._waiting
        if waiting is not None and not waiting.done() and self._may_start_group():
            waiting.set_result(None)

    def take(self) -> StartPlace:
        """Return the place of a choice, which starts now."""
        self._num_reserved -= 1
        place = StartPlace(self)
        self._places.append(place)
        return place

    def close(self) -> None:
        """Leave all places, because the request has ended."""
        for place in self._places:
            place.leave()
        self._places.clear()
        if self._num_reserved:
            self.count(-self._num_reserved, Stage.PREFILL, None)
            self._num_reserved = 0
            self.window.changed()
        self._end_starting()

    def count(
        self,
        num_choices: int,
        stage: Stage,
        worker_id: int | None,
        until: Stage = Stage.NONE,
    ) -> None:
        """Count choices of this stage.

        Args:
            num_choices: how many; negative: they do not count any more.
            stage: what they wait for.
            worker_id: of the worker that is called; None: the places are reserved.
            until: the limits of this stage and of later ones do not change.
        """
        for index in range(stage, until):
            self._num_counted[index] += num_choices
            cost = num_choices * self.costs[index]
            usage = self.window.usages[index]
            usage.total += cost
            if worker_id is not None:
                usage.by_worker[worker_id] += cost

    def _may_start_group(self) -> bool:
        return self.workers_have_capacity() and self.window.has_capacity(self.costs, self.share)

    def _reserve(self) -> None:
        self.group_begun_s = self.window.clock()
        group = min(GROUP, self._num_left)
        self._num_left -= group
        self._num_reserved += group
        self.count(group, Stage.PREFILL, None)

    def _end_starting(self) -> None:
        if self in self.window.starting:
            self.window.starting.remove(self)
            self.window.on_capacity()


class StartWindow:
    """The choices of one model that are at its workers.

    However many choices are at one worker, they count as at most its part of each limit. So a
    worker that has stopped answering delays no requests to others.

    Args:
        model: the name of the model.
        view: the workers.
        on_capacity: called when further choices may start.
        uses_all_paths: see `capacity`.
        ttft_s: limit of the time to first token. Requests that can't keep it are late.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        model: str,
        view: ClusterView,
        on_capacity: Callable[[], None],
        *,
        uses_all_paths: bool = False,
        ttft_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.on_capacity = on_capacity
        self.clock = clock
        # How long choices took from their start to their first token. None: not known yet.
        self._first_tokens: RecentDurations | None = None
        self._ttft_s = ttft_s
        self._uses_all_paths = uses_all_paths
        # The requests that have groups to start, the oldest first. They are few: the next request
        # begins only when these have filled their workers.
        self.starting: list[RequestPlaces] = []
        self.usages = (_LimitUsage(), _LimitUsage(), _LimitUsage())  # one per limit
        # The limit for which the last choice that asked has to wait; None: it might start.
        self.full_stage: Stage | None = None
        self._view = view
        # Sums over recent prompts: all tokens, and those that were in a prefix cache.
        self._prompt_tokens = 0.0
        self._cached_tokens = 0.0

    def places_for(
        self,
        num_choices: int,
        prompt_tokens: int,
        rank: int = 0,
        ttft_s: float | None = None,
    ) -> RequestPlaces:
        """Return the places of a request that has just arrived, which takes none yet.

        Args:
            num_choices: of the request.
            prompt_tokens: of its longest prompt.
            rank: its priority among the requests of all clients.
            ttft_s: its own limit of the time to first token. It has no effect if the window has
                no such limit.
        """
        view = self._view.model(self.model)
        worker_capacity = capacity(view, uses_all_paths=self._uses_all_paths)
        costs = FREE
        if worker_capacity is not None:
            costs = worker_capacity.costs(prompt_tokens, self.computed_tokens(prompt_tokens))
        late_at_s = math.inf
        if self._ttft_s < math.inf:
            limit_s = self._ttft_s if ttft_s is None else ttft_s
            late_at_s = self.clock() + limit_s - self.first_token_s
        return RequestPlaces(self, costs, num_choices, rank, late_at_s)

    def computed_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of prompts are probably in no prefix cache."""
        cached_fraction = self._cached_tokens / max(1.0, self._prompt_tokens)
        return int(prompt_tokens * (1.0 - cached_fraction))

    def note_first_token(self, seconds: float) -> None:
        """Note how long a choice took from its start to its first token."""
        if self._first_tokens is None:
            self._first_tokens = RecentDurations(seconds)
        else:
            self._first_tokens.note(seconds)

    @property
    def first_token_s(self) -> float:
        """Return the time within which most choices have their first token. 0: not known yet."""
        return 0.0 if self._first_tokens is None else self._first_tokens.within_s(1.0)

    def note_cached(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Note how many tokens of a prompt were in a prefix cache."""
        # Earlier prompts count less with each further one.
        decay = 1.0 - 1.0 / _RECENT_PROMPTS
        self._prompt_tokens = decay * self._prompt_tokens + prompt_tokens
        self._cached_tokens = decay * self._cached_tokens + cached_tokens

    def set_limits(self, limits: Sequence[int]) -> None:
        """Set what this process may take of the workers, as parts of WINDOW.

        The rest is for other frontends.

        Args:
            limits: one per limit of the workers.
        """
        before = [usage.limit for usage in self.usages]
        for usage, limit in zip(self.usages, limits, strict=True):
            usage.limit = limit
        if any(usage.limit > limit for usage, limit in zip(self.usages, before, strict=True)):
            self.changed()

    def has_capacity(self, costs: ChoiceCosts, share: ClientShare) -> bool:
        """Return whether a further choice may start.

        Capacity for one choice is enough for its whole group, which may exceed the limit.

        Args:
            costs: of the choice.
            share: what its client has got of the workers, compared with other clients.
        """
        num_workers = self._num_workers()
        for stage, usage, cost in zip(_STAGES, self.usages, costs, strict=True):
            limit = usage.limit
            if share is ClientShare.BELOW and stage is not Stage.RUN:
                # Prompts of clients below their share go first. Others may fill the limit already.
                # With twice the limit, a worker still gets the next step of such prompts in time,
                # so it runs no step of others in between.
                limit *= 2
            # Other frontends may take so much of a worker that one choice costs more than the part
            # that is left. It counts as that part, because otherwise it could never start.
            counted_cost = min(cost, limit // num_workers)
            # The total is compared first, because it needs no loop over the workers.
            if usage.total + counted_cost > limit:
                if self._limited_cost(usage, limit) + counted_cost > limit:
                    self.full_stage = stage
                    return False
        self.full_stage = None
        return True

    def is_reserved(self) -> bool:
        """Return whether free capacity is for the next group of a request that has begun."""
        return any(request.workers_have_capacity() for request in self.starting)

    def smallest_parts(self) -> list[int]:
        """Return one worker's part of each limit, in the role with the most workers."""
        num_workers = self._num_workers()
        return [usage.limit // num_workers for usage in self.usages]

    def changed(self) -> None:
        """Let those that wait look again whether they may start: first those that have begun."""
        for request in self.starting:
            request.changed()
        self.on_capacity()

    def _num_workers(self) -> int:
        """Return the number of workers of the largest role; at least 1."""
        view = self._view.model(self.model).sharing()
        return max(len(view.prefill), len(view.decode), len(view.aggregated), 1)

    def _limited_cost(self, usage: _LimitUsage, limit: int) -> int:
        """Return the cost of all choices. What a worker has above its part does not count."""
        view = self._view.model(self.model).sharing()
        num_workers = {
            Role.PREFILL: len(view.prefill),
            Role.DECODE: len(view.decode),
            Role.AGGREGATED: len(view.aggregated),
        }
        role_sizes_of_elastic = _elastic_counts(view)
        cost = usage.total
        for worker_id, cost_here in list(usage.by_worker.items()):
            worker = self._view.instance(worker_id)
            part = 0  # of a worker that has left
            if worker is not None:
                count = role_sizes_of_elastic.get(worker_id)
                if count is None:
                    count = num_workers.get(worker.role, 0)
                part = limit // max(1, count)
            elif not cost_here:
                # The worker has left, and no choice waits for its end.
                del usage.by_worker[worker_id]
            cost -= max(0, cost_here - part)
        return cost


def _elastic_counts(view: ModelView) -> Mapping[int, int]:
    """Return for each elastic instance the number of workers of its role.

    If it has shares of both roles, the larger number counts.

    Args:
        view: the workers, in the roles in which they have a share.
    """
    counts: dict[int, int] | None = view.cache.get("elastic_counts")
    if counts is None:
        counts = {}
        for of_role in (view.prefill, view.decode):
            for worker in of_role:
                if worker.role is Role.ELASTIC:
                    counts[worker.id] = max(counts.get(worker.id, 0), len(of_role))
        view.cache["elastic_counts"] = counts
    return counts

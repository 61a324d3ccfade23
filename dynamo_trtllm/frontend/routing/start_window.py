"""Limit how many choices of a model wait for their first token at its workers.

Such choices wait for a worker's batch, or their KV waits for a decode worker. If a frontend sent
all that it has, workers would reject some, and those of one client would delay those of others.
So the rest waits in the frontend's queue, where clients take turns. The first token of a choice
lets another one start: nothing has to be estimated, and no worker has to be asked.

The module does no I/O.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView, ModelView
from dynamo_trtllm.protocol.messages import Instance, Role

GROUP: Final = 8  # choices of one request that start together
# Steps may have more choices, but a worker for which so many wait is never idle.
_MAX_STEP_CHOICES: Final = 64
# Waiting prompts may take a quarter of the KV blocks. At half of them, workers reject prompts, and
# other frontends send some, too.
_KV_DIVISOR: Final = 4
# A window is full when the costs of its choices add up to this. Costs are integers, because
# rounding errors of their sum would stay for ever.
_WINDOW: Final = 1 << 20


class _Capacity(NamedTuple):
    """What the workers of a model can begin. It decides what a choice costs."""

    num_choices: int  # that fill the window; 0: there are no workers
    prompt_tokens: int  # that fill the window; 0: the workers report no KV blocks
    block_tokens: int  # a prompt takes whole KV blocks of so many tokens
    num_prompts: int  # that fill the window, however long they are


class StartPlace:
    """The place of one choice in the window, until its first token or its end.

    Args:
        request: the places of its request, where the choice counts already.
    """

    __slots__ = ("_is_counted", "_request", "_worker_id")

    def __init__(self, request: RequestPlaces) -> None:
        self._request: RequestPlaces | None = request  # None: it has left
        self._is_counted = True
        self._worker_id: int | None = None  # of the worker that is called

    def called(self, worker: Instance) -> None:
        """Note that a worker is called with the choice."""
        request = self._request
        if request is None:
            return
        cost_at = request.window.cost_at
        if self._worker_id is not None:
            cost_at[self._worker_id] -= request.cost
        if not self._is_counted:
            self._is_counted = True
            request.count(1)
        self._worker_id = worker.id
        cost_at[worker.id] += request.cost

    def waits_for_workers(self) -> None:
        """Note that there are no workers for the choice now. Others may find some."""
        if self._request is not None:
            self._uncount(self._request)

    def leave(self) -> None:
        """Note the first token or the end of the choice. Idempotent."""
        request = self._request
        if request is not None:
            self._request = None
            self._uncount(request)

    def _uncount(self, request: RequestPlaces) -> None:
        if self._worker_id is not None:
            request.window.cost_at[self._worker_id] -= request.cost
            self._worker_id = None
        if self._is_counted:
            self._is_counted = False
            request.uncount(1)


class RequestPlaces:
    """The places of the choices of one request.

    Choices of a request start in groups. While the next group waits for capacity of the window, no
    further request of the model begins, because it would take the place of this group. A group that
    waits for the request's own workers delays no requests: these workers may hang.

    Args:
        window: that of the model.
        cost: of one choice.
        num_choices: of the request.
    """

    __slots__ = (
        "_num_left",
        "_num_reserved",
        "_num_waiting",
        "_places",
        "_waiting",
        "cost",
        "window",
    )

    def __init__(self, window: StartWindow, cost: int, num_choices: int) -> None:
        self.window = window
        self.cost = cost
        self._num_left = num_choices  # choices without a place
        self._num_reserved = 0  # places that no choice has taken yet
        self._num_waiting = 0  # choices that wait for their first token, and reserved places
        self._places: list[StartPlace] = []
        self._waiting: asyncio.Future[None] | None = None  # until the next group may start

    @property
    def model(self) -> str:
        """The model of the request."""
        return self.window.model

    def may_begin(self) -> bool:
        """Return whether the request may begin."""
        return self.window.has_capacity() and not self.window.is_reserved()

    def begin(self) -> None:
        """Reserve the places of the first group."""
        self._reserve()
        if self._num_left:
            self.window.beginning.append(self)

    async def wait_for_group(self) -> None:
        """Wait until the next group may start."""
        if self._num_reserved:
            return  # the first group has its places
        while not self._may_continue():
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self._reserve()
        if not self._num_left:
            self._end_beginning()

    def is_share_free(self) -> bool:
        """Return whether the workers of the request can begin a further group.

        The choices of a prompt run on the same workers, and wait for these.
        """
        return self._num_waiting * self.cost < self.window.smallest_share()

    def changed(self) -> None:
        """Look again whether the next group may start."""
        waiting = self._waiting
        if waiting is not None and not waiting.done() and self._may_continue():
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
            self.uncount(self._num_reserved)
            self._num_reserved = 0
        self._end_beginning()

    def count(self, num_choices: int) -> None:
        """Count choices that wait for their first token."""
        self._num_waiting += num_choices
        self.window.cost += num_choices * self.cost

    def uncount(self, num_choices: int) -> None:
        """Do not count choices any more."""
        self._num_waiting -= num_choices
        self.window.cost -= num_choices * self.cost
        self.window.changed()

    def _may_continue(self) -> bool:
        return self.is_share_free() and self.window.has_capacity()

    def _reserve(self) -> None:
        group = min(GROUP, self._num_left)
        self._num_left -= group
        self._num_reserved += group
        self.count(group)

    def _end_beginning(self) -> None:
        if self in self.window.beginning:
            self.window.beginning.remove(self)
            self.window.on_capacity()


class StartWindow:
    """The choices of one model that wait for their first token.

    The choices that wait at one worker count at most its share. So a worker that has stopped
    answering delays no requests to others.

    Args:
        model: the name of the model.
        view: the workers.
        num_processes: processes of the frontend, which share the capacity of the workers.
        on_capacity: called when further choices may start.
    """

    def __init__(
        self, model: str, view: ClusterView, num_processes: int, on_capacity: Callable[[], None]
    ) -> None:
        self.model = model
        self.on_capacity = on_capacity
        # The requests that have groups to start, the oldest first. They are few: each had taken a
        # worker's share when the next one began.
        self.beginning: list[RequestPlaces] = []
        self.cost = 0  # of all choices
        # By id of the worker. Workers without choices stay, because to remove them for each request
        # would take longer.
        self.cost_at: defaultdict[int, int] = defaultdict(int)
        self._view = view
        self._limit = _WINDOW // num_processes

    def request(self, num_choices: int, prompt_tokens: int) -> RequestPlaces:
        """Return the places of a request, which takes none yet.

        Args:
            num_choices: of the request.
            prompt_tokens: of its longest prompt.
        """
        cost = _choice_cost(_capacity(self._view.model(self.model)), prompt_tokens)
        return RequestPlaces(self, cost, num_choices)

    def has_capacity(self) -> bool:
        """Return whether a further group may start. It may then exceed the limit."""
        # `cost` is known at once, and usually low enough.
        return self.cost < self._limit or self._limited_cost() < self._limit

    def is_reserved(self) -> bool:
        """Return whether free capacity is for the next group of a request that has begun."""
        return any(request.is_share_free() for request in self.beginning)

    def smallest_share(self) -> int:
        """Return the share of a worker of the role that has the most workers."""
        view = self._view.model(self.model)
        num_workers = max(len(view.prefill), len(view.decode), len(view.aggregated), 1)
        return self._limit // num_workers

    def changed(self) -> None:
        """Let those that wait look again whether they may start: first those that have begun."""
        for request in self.beginning:
            request.changed()
        self.on_capacity()

    def _limited_cost(self) -> int:
        """Return the cost of all choices, of which each worker has at most its share."""
        view = self._view.model(self.model)
        num_workers = {
            Role.PREFILL: len(view.prefill),
            Role.DECODE: len(view.decode),
            Role.AGGREGATED: len(view.aggregated),
        }
        cost = self.cost
        for worker_id, cost_here in list(self.cost_at.items()):
            worker = self._view.instance(worker_id)
            share = 0
            if worker is not None:
                share = self._limit // max(1, num_workers[worker.role])
            elif not cost_here:
                del self.cost_at[worker_id]  # the worker has left, and no choice waits for its end
            cost -= max(0, cost_here - share)
        return cost


class StartWindows:
    """The start windows of all models.

    Args:
        view: the workers.
        num_processes: processes of the frontend.
        on_capacity: called when requests may begin.
    """

    def __init__(
        self, view: ClusterView, num_processes: int, on_capacity: Callable[[], None]
    ) -> None:
        self._view = view
        self._num_processes = num_processes
        self._on_capacity = on_capacity
        self._windows: dict[str, StartWindow] = {}

    def window(self, model: str) -> StartWindow:
        """Return the window of a model that exists."""
        window = self._windows.get(model)
        if window is None:
            window = StartWindow(model, self._view, self._num_processes, self._on_capacity)
            self._windows[model] = window
        return window


def _capacity(view: ModelView) -> _Capacity:
    """Return what the workers can begin. The result is cached in the view."""
    cached: _Capacity | None = view.cache.get("start_capacity")
    if cached is not None:
        return cached
    capacity = _new_capacity(view)
    view.cache["start_capacity"] = capacity
    return capacity


def _new_capacity(view: ModelView) -> _Capacity:
    has_pairs = bool(view.prefill and view.decode)
    # Workers that compute prompts.
    if has_pairs:
        workers = view.prefill
    else:
        workers = view.aggregated or view.decode
    num_choices = 0
    prompt_tokens = 0
    block_tokens = max((worker.layout.block_tokens for worker in workers), default=0)
    for worker in workers:
        # One step runs, and the choices of the next one wait.
        num_choices += 2 * _step_choices(worker)
        prompt_tokens += worker.limits.kv_blocks * worker.layout.block_tokens // _KV_DIVISOR
    if has_pairs:
        # The KV of these choices is being transferred, or waits for a step.
        num_choices += sum(_step_choices(worker) for worker in view.decode)
    # Two prompts of any length can wait at each worker: otherwise a worker would be idle after
    # each long one.
    return _Capacity(num_choices, prompt_tokens, block_tokens, num_prompts=2 * len(workers))


def _step_choices(worker: Instance) -> int:
    """Return how many choices a step of a worker has at most."""
    return min(worker.limits.max_batch_size or _MAX_STEP_CHOICES, _MAX_STEP_CHOICES)


def _choice_cost(capacity: _Capacity, prompt_tokens: int) -> int:
    """Return the part of a window that a choice takes: as one of the choices, or for its KV.

    It is the larger one. Without workers it is 0: the router waits for some, or rejects the
    request.
    """
    if not capacity.num_choices:
        return 0
    batch_cost = _rounded_up(_WINDOW, capacity.num_choices)
    if not capacity.prompt_tokens:
        return batch_cost
    kv_tokens = _rounded_up(prompt_tokens, capacity.block_tokens) * capacity.block_tokens
    kv_cost = _rounded_up(_WINDOW * kv_tokens, capacity.prompt_tokens)
    max_kv_cost = _WINDOW // capacity.num_prompts
    return max(batch_cost, min(kv_cost, max_kv_cost))


def _rounded_up(dividend: int, divisor: int) -> int:
    """Return the quotient of two numbers, rounded up."""
    return -(-dividend // divisor)

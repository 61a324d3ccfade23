"""Say whether the workers of the path that a request would get now have room for it.

With `--router-mode slo`, many requests in a row may get the same workers although others are idle,
because those have streams that would be delayed. A worker runs its requests in order of arrival. If
it had all of them at once, late ones would delay those that can still keep their limits. In the
queue of the frontend, late requests come last.

The module does no I/O.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.routing.pair_breakers import FleetHealth
from dynamo_trtllm.frontend.routing.path_selection import ChosenPath
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement
from dynamo_trtllm.frontend.routing.worker_capacity import step_choices
from dynamo_trtllm.protocol.messages import Instance

# So many prompts of any length may be at a worker: otherwise it would be idle after each long one.
_LEAST_PROMPTS: Final = 2
_STEPS: Final = 2  # one step runs, and the prompts of the next one wait


class WaitingRequest(NamedTuple):
    """What decides on the path of a request that waits."""

    arrived_s: float
    prompt_tokens: int
    computed_tokens: int  # those of them that are probably in no prefix cache
    ttft_s: float | None  # its own limit of the time to first token


class PromptsAtWorkers:
    """The prompts of a model that this frontend has at each worker, and that are not computed."""

    def __init__(self) -> None:
        # By id of the worker: how many there are, and their tokens.
        self._by_worker: dict[int, tuple[int, int]] = {}

    def add(self, worker_id: int, tokens: int) -> None:
        """Count a prompt."""
        num_prompts, before = self._by_worker.get(worker_id, (0, 0))
        self._by_worker[worker_id] = num_prompts + 1, before + tokens

    def remove(self, worker_id: int, tokens: int) -> None:
        """Stop counting a prompt."""
        num_prompts, before = self._by_worker.pop(worker_id)
        if num_prompts > 1:
            self._by_worker[worker_id] = num_prompts - 1, before - tokens

    def has_room(self, worker: Instance, tokens: int, part: float) -> bool:
        """Return whether a worker may get a further prompt. If not, its next step is full.

        Args:
            worker: the worker.
            tokens: those of the prompt.
            part: of the steps of the worker, which this frontend may fill.
        """
        num_prompts, before = self._by_worker.get(worker.id, (0, 0))
        if num_prompts < _LEAST_PROMPTS:
            return True
        num_steps = _STEPS * part
        step_tokens = worker.limits.max_num_tokens or math.inf  # 0: not reported
        if before + tokens > num_steps * step_tokens:
            return False
        return num_prompts < num_steps * step_choices(worker)


class PathRoom:
    """Predicts the paths of requests that wait in the frontend.

    Args:
        placement: selects the paths.
        health: says which workers and pairs are used.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        placement: SloPlacement,
        health: FleetHealth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement = placement
        self._health = health
        self._clock = clock
        self._full: set[int] = set()  # workers without space, for which requests wait
        self._on_space: Callable[[], None] = lambda: None
        placement.loads.on_new_report = self._reported

    def notify(self, on_space: Callable[[], None]) -> None:
        """Set what is called when a worker may have space for streams again."""
        self._on_space = on_space

    def path(self, model: str, request: WaitingRequest) -> ChosenPath | None:
        """Return the path that a request would get now; None: it is not known."""
        now = self._clock()
        view = self._health.view.model(model)
        return self._placement.path_of_waiting(
            view.excluding(self._health.cooling_down(now)).sharing(),
            request.prompt_tokens,
            request.ttft_s,
            self._health.breakers,
            now,
            waited_s=now - request.arrived_s,
        )

    def wait_for_space(self, worker_id: int) -> None:
        """Note that a request waits until a worker has space for its stream.

        Streams of other frontends may give it. Only reports of the worker say so.
        """
        self._full.add(worker_id)

    def _reported(self, worker_id: int) -> None:
        if worker_id in self._full:
            self._full.remove(worker_id)
            self._on_space()

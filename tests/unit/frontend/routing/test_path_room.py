"""Requests wait in the frontend until the workers of the path that they would get have room."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.pair_breakers import FleetHealth, PairBreakers
from dynamo_trtllm.frontend.routing.path_room import PathRoom, PromptsAtWorkers
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement
from dynamo_trtllm.frontend.routing.start_window import StartPlace, StartWindow
from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    linear_decode_fit,
    linear_prefill_fit,
)
from dynamo_trtllm.protocol.messages import ClientShare, Instance, Limits, LoadReport, Phase, Role
from tests.kit.admission import Clock
from tests.kit.cases import each_case
from tests.kit.instances import make_instance

PREFILL, OTHER_PREFILL, DECODE = 1, 2, 11
MAX_STREAMS = 8
# A step with 1,000 prompt tokens takes 110 ms: streams would miss their limit of 100 ms.
COST = CostModel(
    decode=linear_decode_fit(0.01), prefill=linear_prefill_fit(0.01, 1e-4), step_tokens=1000
)


class Frontend:
    """The start window of a frontend with a router mode `slo`, two prefill and a decode worker."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.view = ClusterView()
        roles = {PREFILL: Role.PREFILL, OTHER_PREFILL: Role.PREFILL, DECODE: Role.DECODE}
        limits = Limits(max_batch_size=MAX_STREAMS, max_num_tokens=1000)
        for id_, role in roles.items():
            instance = make_instance(id_, role=role)
            self.view.add(msgspec.structs.replace(instance, limits=limits, can_aggregate=True))
        self.placement = SloPlacement(1.0, 0.1, seed=1)
        for id_ in roles:
            self.report(id_)
        health = FleetHealth(self.view, PairBreakers())
        room = PathRoom(self.placement, health, self.clock)
        self.num_calls = 0  # of `on_capacity`
        room.notify(self._on_capacity)
        self.window = StartWindow(
            make_instance(1).card.name,
            self.view,
            self._on_capacity,
            uses_all_paths=True,
            ttft_s=1.0,
            room=room,
            clock=self.clock,
        )
        self._num_reports = 1

    def _on_capacity(self) -> None:
        self.num_calls += 1

    def report(self, worker_id: int, number: int = 1, **fields: Any) -> None:
        idle = LoadReport(worker_id, number, 0, 0, 0, 0, 1000, 0, COST)
        self.placement.loads.on_report(msgspec.structs.replace(idle, **fields), self.clock.now)

    def worker(self, worker_id: int) -> Instance:
        worker = self.view.instance(worker_id)
        assert worker is not None
        return worker

    def may_begin(self, prompt_tokens: int = 1000) -> bool:
        return self.window.places_for(1, prompt_tokens).may_begin(ClientShare.EVEN)

    def begin(self, prompt_tokens: int = 1000) -> StartPlace:
        """Begin a request, whose workers are not selected yet."""
        places = self.window.places_for(1, prompt_tokens)
        assert places.may_begin(ClientShare.EVEN)
        places.begin(ClientShare.EVEN)
        return places.take()

    def prefill(self, worker_id: int) -> StartPlace:
        """Begin a request whose prompt a worker computes."""
        place = self.begin()
        place.called(self.worker(worker_id), Phase.PREFILL)
        return place


def test_prompts_wait_for_their_worker_while_another_one_is_idle_but_has_streams() -> None:
    """Else they wait there in order of arrival, and all of them are late in the end."""
    frontend = Frontend()
    frontend.report(OTHER_PREFILL, 2, num_generating=5)
    first, _ = [frontend.prefill(PREFILL) for _ in range(2)]
    assert not frontend.may_begin()
    first.called(frontend.worker(DECODE), Phase.DECODE)
    assert frontend.num_calls > 0
    assert frontend.may_begin()


def test_prompts_go_to_the_other_worker_if_it_has_no_streams() -> None:
    frontend = Frontend()
    for _ in range(2):
        frontend.prefill(PREFILL)
    frontend.report(PREFILL, 2, queued_prefill_tokens=2000)
    assert frontend.may_begin()


def test_requests_wait_while_their_decode_worker_is_full() -> None:
    """If they waited there, later ones could not overtake them when they are late."""
    frontend = Frontend()
    place = frontend.prefill(PREFILL)
    place.called(frontend.worker(DECODE), Phase.DECODE)
    place.decode_began()
    frontend.report(DECODE, 2, running=MAX_STREAMS)
    assert not frontend.may_begin()
    num_calls = frontend.num_calls
    frontend.report(DECODE, 3, running=MAX_STREAMS - 1)
    assert frontend.num_calls > num_calls
    assert frontend.may_begin()


def test_decode_worker_that_others_have_filled_may_get_a_request() -> None:
    """It might never report enough space for a long prompt."""
    frontend = Frontend()
    frontend.prefill(PREFILL)
    frontend.report(DECODE, 2, running=MAX_STREAMS)
    assert frontend.may_begin()


def test_next_request_waits_until_workers_of_the_one_before_are_selected() -> None:
    """Several that begin at one moment would all get the worker that has room for one."""
    frontend = Frontend()
    place = frontend.begin()
    assert not frontend.may_begin()
    place.called(frontend.worker(PREFILL), Phase.PREFILL)
    assert frontend.may_begin()
    assert frontend.num_calls == 1
    frontend.begin().leave()
    assert frontend.may_begin()


def test_request_that_ends_before_its_choices_start_holds_up_none() -> None:
    frontend = Frontend()
    places = frontend.window.places_for(1, 1000)
    places.begin(ClientShare.EVEN)
    assert not frontend.may_begin()
    places.close()
    assert frontend.may_begin()


@each_case(
    ("before", "tokens", "part", "expected"),
    [
        ((), 5000, 1.0, True),
        ((5000,), 5000, 1.0, True),  # two prompts of any length
        ((900, 900), 201, 1.0, False),
        ((900, 900), 200, 1.0, True),  # two steps
        ((900, 900), 200, 0.5, False),
        ((1,) * 16, 1, 1.0, False),  # two batches
        ((1,) * 15, 1, 1.0, True),
    ],
)
def test_worker_may_have_the_prompts_of_two_steps(
    before: tuple[int, ...], tokens: int, part: float, expected: bool
) -> None:
    limits = Limits(max_batch_size=MAX_STREAMS, max_num_tokens=1000)
    worker = msgspec.structs.replace(make_instance(PREFILL), limits=limits)
    prompts = PromptsAtWorkers()
    for prompt in before:
        prompts.add(PREFILL, prompt)
    assert prompts.has_room(worker, tokens, part) == expected
    for prompt in before:
        prompts.remove(PREFILL, prompt)
    assert prompts.has_room(worker, 1 << 20, part)

"""What a planner observes from the reports of workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.planner.decide import DecisionOutcome, Observation
from dynamo_trtllm.planner.frontend_queues import FrontendQueue
from dynamo_trtllm.planner.observe import WINDOW_S, Observer
from dynamo_trtllm.planner.planner import Planner, changes_of, reason_of
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.frontend_usage import FrontendUsage, ModelUsage
from dynamo_trtllm.protocol.messages import LoadReport, Role
from dynamo_trtllm.protocol.shares import DECODE_ONLY, PREFILL_ONLY
from tests.kit.instances import elastic_instance, make_instance

MODEL = elastic_instance(1).card.name
COST = MockArgs(prefill_token_s=0.0001, decode_request_s=0.001).cost_prior


def report(
    instance_id: int, number: int, *, streams: int = 0, queued: int = 0, prompts: int = 0
) -> LoadReport:
    """Return a report of a worker that has computed prompts of 1000 tokens."""
    return LoadReport(
        instance_id=instance_id,
        number=number,
        running=streams,
        waiting=0,
        queued_prefill_tokens=queued,
        kv_blocks_used=0,
        kv_blocks_total=100,
        context_tokens=100 * streams,
        cost=COST,
        num_generating=streams,
        generating_tokens=100 * streams,
        computed_prompts=prompts,
        computed_tokens=1000 * prompts,
    )


class Watched:
    """Two elastic workers, and what is observed of them."""

    def __init__(self) -> None:
        self.view = ClusterView()
        for instance_id in (1, 2):
            self.view.add(elastic_instance(instance_id))
        self.observer = Observer(self.view, 0.0)

    def at(self, now: float) -> Observation:
        (observation,) = self.observer.observations(now).values()
        return observation


def test_rates_are_those_of_the_last_seconds() -> None:
    watched = Watched()
    for second in range(31):
        # Four prompts a second, but for the last half of the window.
        prompts = 4 * min(second, 25)
        watched.observer.on_report(report(1, second + 1, prompts=prompts), float(second))
    observation = watched.at(30.0)
    assert observation.prompt_tokens == 1000
    assert observation.prompts_per_s == 20 / WINDOW_S


def test_prompts_that_wait_have_come_too() -> None:
    watched = Watched()
    watched.observer.on_report(report(1, 1), 0.0)
    watched.observer.on_report(report(1, 2, prompts=10, queued=30_000), 10.0)
    assert watched.at(10.0).prompts_per_s == 4.0


def usage(process: int, **fields: Any) -> FrontendUsage:
    of_model = ModelUsage(taken=(9, 9, 9), waiting={}, tokens={}, **fields)
    return FrontendUsage(process, 1, {MODEL: of_model}, {})


def test_queues_of_all_frontend_processes_are_added() -> None:
    watched = Watched()
    assert watched.at(9.0).queue == FrontendQueue()
    watched.observer.on_usage(usage(1, queued_choices=3, queued_tokens=3000), 10.0)
    watched.observer.on_usage(usage(2, queued_choices=1, queued_tokens=500), 10.5)
    assert watched.at(11.0).queue == FrontendQueue(choices=4, tokens=3500)
    # The first process has ended, and the second one has less.
    watched.observer.on_usage(usage(2, queued_choices=1, queued_tokens=400), 11.5)
    assert watched.at(13.2).queue == FrontendQueue(choices=1, tokens=400)
    assert watched.at(15.0).queue == FrontendQueue()


def test_full_decode_workers_let_choices_wait_at_frontends() -> None:
    watched = Watched()
    watched.observer.on_usage(usage(1, queued_choices=3, waits_for_decode=True), 10.0)
    assert watched.at(10.0).queue.waits_for_decode
    watched.observer.on_usage(usage(2, queued_choices=3), 10.0)
    assert not watched.at(10.0).queue.waits_for_decode


def test_pairs_are_lacking_if_all_frontends_say_so() -> None:
    watched = Watched()
    assert not watched.at(10.0).lacks_pairs
    watched.observer.on_usage(usage(1, lacks_pairs=True), 10.0)
    assert watched.at(10.0).lacks_pairs
    watched.observer.on_usage(usage(2), 10.0)
    assert not watched.at(10.0).lacks_pairs
    watched.observer.on_usage(usage(1, lacks_pairs=True), 12.0)
    assert watched.at(13.5).lacks_pairs  # the second process has ended
    assert not watched.at(16.0).lacks_pairs


def test_prompts_that_wait_at_frontends_have_come_too() -> None:
    watched = Watched()
    watched.observer.on_report(report(1, 1), 0.0)
    assert watched.at(1.0).prompts_per_s == 0
    watched.observer.on_report(report(1, 2, prompts=10), 10.0)
    # Those that wait are longer: their mean counts for what is expected.
    watched.observer.on_usage(usage(1, queued_choices=10, queued_tokens=50_000), 10.0)
    observation = watched.at(10.0)
    assert observation.prompt_tokens == 3000
    assert observation.prompts_per_s == pytest.approx(2.0)


def test_queue_from_before_a_pause_has_not_changed_since() -> None:
    """A planner that did not lead has seen nothing meanwhile."""
    watched = Watched()
    watched.observer.on_report(report(1, 1), 0.0)
    watched.observer.on_usage(usage(1, queued_choices=10, queued_tokens=50_000), 1.0)
    assert watched.at(1.0).prompts_per_s == 0
    watched.observer.on_report(report(1, 2), 99.0)
    watched.observer.on_usage(usage(1, queued_choices=60, queued_tokens=300_000), 100.0)
    assert watched.at(100.0).prompts_per_s == 0


def test_pools_of_a_model_divide_its_queue() -> None:
    watched = Watched()
    for number in (3, 4, 5, 6):
        other = msgspec.structs.replace(elastic_instance(number), kv_compat={"release": "other"})
        watched.view.add(other)
    for number in (7, 8):
        watched.view.add(make_instance(number, role=Role.AGGREGATED))
    watched.observer.on_usage(usage(1, queued_choices=8, queued_tokens=8000), 10.0)
    queues = [one.queue for one in watched.observer.observations(10.0).values()]
    assert sorted(queues) == [FrontendQueue(2, 2000), FrontendQueue(4, 4000)]


def test_streams_of_elastic_workers_are_those_that_generate() -> None:
    watched = Watched()
    running = msgspec.structs.replace(report(1, 1, streams=3), running=8)
    watched.observer.on_report(running, 0.0)
    assert [worker.streams for worker in watched.at(0.0).workers] == [3, 0]


def test_a_worker_is_fresh_only_after_a_report() -> None:
    watched = Watched()
    watched.observer.on_report(report(1, 1), 0.0)
    assert [worker.is_fresh for worker in watched.at(0.0).workers] == [True, False]
    assert not any(worker.is_fresh for worker in watched.at(60.0).workers)
    watched.observer.on_report(report(2, 1), 60.0)
    watched.view.remove(1)
    watched.observer.remove(1)
    assert [worker.id for worker in watched.at(60.0).workers] == [2]


def roles_of_three(observer: Observer, view: ClusterView) -> Planner:
    """Return a planner of two workers for prefill, and one for decode."""
    view.add(elastic_instance(3))
    view.set_shares({1: PREFILL_ONLY, 2: PREFILL_ONLY, 3: DECODE_ONLY})
    return Planner(observer, TimeLimits(2.0, 0.05))


def test_first_reports_come_one_after_the_other() -> None:
    """A planner that starts does not take the only decode worker for lost."""
    watched = Watched()
    planner = roles_of_three(watched.observer, watched.view)
    for now, reporting in ((0.0, 1), (3.0, 2), (9.0, 3)):
        watched.observer.on_report(report(reporting, 1), now)
        (decision,) = planner.decisions(now).values()
        assert not decision.changes
    assert decision.outcome is DecisionOutcome.FITS


def test_a_worker_that_never_reports_is_replaced() -> None:
    watched = Watched()
    planner = roles_of_three(watched.observer, watched.view)
    for second in range(13):
        for reporting in (1, 2):
            watched.observer.on_report(report(reporting, second + 1), float(second))
        assert not changes_of(planner.decisions(float(second)))
    assert changes_of(planner.decisions(13.0))


def test_without_any_reports_the_shares_stay() -> None:
    """NATS is away for 40 s. The report of the decode worker was the oldest one."""
    watched = Watched()
    planner = roles_of_three(watched.observer, watched.view)
    for now, reporting in ((0.0, 3), (5.0, 1), (9.0, 2)):
        watched.observer.on_report(report(reporting, 1), now)
    for second in range(9, 50):
        assert not changes_of(planner.decisions(float(second)))
    # Reports arrive again, that of the decode worker last.
    for now, reporting in ((50.0, 1), (52.0, 2), (58.0, 3)):
        watched.observer.on_report(report(reporting, 2), now)
        assert not changes_of(planner.decisions(now))


def test_an_older_report_changes_nothing() -> None:
    watched = Watched()
    watched.observer.on_report(report(1, 2, streams=3), 0.0)
    watched.observer.on_report(report(1, 1, streams=9), 0.1)
    assert watched.at(0.1).workers[0].streams == 3


def test_pools_without_elastic_workers_are_not_observed() -> None:
    view = ClusterView()
    view.add(make_instance(1, role=Role.PREFILL))
    view.add(make_instance(2, role=Role.DECODE))
    assert Observer(view, 0.0).observations(0.0) == {}


def test_fixed_roles_are_part_of_a_pool() -> None:
    watched = Watched()
    prefill = make_instance(3, role=Role.PREFILL)
    watched.view.add(prefill)
    (fixed,) = (worker for worker in watched.at(0.0).workers if worker.id == 3)
    assert not fixed.is_elastic
    assert fixed.shares.decode == 0


def test_planner_changes_the_shares_of_a_pool() -> None:
    watched = Watched()
    planner = Planner(watched.observer, TimeLimits(ttft_s=2.0, itl_s=0.02))
    decisions = {}
    for second in range(8):
        for instance_id in (1, 2):
            watched.observer.on_report(
                report(instance_id, second + 1, streams=2, queued=4000, prompts=4 * second),
                float(second),
            )
        decisions = planner.decisions(float(second))
        if changes_of(decisions):
            break
    (decision,) = decisions.values()
    assert decision.outcome is DecisionOutcome.CHANGE
    assert len(changes_of(decisions)) == 2
    assert reason_of(decisions).startswith("tiny: decode is short")


def test_streams_of_the_last_seconds_have_a_mean() -> None:
    watched = Watched()
    for second, streams in enumerate((4, 0, 4, 0)):
        watched.observer.on_report(report(1, second + 1, streams=streams), float(second))
    (first, _) = watched.at(4.0).workers
    assert (first.streams, first.mean_streams, first.mean_context_tokens) == (0, 2.0, 200.0)


def test_streams_that_become_more_are_seen() -> None:
    watched = Watched()
    for second in range(21):
        streams = 10 * max(0, second - 10)
        watched.observer.on_report(report(1, second + 1, streams=streams), float(second))
    watched.observer.on_report(report(2, 1, streams=7), 20.0)
    states = watched.at(20.0).workers
    assert [state.more_streams_per_s for state in states] == [10.0, 0.0]

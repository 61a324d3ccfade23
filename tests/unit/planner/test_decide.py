"""What a planner decides for a pool of workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.planner.decide import (
    DRAINING,
    HOLD_S,
    MIN_INTERVAL_S,
    ChangeTiming,
    Decision,
    DecisionOutcome,
    Observation,
    WorkerState,
    decide,
)
from dynamo_trtllm.planner.frontend_queues import FrontendQueue
from dynamo_trtllm.planner.predict import PredictedTimes, RoleCounts, TimeLimits
from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    linear_decode_fit,
    linear_prefill_fit,
    prior_fit,
)
from dynamo_trtllm.protocol.shares import ALL_WORK, DECODE_ONLY, PREFILL_ONLY, Shares
from tests.kit.cases import each_case

# A prompt of 8000 tokens takes 0.4 s, and a decode step 5 ms and 1 ms per stream.
COST = MockArgs(
    step_s=0.005,
    prefill_token_s=0.00005,
    decode_request_s=0.001,
    prefill_tokens_per_step=8000,
).cost_prior
LIMITS = TimeLimits(ttft_s=2.0, itl_s=0.05)
CONTEXT = 1000  # tokens of a stream


def worker(
    number: int, shares: Shares = ALL_WORK, streams: int = 0, queued_tokens: int = 0
) -> WorkerState:
    return WorkerState(
        number,
        shares,
        is_elastic=True,
        streams=streams,
        context_tokens=CONTEXT * streams,
        queued_tokens=queued_tokens,
        is_fresh=True,
    )


def split(num_prefill: int, num_decode: int, streams: int, queued_tokens: int) -> list[WorkerState]:
    """Return workers of which some get each kind of calls, with work for each of them."""
    workers = [worker(number, PREFILL_ONLY, 0, queued_tokens) for number in range(num_prefill)]
    decode_numbers = range(num_prefill, num_prefill + num_decode)
    return workers + [worker(number, DECODE_ONLY, streams) for number in decode_numbers]


def observed(
    workers: Sequence[WorkerState],
    prompts_per_s: float = 0.0,
    at_s: float = 100.0,
    cost: CostModel | None = COST,
    prompt_tokens: int = 8000,
) -> Observation:
    return Observation(at_s, workers, cost, prompts_per_s, prompt_tokens, 256, 1_000_000)


def settled(observation: Observation, limits: TimeLimits = LIMITS) -> Decision:
    """Return what is decided if what is observed stays for a while."""
    timing = ChangeTiming()
    for at_s in (0.0, HOLD_S / 2, HOLD_S):
        decision, timing = decide(observation._replace(at_s=at_s), limits, timing)
    return decision


def test_workers_turn_to_prefill_if_prompts_queue() -> None:
    """As in dynamo#10528: prefill is saturated, and decode is idle."""
    decision = settled(observed(split(1, 3, 2, 40_000), prompts_per_s=5.0))
    assert decision.outcome is DecisionOutcome.CHANGE
    assert decision.counts == RoleCounts(prefill=3, decode=1)
    assert len(decision.changes) == 2
    assert set(decision.changes.values()) == {DRAINING}
    assert decision.before is not None
    assert decision.after is not None
    assert decision.after.ttft_s < LIMITS.ttft_s < decision.before.ttft_s
    assert "prefill is short" in decision.reason
    some = msgspec.structs.replace(COST, kv_transfer=prior_fit((0.0, 0.002, 0.002)))
    decision = settled(observed(split(1, 3, 2, 40_000), prompts_per_s=5.0, cost=some))
    assert "prefill is short" in decision.reason


@pytest.mark.parametrize("prompts_per_s", [1.0, 3.0, 6.0])
def test_wanted_workers_keep_the_limit_with_the_kv_transfer(prompts_per_s: float) -> None:
    cost = msgspec.structs.replace(COST, kv_transfer=prior_fit((0.0, 0.03, 0.03)))
    limits = LIMITS._replace(ttft_s=1.0)
    wanted = settled(observed(split(1, 1, 2, 0), prompts_per_s, cost=cost), limits).wanted
    assert wanted is not None
    enough = split(wanted.prefill, wanted.decode, 2, 0)
    assert settled(observed(enough, prompts_per_s, cost=cost), limits).outcome is (
        DecisionOutcome.FITS
    )
    assert wanted.prefill <= 3 * prompts_per_s + 2


def test_workers_are_not_divided_if_no_pair_can_transfer_kv() -> None:
    seen = observed(split(1, 3, 2, 100), prompts_per_s=0.5)
    assert settled(seen).outcome is DecisionOutcome.FITS
    decision = settled(seen._replace(lacks_pairs=True))
    assert decision.outcome is DecisionOutcome.CHANGE
    assert set(decision.changes.values()) == {ALL_WORK}
    assert len(decision.changes) == 4
    assert "quarantined" in decision.reason
    # Undivided workers stay so, although a split would keep the limits.
    both = observed([worker(number, ALL_WORK, 2) for number in range(4)], prompts_per_s=2.0)
    assert settled(both).counts == RoleCounts(prefill=2, decode=2)
    stays = settled(both._replace(lacks_pairs=True))
    assert (stays.outcome, stays.changes) == (DecisionOutcome.LACKS_PAIRS, {})


def test_workers_are_not_divided_if_kv_transfers_are_slow() -> None:
    """As on one H200 that two engines shared: the KV of 8,000 tokens took 0.2 s."""
    slow = msgspec.structs.replace(COST, kv_transfer=prior_fit((0.0, 0.026, 0.026)))
    prompts_per_s = 4.4
    one_decodes = split(4, 1, 2, 0)
    assert settled(observed(one_decodes, prompts_per_s)).outcome is DecisionOutcome.FITS
    seen = observed(one_decodes, prompts_per_s, cost=slow)
    # A second decode worker has another network.
    decision = settled(seen)
    assert decision.counts == RoleCounts(prefill=3, decode=2)
    assert "KV transfers are slow" in decision.reason
    assert decision.wanted == RoleCounts(prefill=3, decode=2)
    # What is wanted keeps the limits, with the KV transfer.
    wanted = settled(observed(split(3, 2, 2, 0), prompts_per_s, cost=slow))
    assert wanted.outcome is DecisionOutcome.FITS
    # A network that is too slow for the rate has a queue that grows.
    assert wanted.before is not None
    grows = settled(observed(one_decodes, 2 * prompts_per_s, cost=slow))
    assert grows.before is not None
    assert grows.before.transfer_s > 5.0
    assert grows.before.decode_part > 1.0
    # Gaps may be as long as a step with a prompt: then whole requests need no transfer.
    slower = msgspec.structs.replace(COST, kv_transfer=prior_fit((0.0, 0.06, 0.06)))
    pair = observed(split(1, 1, 2, 0), prompts_per_s=1.8, cost=slower)
    decision = settled(pair, LIMITS._replace(itl_s=0.6))
    assert decision.counts == RoleCounts(both=2)
    assert decision.after is not None
    assert decision.after.transfer_s == 0.0


def test_prompts_that_wait_at_frontends_count() -> None:
    """Frontends keep what is more than a step for each worker."""
    seen = observed(split(1, 3, 2, 8_000), prompts_per_s=1.0)
    assert settled(seen).outcome is DecisionOutcome.FITS
    decision = settled(seen._replace(queue=FrontendQueue(choices=10, tokens=80_000)))
    assert decision.outcome is DecisionOutcome.CHANGE
    assert decision.counts.prefill > 1
    assert "prefill is short" in decision.reason


def test_choices_that_wait_for_full_decode_workers_are_streams() -> None:
    seen = observed(split(3, 1, 35, 0), prompts_per_s=0.5)
    assert settled(seen).outcome is DecisionOutcome.FITS
    queue = FrontendQueue(choices=40, tokens=320_000, waits_for_decode=True)
    decision = settled(seen._replace(queue=queue))
    assert decision.outcome is DecisionOutcome.CHANGE
    assert decision.counts.decode > 1
    assert "decode is short" in decision.reason


def test_workers_turn_to_decode_if_gaps_are_long() -> None:
    decision = settled(observed(split(3, 1, 90, 0), prompts_per_s=0.5))
    assert decision.outcome is DecisionOutcome.CHANGE
    assert decision.counts.decode > 1
    assert set(decision.changes.values()) == {DECODE_ONLY}
    assert decision.after is not None
    assert decision.after.gap_s < LIMITS.itl_s
    assert "decode is short" in decision.reason


def test_full_kv_caches_need_more_decode_workers() -> None:
    full = observed(split(3, 1, 20, 0), prompts_per_s=0.5)._replace(kv_tokens=20_000)
    assert settled(full).counts.decode > 1


def test_decode_gets_as_few_workers_as_keep_its_limit() -> None:
    """All get both kinds of calls, and prompts make long gaps. One worker is enough for all."""
    workers = [worker(number, streams=1) for number in range(4)]
    decision = settled(observed(workers, prompts_per_s=2.0))
    assert decision.counts == RoleCounts(prefill=3, decode=1)


def test_the_worker_with_the_fewest_streams_turns_to_prefill() -> None:
    workers = [
        worker(0, PREFILL_ONLY, queued_tokens=60_000),
        worker(1, DECODE_ONLY, streams=5),
        worker(2, DECODE_ONLY, streams=1),
        worker(3, DECODE_ONLY, streams=9),
    ]
    changes = settled(observed(workers, prompts_per_s=4.0)).changes
    assert changes == {2: DRAINING}


def test_a_worker_takes_all_prompts_when_its_streams_have_ended() -> None:
    workers = [
        worker(0, PREFILL_ONLY),
        worker(1, DRAINING, streams=1),
        worker(2, DRAINING),
        worker(3, DECODE_ONLY, streams=5),
    ]
    # The last change was just now.
    decision, _ = decide(observed(workers, 1.0), LIMITS, ChangeTiming(changed_at_s=100.0))
    assert decision.outcome is DecisionOutcome.DRAINED
    assert decision.changes == {2: PREFILL_ONLY}
    assert decision.reason == "the streams of 1 worker for prefill have ended"


def test_one_worker_computes_prompts_while_others_drain() -> None:
    """The one with the fewest streams."""
    workers = [worker(number, DECODE_ONLY, streams=3 - number) for number in range(3)]
    decision, _ = decide(observed(workers, prompts_per_s=6.0), LIMITS, ChangeTiming())
    assert decision.changes == {1: DRAINING, 2: PREFILL_ONLY}
    left = [worker(0, DECODE_ONLY, 3), worker(1, DRAINING, 2)]
    decision, _ = decide(
        observed(left, prompts_per_s=1.0), LIMITS, ChangeTiming(changed_at_s=100.0)
    )
    assert decision.changes == {1: PREFILL_ONLY}
    assert "no other worker computes prompts" in decision.reason


def test_steady_load_changes_nothing_in_ten_minutes() -> None:
    """Arrivals vary, and two splits would keep the limits."""
    random = Random(1)
    timing = ChangeTiming()
    outcomes = set()
    for second in range(600):
        streams = round(random.gauss(15, 4))
        queued = int(8000 * max(0.0, random.gauss(0.5, 1)))
        workers = split(2, 2, max(0, streams), queued)
        rate = max(0.1, random.gauss(3, 0.5))
        decision, timing = decide(observed(workers, rate, at_s=second), LIMITS, timing)
        outcomes.add(decision.outcome)
    assert DecisionOutcome.CHANGE not in outcomes
    assert DecisionOutcome.FITS in outcomes


def test_a_change_is_made_only_if_it_stays_better() -> None:
    busy = observed(split(1, 3, 2, 40_000), prompts_per_s=5.0)
    calm = observed(split(1, 3, 2, 0), prompts_per_s=0.1)
    timing = ChangeTiming()
    outcomes = []
    for second, observation in enumerate((busy, busy, calm, busy, busy, busy)):
        decision, timing = decide(observation._replace(at_s=second), LIMITS, timing)
        outcomes.append(decision.outcome)
    waiting, change = DecisionOutcome.WAITING, DecisionOutcome.CHANGE
    assert outcomes == [waiting, waiting, DecisionOutcome.FITS, waiting, waiting, change]


def test_changes_are_not_made_one_after_the_other() -> None:
    """Whatever is decided, the other kind of call is short at once."""
    timing = ChangeTiming()
    changed_at = []
    for second in range(60):
        is_prefill_short = len(changed_at) % 2 == 0
        workers = split(1, 3, 2, 40_000) if is_prefill_short else split(3, 1, 90, 0)
        rate = 5.0 if is_prefill_short else 0.5
        decision, timing = decide(observed(workers, rate, at_s=second), LIMITS, timing)
        if decision.changes:
            changed_at.append(second)
    gaps = [later - earlier for earlier, later in itertools.pairwise(changed_at)]
    assert gaps
    assert min(gaps) >= MIN_INTERVAL_S


def test_a_lost_role_is_filled_at_once() -> None:
    """The only decode worker has left."""
    decision, _ = decide(
        observed(split(3, 0, 0, 0), prompts_per_s=1.0), LIMITS, ChangeTiming(changed_at_s=99.0)
    )
    assert decision.outcome is DecisionOutcome.CHANGE
    assert decision.counts.num_decode >= 1
    assert decision.counts.num_prefill >= 1
    assert "decode" in decision.reason


def test_overload_shares_the_workers_out_evenly() -> None:
    """No split keeps a limit, so neither role gets all of them."""
    decision = settled(observed(split(1, 3, 120, 400_000), prompts_per_s=20.0))
    assert decision.counts.num_prefill >= 1
    assert decision.counts.num_decode >= 1


def without_loads() -> Observation:
    workers = [worker(number)._replace(is_fresh=False) for number in range(4)]
    return observed(workers)


@each_case(
    ("observation", "outcome"),
    [
        (observed([]), DecisionOutcome.NO_ELASTIC_WORKERS),
        (observed([worker(1)._replace(is_elastic=False)]), DecisionOutcome.NO_ELASTIC_WORKERS),
        (observed([worker(1, streams=200)]), DecisionOutcome.ONE_WORKER),
        (without_loads(), DecisionOutcome.NO_LOADS),
        (observed([worker(1), worker(2)], cost=None), DecisionOutcome.NO_COST_MODEL),
        (observed([worker(1), worker(2)], cost=CostModel()), DecisionOutcome.NO_COST_MODEL),
        (observed([worker(1), worker(2)]), DecisionOutcome.FITS),  # no work
    ],
)
def test_no_change_has_a_named_outcome(observation: Observation, outcome: DecisionOutcome) -> None:
    decision = settled(observation)
    assert decision.outcome is outcome
    assert not decision.changes
    assert decision.reason


def test_elastic_workers_with_old_loads_are_the_reason() -> None:
    workers = [worker(number)._replace(is_elastic=False) for number in range(3)]
    workers.append(worker(3)._replace(is_fresh=False))
    decision = settled(observed(workers))
    assert decision.outcome is DecisionOutcome.NO_LOADS
    assert decision.reason == "no elastic worker has reported its load lately"


def test_a_worker_with_an_old_load_keeps_its_shares() -> None:
    workers = split(1, 3, 2, 40_000)
    workers[3] = workers[3]._replace(is_fresh=False)
    decision = settled(observed(workers, prompts_per_s=5.0))
    assert decision.changes
    assert workers[3].id not in decision.changes
    assert sum(decision.counts) == 3


def test_workers_of_fixed_roles_count_and_stay() -> None:
    workers = split(1, 3, 2, 40_000)
    workers[1] = workers[1]._replace(is_elastic=False)
    decision = settled(observed(workers, prompts_per_s=5.0))
    assert decision.counts == RoleCounts(prefill=3, decode=1)
    assert set(decision.changes) == {2, 3}


@each_case("limits", [TimeLimits(0.1, 0.05), TimeLimits(2.0, 0.001)])
def test_an_unreachable_limit_is_named(limits: TimeLimits) -> None:
    decision = settled(observed(split(2, 2, 10, 8000), prompts_per_s=2.0), limits)
    assert len(decision.unreachable) == 1
    assert "on an idle worker" in decision.unreachable[0]
    # It does not take all workers from the other role.
    assert decision.counts.num_prefill == 2


def test_wanted_workers_grow_with_the_load() -> None:
    low = settled(observed(split(2, 2, 10, 0), prompts_per_s=2.0)).wanted
    high = settled(observed(split(2, 2, 100, 0), prompts_per_s=40.0)).wanted
    assert low is not None
    assert high is not None
    assert high.prefill >= 16  # a prompt takes 0.4 s
    assert low.prefill < high.prefill
    assert low.decode < high.decode


def test_decisions_are_equal_for_equal_observations() -> None:
    observation = observed(split(1, 3, 2, 40_000), prompts_per_s=5.0)
    assert msgspec.structs.asdict(settled(observation)) == msgspec.structs.asdict(
        settled(observation)
    )


def test_streams_that_are_absent_at_a_moment_count() -> None:
    """A worker with few requests has none at many moments."""
    idle = [
        worker(number)._replace(mean_streams=0.5, mean_context_tokens=500.0) for number in range(4)
    ]
    decision = settled(observed(idle, prompts_per_s=1.0))
    assert "decode is short" in decision.reason


@pytest.mark.parametrize(("itl_s", "gap_s"), [(0.05, 0.045), (0.5, 0.3)])
def test_steps_beside_streams_follow_the_limit(itl_s: float, gap_s: float) -> None:
    observation = observed([worker(number, ALL_WORK, 5) for number in range(2)], prompts_per_s=0.1)
    before = settled(observation, TimeLimits(ttft_s=60.0, itl_s=itl_s)).before
    assert before is not None
    assert before.gap_s == pytest.approx(gap_s, rel=0.01)


def test_small_prompts_do_not_wait_for_full_steps() -> None:
    """A step takes 25 ms with a prompt of 400 tokens, and 405 ms if it is full."""
    workers = split(1, 1, 2, 0)
    decision = settled(observed(workers, prompts_per_s=16.0, prompt_tokens=400))
    assert decision.before is not None
    assert decision.before.ttft_s < 0.1


@pytest.mark.parametrize(
    ("seconds", "streams", "outcome"),
    [
        (0.0, 0, DecisionOutcome.FITS),
        (0.0, 3, DecisionOutcome.FITS),
        (1e6, 0, DecisionOutcome.NOTHING_BETTER),
        (1e6, 3, DecisionOutcome.NOTHING_BETTER),
    ],
)
def test_any_time_that_workers_report_has_an_outcome(
    seconds: float, streams: int, outcome: DecisionOutcome
) -> None:
    cost = CostModel(
        decode=linear_decode_fit(seconds),
        prefill=linear_prefill_fit(seconds, seconds),
        step_tokens=1000,
    )
    workers = [worker(number, streams=streams) for number in range(3)]
    assert settled(observed(workers, prompts_per_s=5.0, cost=cost)).outcome is outcome


def test_streams_that_become_more_are_planned_for() -> None:
    """25 streams on a worker have gaps of 30 ms, and 50 have 55 ms."""
    workers = split(3, 1, 25, 0)
    assert settled(observed(workers, prompts_per_s=0.5)).outcome is DecisionOutcome.FITS
    workers[3] = workers[3]._replace(more_streams_per_s=2.5)
    decision = settled(observed(workers, prompts_per_s=0.5))
    assert decision.counts == RoleCounts(prefill=2, decode=2)
    # If they become fewer, they are planned for as they are.
    workers[3] = workers[3]._replace(more_streams_per_s=-2.5)
    assert settled(observed(workers, prompts_per_s=0.5)).outcome is DecisionOutcome.FITS


def test_streams_that_become_more_by_chance_are_no_growth() -> None:
    """In five seconds, 25 streams become 6 more or fewer by chance. Then gaps would be 43 ms."""
    workers = split(3, 1, 25, 0)
    workers[3] = workers[3]._replace(more_streams_per_s=1.3)
    assert settled(observed(workers, prompts_per_s=0.5)).outcome is DecisionOutcome.FITS
    # On four workers, 100 streams become 13 more or fewer by chance, so 24 more are growth.
    grown = split(3, 4, 25, 0)
    for number in range(3, 7):
        grown[number] = grown[number]._replace(more_streams_per_s=1.2)
    assert settled(observed(grown, prompts_per_s=0.5)).counts == RoleCounts(prefill=2, decode=5)


def test_a_split_that_keeps_the_limits_is_not_given_up() -> None:
    """It has gaps of 49 of 50 ms. Four workers for both have shorter ones, but all have streams."""
    full = observed(split(1, 3, 44, 0), prompts_per_s=1.0, prompt_tokens=20)
    assert settled(full).outcome is DecisionOutcome.NOTHING_BETTER
    over = observed(split(1, 3, 48, 0), prompts_per_s=1.0, prompt_tokens=20)
    assert settled(over, TimeLimits(2.0, 0.052)).counts == RoleCounts(both=4)


def test_prompts_that_wait_count_before_any_was_computed() -> None:
    """Their mean size is not known yet, as in the first seconds or while prompts are very long."""
    waiting = observed(split(1, 3, 2, 400_000), prompt_tokens=0)
    assert settled(waiting).counts == RoleCounts(prefill=3, decode=1)
    assert "prefill is short" in settled(waiting).reason


def test_reason_of_an_overload_says_no_absurd_times() -> None:
    """A queue is predicted for the next 10 s. What it would be later is not known."""
    decision = settled(observed(split(1, 3, 0, 10_000_000), prompts_per_s=100.0))
    assert decision.before is not None
    assert decision.before.ttft_s > 100
    assert "first tokens after more than 10 s, gaps of 0 ms" in decision.reason


def test_reason_says_times_within_a_long_limit() -> None:
    """With a limit of 30 s, first tokens after 20 s are in time, and those after 40 s are not."""
    times = PredictedTimes(20.0, 0.0, 0.05, 20 / 30, 0.5)
    assert str(times) == "first tokens after 20000 ms, gaps of 50 ms"
    late = times._replace(ttft_s=40.0, ttft_part=40 / 30)
    assert str(late) == "first tokens after more than 30 s, gaps of 50 ms"

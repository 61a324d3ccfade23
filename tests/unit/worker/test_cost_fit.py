"""A worker's cost model learns from steps and calls, also from noisy, late and misleading ones."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from statistics import median

import msgspec
import pytest

from dynamo_trtllm.protocol.cost_model import CostModel, EngineWork, Fit, StepSample
from dynamo_trtllm.worker.cost_fit import CallSample, CostFit

WORK = EngineWork()


def seconds(step: StepSample) -> float:
    """Return how long a step takes: decode steps use more experts for more requests, short prompts
    leave a GPU idle.
    """
    requests = step.decode_requests
    context = step.context_tokens
    tokens = step.prefill_tokens
    if not tokens:
        return 0.014 - 0.010 * (1 - 4 / 128) ** requests + 2e-5 * requests + 1e-8 * context
    return (
        0.002
        + max(0.016, 2e-5 * (tokens + requests))
        + 1e-8 * context
        + 1e-9 * step.attention_pairs
    )


class Engine:
    """An engine whose step times are noisy, and sometimes much too long."""

    def __init__(self, seed: int = 1, noise: float = 0.05, outliers: float = 0.02) -> None:
        self._random = random.Random(seed)
        self._noise = noise
        self._outliers = outliers
        self.slowdown = 1.0

    def step(self, requests: int, context: int, tokens: int = 0) -> StepSample:
        step = StepSample(0.0, requests, requests * context, tokens, tokens * tokens / 2)
        took_s = seconds(step) * self.slowdown * max(0.1, self._random.gauss(1, self._noise))
        if self._random.random() < self._outliers:
            took_s *= self._random.uniform(3, 20)
        return step._replace(seconds=took_s)

    def decodes(
        self, count: int, requests: Iterable[int] = (1, 4, 16, 64), context: int = 1000
    ) -> list[StepSample]:
        return [self.step(self._random.choice([*requests]), context) for _ in range(count)]

    def mixed(
        self, count: int, tokens: Iterable[int] = (32, 200, 700, 1500, 4000)
    ) -> list[StepSample]:
        return [
            self.step(self._random.choice([0, 4, 16]), 500, self._random.choice([*tokens]))
            for _ in range(count)
        ]


def feed(fit: CostFit, steps: list[StepSample], batch: int = 40) -> CostModel:
    for begin in range(0, len(steps), batch):
        fit.take(steps[begin : begin + batch])
    return fit.model


def error(model: CostModel, step: StepSample) -> float:
    """Return the relative error of a prediction."""
    fit = model.prefill if step.prefill_tokens else model.decode
    assert fit is not None
    return abs(fit.predict(step.features) / seconds(step) - 1)


def test_predictions_of_unseen_loads_are_within_ten_percent() -> None:
    engine = Engine()
    fit = CostFit()
    model = feed(fit, engine.decodes(800) + engine.mixed(800))
    unseen = [engine.step(n, c) for n in (2, 8, 24, 40, 100) for c in (300, 1000, 3000)]
    assert median(error(model, step) for step in unseen) < 0.05
    assert max(error(model, step) for step in unseen) < 0.2
    assert (
        median(error(model, step) for step in engine.mixed(100, (64, 400, 1000, 2500, 8000))) < 0.05
    )


def test_interval_holds_nine_of_ten_noisy_times() -> None:
    outcomes: list[bool] = []
    engine = Engine(noise=0.1)
    fit = CostFit(on_outcome=lambda name, ratio, is_covered: outcomes.append(is_covered))
    feed(fit, engine.decodes(600))
    outcomes.clear()
    feed(fit, engine.decodes(1000, (2, 8, 32)))
    assert len(outcomes) == 1000
    assert 0.85 <= sum(outcomes) / len(outcomes) <= 0.95


@pytest.mark.parametrize("slowdown", [0.5, 1.5])
def test_predictions_follow_a_changed_engine(slowdown: float) -> None:
    engine = Engine()
    fit = CostFit()
    feed(fit, engine.decodes(800))
    assert fit.decode.num_changes == 0
    engine.slowdown = slowdown
    model = feed(fit, engine.decodes(60, (4,)), batch=10)
    assert fit.decode.num_changes == 1
    assert model.decode is not None
    for requests in (4, 16):  # what is not measured any more changes alike
        step = engine.step(requests, 1000)
        assert model.decode.predict(step.features) == pytest.approx(
            slowdown * seconds(step), rel=0.12
        )


def test_new_load_is_no_change_of_the_engine() -> None:
    """An engine that computes 9 to 16 requests as 16 takes other times than any fit."""
    engine = Engine(noise=0.001, outliers=0.0)
    fit = CostFit()
    feed(fit, engine.decodes(400, (1, 2, 8)))
    feed(fit, [engine.step(16, 1000)._replace(decode_requests=n) for n in (9, 10) * 40])
    feed(fit, engine.decodes(80, (250,), context=200))
    feed(fit, engine.decodes(80, (28,), context=8000))
    assert fit.decode.num_changes == 0


def test_predictions_ignore_an_outlier() -> None:
    engine = Engine(noise=0.01, outliers=0.0)
    fit = CostFit()
    steps = engine.decodes(100)
    for at in (0, 1, 50, 60):
        steps[at] = steps[at]._replace(seconds=5.0)
    assert error(feed(fit, steps), engine.step(8, 1000)) < 0.08


def test_predictions_of_one_step_kind_are_finite_for_others() -> None:
    engine = Engine()
    fit = CostFit()
    model = feed(fit, engine.decodes(100, (8,)))  # all features are collinear
    assert error(model, engine.step(8, 1000)) < 0.05
    assert model.readable() == model
    assert model.prefill is None
    assert model.decode is not None
    assert 0 < model.decode.predict(StepSample(0.0, 300, 300_000).features) < 10
    assert model.prefill_steps_s(100, 0, WORK) is None


def test_prior_predicts_until_there_are_samples() -> None:
    prior = CostModel(decode=Fit((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.5, 2.0, 0), step_tokens=512)
    engine = Engine()
    fit = CostFit(prior)
    assert fit.model == prior
    assert feed(fit, engine.decodes(20)) == prior
    assert error(feed(fit, engine.decodes(400)), engine.step(8, 1000)) < 0.1
    assert fit.model.decode is not None
    assert fit.model.decode.num_samples > 0


@pytest.mark.parametrize("scheduled_steps", [0, 1])
def test_queued_calls_predict_the_first_token(scheduled_steps: int) -> None:
    """Every step takes 10 ms and computes 100 prompt tokens, and every call takes 5 ms besides.

    Some engines have already scheduled the step after the running one when a call arrives.
    """
    fit = CostFit(CostModel(prefill=Fit((0.01, *[0.0] * 9), 0.9, 1.1, 0), step_tokens=100))
    rnd = random.Random(1)
    for _ in range(60):
        tokens = rnd.randint(10, 500)
        queued = rnd.choice([0, rnd.randint(0, 1000)])
        running = min(queued, 100)
        wait_steps = (rnd.random() + scheduled_steps) * (running > 0)
        took_s = 0.005 + 0.01 * (wait_steps + -(-(queued - running + tokens) // 100))
        fit.take([], [CallSample(took_s, tokens, 0, EngineWork(0, 0, queued))])
    for queued, steps in ((0, 3), (100, 3.5 + scheduled_steps), (800, 10.5 + scheduled_steps)):
        first_token = fit.model.first_token
        assert first_token is not None
        predicted_s = fit.model.first_token_s(250, 0, EngineWork(0, 0, queued))
        took_s = 0.005 + 0.01 * steps
        assert predicted_s == pytest.approx(took_s, rel=0.08)
        assert first_token.low * predicted_s < took_s < first_token.high * predicted_s


def test_fetching_calls_predict_time_from_the_prompt() -> None:
    fit = CostFit()
    for number in range(60):
        tokens = 100 + 50 * number
        fit.take([], [CallSample(0.003 + tokens * 1e-5, tokens, 0, WORK, fetches_kv=True)])
    predicted_s = fit.model.kv_transfer_s(5000)
    assert predicted_s == pytest.approx(0.053, rel=0.05)
    feed(fit, Engine().mixed(40))
    fit.take([], [CallSample(0.02, 168, 0, WORK)])  # an aggregated one, such as a probe
    assert fit.model.first_token is not None
    assert fit.model.kv_transfer_s(5000) == predicted_s


@pytest.mark.parametrize("shares_network", [True, False])
def test_fits_of_kv_transfers_tell_if_they_wait_for_others(shares_network: bool) -> None:
    fit = CostFit()
    draw = random.Random(3)
    now = 0.0
    free_at = 0.0  # of the network
    under_way: list[tuple[float, int]] = []
    for _ in range(400):
        now += draw.expovariate(4.0)
        under_way = [(until, tokens) for until, tokens in under_way if until > now]
        tokens = draw.choice([1000, 4000, 8000])
        free_at = (max(now, free_at) if shares_network else now) + tokens * 2.5e-5
        others = sum(tokens for _, tokens in under_way)
        fit.take([], [CallSample(0.01 + free_at - now, tokens, 0, WORK, True, others)])
        under_way.append((free_at, tokens))
    model = fit.model
    assert model.kv_transfer_s(8000) == pytest.approx(0.21, rel=0.2)
    # Some KV of the others was fetched before, and this is not in the sample.
    waiting_s = model.kv_transfer_s(8000, other_tokens=16_000) - model.kv_transfer_s(8000)
    if not shares_network:
        assert waiting_s < 0.02
        return
    assert 0.2 < waiting_s <= 0.4
    # What is fetched in the meantime need not be waited for.
    later_s = model.kv_transfer_s(8000, other_tokens=16_000, after_s=0.1)
    assert later_s == pytest.approx(model.kv_transfer_s(8000) + waiting_s - 0.1)
    assert model.kv_transfer_s(8000, 16_000, after_s=9.0) == model.kv_transfer_s(8000)


def test_calls_alone_do_not_displace_calls_beside_others() -> None:
    fit = CostFit()
    for number in range(300):
        other_tokens = 8000 * (number % 3) if number < 150 else 0
        took_s = 0.01 + 2.5e-5 * (4000 + other_tokens)
        fit.take([], [CallSample(took_s, 4000, 0, WORK, True, other_tokens)])
    assert fit.model.kv_transfer_s(4000, other_tokens=8000) == pytest.approx(0.31, rel=0.1)


def test_calls_that_waited_for_space_do_not_count_for_long() -> None:
    """They look as if KV of the others delayed them, and later calls beside others are rare."""
    fit = CostFit()
    draw = random.Random(2)

    def call(other_tokens: int, waiting_s: float = 0.0) -> None:
        tokens = draw.choice([1000, 4000, 8000])
        took_s = 0.01 + 2.5e-6 * tokens + waiting_s
        fit.take([], [CallSample(took_s, tokens, 0, WORK, True, other_tokens)])

    for _ in range(200):
        call(0)
    for _ in range(40):
        call(draw.randint(1000, 30_000), draw.uniform(3, 8))
    assert fit.model.kv_transfer_s(8000, other_tokens=16_000) > 0.5
    for number in range(60):
        call(2000 if number % 4 == 0 else 0)
    assert fit.model.kv_transfer_s(8000, other_tokens=16_000) < 0.1


def test_calls_in_a_full_batch_recover_predictions() -> None:
    fit = CostFit()
    rnd = random.Random(1)

    def call(count: int, call_s: float) -> float:
        for _ in range(count):
            tokens = rnd.choice([500, 1000, 2000, 4000])
            fit.take(
                [],
                [CallSample((call_s + tokens * 1e-5) * rnd.gauss(1, 0.05), tokens, 0, WORK, True)],
            )
        return fit.model.kv_transfer_s(2000)

    assert call(400, 0.02) == pytest.approx(0.04, rel=0.1)
    call(20, 5.0)
    assert call(60, 0.02) == pytest.approx(0.04, rel=0.1)
    assert fit.kv_transfer.num_changes == 0


def test_fits_with_many_samples_do_not_delay_others() -> None:
    engine = Engine()
    fit = CostFit()
    calls = [CallSample(0.05, 500, 0, WORK, fetches_kv=True)] * 40
    model = fit.take(engine.decodes(800) + engine.mixed(40), calls)
    assert None not in (model.decode, model.prefill, model.first_token, model.kv_transfer)


def test_learning_from_damaged_samples_keeps_last_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    steps = deque[StepSample]()
    fit = CostFit(steps=steps)
    steps += engine.decodes(100)
    model = fit.learn(1.0)
    assert model.decode is not None
    steps += [
        StepSample(0.01, 4, 1000, 10, attention_pairs=float("inf")),
        StepSample(float("nan"), 4, 1000),
    ]
    assert fit.learn(2.0).decode == model.decode
    assert fit.model.prefill is None
    model = fit.model
    monkeypatch.setattr(fit.decode, "refit", lambda: 1 / 0)
    steps += engine.decodes(10)
    assert fit.learn(3.0) == model
    assert "the cost model could not learn from 10 steps and 0 calls" in caplog.text


def test_fits_of_another_release_are_left_out() -> None:
    good = Fit((0.01, *[0.0] * 9), 0.9, 1.1, 7)
    transfers = Fit((0.01, 0.0), 0.9, 1.1, 7)  # without the term of other calls
    model = CostModel(prefill=good, step_tokens=9)
    assert model.readable() == model
    assert msgspec.structs.replace(model, kv_transfer=transfers).readable() == model
    for bad in (
        Fit((0.01,), 0.9, 1.1, 7),
        Fit((float("nan"), *[0.0] * 9), 0.9, 1.1, 7),
        Fit((-1.0, *[0.0] * 9), 0.9, 1.1, 7),
        Fit((1e308, *[0.0] * 9), 0.9, 1.1, 7),
        Fit((0.01, *[0.0] * 9), 1.1, 0.9, 7),
    ):
        assert CostModel(prefill=bad).readable() == CostModel()

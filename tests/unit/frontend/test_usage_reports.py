"""What frontend processes tell each other: shares of the workers, tokens of clients, usage of keys."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.access.api_keys import ApiKey, digest_of
from dynamo_trtllm.access.key_usage import SLOT_S, UsageTable
from dynamo_trtllm.access.other_frontends import REPORT_AGE_S
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits
from dynamo_trtllm.frontend.requests.token_counters import BELOW_TOKENS, Client
from dynamo_trtllm.frontend.requests.usage_reports import UsageReports, shares
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import Stage
from dynamo_trtllm.frontend.routing.worker_capacity import WINDOW
from dynamo_trtllm.protocol.errors import RateLimitExceeded
from dynamo_trtllm.protocol.frontend_usage import FrontendUsage, ModelUsage
from dynamo_trtllm.protocol.messages import ClientShare
from tests.kit.admission import Clock, acquire, left, wait_until_loaded

MODEL = "m"
NOTHING = (0, 0, 0)


class Process:
    """A process of a frontend without workers, and what it knows of the others."""

    def __init__(self, clock: Clock, keys: UsageTable | None = None) -> None:
        self.limits = AdmissionLimits(FrontendConfig(max_inflight=1), ClusterView())
        self.usage_reports = UsageReports(self.limits, lambda model: False, keys, clock)
        self.window = self.limits.start_windows.window(MODEL)
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, client: str, tokens: int = 1) -> None:
        """Send a request. The first one begins, and the others wait."""

        async def run() -> None:
            places = self.window.places_for(1, tokens)
            await acquire(
                self.limits.choice_permits, 1, client, places=places, prompt_tokens=tokens
            )

        self.tasks.append(asyncio.create_task(run()))
        await wait_until_loaded()

    def share_of(self, client: str) -> ClientShare:
        counters = self.limits.choice_permits.counters(MODEL)
        return counters.share(counters.counter(Client(client)))

    def value(self, client: str) -> float:
        return self.limits.choice_permits.counters(MODEL).counter(Client(client)).value

    @property
    def share(self) -> float:
        return self.window.usages[0].limit / WINDOW


def report_all(*processes: Process) -> None:
    """Let all processes know the reports of all."""
    reports = [process.usage_reports.report() for process in processes]
    for process in processes:
        for report in reports:
            process.usage_reports.receive(report)


async def test_busy_processes_divide_workers_by_waiting_clients() -> None:
    clock = Clock()
    one, two = Process(clock), Process(clock)
    for client in "xabc":
        await one.send(client)
    for client in "xd":
        await two.send(client)
    report_all(one, two)
    assert (one.share, two.share) == (0.75, 0.25)
    await left(*one.tasks, *two.tasks)


async def test_client_of_two_processes_has_one_share() -> None:
    clock = Clock()
    processes = [Process(clock) for _ in range(3)]
    for process, client in zip(processes, "aab", strict=True):
        await process.send("x")
        await process.send(client)
    report_all(*processes)
    assert [process.share for process in processes] == [0.25, 0.25, 0.5]
    await left(*(task for process in processes for task in process.tasks))


def test_weights_of_keys_count_between_processes() -> None:
    other = ModelUsage(taken=NOTHING, waiting={"b": 1.0}, tokens={})
    until_computed, *_ = shares({"a": 3.0}, [other])
    assert until_computed == WINDOW * 3 // 4


def test_process_takes_what_idle_others_leave() -> None:
    taken = (WINDOW // 8, 0, WINDOW // 4)
    idle = ModelUsage(taken=taken, waiting={}, tokens={})
    assert shares({"a": 1.0}, [idle]) == [WINDOW * 7 // 8, WINDOW, WINDOW * 3 // 4]


def test_process_has_a_share_when_others_take_all() -> None:
    full = ModelUsage(taken=(WINDOW, WINDOW, WINDOW), waiting={}, tokens={})
    assert shares({}, [full]) == [WINDOW // 2] * 3
    assert shares({}, []) == [WINDOW] * 3


async def test_silent_process_gives_back_its_share() -> None:
    clock = Clock()
    one, two = Process(clock), Process(clock)
    for client in "xa":
        await one.send(client)
        await two.send(client)
    report_all(one, two)
    assert one.share == 0.5
    clock.now += REPORT_AGE_S
    one.usage_reports.set_shares()
    assert one.share == 1.0
    await left(*one.tasks, *two.tasks)


async def test_tokens_of_a_client_count_at_all_processes_once() -> None:
    clock = Clock()
    one, two = Process(clock), Process(clock)
    await one.send("a", tokens=500)
    report_all(one, two)
    report_all(one, two)
    assert (one.value("a"), two.value("a")) == (500, 500)
    await left(*one.tasks)


async def test_process_without_usage_reports_nothing() -> None:
    process = Process(Clock())
    assert not process.usage_reports.report().models
    await process.send("a")
    assert process.usage_reports.report().models
    assert not process.usage_reports.report().models


async def test_reports_have_what_waits_at_the_process() -> None:
    process = Process(Clock())
    for client, tokens in (("a", 10), ("a", 20), ("b", 300)):
        await process.send(client, tokens)
    # Workers have space, and the choices wait for permits of this frontend.
    usage = process.usage_reports.report().models[MODEL]
    assert (usage.queued_choices, usage.queued_tokens) == (0, 0)
    process.window.full_stage = Stage.PREFILL
    usage = process.usage_reports.report().models[MODEL]
    assert (usage.queued_choices, usage.queued_tokens) == (2, 320)
    assert not usage.waits_for_decode
    # A fourth of recent prompts was cached.
    process.window.note_cached(100, 25)
    process.window.full_stage = Stage.RUN
    usage = process.usage_reports.report().models[MODEL]
    assert (usage.queued_choices, usage.queued_tokens) == (2, 240)
    assert usage.waits_for_decode
    await left(*process.tasks)
    assert MODEL not in process.usage_reports.report().models


def limited_key(**limits: int) -> ApiKey:
    return ApiKey(name="a", sha256=digest_of("a").hex(), **limits)


async def test_limits_of_a_key_hold_over_frontends() -> None:
    clock = Clock()
    key = limited_key(requests_per_minute=3, tokens_per_minute=100, concurrent_generations=2)
    tables = [UsageTable(clock=clock) for _ in range(2)]
    processes = [Process(clock, table) for table in tables]
    here, there = (table.usage(key) for table in tables)
    assert here is not None
    assert there is not None
    for _ in range(3):
        there.count_request()
    charge = there.charge(2, 60)
    report_all(*processes)
    with pytest.raises(RateLimitExceeded, match="3 requests per minute"):
        here.count_request()
    with pytest.raises(RateLimitExceeded, match="already runs 2 generations"):
        here.charge(1, 1)
    charge.close(50)
    report_all(*processes)
    with pytest.raises(RateLimitExceeded, match="100 tokens per minute"):
        here.charge(1, 51)
    here.charge(1, 50)
    clock.now += 17 * SLOT_S
    report_all(*processes)
    here.count_request()


async def test_generations_of_an_ended_frontend_do_not_count() -> None:
    clock = Clock()
    key = limited_key(concurrent_generations=2, tokens_per_minute=100)
    tables = [UsageTable(clock=clock) for _ in range(2)]
    processes = [Process(clock, table) for table in tables]
    here, there = (table.usage(key) for table in tables)
    assert here is not None
    assert there is not None
    there.charge(2, 60)
    report_all(*processes)
    clock.now += REPORT_AGE_S
    with pytest.raises(RateLimitExceeded, match="100 tokens"):
        here.charge(1, 41)
    here.charge(1, 40)


async def test_processes_of_one_frontend_count_keys_once() -> None:
    clock = Clock()
    table = UsageTable(clock=clock)
    one, two = Process(clock, table), Process(clock, table)
    usage = table.usage(limited_key(requests_per_minute=2))
    assert usage is not None
    usage.count_request()
    report_all(one, two)
    usage.count_request()


async def test_report_of_unknown_model_changes_nothing() -> None:
    process = Process(Clock())
    process.usage_reports.receive(
        FrontendUsage(1, 1, {"other": ModelUsage(NOTHING, {"a": 1.0}, {"a": 9.0})}, {})
    )
    assert process.share == 1.0
    assert set(process.limits.start_windows.by_model) == {MODEL}


async def test_client_is_compared_with_those_at_other_processes() -> None:
    clock = Clock()
    one, two = Process(clock), Process(clock)
    await one.send("light")
    one.limits.choice_permits.release(1, "light")
    for _ in range(3):
        await two.send("flood", tokens=10 * BELOW_TOKENS)
    report_all(one, two)
    assert one.share_of("light") is ClientShare.BELOW
    assert two.share_of("flood") is ClientShare.EVEN
    await one.send("light")
    report_all(one, two)
    assert two.share_of("flood") is ClientShare.ABOVE
    clock.now += REPORT_AGE_S
    for process in (one, two):
        process.usage_reports.set_shares()
    assert two.share_of("flood") is ClientShare.EVEN
    await left(*one.tasks, *two.tasks)


async def test_client_is_not_behind_those_that_come_to_other_processes() -> None:
    clock = Clock()
    one, two = Process(clock), Process(clock)
    await one.send("early", tokens=10 * BELOW_TOKENS)
    for _ in range(2):
        await two.send("late")
    report_all(one, two)
    assert one.share_of("early") is ClientShare.EVEN
    assert one.value("late") >= 10 * BELOW_TOKENS  # what early got before it came counts for both
    await left(*one.tasks, *two.tasks)


async def test_report_says_for_which_models_all_pairs_are_quarantined() -> None:
    process = Process(Clock())
    for client in "ab":
        await process.send(client)
    reports = [
        UsageReports(process.limits, lacks_pairs).report()
        for lacks_pairs in (lambda model: model == MODEL, lambda model: False)
    ]
    assert [report.models[MODEL].lacks_pairs for report in reports] == [True, False]

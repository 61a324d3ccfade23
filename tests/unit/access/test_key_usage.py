"""The limits of API keys, over one and several processes, with a clock of the test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dynamo_trtllm.access.api_keys import ApiKey, digest_of
from dynamo_trtllm.access.key_usage import KeyUsage, UsageTable, shared_memory
from dynamo_trtllm.protocol.errors import ExceedsKeyLimit, RateLimitExceeded


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory() -> Iterator[int]:
    file = shared_memory(3)
    yield file
    os.close(file)


def key(name: str = "alice", **limits: int) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(name).hex(), **limits)  # type: ignore[arg-type]


def usage_of(table: UsageTable, api_key: ApiKey) -> KeyUsage:
    usage = table.usage(api_key)
    assert usage is not None
    return usage


def test_requests_of_any_minute_stay_within_the_limit(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(requests_per_minute=5))
    admitted: list[float] = []
    for _ in range(400):  # 200 s
        try:
            usage.count_request()
            admitted.append(clock.now_s)
        except RateLimitExceeded:
            pass
        clock.now_s += 0.5
    for begin_s in admitted:
        assert sum(begin_s <= time_s < begin_s + 60 for time_s in admitted) <= 5
    assert len(admitted) >= 15  # three full minutes, and a little


def test_rejected_request_says_when_the_next_one_is_allowed(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(requests_per_minute=2))
    usage.count_request()
    clock.now_s += 30
    usage.count_request()
    with pytest.raises(RateLimitExceeded) as caught:
        usage.count_request()
    assert 30 <= caught.value.retry_after_s <= 34
    clock.now_s += caught.value.retry_after_s - 1.5
    with pytest.raises(RateLimitExceeded):
        usage.count_request()
    clock.now_s += 1.5
    usage.count_request()


def test_limits_hold_over_all_processes(clock: Clock, memory: int) -> None:
    alice = key(requests_per_minute=4, tokens_per_minute=100, concurrent_generations=3)
    usages = []
    for number in (1, 2, 3):
        table = UsageTable(memory, number, 3, clock)
        usage_of(table, key("bob", requests_per_minute=9)).count_request()  # other rows
        usages.append(usage_of(table, alice))
        clock.now_s += 4  # one process has not counted for some time when another one does
    first, second, third = usages
    for usage in (first, second, third, second):
        usage.count_request()
    for usage in usages:
        with pytest.raises(RateLimitExceeded, match="4 requests"):
            usage.count_request()
    charge = first.charge(2, 60)
    with pytest.raises(RateLimitExceeded, match=r"3 at once.*when these have ended"):
        second.charge(2, 1)
    with pytest.raises(RateLimitExceeded, match="100 tokens"):
        third.charge(1, 41)
    third.charge(1, 40)
    with pytest.raises(RateLimitExceeded):
        second.check()
    charge.close(10)
    second.charge(2, 50)


def test_other_keys_have_their_own_limits(clock: Clock) -> None:
    table = UsageTable(clock=clock)
    usage_of(table, key("alice", requests_per_minute=1)).count_request()
    usage_of(table, key("bob", requests_per_minute=1)).count_request()


def test_keys_that_are_read_again_keep_their_usage(clock: Clock) -> None:
    table = UsageTable(clock=clock)
    usage_of(table, key(requests_per_minute=1)).count_request()
    with pytest.raises(RateLimitExceeded):
        usage_of(table, key(requests_per_minute=1)).count_request()
    usage_of(table, key(requests_per_minute=2)).count_request()


def test_process_that_starts_again_runs_no_generations(clock: Clock, memory: int) -> None:
    limited = key(requests_per_minute=1, concurrent_generations=1)
    before = usage_of(UsageTable(memory, 1, 3, clock), limited)
    before.count_request()
    before.charge(1, 0)
    after = usage_of(UsageTable(memory, 1, 3, clock), limited)
    after.charge(1, 0)
    with pytest.raises(RateLimitExceeded):
        after.count_request()  # the minute goes on


def test_process_that_starts_again_replaces_its_reports(clock: Clock, memory: int) -> None:
    """Its running generations have ended, and its requests count once."""
    limited = key(requests_per_minute=3, concurrent_generations=1)
    other = UsageTable(clock=clock)
    before = UsageTable(memory, 1, 3, clock)
    usage = usage_of(before, limited)
    usage.count_request()
    usage.charge(1, 0)
    other.others.report(before.process_id, before.totals())
    after = UsageTable(memory, 1, 3, clock)
    other.others.report(after.process_id, after.totals())
    usage_of(other, limited).charge(1, 0)
    usage_of(after, limited).count_request()
    other.others.report(after.process_id, after.totals())
    usage_of(other, limited).count_request()


def test_tokens_are_corrected_at_the_end(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(tokens_per_minute=100))
    charge = usage.charge(1, 100)
    with pytest.raises(RateLimitExceeded):
        usage.check()
    clock.now_s += 20
    charge.close(30)
    charge.close(99)  # only the first call counts
    usage.check()
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "70"
    usage.charge(1, 70).close(80)  # the output was longer than expected
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "0"
    clock.now_s += 45  # the first charge has left the minute, the second one has not
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "20"


def test_tokens_of_a_long_request_are_not_returned_twice(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(tokens_per_minute=100))
    charge = usage.charge(1, 100)
    clock.now_s += 90
    charge.close(0)
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "100"


def test_request_larger_than_the_limit_says_so(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(tokens_per_minute=100))
    with pytest.raises(ExceedsKeyLimit, match=r"take 101 tokens.* 1 more than the 100 tokens per"):
        usage.charge(1, 101)


def test_error_of_running_generations_says_what_helps(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(concurrent_generations=2))
    with pytest.raises(ExceedsKeyLimit, match=r"has 3 choices.* 1 more than the 2 concurrent"):
        usage.charge(3, 0)
    usage.charge(2, 0)
    # The body of the next request is not read, so its number of choices is not known.
    with pytest.raises(RateLimitExceeded, match=r"already runs 2 generations.*when one has ended"):
        usage.check()


def test_rejected_charge_counts_nothing(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(tokens_per_minute=100, concurrent_generations=1))
    for generations, tokens in ((1, 101), (2, 1)):
        with pytest.raises(ExceedsKeyLimit):
            usage.charge(generations, tokens)
    usage.charge(1, 100)


def test_headers_name_the_limits_per_minute(clock: Clock) -> None:
    usage = usage_of(UsageTable(clock=clock), key(requests_per_minute=5, tokens_per_minute=10))
    usage.count_request()
    usage.charge(1, 3)
    assert usage.headers() == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "64.0s",
        "x-ratelimit-limit-tokens": "10",
        "x-ratelimit-remaining-tokens": "7",
        "x-ratelimit-reset-tokens": "64.0s",
    }


def test_key_without_limits_is_not_counted() -> None:
    assert UsageTable().usage(key()) is None

"""What the console computes: means, quantiles, slow workers, and reasons in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_trtllm.frontend.console.activity import RequestActivity
from dynamo_trtllm.frontend.console.health_reasons import of_changes, of_requests
from dynamo_trtllm.frontend.console.snapshot import points_of, quantile, ttft_parts
from dynamo_trtllm.frontend.console.worker_times import RecentTimes, slow_ratios
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.frontend.routing.model_registry import WorkerChange
from dynamo_trtllm.protocol.frontend_samples import RequestRow, WorkerProgress
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case
from tests.kit.instances import make_instance

NOW = 1000.0


def row(**fields: Any) -> RequestRow:
    about: dict[str, Any] = {
        "id": "0123456789abcdef",
        "model": "tiny",
        "endpoint": "chat",
        "code": "ok",
        "status": 200,
        "finish": "stop",
        "begun_at": NOW,
        "total_s": 2.0,
        "first_token_s": 1.0,
        "prefill": "a",
        "decode": "b",
        "prompt_tokens": 120,
        "cached_tokens": 20,
        "output_tokens": 11,
        "retries": 0,
        "migrations": 0,
        "kv_bytes": 0,
        "kv_transfer_s": 0.0,
        "phases": (),
    }
    return RequestRow(**about | fields)


@each_case(
    ("seconds", "slow"),
    [
        ({}, {}),
        ({1: 0.05}, {}),
        ({1: 0.01, 2: 0.01, 3: 0.011}, {}),
        ({1: 0.01, 2: 0.012, 3: 0.03}, {3: pytest.approx(0.03 / 0.011)}),
        ({1: 0.01, 2: 0.04}, {2: pytest.approx(4.0)}),
        ({1: 0.0001, 2: 0.0003}, {}),
    ],
)
def test_slow_workers_are_those_above_the_median_of_others(
    seconds: dict[int, float], slow: dict[int, Any]
) -> None:
    assert slow_ratios(seconds) == slow


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),
        ([1, 1, 0], 1.0, 2.0),
        ([0, 0, 3], 0.5, 2.0),
    ],
)
def test_quantile_is_interpolated_within_its_bucket(
    counts: list[int], share: float, expected: float | None
) -> None:
    assert quantile(counts, [1.0, 2.0], share) == expected


def test_ttft_parts_have_all_phases_before_the_first_token() -> None:
    ttft_phases = (
        ("frontend", "tokenize", 0.1),
        ("prefill", "queue", 0.2),
        ("prefill", "prefill", 0.3),
        ("decode", "kv_transfer", 0.05),
        ("decode", "send", 0.01),
        ("decode", "a_new_phase", 0.02),
    )
    phases = (*ttft_phases, ("decode", "decode", 5.0))
    parts = ttft_parts(row(phases=phases, ttft_phases=ttft_phases))
    assert parts["frontend"] == 0.1
    assert parts["kv_transfer"] == 0.05
    assert sum(parts.values()) == pytest.approx(0.68)


def test_points_of_ended_requests_are_by_second_of_their_end() -> None:
    rows = [row(), row(code="deadline"), row(begun_at=NOW + 5, first_token_s=None)]
    points = points_of(rows)
    assert [point.at for point in points] == [NOW + 2, NOW + 7]
    assert (points[0].requests_per_s, points[0].failures_per_s) == (2, 1)
    assert points[0].ttft_p50_s == 1.0
    assert points[0].gap_p50_s == pytest.approx(0.1)
    assert points[1].ttft_p50_s is None


def test_times_of_workers_and_pairs_come_from_requests() -> None:
    times = RecentTimes()
    phases = (
        ("prefill", "prefill", 0.5),
        ("decode", "kv_transfer", 0.01),
        ("decode", "decode_wait", 0.1),
        ("decode", "decode", 0.9),
    )
    moved = row(phases=phases, kv_bytes=1000, kv_transfer_s=0.01)
    times.add_request(moved, with_tokens=True)
    assert times.prompt_token_s(0xA) == pytest.approx(0.5 / 100)
    assert times.token_s(0xB) == pytest.approx(0.1)
    assert times.bytes_per_s((0xA, 0xB)) == pytest.approx(100_000)
    times.keep_only([0xB])
    assert times.prompt_token_s(0xA) is None
    assert times.bytes_per_s((0xA, 0xB)) is None


@pytest.mark.parametrize("ids", ["", "a,b", "no id"])
def test_times_of_several_or_unknown_workers_are_left_out(ids: str) -> None:
    times = RecentTimes()
    phases = (("prefill", "prefill", 0.5),)
    times.add_request(row(phases=phases, prefill=ids, decode=ids), with_tokens=True)
    assert times.workers == {}


def test_times_of_long_ago_are_not_shown() -> None:
    times = RecentTimes()
    times.add_progress(WorkerProgress(1, 1, 10, 0.1, 10, 0.0), 1.0)
    for _ in range(60):
        times.age()
    assert times.token_s(1) is None
    assert times.workers[1].streams == 0


def change(instance_id: int, at: float, *, is_added: bool) -> WorkerChange:
    return WorkerChange(make_instance(instance_id, role=Role.DECODE), is_added, at)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({"ok": 3, "cancelled": 5}, []),
        (
            {"ok": 3, "cancelled": 1, "overloaded": 2, "timeout": 4},
            ["6 of 10 requests failed in the last minute: timeout (4), overloaded (2)."],
        ),
    ],
)
def test_requests_that_clients_cancelled_are_no_failures(
    codes: dict[str, int], said: list[str]
) -> None:
    assert [reason.text for reason in of_requests(codes, 0, [])] == said


def test_worker_that_left_is_missed_until_another_registers() -> None:
    left = change(1, NOW, is_added=False)
    (reason,) = of_changes([left], NOW + 12)
    assert reason.text == (
        "The decode worker 1 left 12 s ago, and no decode worker has registered since."
    )
    replaced = [left, change(2, NOW + 5, is_added=True)]
    assert list(of_changes(replaced, NOW + 12)) == []
    assert list(of_changes([left], NOW + 3600)) == []


# --- the activity of a process --------------------------------------------------------------------


class Stream:
    """The part of a choice that activity reads."""

    def __init__(self, worker: int | None) -> None:
        self.num_tokens = 0
        self.is_running = True
        self.timeline = SimpleNamespace(
            decode_instance=worker, first_s=None, last_s=0.0, decode_begun_s=None
        )

    def token(self, at_s: float) -> None:
        self.early_token(at_s)
        if self.timeline.decode_begun_s is None:
            self.timeline.decode_begun_s = at_s

    def early_token(self, at_s: float) -> None:
        """Send a token of a prefill worker."""
        self.num_tokens += 1
        if self.timeline.first_s is None:
            self.timeline.first_s = at_s
        self.timeline.last_s = at_s


def activity_with(stream: Stream, now_s: float) -> RequestActivity:
    activity = RequestActivity(lambda: now_s)
    timeline = SimpleNamespace(choices=[stream])
    activity._on_started(cast("RequestTimeline", timeline_key(timeline)))
    return activity


def timeline_key(timeline: SimpleNamespace) -> Any:
    """Return an object with these attributes that can be a key."""
    return type("Timeline", (), vars(timeline))()


def test_sample_counts_the_tokens_of_running_streams() -> None:
    stream = Stream(5)
    activity = activity_with(stream, 12.0)
    activity.begin()
    assert activity.take().workers == (WorkerProgress(5, 1, 0, 0.0, 0, 0.0),)
    for at_s in (10.0, 10.1, 10.3):
        stream.token(at_s)
    (progress,) = activity.take().workers
    assert (progress.tokens, progress.num_gaps) == (3, 2)
    assert progress.gap_s == pytest.approx(0.3)
    assert progress.silent_s == pytest.approx(1.7)
    stream.token(10.5)
    (progress,) = activity.take().workers
    assert (progress.tokens, progress.num_gaps) == (1, 1)
    assert progress.gap_s == pytest.approx(0.2)


def test_pause_after_an_early_token_is_not_of_the_decode_worker() -> None:
    stream = Stream(5)
    activity = activity_with(stream, 12.0)
    activity.begin()
    stream.early_token(10.0)
    (progress,) = activity.take().workers
    assert (progress.tokens, progress.num_gaps, progress.silent_s) == (1, 0, 0.0)
    stream.token(11.0)
    stream.token(11.2)
    (progress,) = activity.take().workers
    assert (progress.tokens, progress.num_gaps) == (2, 2)
    assert progress.gap_s == pytest.approx(0.2)
    assert progress.silent_s == pytest.approx(0.8)


def test_sample_begins_with_the_tokens_that_are_there() -> None:
    stream = Stream(5)
    stream.token(10.0)
    activity = activity_with(stream, 10.0)
    activity.begin()
    assert activity.take().workers[0].tokens == 0


def test_stream_that_no_worker_has_is_not_counted() -> None:
    activity = activity_with(Stream(None), 1.0)
    activity.begin()
    assert activity.take().workers == ()

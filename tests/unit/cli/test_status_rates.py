"""The rates and percentiles that `dynamo-trtllm status --watch` shows."""

from __future__ import annotations

import math

import pytest

from dynamo_trtllm.cli.status_rates import RateMeter, percentile, ttft_buckets
from dynamo_trtllm.cli.status_view import DeploymentReport, ProcessStatus, as_text

INF = math.inf
PAGE = """\
# TYPE dynamo_trtllm_ttft_seconds histogram
dynamo_trtllm_ttft_seconds_bucket{model="a",le="0.1"} 2.0
dynamo_trtllm_ttft_seconds_bucket{model="a",le="+Inf"} 3.0
dynamo_trtllm_ttft_seconds_bucket{le="0.1",model="b"} 1.0
dynamo_trtllm_ttft_seconds_count{model="a"} 3.0
"""


def frontend(requests: float, tokens: float, **buckets: float) -> DeploymentReport:
    limits = {"fast": 0.1, "slow": 1.0, "all": INF}
    process = ProcessStatus(
        name="frontend",
        role="frontend",
        state="ready",
        load={"requests_total": requests, "output_tokens_total": tokens},
        ttft_buckets={limits[name]: count for name, count in buckets.items()},
    )
    return DeploymentReport(namespace="n", name="n", processes=[process])


def watched(*steps: tuple[float, DeploymentReport]) -> str:
    """Return the load of the frontend after these steps: seconds and report."""
    meter = RateMeter()
    for now_s, report in steps:
        meter.add([report], now_s)
    return as_text([steps[-1][1]]).splitlines()[-1]


def test_rates_are_those_since_the_last_look() -> None:
    line = watched((0.0, frontend(10, 100)), (2.0, frontend(13, 500)))
    assert "1.5 requests/s, 200 tokens/s" in line
    assert "TTFT" not in line


def test_first_look_has_totals_and_no_rates() -> None:
    line = watched((0.0, frontend(10, 100)))
    assert "10 requests, 100 tokens" in line
    assert "/s" not in line


def test_frontend_that_began_again_has_no_negative_rate() -> None:
    line = watched((0.0, frontend(10, 5000)), (2.0, frontend(13, 50)))
    assert "13 requests, 50 tokens" in line
    assert "/s" not in line


def test_rates_are_of_ten_seconds_and_percentiles_of_a_minute() -> None:
    line = watched(
        (0.0, frontend(0, 0, fast=0, slow=0, all=0)),
        (50.0, frontend(98, 0, fast=98, slow=98, all=98)),
        (55.0, frontend(100, 1000, fast=98, slow=100, all=100)),
    )
    assert "0.4 requests/s, 200 tokens/s, TTFT p50 51, p99 550 ms" in line


def test_counters_of_a_new_run_begin_again() -> None:
    line = watched((0.0, frontend(10, 100)), (2.0, frontend(1, 5)))
    assert "1 request, 5 tokens" in line


def test_buckets_are_summed_over_other_labels() -> None:
    assert ttft_buckets(PAGE) == {0.1: 3.0, INF: 3.0}


@pytest.mark.parametrize(
    ("buckets", "part", "value"),
    [
        ({}, 0.5, None),
        ({0.1: 0.0, INF: 0.0}, 0.5, None),
        ({0.1: 10.0, 0.2: 10.0, INF: 10.0}, 0.5, 0.05),
        ({0.1: 0.0, 0.2: 10.0, INF: 10.0}, 0.5, 0.15),
        ({0.1: 1.0, INF: 10.0}, 0.99, 0.1),
    ],
)
def test_percentile_is_estimated_within_its_bucket(
    buckets: dict[float, float], part: float, value: float | None
) -> None:
    assert percentile(buckets, part) == pytest.approx(value)

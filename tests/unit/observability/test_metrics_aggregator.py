"""The numbers of several processes as those of one."""

from __future__ import annotations

from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.observability.metrics_aggregator import MetricsAggregator


def page(*parts: str) -> bytes:
    return "".join(parts).encode()


def counter(value: float, labels: str = "") -> str:
    return (
        f"# HELP requests_total finished\n# TYPE requests_total counter\nrequests_total{labels}"
        f" {value}\n"
    )


def gauge(value: float) -> str:
    return f"# HELP inflight now\n# TYPE inflight gauge\ninflight {value}\n"


def memory(value: float) -> str:
    name = "process_resident_memory_bytes"
    return f"# HELP {name} \n# TYPE {name} gauge\n{name} {value}\n"


def values(page: bytes) -> dict[str, float]:
    """By name and labels, formatted as Prometheus does."""
    lines = (
        line.rpartition(" ")
        for line in page.decode().split("\n")
        if line and not line.startswith("#")
    )
    return {sample: float(value) for sample, _, value in lines}


def test_total_sums_only_equal_labels() -> None:
    aggregator = MetricsAggregator()
    for process, parts in (
        ("1", [counter(1, '{model="a"}')]),
        ("2", [counter(2, '{model="a"}'), gauge(5)]),
        ("3", [counter(4, '{model="b \\n\u2028 c"}')]),
    ):
        aggregator.update(process, page(*parts))
    whole = aggregator.total()
    assert values(whole) == {
        'requests_total{model="a"}': 3,
        'requests_total{model="b \\n\u2028 c"}': 4,
        "inflight": 5,
    }
    assert [line for line in whole.decode().split("\n") if line.startswith("# HELP")] == [
        "# HELP requests_total finished",
        "# HELP inflight now",
    ]


def test_ledger_sums_live_processes() -> None:
    aggregator = MetricsAggregator()
    aggregator.update("frontend-1", page(counter(3), gauge(1), memory(100)))
    aggregator.update("frontend-2", page(counter(4), gauge(2), memory(200)))
    aggregator.update("frontend-2", page(counter(5), gauge(0), memory(300)))
    assert values(aggregator.total()) == {
        "requests_total": 8,
        "inflight": 1,
        'process_resident_memory_bytes{process="frontend-1"}': 100,
        'process_resident_memory_bytes{process="frontend-2"}': 300,
    }


def test_ledger_of_ended_process_keeps_only_counters() -> None:
    aggregator = MetricsAggregator()
    aggregator.update("frontend-1", page(counter(3), gauge(1), memory(100)))
    aggregator.update("frontend-2", page(counter(4), gauge(2)))
    aggregator.ended("frontend-1")
    assert values(aggregator.total()) == {"requests_total": 7, "inflight": 2}
    # the one that was started in its place
    aggregator.update("frontend-1", page(counter(1), gauge(1), memory(90)))
    assert values(aggregator.total()) == {
        "requests_total": 8,
        "inflight": 3,
        'process_resident_memory_bytes{process="frontend-1"}': 90,
    }
    aggregator.ended("frontend-1")
    aggregator.ended("frontend-1")
    assert values(aggregator.total()) == {"requests_total": 8, "inflight": 2}


async def test_metrics_of_two_processes_are_summed() -> None:
    mine = FrontendMetrics()
    other = FrontendMetrics()
    aggregator = MetricsAggregator()
    for metrics, count in ((mine, 2), (other, 3)):
        metrics.watch(choices=lambda count=count: count, queued=lambda: 1.0, body_bytes=lambda: 0.0)
        for _ in range(count):
            metrics.request_started()
            metrics.request_finished(model="m", endpoint="chat", code="ok", seconds=0.2)
        metrics.child("itl_seconds", "m").observe(0.02, count)

    async def gather() -> bytes:
        aggregator.update("frontend-1", mine.render())
        aggregator.update("frontend-2", other.render())
        return aggregator.total()

    mine.gather = gather
    text = (await mine.render_all()).decode()
    for line in (
        'dynamo_trtllm_requests_total{code="ok",endpoint="chat",model="m"} 5.0',
        "dynamo_trtllm_inflight 0.0",
        "dynamo_trtllm_choices 5.0",
        "dynamo_trtllm_queued 2.0",
        'dynamo_trtllm_request_seconds_bucket{le="0.25",model="m"} 5.0',
        'dynamo_trtllm_request_seconds_count{model="m"} 5.0',
        'dynamo_trtllm_itl_seconds_bucket{le="+Inf",model="m"} 5.0',
        "# TYPE dynamo_trtllm_itl_seconds histogram",
    ):
        assert line in text.splitlines(), text
    assert 'process_resident_memory_bytes{process="frontend-2"}' in text
    assert text.count("# TYPE dynamo_trtllm_requests_total counter") == 1
    aggregator.ended("frontend-2")
    # histograms stay, too
    assert values(aggregator.total())['dynamo_trtllm_request_seconds_count{model="m"}'] == 5


async def test_metrics_of_one_process_are_its_own() -> None:
    metrics = FrontendMetrics()
    assert b"dynamo_trtllm_inflight 0.0" in await metrics.render_all()
    assert b'process="' not in await metrics.render_all()

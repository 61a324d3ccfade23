import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_trtllm.observability.metrics import (
    MAX_KEYS,
    MAX_WORKERS,
    PREFIX,
    TABLE,
    ClientLoad,
    FrontendMetrics,
    Histogram,
    PlannerMetrics,
    WorkerMetrics,
    read_client_loads,
)
from dynamo_trtllm.observability.outputs import Outputs


def samples(exposition: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("process", "metrics"), [("frontend", FrontendMetrics()), ("worker", WorkerMetrics())]
)
def test_render_declares_every_name_before_use(process, metrics):
    text = metrics.render().decode()
    for row in TABLE:
        assert (f"# TYPE {PREFIX}{row.name} " in text) is any(
            other.name == row.name and other.process == process for other in TABLE
        )


def test_finished_request_returns_inflight_to_zero():
    metrics = FrontendMetrics()
    metrics.request_started()
    metrics.request_started()
    metrics.request_finished(model="m", endpoint="chat", code="ok", seconds=0.3)
    found = samples(metrics.render())
    assert found["inflight", ()] == 1
    assert found["requests_total", (("code", "ok"), ("endpoint", "chat"), ("model", "m"))] == 1
    assert found["request_seconds_sum", (("model", "m"),)] == pytest.approx(0.3)


def test_labels_of_a_histogram_are_compared_as_text():
    histogram = Histogram("seconds", "Seconds", ["number"], buckets=[1.0])
    for number in (7, "7", 7):
        histogram.labels(number).observe(0.5)
    assert histogram.bucket_counts() == (3, 0)


def test_itl_when_tokens_come_together_then_each_counts():
    metrics = FrontendMetrics()
    metrics.child("itl_seconds", "m").observe(0.02, 5)
    metrics.child("itl_seconds", "m").observe(9.0, 1)
    found = samples(metrics.render())
    assert found["itl_seconds_count", (("model", "m"),)] == 6
    assert found["itl_seconds_sum", (("model", "m"),)] == pytest.approx(9.1)
    assert found["itl_seconds_bucket", (("le", "0.015"), ("model", "m"))] == 0
    assert found["itl_seconds_bucket", (("le", "0.02"), ("model", "m"))] == 5
    assert found["itl_seconds_bucket", (("le", "5.0"), ("model", "m"))] == 5
    assert found["itl_seconds_bucket", (("le", "+Inf"), ("model", "m"))] == 6


def test_placed_requests_label_the_busiest_workers():
    metrics = FrontendMetrics()
    placed = {255: 1}
    metrics.by_worker["placed_requests"] = lambda: placed
    assert samples(metrics.render())["placed_requests", (("worker", "ff"),)] == 1
    placed = {number: number for number in range(1000, 1000 + MAX_WORKERS + 9)}
    found = {
        key: value
        for key, value in samples(metrics.render()).items()
        if key[0] == "placed_requests"
    }
    assert sorted(found.values()) == list(range(1009, 1009 + MAX_WORKERS))


def test_phases_are_counted_by_model_and_role():
    metrics = FrontendMetrics()
    metrics.observe_phases(model="m", phases={("prefill", "queue"): 0.1, ("decode", "queue"): 0.2})
    metrics.child("kv_bytes_total", "nixl/ucx").inc(100)
    found = samples(metrics.render())
    for role, seconds in (("prefill", 0.1), ("decode", 0.2)):
        assert (
            found["phase_seconds_sum", (("model", "m"), ("phase", "queue"), ("role", role))]
            == seconds
        )
    assert found["kv_bytes_total", (("transport", "nixl/ucx"),)] == 100


def test_kv_collections_are_counted_by_outcome():
    metrics = FrontendMetrics()
    for outcome in ("ok", "ok", "overloaded"):
        metrics.kv_collected(outcome)
    text = metrics.render().decode()
    assert 'dynamo_trtllm_kv_collections_total{outcome="ok"} 2.0' in text
    assert 'dynamo_trtllm_kv_collections_total{outcome="overloaded"} 1.0' in text


def test_worker_shows_the_numbers_of_its_engine():
    metrics = WorkerMetrics()
    metrics.child("requests_total", "prefill", "ok").inc()
    engine = {
        "running": 1,
        "waiting": 2,
        "kv_blocks_used": 3,
        "kv_blocks_total": 4,
        "pending_kv_transfers": 5,
        "pending_kv_blocks": 6,
        "kv_checksum_mismatches": 7,
        "kv_event_gaps": 11,
        "kv_events_unreadable": 12,
        "leaked_kv_blocks": 8,
        "queued_prefill_tokens": 9,
        "context_tokens": 10,
    }
    for _ in range(2):  # a counter counts nothing twice
        metrics.render(engine)
    found = samples(metrics.render())
    for counter in ("kv_checksum_mismatches", "kv_event_gaps", "kv_events_unreadable"):
        assert found[f"{counter}_total", ()] == engine.pop(counter)
    for name, value in engine.items():
        assert found[name, ()] == value
    assert found["requests_total", (("code", "ok"), ("phase", "prefill"))] == 1


def test_registries_do_not_share_numbers():
    one = WorkerMetrics()
    two = WorkerMetrics()
    one.child("output_tokens_total", "decode").inc(9)
    assert ("output_tokens_total", (("phase", "decode"),)) not in samples(two.render())


@pytest.mark.parametrize("create", [FrontendMetrics, WorkerMetrics])
def test_log_lines_when_they_were_dropped_then_they_are_counted(create, monkeypatch):
    metrics = create()
    for number in (0, 3, 7):
        monkeypatch.setattr(Outputs, "num_dropped_lines", number)
        assert samples(metrics.render())["dropped_log_lines_total", ()] == number


def test_api_keys_with_the_most_tokens_have_labels():
    metrics = FrontendMetrics()
    loads = {
        f"key-{number}": ClientLoad(weight=1.0, tokens=number, waiting=0, running=0)
        for number in range(MAX_KEYS + 9)
    }
    odd = 'a "b"\\c'
    loads[odd] = ClientLoad(weight=0.5, tokens=10**9, waiting=2, running=3)
    metrics.by_key = lambda: loads
    shown = read_client_loads(metrics.render().decode())
    assert len(shown) == MAX_KEYS
    assert shown[odd] == loads[odd]
    assert "key-0" not in shown
    metrics.by_key = dict
    assert read_client_loads(metrics.render().decode()) == {}


def test_planner_that_does_not_lead_gives_autoscalers_no_number() -> None:
    metrics = PlannerMetrics()
    metrics.add_workers("m", {"both": 2}, {"prefill": 1, "decode": 2})
    metrics.add_predicted("m", 1.0, 0.02)
    wanted = f'{PREFIX}planner_wanted_workers{{model="m",role="decode"}} 2.0'
    assert wanted in metrics.render().decode()
    metrics.clear_plan()
    page = metrics.render().decode()
    assert f"{PREFIX}planner_wanted_workers{{" not in page
    assert f"{PREFIX}planner_predicted_seconds{{" not in page
    metrics.add_workers("m", {"both": 2}, {"prefill": 1, "decode": 2})
    assert wanted in metrics.render().decode()


def test_planner_gauges_are_of_all_pools_of_a_model() -> None:
    metrics = PlannerMetrics()
    for _ in range(2):  # each plan begins anew
        metrics.clear_plan()
        metrics.add_workers("m", {"both": 2}, {"decode": 2})
        metrics.add_workers("m", {"both": 3}, {"decode": 1})
        metrics.add_predicted("m", 1.0, 0.03)
        metrics.add_predicted("m", 2.0, 0.02)
    found = samples(metrics.render())
    assert found["planner_workers", (("model", "m"), ("role", "both"))] == 5
    assert found["planner_wanted_workers", (("model", "m"), ("role", "decode"))] == 3
    assert found["planner_predicted_seconds", (("model", "m"), ("time", "ttft"))] == 2.0
    assert found["planner_predicted_seconds", (("model", "m"), ("time", "itl"))] == 0.03

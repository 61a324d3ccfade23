"""The benchmark of the cost model, with the mock engine: predictions of unseen loads are within the
stated bounds.
"""

from __future__ import annotations

from benchmarks import cost_model
from dynamo_trtllm.simulate.virtual_time import run_virtual


def test_cost_model_predicts_unseen_loads_of_noisy_mock() -> None:
    """Simulated time passes, so this is equal on all machines."""
    args = cost_model.arguments(["mock", "--seed", "2", "--load-s", "8"])
    results = run_virtual(cost_model.measure(args))
    rows = {
        row["time"]: row
        for row in results["rows"]
        if (row["loads"], row["prediction"]) == ("unseen", "online")
    }
    assert rows.keys() == {"decode_step", "prefill_step", "first_token"}
    for row in rows.values():
        assert row["error_p50"] < 0.1, row
        assert 0.85 <= row["within"] <= 0.97, row

"""Times of vLLM's steps: what is asked of an engine process, and what is said without its answer."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from benchmarks.gpu import step_times


def test_table_has_a_column_for_each_backend() -> None:
    rows = [{"streams": 64, "prompt_tokens": 1024, "mean_ms": 54.17}]
    other = [{"streams": 0, "prompt_tokens": 128, "mean_ms": 28.69}]
    result = {"backends": {"triton": {"rows": rows}, "marlin": {"rows": other}}}
    assert [line.split() for line in step_times.table(result).splitlines()] == [
        ["streams", "prompt", "tokens", "triton", "ms", "marlin", "ms"],
        ["0", "128", "28.7"],
        ["64", "1024", "54.2"],
    ]


def test_backend_that_cannot_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine process has answered before it ended counts."""
    monkeypatch.setattr(step_times, "_CHILD", "benchmarks.gpu.no_such_module")
    words = ["--moe-backends", "triton", "--out", str(tmp_path / "found.json"), "--layers", "1"]
    result = step_times.run(step_times.arguments(words), tmp_path)
    assert result["not_run"] == {"triton": "exit status 1"}
    assert orjson.loads((tmp_path / "found.json").read_bytes())["backends"] == {}
    asked = orjson.loads((tmp_path / "triton-asked.json").read_bytes())
    assert asked["engine_args"] == {"moe_backend": "triton"}
    assert asked["streams"] == [0, 16, 64]


def test_backend_without_time_is_not_started(tmp_path: Path) -> None:
    words = [
        "--moe-backends",
        "a,b",
        "--out",
        str(tmp_path / "x"),
        "--budget-s",
        "1",
        "--model",
        "m",
    ]
    result = step_times.run(step_times.arguments(words), tmp_path)
    assert set(result["not_run"]) == {"a", "b"}
    assert all("s left" in why for why in result["not_run"].values())

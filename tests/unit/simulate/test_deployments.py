"""A deployment file becomes what is simulated; without constants there is a named error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.deployment import checked_deployment, load_deployment
from dynamo_trtllm.config.layers import find_file
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.simulate.cluster import simulate
from dynamo_trtllm.simulate.constants import Constants, find_constants, known_constants
from dynamo_trtllm.simulate.deployments import simulated_deployment
from dynamo_trtllm.simulate.workload import Shape, arrivals_at

CONSTANTS = Constants(
    models=("some-model",),
    engine="vllm",
    versions=("1.0",),
    gpu="h200",
    source="made up for this test",
    fitted="nothing",
    mock={"step_s": 0.01, "kv_block_size": 128, "kv_cache_blocks": 100},
    frontend_ms=5.0,
)


def workers(*flags: dict[str, Any], devices: Any = "cpu", count: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "name": f"worker-{number}",
            "disaggregation_mode": "prefill_and_decode",
            "count": count,
            "devices": devices,
            "flags": each,
        }
        for number, each in enumerate(flags)
    ]


def simulated(data: dict[str, Any], gpu: str | None = "h200") -> Any:
    return simulated_deployment(checked_deployment(data, "test"), [CONSTANTS], gpu)


VLLM = {"model": "org/some-model", "engine": "vllm"}


def test_mock_workers_keep_their_arguments() -> None:
    flags = {"model": "m", "engine": "mock", "override-engine-args": {"step_s": 0.5}}
    found = simulated({"workers": workers(flags, count=3)}, gpu=None)
    assert [worker.override_engine_args for worker in found.workers] == [{"step_s": 0.5}] * 3
    assert (found.num_gpus, found.frontend_s) == (3, 0.0)


LIMITS = {"slo-ttft-ms": 1000, "slo-itl-ms": 50}


@pytest.mark.parametrize(
    ("frontend", "planner", "limits"),
    [
        (LIMITS, {}, (1.0, 0.05)),
        (LIMITS, {"planner": "off"}, None),
        (LIMITS, {"planner": {"slo-itl-ms": 80}}, (1.0, 0.08)),
        (LIMITS, {"planner": {"advise": True}}, None),
        ({}, {}, None),
        ({}, {"planner": {"slo-ttft-ms": 500, "slo-itl-ms": 80}}, (0.5, 0.08)),
    ],
)
def test_planner_is_the_one_that_launch_would_start(
    frontend: dict[str, Any], planner: dict[str, Any], limits: tuple[float, float] | None
) -> None:
    elastic = workers({"model": "m", "engine": "mock"}, count=2)
    elastic[0]["disaggregation_mode"] = "elastic"
    data = {"workers": elastic, "frontend": {"router-mode": "slo", **frontend}, **planner}
    if not frontend:
        data["frontend"] = {"router-mode": "kv"}
    assert simulated(data).planner == limits


def test_planner_without_a_limit_is_an_error() -> None:
    elastic = workers({"model": "m", "engine": "mock"}, count=2)
    elastic[0]["disaggregation_mode"] = "elastic"
    with pytest.raises(ConfigError, match="slo-itl-ms"):
        simulated({"workers": elastic, "planner": {"slo-ttft-ms": 500}})


def test_workers_of_other_engines_take_the_constants() -> None:
    found = simulated({"workers": workers(VLLM, count=2, devices=[0, 1])})
    (first, _) = found.workers
    assert (first.engine, first.model_name) == ("mock", "some-model")
    assert first.override_engine_args == {"enable_prefix_caching": True, **CONSTANTS.mock}
    assert first.disaggregation_mode is Role.AGGREGATED
    assert (found.num_gpus, found.frontend_s) == (2, 0.005)


def test_blocks_larger_than_the_kv_cache_are_an_error() -> None:
    flags = VLLM | {"kv-block-size": 12_801}
    with pytest.raises(ConfigError, match="12801 tokens are larger than the KV cache") as failed:
        simulated({"workers": workers(flags)})
    assert failed.value.field == "kv_block_size"
    (worker,) = simulated({"workers": workers(VLLM | {"kv-block-size": 12_800})}).workers
    assert worker.override_engine_args["kv_cache_blocks"] == 1


def test_packaged_deployment_can_be_simulated() -> None:
    file = find_file(Path("deploy/local/gpt-oss-120b-2gpu-vllm.yaml"))
    found = simulated_deployment(load_deployment(file), known_constants(), "h200")
    arrivals = arrivals_at(Shape(2000, 20), [0.0, 5.0, 10.0])
    first, second, third = simulate(found, arrivals).requests
    assert first.is_ok
    # Seconds apart, they do not meet. The first one shows that the KV comes soon after the prompt.
    assert third.ttft_s == pytest.approx(second.ttft_s)
    assert second.ttft_s < first.ttft_s
    assert found.num_gpus == 2


def test_limits_of_the_engine_are_those_of_the_simulation(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("block_size: 32\nmax_num_seqs: 7\nmax_num_batched_tokens: 99\n", "utf-8")
    flags = VLLM | {
        "extra-engine-args": str(file),
        "max-batch-size": 8,
        "override-engine-args": {"block_size": 16},
    }
    (worker,) = simulated({"workers": workers(flags)}).workers
    assert worker.override_engine_args == {
        "enable_prefix_caching": True,
        "step_s": 0.01,
        "kv_block_size": 16,
        "kv_cache_blocks": 800,
        "max_batch_size": 8,
        "prefill_tokens_per_step": 99,
    }


@pytest.mark.parametrize(
    ("engine", "arguments", "reuses_prefixes"),
    [
        ("vllm", {}, True),
        ("vllm", {"enable_prefix_caching": False}, False),
        ("trtllm", {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}, True),
        ("trtllm", {"kv_cache_config": {"enable_block_reuse": False}}, False),
    ],
)
def test_workers_reuse_prefixes_as_their_engine_does(
    engine: str, arguments: dict[str, Any], reuses_prefixes: bool
) -> None:
    constants = msgspec.structs.replace(CONSTANTS, engine=engine)
    flags = {"model": "org/some-model", "engine": engine, "override-engine-args": arguments}
    deployment = checked_deployment({"workers": workers(flags)}, "test")
    (worker,) = simulated_deployment(deployment, [constants], "h200").workers
    found = worker.override_engine_args or {}
    assert found["enable_prefix_caching"] is reuses_prefixes


@pytest.mark.parametrize(
    ("flags", "gpu", "problem"),
    [
        (VLLM, None, "pass --gpu"),
        (
            VLLM,
            "b200",
            "no constants for org/some-model with vllm on 1 b200; known are some-model with vllm 1.0"
            " on 1 h200",
        ),
        (VLLM | {"model": "other"}, "h200", "no constants for other with vllm on 1 h200"),
        (
            VLLM | {"tensor-parallel-size": 4},
            "h200",
            "no constants for org/some-model with vllm on 4 h200",
        ),
        (VLLM | {"engine": "torch"}, "h200", "no constants for org/some-model with torch"),
    ],
)
def test_unknown_model_engine_or_gpu_is_an_error(
    flags: dict[str, Any], gpu: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        simulated({"workers": workers(flags)}, gpu)


def test_deployment_that_is_not_of_one_model_is_an_error() -> None:
    mock = {"engine": "mock"}
    several = workers(mock | {"model": "a"}, mock | {"model": "b"})
    with pytest.raises(ConfigError, match="several models"):
        simulated({"workers": several})
    with pytest.raises(ConfigError, match="no frontend"):
        simulated({"workers": several[:1], "frontend": None})


def test_packaged_constants_name_their_sources() -> None:
    for constants in known_constants():
        assert constants.source
        assert constants.fitted
    found = find_constants(known_constants(), "openai/gpt-oss-120b", "vllm", "H200")
    assert found.mock["kv_block_size"] == 128


def test_own_constants_come_first(tmp_path: Path) -> None:
    file = tmp_path / "constants.yaml"
    text = "{models: [gpt-oss-120b], engine: vllm, versions: ['1'], gpu: h200, source: s, fitted: f, mock: {}}"
    file.write_text(f"constants: [{text}]", encoding="utf-8")
    assert find_constants(known_constants(file), "gpt-oss-120b", "vllm", "h200").source == "s"
    file.write_text("constants: [{models: 5}]", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no constants"):
        known_constants(file)

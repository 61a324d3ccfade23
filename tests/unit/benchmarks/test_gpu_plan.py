"""Which process of a GPU run gets which GPUs and arguments, and that launcher files say the
same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import machine
from benchmarks.gpu.model import gpt_oss_config, write_model
from benchmarks.gpu.plan import (
    ENVIRONMENT,
    Plan,
    disaggregated,
    engine_arguments,
    replicas,
    server_arguments,
    single,
    topology,
)
from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.engines.vllm.args import EXTENSION
from dynamo_trtllm.models.checkpoint import read_checkpoint

LAUNCHER_FILES = Path(__file__).parents[3] / "deploy" / "local"


def plan(gpus: int, **more: Any) -> Plan:
    return Plan(engine="vllm", model="/model", gpus=tuple(range(gpus)), **more)


def devices(workers: list[dict[str, Any]]) -> dict[str, Any]:
    return {worker["name"]: worker["devices"] for worker in workers}


def test_roles_of_eight_gpus_have_four_each() -> None:
    workers = disaggregated(plan(8))
    assert devices(workers) == {"prefill": [0, 1, 2, 3], "decode": [4, 5, 6, 7]}
    assert {worker["flags"]["tensor-parallel-size"] for worker in workers} == {4}
    assert {worker["flags"]["expert-parallel-size"] for worker in workers} == {4}


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("3A", {"aggregated-0": [0], "aggregated-1": [1], "aggregated-2": [2]}),
        ("1P2D", {"prefill-0": [0], "decode-1": [1], "decode-2": [2]}),
        ("2A@2", {"aggregated-0": [0, 1], "aggregated-1": [2, 3]}),
        ("2E", {"elastic-0": [0], "elastic-1": [1]}),
        ("1P1D@2", {"prefill-0": [0, 1], "decode-1": [2, 3]}),
    ],
)
def test_topology_word_gives_each_worker_its_own_gpus(word: str, found: dict[str, Any]) -> None:
    workers = topology(plan(4), word)
    assert devices(workers) == found
    roles = {
        "aggregated": "prefill_and_decode",
        "elastic": "elastic",
        "prefill": "prefill",
        "decode": "decode",
    }
    assert all(
        worker["disaggregation_mode"] == roles[worker["name"].split("-")[0]] for worker in workers
    )


@pytest.mark.parametrize("workers", [disaggregated(plan(2)), replicas(plan(2))])
def test_roles_of_two_gpus_are_not_parallel(workers: list[dict[str, Any]]) -> None:
    assert list(devices(workers).values()) == [[0], [1]]
    assert all("tensor-parallel-size" not in worker["flags"] for worker in workers)


def test_roles_when_one_gpu_is_there_then_all_share_it() -> None:
    assert devices(disaggregated(plan(1))) == {"prefill": [0], "decode": [0]}
    assert devices(single(plan(1), 1)) == {"aggregated-1": [0]}


def test_roles_with_fewer_prefill_gpus_give_decode_the_rest() -> None:
    workers = disaggregated(plan(3, first=1))
    assert devices(workers) == {"prefill": [0], "decode": [1, 2]}
    assert workers[1]["flags"]["tensor-parallel-size"] == 2


def test_mock_plan_runs_on_cpu() -> None:
    worker, _ = disaggregated(Plan(engine="mock", model="bench"))
    assert worker["devices"] == "cpu"
    assert "load-format" not in worker["flags"]
    assert worker["flags"]["override-engine-args"] == {"step_s": 0.005}


@pytest.mark.parametrize(
    "workers", [disaggregated(plan(2)), disaggregated(Plan(engine="mock", model="bench"))]
)
def test_engine_environment_disables_multicast(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        assert ENVIRONMENT.items() <= worker["env"].items()
    assert ENVIRONMENT["NCCL_NVLS_ENABLE"] == "0"
    assert ENVIRONMENT["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"


def test_their_server_gets_our_engine_arguments() -> None:
    chosen = plan(
        2,
        is_eager=True,
        max_seq_len=1000,
        max_num_tokens=2000,
        max_batch_size=30,
        extra={"block_size": 32},
    )
    argv = server_arguments(chosen, port=1234, width=1)
    flags = single(chosen, 0)[0]["flags"]
    assert f"--max-model-len={flags['max-seq-len']}" in argv
    assert f"--max-num-batched-tokens={flags['max-num-tokens']}" in argv
    assert f"--max-num-seqs={flags['max-batch-size']}" in argv
    assert f"--load-format={flags['load-format']}" in argv
    assert {
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--block-size=32",
        "--port=1234",
    } <= set(argv)
    assert engine_arguments(chosen) == flags["override-engine-args"]
    assert f"--worker-extension-cls={EXTENSION}" in argv  # or it would have other dummy weights
    assert "--enable-expert-parallel" not in argv
    assert "--enable-expert-parallel" in server_arguments(plan(4), port=1, width=2)


def test_their_server_gets_list_argument_as_words() -> None:
    argv = server_arguments(
        replace(plan(2), extra={"cudagraph_capture_sizes": [1, 8]}), port=1, width=1
    )
    at = argv.index("--cudagraph-capture-sizes")
    assert argv[at + 1 : at + 3] == ["1", "8"]


@pytest.mark.parametrize("gpus", [2, 8])
def test_launcher_file_places_roles_as_the_benchmark(gpus: int) -> None:
    deployment = load_deployment(LAUNCHER_FILES / f"gpt-oss-120b-{gpus}gpu-vllm.yaml", {})
    planned = disaggregated(plan(gpus))
    assert [(worker.name, worker.devices) for worker in deployment.workers] == list(
        devices(planned).items()
    )
    for worker, wanted in zip(deployment.workers, planned, strict=True):
        assert worker.disaggregation_mode == wanted["disaggregation_mode"]
        assert worker.flags["engine"] == "vllm"
        assert worker.flags.get("tensor_parallel_size") == wanted["flags"].get(
            "tensor-parallel-size"
        )
        assert worker.flags.get("expert_parallel_size") == wanted["flags"].get(
            "expert-parallel-size"
        )
        assert worker.env["NCCL_NVLS_ENABLE"] == worker.env["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"


def test_launcher_file_when_variables_are_set_then_they_win() -> None:
    environ = {"MODEL_PATH": "/other", "LOAD_FORMAT": "dummy", "DECODE_CUDA_VISIBLE_DEVICES": "3"}
    deployment = load_deployment(LAUNCHER_FILES / "gpt-oss-120b-2gpu-vllm.yaml", environ)
    assert {worker.flags["model_path"] for worker in deployment.workers} == {"/other"}
    assert {worker.flags["load_format"] for worker in deployment.workers} == {"dummy"}
    assert deployment.workers[1].devices == [3]


def test_model_folder_reads_as_gpt_oss_120b(tmp_path: Path) -> None:
    found = read_checkpoint(write_model(tmp_path / "m", layers=6))
    assert (found.model_type, found.num_layers, found.num_sliding_layers, found.num_experts) == (
        "gpt_oss",
        6,
        3,
        128,
    )
    assert (found.quantization, found.head_dim, found.num_kv_heads) == ("mxfp4", 64, 8)
    assert found.renderer == "harmony"
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json"]
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == gpt_oss_config(layers=6)


def test_result_names_the_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    assert "gpu_share" not in machine.machine()
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    # Without a GPU, nothing has a share of it.
    monkeypatch.setattr(machine, "_smi", lambda *_: [])
    assert "gpu_share" not in machine.machine()
    monkeypatch.setattr(machine, "_smi", lambda *_: ["NVIDIA H200, 143771 MiB, 580.159.04"])
    assert machine.machine()["gpu_share"].startswith("each process has 50 %")

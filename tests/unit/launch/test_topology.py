"""What `serve` chooses for a machine and a model, and the reasons that it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_trtllm.config.commands import ServeConfig
from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.engines.gpu import GpuMemory
from dynamo_trtllm.launch.process_specs import processes
from dynamo_trtllm.launch.topology import (
    MachineFacts,
    ModelFacts,
    Topology,
    choose,
    deployment_data,
)
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case

GIB = 1 << 30
LAPTOP = MachineFacts(
    gpus=(),
    no_gpu_reason="nvidia-smi is not installed",
    cpus=8,
    memory_bytes=16 * GIB,
    engines=frozenset({"torch", "vllm"}),
)
SMALL = ModelFacts(
    path="/m/small", name="small", weight_bytes=2 * GIB, torch_values=GIB, num_heads=16
)
LARGE = ModelFacts(
    path="/m/large", name="large", weight_bytes=130 * GIB, torch_values=65 * GIB, num_heads=64
)
PAIR = {Role.PREFILL: 1, Role.DECODE: 1}


def gpus(*free: float, total: float = 80) -> MachineFacts:
    """A machine with GPUs of `total` GiB, of which `free` are free."""
    cards = tuple(
        GpuMemory(
            number=number, name="H100", total_bytes=int(total * GIB), free_bytes=int(free_gib * GIB)
        )
        for number, free_gib in enumerate(free)
    )
    return replace(LAPTOP, gpus=cards, no_gpu_reason="")


def options(**given: object) -> ServeConfig:
    return ServeConfig.model_validate({"model": "m", **given})


def test_choose_without_gpu_gives_a_torch_pair_on_cpu() -> None:
    chosen = choose(LAPTOP, SMALL, options())
    assert (chosen.engine, chosen.workers, list(chosen.gpus), chosen.threads) == (
        "torch",
        PAIR,
        [],
        4,
    )
    assert chosen.reasons == {
        "model": "small, 2.0 GiB of weights",
        "engine": (
            "torch: no NVIDIA GPU was found (nvidia-smi is not installed), and it runs on CPUs"
        ),
        "topology": "1 prefill and 1 decode worker, the smallest disaggregated deployment",
        "devices": "CPU, 4 of 8 cores per worker",
    }


def test_choose_with_memory_for_one_copy_is_aggregated() -> None:
    # 8 GiB in float32, of 12.8 for weights
    chosen = choose(LAPTOP, replace(SMALL, torch_values=2 * GIB), options())
    assert chosen.workers == {Role.AGGREGATED: 1}
    assert (
        chosen.reasons["topology"]
        == "1 aggregated worker: the memory does not hold the weights twice"
    )


@pytest.mark.parametrize(("values", "given"), [(4 * GIB, {}), (2 * GIB, {"prefill": 1})])
def test_choose_with_too_little_memory_says_how_much(values: int, given: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=r"would hold 16\.0 GiB of weights, but 16\.0 GiB of memory are available"
    ):
        choose(LAPTOP, replace(SMALL, torch_values=values), options(**given))


def test_choose_with_one_gpu_is_aggregated() -> None:
    chosen = choose(gpus(79), SMALL, options())
    assert (chosen.engine, chosen.workers, list(chosen.gpus)) == ("vllm", {Role.AGGREGATED: 1}, [0])
    assert chosen.reasons["engine"] == "vLLM: TensorRT-LLM not installed"
    assert (
        chosen.reasons["topology"]
        == "1 aggregated worker: prefill and decode workers would need 2 free GPUs"
    )


def test_choose_with_more_gpus_gives_a_pair() -> None:
    chosen = choose(gpus(79, 79, 79), SMALL, options())
    assert (chosen.workers, list(chosen.gpus), chosen.tensor_parallel_size) == (PAIR, [0, 1], 1)
    assert (
        chosen.reasons["devices"]
        == "GPU 0, 1 (H100); 2.0 GiB of weights fit one GPU with 64.0 GiB for weights each; 1 more"
        " free, which --prefill and --decode can use"
    )


@pytest.mark.parametrize(
    ("count", "size", "workers"),
    [(4, 4, {Role.AGGREGATED: 1}), (8, 4, PAIR), (5, 4, {Role.AGGREGATED: 1})],
)
def test_choose_of_large_model_uses_tensor_parallelism(
    count: int, size: int, workers: dict[Role, int]
) -> None:
    chosen = choose(gpus(*[79] * count), LARGE, options())
    assert (chosen.tensor_parallel_size, chosen.workers) == (size, workers)
    assert (
        "130.0 GiB of weights need 4 GPUs with 64.0 GiB for weights each"
        in chosen.reasons["devices"]
    )


def test_choose_when_a_gpu_is_in_use_then_it_is_left_alone() -> None:
    chosen = choose(gpus(3, 79, 79), SMALL, options())
    assert list(chosen.gpus) == [1, 2]
    assert "in use by others: 0" in chosen.reasons["devices"]


@each_case(
    ("machine", "model", "given", "says"),
    [
        (gpus(1, 1), SMALL, {}, r"every GPU is in use: 80\.0 GiB \(1\.0 GiB free\)"),
        (
            gpus(79, 79),
            LARGE,
            {},
            r"130\.0 GiB of weights with vLLM, but GPUs of .* and there are 2; choose a smaller",
        ),
        (
            gpus(*[79] * 8),
            LARGE,
            {"engine": "torch"},
            "with torch, .* use vLLM or TensorRT-LLM, or choose a smaller",
        ),
        (gpus(*[79] * 8), replace(LARGE, num_heads=6), {}, "choose a smaller model"),
        (
            gpus(79),
            SMALL,
            {"decode": 1},
            "1 prefill and 1 decode worker with 1 GPU each need 2 GPUs, but 1 GPU is free",
        ),
        (
            gpus(79, 79),
            SMALL,
            {"engine": "torch", "tensor_parallel_size": 2},
            "the torch engine runs on one GPU",
        ),
        (LAPTOP, SMALL, {"tensor_parallel_size": 2}, "--tensor-parallel-size 2 needs GPUs"),
        (
            LAPTOP,
            SMALL,
            {"engine": "mock", "prefill": 1000},
            r"1000 .* need at least 31\.3 GiB of memory without weights",
        ),
        (
            replace(LAPTOP, engines=frozenset()),
            SMALL,
            {},
            r"no engine for this machine is installed \(torch\)",
        ),
    ],
)
def test_choose_that_is_impossible_says_what_is_missing(
    machine: MachineFacts, model: ModelFacts, given: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(machine, model, options(**given))


def test_choose_when_wishes_are_typed_then_they_win() -> None:
    given = options(engine="torch", prefill=1, decode=3)
    chosen = choose(gpus(79, 79, 79, 79), SMALL, given)
    assert (chosen.engine, chosen.workers) == ("torch", {Role.PREFILL: 1, Role.DECODE: 3})
    assert chosen.reasons["engine"] == "torch: given with --engine"
    assert choose(gpus(*[79] * 4), SMALL, options(tensor_parallel_size=2)).tensor_parallel_size == 2
    assert (
        choose(LAPTOP, SMALL, options(engine="mock", prefill=4, decode=9)).workers[Role.DECODE] == 9
    )


@pytest.mark.parametrize("machine", [LAPTOP, gpus(79, 79)], ids=["cpu", "gpus"])
def test_choose_engine_of_another_package_gets_one_worker(machine: MachineFacts) -> None:
    chosen = choose(machine, SMALL, options().model_copy(update={"engine": "own"}))
    assert (chosen.engine, chosen.workers) == ("own", {Role.AGGREGATED: 1})
    assert chosen.reasons["engine"] == "own: given with --engine"


def test_choose_when_the_model_is_gguf_then_torch_also_with_gpus() -> None:
    chosen = choose(gpus(79), replace(SMALL, is_gguf=True, torch_values=None), options())
    assert chosen.reasons["engine"] == "torch: it alone loads GGUF files"
    assert "the size of the weights is not known" in chosen.reasons["devices"]


def test_deployment_data_starts_what_was_chosen() -> None:
    wanted = options(port=1234, host="0.0.0.0", namespace="n")
    chosen = Topology(
        engine="vllm",
        workers={Role.PREFILL: 1, Role.DECODE: 2},
        tensor_parallel_size=2,
        gpus=[1, 2, 4, 5, 6, 7],
    )
    data = deployment_data(chosen, SMALL, wanted, {"max_seq_len": 4096}, {"stall_timeout_s": 9.0})
    environ = {"DYN_TRTLLM_ALLOW_ANONYMOUS": "true"}
    specs = {spec.name: spec for spec in processes(checked_deployment(data, "serve"), environ)}
    assert {name: spec.env.get("CUDA_VISIBLE_DEVICES") for name, spec in specs.items()} == {
        "frontend": None,
        "prefill": "1,2",
        "decode-1": "4,5",
        "decode-2": "6,7",
    }
    assert data["frontend"]["stall-timeout-s"] == 9.0
    assert (specs["frontend"].host, specs["frontend"].port) == ("0.0.0.0", 1234)
    worker = specs["decode-2"].worker
    assert worker is not None
    assert (worker.model_path, worker.served_model_name, worker.namespace) == (
        "/m/small",
        "small",
        "n",
    )
    assert (worker.engine, worker.tensor_parallel_size, worker.max_seq_len) == ("vllm", 2, 4096)
    assert worker.disaggregation_mode is Role.DECODE


def test_deployment_data_on_cpu_shares_threads() -> None:
    chosen = choose(LAPTOP, SMALL, options())
    workers = deployment_data(chosen, SMALL, options(), {}, {})["workers"]
    assert [worker["flags"]["override-engine-args"] for worker in workers] == [
        {"num_threads": 4}
    ] * 2
    given = {"override_engine_args": {"num_threads": 2, "dtype": "bfloat16"}}
    workers = deployment_data(chosen, SMALL, options(), given, {})["workers"]
    assert workers[0]["flags"]["override-engine-args"] == {"num_threads": 2, "dtype": "bfloat16"}

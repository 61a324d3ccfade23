"""The deployment files of the launch scripts start what the guides' launch lines start."""

from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.launch.process_specs import ProcessSpec, processes
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case
from tests.unit.test_guide_commands import Command, commands

FOLDER = Path(__file__).parents[3] / "deploy" / "local"
SAME = (
    "served_model_name",
    "disaggregation_mode",
    "disaggregation_strategy",
    "max_num_tokens",
    "max_batch_size",
    "free_gpu_memory_fraction",
    "tensor_parallel_size",
    "expert_parallel_size",
    "dyn_reasoning_parser",
    "dyn_tool_call_parser",
)


def specs(name: str, environ: dict[str, str] | None = None) -> list[ProcessSpec]:
    return processes(load_deployment(FOLDER / name, environ))


def worker(words: Any, engine: str) -> WorkerConfig:
    return load(WorkerConfig, prog="p", argv=["--engine", engine, *words], environ={})


def of_guide(guide: str, module: str) -> list[Command]:
    return [command for command in commands() if (command.guide, command.module) == (guide, module)]


def by_role(
    name: str, engine: str, environ: dict[str, str] | None = None
) -> dict[Role, tuple[WorkerConfig, str]]:
    """Each worker with its GPUs."""
    found = [
        (worker(spec.argv, engine), spec.env["CUDA_VISIBLE_DEVICES"])
        for spec in specs(name, environ)[1:]
    ]
    return {config.disaggregation_mode: (config, devices) for config, devices in found}


@pytest.mark.parametrize("command", of_guide("001", "dynamo.trtllm"), ids=("prefill", "decode"))
def test_disaggregated_settings_equal_the_guides(command: Command) -> None:
    theirs = worker(command.words, "trtllm")
    ours, devices = by_role("gpt-oss-120b-disagg.yaml", "trtllm")[theirs.disaggregation_mode]
    assert devices == command.environment["CUDA_VISIBLE_DEVICES"]
    wanted = {name: getattr(theirs, name) for name in SAME}
    if theirs.disaggregation_mode is Role.DECODE:
        wanted["max_batch_size"] = 128  # in the guide's text, and in the command of its draft
    assert {name: getattr(ours, name) for name in SAME} == wanted
    merged = trtllm_args(ours, LIBRARY.newest)
    guides = trtllm_args(theirs, LIBRARY.newest)
    for key in (
        "cache_transceiver_config.max_tokens_in_buffer",
        "moe_config.backend",
        "enable_attention_dp",
    ):
        assert merged.get(key) == guides.get(key)


@pytest.mark.parametrize("command", of_guide("004", "dynamo.vllm"), ids=("decode", "prefill"))
def test_vllm_settings_equal_the_guides(command: Command) -> None:
    theirs = worker(command.words, "vllm")
    role = Role.PREFILL if "--is-prefill-worker" in command.words else Role.DECODE
    ours, devices = by_role("gpt-oss-120b-vllm-disagg.yaml", "vllm")[role]
    assert devices == command.environment["CUDA_VISIBLE_DEVICES"]
    for name in (
        "tensor_parallel_size",
        "expert_parallel_size",
        "dyn_reasoning_parser",
        "dyn_tool_call_parser",
    ):
        assert getattr(ours, name) == getattr(theirs, name)
    # which vLLM's own server would take for the name
    assert ours.served_model_name == theirs.model_path


def test_agg_when_read_then_the_aggregated_targets_size() -> None:
    ((config, devices),) = by_role("gpt-oss-120b-agg.yaml", "trtllm").values()
    assert devices == "0,1,2,3"
    assert (config.max_batch_size, config.tensor_parallel_size, config.expert_parallel_size) == (
        800,
        4,
        4,
    )
    assert trtllm_args(config, LIBRARY.newest).get("moe_config.backend") == "TRTLLM"


def test_five_gpus_have_the_sizes_of_the_target() -> None:
    workers = by_role("gpt-oss-120b-disagg-5gpu.yaml", "trtllm")
    sizes = {
        role: (trtllm_args(config, LIBRARY.newest).get("tensor_parallel_size"), devices)
        for role, (config, devices) in workers.items()
    }
    assert sizes == {Role.PREFILL: (1, "0"), Role.DECODE: (4, "1,2,3,4")}
    for spec in specs("gpt-oss-120b-disagg-5gpu.yaml")[1:]:
        assert spec.env["OVERRIDE_QUANT_ALGO"] == "W4A8_MXFP4_MXFP8"


def test_hopper_flags_override_no_engine_file_size() -> None:
    workers = by_role("gpt-oss-120b-disagg-hopper.yaml", "trtllm")
    assert [devices for _, devices in workers.values()] == ["0,1,2,3", "4,5,6,7"]
    for role, (config, _) in workers.items():
        merged = trtllm_args(config, LIBRARY.newest)
        source = f"YAML engine_configs/gpt-oss-120b/hopper/{role}.yaml"
        for key, value in (
            ("max_num_tokens", 16384),
            ("kv_cache_config.free_gpu_memory_fraction", 0.8),
            ("tensor_parallel_size", 4),
            ("moe_expert_parallel_size", 4),
        ):
            assert merged.leaves[key] == (value, source)


@each_case("path", sorted(FOLDER.glob("gpt-oss-120b-*.yaml")))
def test_deployment_processes_have_the_guides_variables(path: Path) -> None:
    environ = {
        "MODEL_PATH": "/m",
        "SERVED_MODEL_NAME": "n",
        "DYN_HTTP_PORT": "81",
        "DYN_NAMESPACE": "ns",
    }
    frontend, *workers = specs(path.name, environ)
    read = load(FrontendConfig, prog="p", argv=frontend.arguments(frontend.port), environ={})
    assert (read.http_port, read.namespace) == (81, "ns")
    assert workers
    for spec in workers:
        config = load(WorkerConfig, prog="p", argv=spec.argv, environ={})
        assert (config.model_path, config.served_model_name, config.namespace) == ("/m", "n", "ns")
        assert config.engine in ("trtllm", "vllm")


def test_strategy_when_named_then_both_roles_take_it() -> None:
    workers = by_role(
        "gpt-oss-120b-disagg.yaml", "trtllm", {"DISAGGREGATION_STRATEGY": "decode_first"}
    )
    assert {config.disaggregation_strategy for config, _ in workers.values()} == {"decode_first"}

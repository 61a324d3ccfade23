"""The guides' launch lines, word for word but for the module name: what each configures, or the
line that refuses it.

The guide of the Kubernetes targets (003) starts no process by hand and so has no line. The other
commands of the file, and what is there in their place, are held by test_guides_page.py.
"""

import logging
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY as VLLM
from dynamo_trtllm.engines.vllm.args import vllm_args
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case

DATA = Path(__file__).parents[1] / "data" / "guide_commands.txt"


class Command(NamedTuple):
    guide: str
    module: str
    environment: dict[str, str]
    words: list[str]


def commands() -> list[Command]:
    found = []
    for part in DATA.read_text().split("== ")[1:]:
        guide, _, text = part.partition("\n")
        for line in text.replace("\\\n", " ").splitlines():
            if " -m dynamo." not in line:
                continue
            words = shlex.split(line.removesuffix("&"))
            environment = dict(
                word.split("=") for word in words if re.fullmatch(r"[A-Z_]+=.*", word)
            )
            start = words.index("-m")
            found.append(Command(guide, words[start + 1], environment, words[start + 2 :]))
    return found


def of(module: str) -> list[Any]:
    return [
        pytest.param(command, id=f"{command.guide}-{i}")
        for i, command in enumerate(commands())
        if command.module == module
    ]


def parsed(model: type, words: list[str], environment: dict[str, str] | None = None) -> Any:
    return load(model, prog="p", argv=words, environ=environment or {})


EXPECTED = {
    ("000", Role.PREFILL): {"max_num_tokens": 20000, "max_batch_size": 32},
    ("000", Role.DECODE): {"max_num_tokens": 16384, "max_batch_size": None},
    ("001", Role.PREFILL): {"max_num_tokens": 20000, "max_batch_size": 32},
    ("001", Role.DECODE): {"max_num_tokens": 16384, "max_batch_size": None},
    ("002", Role.PREFILL): {"max_num_tokens": 20000, "max_batch_size": 32},
    ("002", Role.DECODE): {"max_num_tokens": 16384, "max_batch_size": 128},
}


def test_commands_when_counted_then_those_of_all_guides() -> None:
    assert [(command.guide, command.module.removeprefix("dynamo.")) for command in commands()] == [
        *[
            (guide, name)
            for guide in ("000", "001", "002")
            for name in ("frontend", "trtllm", "trtllm")
        ],
        *[("004", name) for name in ("frontend", "vllm", "vllm")],
    ]


@pytest.mark.parametrize("command", of("dynamo.frontend"))
def test_frontend_line_when_parsed_then_its_port_and_policy(command: Command) -> None:
    config = parsed(FrontendConfig, command.words)
    assert (config.http_port, config.router_mode) == (8000, "round-robin")


@each_case("command", of("dynamo.trtllm"))
def test_worker_line_when_parsed_then_what_the_guide_means(command: Command) -> None:
    config = parsed(WorkerConfig, command.words, command.environment)
    expected = EXPECTED[command.guide, config.disaggregation_mode] | {
        "model_path": "/model",
        "served_model_name": "gpt-oss-120b" if command.guide == "002" else "openai/gpt-oss-120b",
        "disaggregation_strategy": "prefill_first",
        "tensor_parallel_size": 4,
        "expert_parallel_size": 4,
        "free_gpu_memory_fraction": 0.9,
        "engine": None,  # TensorRT-LLM where it is installed
        "dyn_reasoning_parser": "gpt_oss" if command.guide == "001" else None,
        "dyn_tool_call_parser": "harmony" if command.guide == "001" else None,
        "kernels_profile": None,
        "override_engine_args": None,
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("command", of("dynamo.trtllm"))
@pytest.mark.parametrize("release", LIBRARY.releases, ids=lambda release: release.name)
def test_worker_line_flags_override_its_file(
    command: Command,
    release: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)  # the guides' paths are not here: the shipped files are taken
    config = parsed(WorkerConfig, command.words)
    with caplog.at_level(logging.INFO):
        args = trtllm_args(config, release, [])
    assert (
        f"{config.extra_engine_args} does not exist; using engine_configs/gpt-oss-120b/"
        in caplog.text
    )
    is_prefill = config.disaggregation_mode is Role.PREFILL
    for key, value in {
        "tensor_parallel_size": 4,
        "moe_expert_parallel_size": 4,
        "kv_cache_config.free_gpu_memory_fraction": 0.9,
        "max_num_tokens": 20000 if is_prefill else 16384,
        "moe_config.backend": "CUTLASS",
        "cache_transceiver_config.backend": "UCX",
        "cache_transceiver_config.max_tokens_in_buffer": 65536,
        "cuda_graph_config.max_batch_size": 32 if is_prefill else 128,
        "enable_attention_dp": not is_prefill,
        "enable_chunked_prefill": is_prefill,
        "disable_overlap_scheduler": is_prefill,
        "stream_interval": 10,
    }.items():
        assert args.get(key) == value, key
    beaten = (
        [] if is_prefill or command.guide == "001" else ["kv_cache_config.free_gpu_memory_fraction"]
    )
    notes = [
        f"--free-gpu-memory-fraction 0.9 overrides {key} 0.8 of YAML {config.extra_engine_args}"
        for key in beaten
    ]
    assert [note for note in args.notes if "transceiver_runtime" not in note] == notes
    # whose Python transceiver has no UCX
    assert len(args.notes) == len(notes) + (release.name >= "1.3")


@pytest.mark.parametrize("command", of("dynamo.vllm"))
def test_vllm_line_when_parsed_then_what_the_guide_means(command: Command) -> None:
    config = parsed(WorkerConfig, ["--engine", "vllm", *command.words])
    is_prefill = "--is-prefill-worker" in command.words
    expected = {
        "engine": "vllm",
        "model_path": "openai/gpt-oss-120b",
        "tensor_parallel_size": 4,
        # one of each, the guide says
        "disaggregation_mode": Role.PREFILL if is_prefill else Role.DECODE,
        "dyn_reasoning_parser": "gpt_oss",
        "dyn_tool_call_parser": "harmony",
    }
    assert {name: getattr(config, name) for name in expected} == expected
    args = vllm_args(config, VLLM.newest)
    assert args.leaves["tensor_parallel_size"] == (4, "flag --tensor-parallel-size")
    assert args.get("kv_transfer_config.kv_connector") == "NixlConnector"


def test_events_flag_when_typed_then_taken_for_tensorrt_llm() -> None:
    assert parsed(WorkerConfig, ["--model", "m", "--publish-kv-events"]).publish_kv_events

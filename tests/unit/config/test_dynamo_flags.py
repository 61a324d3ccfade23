"""Command lines of NVIDIA Dynamo's workers: what is the same here, and what is answered for the
rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import described_arguments
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY as VLLM
from dynamo_trtllm.engines.vllm.args import vllm_args
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case

# Flags that ai-dynamo 1.7.0.dev20261026 has besides ours, without those for images and videos
# (dynamo/trtllm/backend_args.py and args.py, dynamo/common/configuration/groups/runtime_args.py).
OTHERS = (
    "--allowed-local-media-path",
    "--connector",
    "--conversation-affinity",
    "--conversation-affinity-dp-rank-source",
    "--discovery-backend",
    "--dyn-structural-tag",
    "--enable-multimodal",
    "--encode-endpoint",
    "--event-plane",
    "--fpm-trace",
    "--frontend-decoding",
    "--health-check-payload",
    "--max-file-size-mb",
    "--modality",
    "--model-loader-extra-config",
    "--output-modalities",
    "--publish-events-and-metrics",
    "--publish-metrics",
    "--request-plane",
    "--response-plane",
    "--revision",
    "--trtllm.kv_cache_config.free_gpu_memory_fraction",
)


def worker(*argv: str, **environ: str) -> WorkerConfig:
    return load(WorkerConfig, prog="worker", argv=["--model", "m", *argv], environ=environ)


@pytest.mark.parametrize("name", ["agg", "pd", "prefill_and_decode"])
def test_role_of_newer_name_does_both_phases(name: str, tmp_path: Path) -> None:
    assert worker("--disaggregation-mode", name).disaggregation_mode is Role.AGGREGATED
    assert worker(DYN_TRTLLM_DISAGGREGATION_MODE=name).disaggregation_mode is Role.AGGREGATED
    file = tmp_path / "deployment.yaml"
    file.write_text(
        f"workers: [{{name: w, disaggregation_mode: {name}, flags: {{model: m, engine: mock}}}}]"
    )
    assert load_deployment(file).workers[0].disaggregation_mode is Role.AGGREGATED


def test_role_when_it_is_unknown_then_the_error_names_ours() -> None:
    with pytest.raises(
        ConfigError, match="'both': should be 'prefill', 'decode', 'prefill_and_decode' or"
    ):
        worker("--disaggregation-mode", "both")


FLAGS: list[tuple[list[str], str, Any]] = [
    (["--enable-attention-dp"], "enable_attention_dp", True),
    (["--no-enable-attention-dp"], "enable_attention_dp", False),
    (["--gpus-per-node", "4"], "gpus_per_node", 4),
    (["--max-beam-width", "2"], "max_beam_width", 2),
    (["--guided-decoding-backend", "xgrammar"], "guided_decoding_backend", "xgrammar"),
]


@pytest.mark.parametrize(("flags", "argument", "value"), FLAGS)
def test_flag_when_tensorrt_llm_has_the_argument_then_it_is_set(
    flags: list[str], argument: str, value: Any
) -> None:
    for release in LIBRARY.releases:
        args = trtllm_args(worker("--kernels-profile", "fallback", *flags), release)
        assert args.values[argument] == value
        assert args.leaves[argument].source == f"flag --{argument.replace('_', '-')}"
    unset = trtllm_args(worker("--kernels-profile", "fallback"), LIBRARY.newest)
    assert argument not in unset.values


@pytest.mark.parametrize(("flags", "argument", "_"), FLAGS)
def test_flag_without_engine_argument_is_rejected_by_name(
    flags: list[str], argument: str, _: Any
) -> None:
    with pytest.raises(
        ConfigError, match=f"{argument} is an argument of the trtllm engine; with vLLM use"
    ):
        vllm_args(worker("--engine", "vllm", *flags), VLLM.newest)
    with pytest.raises(ConfigError, match="the mock engine has no such setting"):
        described_arguments(worker("--engine", "mock", *flags), MockArgs, "mock")


def test_variable_when_it_is_dynamos_then_it_sets_the_flag() -> None:
    config = worker(DYN_CUSTOM_JINJA_TEMPLATE="/t.jinja", DYN_TRTLLM_ENABLE_ATTENTION_DP="true")
    assert (config.custom_jinja_template, config.enable_attention_dp) == (Path("/t.jinja"), True)


@each_case("flag", OTHERS)
def test_flag_without_counterpart_says_what_to_do(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        worker(flag, "value")
    message = caught.value.message
    assert message.startswith(f"unknown flag {flag}; ")
    assert "did you mean" not in message
    assert "see --help" not in message


def test_dynamic_flag_is_answered_with_the_json_flag() -> None:
    with pytest.raises(ConfigError, match="--override-engine-args"):
        worker("--trtllm.kv_cache_config.dtype", "fp8")

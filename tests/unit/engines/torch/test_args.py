"""Engine arguments: what is taken, what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.protocol.errors import ConfigError


def config(**values: Any) -> WorkerConfig:
    return WorkerConfig(model_path="m", **values)


def test_args_override_beats_flag_beats_yaml(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("max_batch_size: 2\nmax_num_tokens: 100\nprefill_chunk_tokens: 64\n")
    given = config(
        extra_engine_args=path,
        max_batch_size=3,
        max_num_tokens=200,
        override_engine_args={"max_num_tokens": 300},
    )
    args = engine_arguments(given, TorchArgs, "torch")
    assert (args.max_batch_size, args.max_num_tokens, args.prefill_chunk_tokens) == (3, 300, 64)


@pytest.mark.parametrize(
    "flag", ["tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size"]
)
def test_args_flag_for_several_devices_is_rejected(flag: str) -> None:
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        engine_arguments(config(**{flag: 2}), TorchArgs, "torch")
    assert engine_arguments(config(**{flag: 1}), TorchArgs, "torch").max_batch_size == 16


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_batch_sise": 2}, "max_batch_size"),
        ({"dtype": "int3"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"max_num_tokens": 15}, "max_num_tokens .*max_batch_size 16"),
    ],
)
def test_args_wrong_key_or_value_is_config_error(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_arguments(config(override_engine_args=given), TorchArgs, "torch")

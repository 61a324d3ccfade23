"""Former names of engine arguments, which are accepted with a warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.errors import ConfigError


def config_of(**override: Any) -> WorkerConfig:
    return WorkerConfig(model_path="m", engine="mock", override_engine_args=override)


@pytest.mark.parametrize("schema", [MockArgs, TorchArgs])
def test_argument_when_its_former_name_is_used_then_it_counts_and_a_warning_is_logged(
    schema: type[MockArgs] | type[TorchArgs], caplog: pytest.LogCaptureFixture
) -> None:
    args = engine_arguments(config_of(carrier="nixl"), schema, "mock")
    assert args.transfer_backend == "nixl"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("--override-engine-args: argument carrier was renamed; use transfer_backend")


def test_argument_when_both_names_are_used_then_config_error() -> None:
    with pytest.raises(ConfigError, match=r"carrier is the former name of transfer_backend\. Remove carrier"):
        engine_arguments(config_of(carrier="tcp", transfer_backend="tcp"), MockArgs, "mock")

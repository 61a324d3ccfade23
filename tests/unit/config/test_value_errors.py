"""What Python code learns of wrong settings: one line of ours, no report of pydantic."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_trtllm import ConfigError, Frontend, FrontendConfig, Worker, WorkerConfig
from tests.kit.cases import each_case


@each_case(
    ("model", "settings", "message"),
    [
        (WorkerConfig, {"model": "m"}, "there is no setting model; use model_path (and 1 more)"),
        (WorkerConfig, {}, "model_path is missing; pass it"),
        (
            WorkerConfig,
            {"model_path": "m", "max_bath_size": 1},
            "there is no setting max_bath_size; did you mean max_batch_size?",
        ),
        (
            WorkerConfig,
            {"model_path": "m", "zzz": 1},
            "there is no setting zzz; the settings are the fields of WorkerConfig",
        ),
        (
            WorkerConfig,
            {"model_path": "m", "engine": "mok"},
            "engine is 'mok': there is no engine 'mok'; did you mean mock? built in: trtllm, vllm, torch, mock; installed: none",
        ),
        (FrontendConfig, {"port": 1}, "there is no setting port; use http_port"),
        (
            FrontendConfig,
            {"max_body_bytes": 9, "max_total_body_bytes": 9},
            "--max-total-body-bytes 9 must be at least twice --max-body-bytes 9; raise it or lower"
            " --max-body-bytes",
        ),
    ],
)
def test_settings_with_wrong_value_say_what_to_do(
    model: type[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        model(**settings)
    assert caught.value.message == f"{model.__name__}: {message}"


def test_settings_with_wrong_address_mask_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(model_path="m", nats_server="http://user:secret@h:1/x")
    assert "secret" not in caught.value.message
    assert caught.value.field == "nats_server"


@pytest.mark.parametrize("settings", [None, 5, {"model_path": "m"}])
def test_worker_and_frontend_name_what_to_pass_as_settings(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"pass a WorkerConfig\("):
        Worker(settings)
    with pytest.raises(ConfigError, match=r"pass a FrontendConfig\("):
        Frontend(settings)

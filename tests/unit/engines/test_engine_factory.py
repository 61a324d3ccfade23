"""Which engine is meant when none is named."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.external.library import LibraryPackage
from dynamo_trtllm.engines.factory import create_engine
from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.worker.show_arguments import describe_arguments
from tests.kit.cases import each_case
from tests.kit.fake_packages import fake_tensorrt_llm


def without_trtllm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "tensorrt_llm" else found(name, *rest),
    )


def test_engine_default_without_trtllm_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    without_trtllm(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        create_engine(WorkerConfig(model_path="m"), instance_id=1)
    message = caught.value.message
    assert all(
        advice in message
        for advice in ("pip install tensorrt-llm", "--engine torch", "--engine mock")
    )
    assert message.startswith(
        "--engine is not given and the default, TensorRT-LLM, is not installed. "
    )
    assert "\n" not in message


def test_engine_trtllm_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without_trtllm(monkeypatch)
    with pytest.raises(ConfigError, match="pip install tensorrt-llm"):
        create_engine(WorkerConfig(model_path="m", engine="trtllm"), instance_id=1)


def test_engine_default_with_trtllm_is_trtllm(tmp_path: Path) -> None:
    trtllm_model(tmp_path)
    with fake_tensorrt_llm():
        assert isinstance(
            create_engine(WorkerConfig(model_path=str(tmp_path)), instance_id=1), TrtllmEngine
        )


def test_factory_when_it_decides_then_trtllm_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_trtllm(monkeypatch)
    sys.modules.pop("tensorrt_llm", None)
    with pytest.raises(ConfigError):
        create_engine(WorkerConfig(model_path="m"), instance_id=1)
    assert "tensorrt_llm" not in sys.modules


def test_create_when_vllm_is_not_installed_then_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LibraryPackage, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match="the vllm engine needs vLLM") as caught:
        create_engine(WorkerConfig(model_path="/m", engine="vllm"), instance_id=1)
    assert caught.value.field == "engine"


def test_create_without_dummy_weights_rejects_load_format() -> None:
    with pytest.raises(ConfigError, match="--load-format: the mock engine has no such setting"):
        create_engine(
            WorkerConfig(model_path="/m", engine="mock", load_format="dummy"), instance_id=1
        )


@pytest.mark.parametrize("engine", ["torch", "mock"])
def test_arguments_reject_unsupported_kernel_profile(engine: str) -> None:
    config = WorkerConfig(model_path="m", engine=engine, kernels_profile="blackwell")
    with pytest.raises(
        ConfigError,
        match=f"--kernels-profile: the {engine} engine has no such setting. Remove the flag",
    ):
        describe_arguments(config)


def trtllm_model(folder: Path) -> Path:
    shape = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
    }
    config = {"model_type": "llama", "vocab_size": 16, "max_position_embeddings": 64, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@each_case(
    ("version", "args", "key"),
    [
        ("1.2.1", {}, "disable_overlap_scheduler"),
        ("1.2.1", {"disable_overlap_scheduler": True}, "kv_cache_config"),
        ("1.3.0rc29", {}, "kv_cache_config"),
    ],
)
def test_elastic_trtllm_worker_is_an_error_that_names_the_key(
    version: str, args: dict[str, object], key: str, tmp_path: Path
) -> None:
    transceiver = {"cache_transceiver_config": {"backend": "UCX"}}
    config = WorkerConfig(
        model_path=str(trtllm_model(tmp_path)),
        engine="trtllm",
        disaggregation_mode=Role.ELASTIC,
        override_engine_args=transceiver | args,
    )
    with fake_tensorrt_llm(version), pytest.raises(ConfigError, match=f": {key}") as caught:
        create_engine(config, instance_id=1)
    assert "can't run an elastic worker" in caught.value.message

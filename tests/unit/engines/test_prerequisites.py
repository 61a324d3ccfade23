"""Errors in a worker's settings are found before large libraries are imported, and reported
once.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.factory import check_prerequisites
from dynamo_trtllm.models import locate
from dynamo_trtllm.protocol.errors import ConfigError

Makes = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Makes:
    """A folder with these files: contents by name, JSON where they are not text."""

    def make(files: dict[str, Any]) -> str:
        for name, content in files.items():
            (tmp_path / name).write_text(
                content if isinstance(content, str) else json.dumps(content)
            )
        return str(tmp_path)

    return make


def refused(config: WorkerConfig, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(config, environment or {}, locate)
    return caught.value.message


@pytest.mark.parametrize(
    ("files", "engine", "says"),
    [
        ({}, "torch", "contains neither config.json nor exactly one .gguf file"),
        ({}, "vllm", "contains neither config.json nor exactly one .gguf file"),
        (
            {"a.gguf": "", "b.gguf": ""},
            "torch",
            "contains neither config.json nor exactly one .gguf file",
        ),
        ({"a.gguf": ""}, "trtllm", "only the torch engine supports"),
        ({"config.json": "{"}, "torch", "config.json can't be read"),
        ({"config.json": {}}, "vllm", "model_type is missing"),
        ({"config.json": {"model_type": "llama"}}, "torch", "has no tokenizer.json"),
        (
            {"config.json": {"model_type": "llama"}, "tokenizer.json": {}},
            "vllm",
            "has no tokenizer_config.json",
        ),
        ({"config.json": {"model_type": "gpt_oss"}}, "torch", "has none of model.safetensors, "),
        (
            {"config.json": {"model_type": "gpt_oss"}, "weights.safetensors": ""},
            "torch",
            "weights.safetensors has another name",
        ),
    ],
)
def test_model_folder_when_it_lacks_a_file_then_it_is_named(
    folder: Makes, files: dict[str, Any], engine: Any, says: str
) -> None:
    assert says in refused(WorkerConfig(model_path=folder(files), engine=engine))


@pytest.mark.parametrize(
    ("files", "engine"),
    [
        ({}, "mock"),
        ({"a.gguf": ""}, "torch"),
        ({"config.json": {"model_type": "gpt_oss"}, "model.safetensors": ""}, "torch"),
        ({"config.json": {"model_type": "gpt_oss"}, "model.safetensors.index.json": {}}, "torch"),
        ({"config.json": {"model_type": "gpt_oss"}}, "vllm"),
        (
            {
                "config.json": {"model_type": "llama"},
                "tokenizer.json": {},
                "tokenizer_config.json": {},
                "pytorch_model.bin": "",
            },
            "torch",
        ),
    ],
)
def test_model_folder_with_all_needed_files_is_accepted(
    folder: Makes, files: dict[str, Any], engine: Any
) -> None:
    check_prerequisites(WorkerConfig(model_path=folder(files), engine=engine), {}, locate)


def test_dummy_weights_need_no_files(folder: Makes) -> None:
    path = folder({"config.json": {"model_type": "gpt_oss"}})
    args = {"load_format": "dummy"}
    config = WorkerConfig(model_path=path, engine="torch", override_engine_args=args)
    check_prerequisites(config, {}, locate)


def test_path_of_a_file_is_no_folder(folder: Makes) -> None:
    path = Path(folder({"config.json": {}})) / "config.json"
    assert "is no folder" in refused(WorkerConfig(model_path=str(path), engine="torch"))


def test_hugging_face_name_suggests_the_download_line() -> None:
    said = refused(WorkerConfig(model_path="openai/gpt-oss-20b", engine="torch"))
    assert "hf download openai/gpt-oss-20b --local-dir gpt-oss-20b" in said
    assert "hf download" not in refused(WorkerConfig(model_path="/models/none", engine="torch"))


@pytest.mark.parametrize(
    ("engine", "environment", "args", "wrong"),
    [
        ("torch", {"CUDA_VISIBLE_DEVICES": "0"}, None, "The torch engine requests GPUs 0 "),
        (
            "torch",
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            {"device": "auto"},
            "The torch engine requests GPUs 0,1 ",
        ),
        ("torch", {"CUDA_VISIBLE_DEVICES": "0"}, {"device": "cpu"}, ""),
        ("torch", {"CUDA_VISIBLE_DEVICES": ""}, None, ""),
        ("torch", {"CUDA_VISIBLE_DEVICES": "-1"}, None, ""),
        ("torch", {}, None, ""),
        ("mock", {"CUDA_VISIBLE_DEVICES": "0"}, None, ""),
    ],
)
def test_requested_gpus_that_are_missing_are_an_error(
    monkeypatch: pytest.MonkeyPatch, engine: Any, environment: dict[str, str], args: Any, wrong: str
) -> None:
    monkeypatch.setattr(gpu, "visible_gpus", lambda environment=None: [])
    monkeypatch.setattr(gpu, "_DRIVERS", ())
    config = WorkerConfig(model_path="tiny-gpt-oss", engine=engine, override_engine_args=args)
    if wrong:
        said = refused(config, environment)
        assert wrong in said
        assert "this machine shows 0" in said
    else:
        check_prerequisites(config, environment, locate)


DEPLOYMENT = """\
workers:
  - {name: prefill, disaggregation_mode: prefill, flags: {model: tiny-gpt-oss, engine: torch}}
  - {name: decode, disaggregation_mode: decode, devices: [4000], flags: {model: tiny-gpt-oss, engine: torch}}
"""


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["dynamo_trtllm", "--engine=torch", "--model={folder}"],
            "{folder} contains neither config.json nor exactly one .gguf",
        ),
        (
            [
                "dynamo_trtllm",
                "--engine=torch",
                "--model=tiny-gpt-oss",
                "--extra-engine-args=nope.yaml",
            ],
            "nope.yaml: can't be read: No such file or directory",
        ),
        (
            ["dynamo_trtllm.launch", "{folder}/d.yaml", "--model=a/b"],
            "prefill: model folder a/b does not exist",
        ),
        (
            ["dynamo_trtllm.launch", "{folder}/d.yaml"],
            "decode: The torch engine requests GPUs 4000 ",
        ),
    ],
)
def test_wrong_setting_exits_with_2_before_imports(
    tmp_path: Path, argv: list[str], says: str
) -> None:
    (tmp_path / "d.yaml").write_text(DEPLOYMENT)
    words = [word.format(folder=tmp_path) for word in argv]
    command = [sys.executable, "-X", "importtime", "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), lines
    assert says.format(folder=tmp_path) in lines[0]
    assert not re.search(r"\| +(torch|transformers|vllm|nixl)$", done.stderr, re.MULTILINE)

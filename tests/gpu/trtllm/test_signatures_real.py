"""The installed TensorRT-LLM against the manifest that the adapter was written to."""

from __future__ import annotations

import importlib

import pytest

from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.bindings import TrtllmBindings
from tests.gpu.trtllm.signatures import argument_differences, differences

pytestmark = [pytest.mark.gpu, pytest.mark.trtllm, pytest.mark.timeout(600)]


def test_adapter_finds_every_name_in_the_package() -> None:
    assert TrtllmBindings().version == importlib.import_module("tensorrt_llm").__version__


def test_manifest_names_and_defaults_match_the_package() -> None:
    package = importlib.import_module("tensorrt_llm")
    importlib.import_module("tensorrt_llm.llmapi.llm_args")
    release = release_for(package.__version__)
    assert differences(package, release) + argument_differences(package, release) == []

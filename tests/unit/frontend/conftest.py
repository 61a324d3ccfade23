"""Fixtures: models to plan requests for, workers, and a model registry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers

from dynamo_trtllm.frontend.routing.model_registry import RegistryTiming
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.worker.card import FILE_CHUNK_BYTES
from tests.kit.generation_plans import TemplateModels, harmony_model
from tests.kit.model_registry import TEMPLATE, Frontend
from tests.kit.routing import Cluster


@pytest.fixture(scope="session")
def harmony() -> ServedModel:
    return harmony_model()


@pytest.fixture(scope="session")
def make_template(tmp_path_factory: pytest.TempPathFactory) -> TemplateModels:
    return TemplateModels(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Close it at the end, and check that no task remains."""
    before = asyncio.all_tasks()
    cluster = Cluster()
    yield cluster
    await cluster.router.aclose()
    await cluster.plane.aclose()
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()


@pytest.fixture
def registry_timing() -> RegistryTiming:
    """Return the waits of `frontend`, which a test may parametrize."""
    return RegistryTiming(retry_s=0.001, preload_after_s=3600.0)


@pytest.fixture
async def frontend(registry_timing: RegistryTiming) -> AsyncIterator[Frontend]:
    """Close it at the end, and check that no task remains."""
    before = asyncio.all_tasks()
    frontend = Frontend(registry_timing)
    yield frontend
    await frontend.aclose()
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Write the files of a chat_template renderer. The template is sent in three chunks."""
    tokenizer = tokenizers.Tokenizer(
        tokenizer_models.WordLevel({"<unk>": 0, "the": 1, "fox": 2}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    contents = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({}),
        "chat_template.jinja": "{# " + "x" * (2 * FILE_CHUNK_BYTES) + " #}" + TEMPLATE,
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return {name: tmp_path / name for name in contents}

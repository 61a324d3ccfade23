"""Models that several test files plan requests for, and workers that several ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo_trtllm.frontend.models import ServedModel
from tests.unit.frontend.legs import Cluster
from tests.unit.frontend.planning import TemplateModels, harmony_model


@pytest.fixture(scope="session")
def harmony() -> ServedModel:
    return harmony_model()


@pytest.fixture(scope="session")
def make_template(tmp_path_factory: pytest.TempPathFactory) -> TemplateModels:
    return TemplateModels(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Closed at the end, after which no task may be left."""
    before = asyncio.all_tasks()
    cluster = Cluster()
    yield cluster
    await cluster.pipeline.aclose()
    await cluster.plane.aclose()
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()

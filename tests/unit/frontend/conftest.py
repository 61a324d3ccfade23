"""Models that several test files plan requests for."""

from __future__ import annotations

import pytest

from dynamo_trtllm.frontend.models import ServedModel
from tests.unit.frontend.planning import TemplateModels, harmony_model


@pytest.fixture(scope="session")
def harmony() -> ServedModel:
    return harmony_model()


@pytest.fixture(scope="session")
def make_template(tmp_path_factory: pytest.TempPathFactory) -> TemplateModels:
    return TemplateModels(tmp_path_factory.mktemp("tokenizer"))

"""Tiny models with random weights, saved once per session."""

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_gpt_oss, save_tiny_llama


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")

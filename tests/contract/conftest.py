"""Tiny models with random weights, saved once per session, and the trtllm engine over its stand-in."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.standin import hurry, playing
from tests.tiny_models import save_tiny_gpt_oss, save_tiny_llama
from tests.trio import Engines, three


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, as `tensorrt_llm`; the adapter waits milliseconds where it would wait seconds."""
    hurry(monkeypatch)
    with playing() as found:
        yield found


@pytest.fixture
async def engines(package: Any, gpt_oss: Path) -> AsyncIterator[Engines]:
    async with three(package, gpt_oss) as found:
        yield found

"""Fixtures of the tests over the scripted vendor."""

from __future__ import annotations

import pytest

from dynamo_trtllm.engines.external import runner
from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.protocol.messages import Role
from tests.unit.engines.trtllm.fake_bindings import Llm, make


@pytest.fixture
def decode() -> tuple[ExternalEngine, Llm]:
    return make(Role.DECODE)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KV_WAIT_S", "ANSWER_S"):
        monkeypatch.setattr(runner, name, 0.05)

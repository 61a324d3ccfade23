"""Fixtures of the tests over the scripted vendor."""

from __future__ import annotations

import pytest

from dynamo_trtllm.engines.trtllm.inflight import TrtllmInflightRequest
from dynamo_trtllm.engines.trtllm.session import TrtllmSession
from dynamo_trtllm.messages import Role
from tests.unit.engines.trtllm.scripted_vendor import Llm, make


@pytest.fixture
def decode() -> tuple[TrtllmSession, Llm]:
    return make(Role.DECODE)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kv_wait_s", "answer_s"):
        monkeypatch.setitem(TrtllmInflightRequest.abort_and_drain.__kwdefaults__, name, 0.05)

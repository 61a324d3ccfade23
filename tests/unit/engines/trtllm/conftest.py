"""Fixtures of the tests over the scripted vendor."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from dynamo_trtllm.engines.trtllm import kernels
from dynamo_trtllm.engines.trtllm.inflight import TrtllmInflightRequest
from dynamo_trtllm.engines.trtllm.session import TrtllmSession
from dynamo_trtllm.messages import Role
from tests.unit.engines.trtllm.fake_bindings import Llm, make


@pytest.fixture(scope="module")
def profiles_read_once() -> Iterator[None]:
    """Nearly all that a check of a configuration computes is to parse the same kernel profiles again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "load", functools.cache(kernels.load))
        yield


@pytest.fixture
def decode() -> tuple[TrtllmSession, Llm]:
    return make(Role.DECODE)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kv_wait_s", "answer_s"):
        monkeypatch.setitem(TrtllmInflightRequest.abort_and_drain.__kwdefaults__, name, 0.05)

"""`python -m benchmarks.frontend_step`: its requests succeed, so that their cost is that of tokens."""

from __future__ import annotations

import pytest

from benchmarks import frontend_step
from dynamo_trtllm.protocol.errors import ModelNotFound


async def test_requests_are_answered() -> None:
    await frontend_step.make_exchange("content", 3)()


async def test_request_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_: object) -> None:
        raise ModelNotFound("no model")

    monkeypatch.setattr(frontend_step.FakeRouter, "get", not_found)
    with pytest.raises(RuntimeError, match="the request got HTTP 404"):
        await frontend_step.make_exchange("content", 3)()

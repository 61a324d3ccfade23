"""The example of an engine of one's own holds the contract of engines, and is served."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_trtllm import Engine, Role, WorkerConfig
from dynamo_trtllm.testing import EngineContract
from examples import own_engine


class TestEchoEngine(EngineContract):
    settings = frozenset({"max_seq_len"})

    @classmethod
    def create_engine(cls, role: Role, **settings: Any) -> Engine:
        config = WorkerConfig(
            model_path="echo", disaggregation_mode=role, override_engine_args=settings
        )
        return own_engine.EchoEngine(config, instance_id=1)


async def test_example_repeats_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    await own_engine.main()
    assert capsys.readouterr().out == "Is anyone there?\n"

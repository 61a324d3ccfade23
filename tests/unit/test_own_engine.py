"""The engines of examples/own_engine.py and docs/own-engine.md hold the contract of engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm import Engine, Role, WorkerConfig
from dynamo_trtllm.testing import EngineContract
from examples import own_engine

PAGE = (Path(__file__).parents[2] / "docs" / "own-engine.md").read_text(encoding="utf-8")
DOCUMENTED: dict[str, Any] = {"__name__": "documented"}
for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
    exec(block, DOCUMENTED)


class TestEchoEngine(EngineContract):
    settings = frozenset({"max_seq_len"})

    @classmethod
    def create_engine(cls, role: Role, **settings: Any) -> Engine:
        config = WorkerConfig(
            model_path="echo", disaggregation_mode=role, override_engine_args=settings
        )
        return own_engine.EchoEngine(config, instance_id=1)


class TestCountingEngine(DOCUMENTED["TestCountingEngine"]):  # type: ignore[misc]
    """The class of tests in the documentation."""


async def test_example_repeats_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    await own_engine.main()
    assert capsys.readouterr().out == "Is anyone there?\n"

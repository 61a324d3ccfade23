"""A frontend and a worker name the variables without effect at start, after logging is set up."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_trtllm.config.config_base import Config
from dynamo_trtllm.frontend.process import main as frontend_main
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker import main as worker_main


def stop(*_: object) -> None:
    raise ConfigError("stopped")


@pytest.mark.parametrize(
    ("module", "next_step", "argv"),
    [
        (frontend_main, "Frontend", []),
        (worker_main, "Worker", ["--engine", "mock", "--model", "m"]),
    ],
)
def test_main_names_ineffective_variables_at_start(
    monkeypatch: pytest.MonkeyPatch, module: Any, next_step: str, argv: list[str]
) -> None:
    steps: list[object] = []
    monkeypatch.setattr(module.observe_logging, "setup", lambda *_: steps.append("logging"))
    monkeypatch.setattr(module, "warn_of_ignored_variables", steps.append)
    monkeypatch.setattr(module, next_step, stop)
    with pytest.raises(SystemExit):
        module.main(argv)
    first, config = steps
    assert first == "logging"
    assert isinstance(config, Config)

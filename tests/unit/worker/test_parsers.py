"""Parser flags: what a model's format brings anyway is accepted, what it does not have is refused by name."""

from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.worker.worker import _check_parsers

FLAGS = [{"dyn_reasoning_parser": "gpt_oss"}, {"dyn_tool_call_parser": "harmony"}]


@pytest.mark.parametrize("flag", [{}, *FLAGS], ids=str)
def test_parser_when_the_model_speaks_harmony_then_accepted(flag: dict[str, Any]) -> None:
    _check_parsers(WorkerConfig(model_path="m", **flag), "harmony")


@pytest.mark.parametrize("flag", FLAGS, ids=str)
def test_parser_when_the_model_has_a_chat_template_then_refused_by_name(flag: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave the flag out") as caught:
        _check_parsers(WorkerConfig(model_path="m", **flag), "chat_template")
    assert caught.value.field in flag


def test_parser_when_none_is_named_then_a_chat_template_is_fine() -> None:
    _check_parsers(WorkerConfig(model_path="m"), "chat_template")

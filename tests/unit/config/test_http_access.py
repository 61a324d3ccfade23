"""API keys in the settings: how they are given, and that they are shown nowhere."""

from __future__ import annotations

import pytest

from dynamo_trtllm.config.child_settings import to_argv, to_environ
from dynamo_trtllm.config.commands import ChatConfig
from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.config.load import config_table, load
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.launch.process_specs import processes
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case

ONE = "first-key-of-twenty"
TWO = "second-key-of-twenty"
VARIABLE = "DYN_TRTLLM_API_KEY"


def frontend(*words: str, **environ: str) -> FrontendConfig:
    return load(FrontendConfig, prog="frontend", argv=words, environ=environ)


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--api-key", ONE, "--api-key", TWO], {}),
        ([f"--api-key={ONE},{TWO}"], {}),
        ([], {VARIABLE: f"{ONE}, {TWO}"}),
        (["--api-key", ONE, "--api-key", TWO], {VARIABLE: "ignored-key-of-twenty"}),
    ],
)
def test_several_keys_are_given_by_flags_or_a_variable(
    words: list[str], environ: dict[str, str]
) -> None:
    config = frontend(*words, **environ)
    assert config.api_key == (ONE, TWO)
    assert config.needs_api_key


@each_case("key", ["short-key", f"{ONE} {TWO}", "k" * 257, f"{ONE}\x7f", f"{ONE},{ONE}", f"{ONE},"])
def test_wrong_key_then_the_error_does_not_show_it(key: str) -> None:
    for make in (
        lambda: frontend("--api-key", key),
        lambda: frontend(**{VARIABLE: key}),
        lambda: FrontendConfig(api_key=tuple(key.split(","))),
        lambda: FrontendConfig(api_key={key: 1}),  # type: ignore[arg-type]
        lambda: checked_deployment(
            {"frontend": {"api-key": {key: 1}}, "workers": [worker()]}, "file"
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert "API key" in caught.value.message
        assert key not in caught.value.message
        assert ONE not in caught.value.message


def worker() -> dict[str, str]:
    return {"name": "w", "disaggregation_mode": "agg", "flags": {"model": "m", "engine": "mock"}}  # type: ignore[dict-item]


def test_keys_are_not_shown() -> None:
    config = frontend("--api-key", ONE)
    assert ONE not in config_table(config)
    assert "***" in config_table(config)
    assert ONE not in repr(config)


def test_child_processes_get_keys_in_their_environment() -> None:
    config = frontend("--api-key", ONE, "--api-key", TWO)
    argv = to_argv(FrontendConfig, dict(config))
    assert ONE not in " ".join(argv)
    environ = to_environ(FrontendConfig, dict(config))
    read = load(FrontendConfig, prog="frontend", argv=argv, environ=environ)
    assert read.api_key == config.api_key


def test_launched_frontend_gets_its_keys_in_its_environment() -> None:
    data = {"frontend": {"api-key": [ONE, TWO]}, "workers": [worker()]}
    spec = processes(checked_deployment(data, "file"))[0]
    assert spec.env == {VARIABLE: f"{ONE},{TWO}"}
    assert ONE not in " ".join(spec.argv)
    assert ONE not in repr(spec.argv)
    assert spec.api_key == ONE
    assert spec.needs_api_key


def test_chat_sends_the_first_of_several_keys() -> None:
    config = load(ChatConfig, prog="chat", argv=[], environ={VARIABLE: f"{ONE},{TWO}"})
    assert config.api_key == ONE

import pytest

from dynamo_trtllm.config.commands import ServeConfig
from dynamo_trtllm.config.flags import build_parser
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case

REQUIRED = {WorkerConfig: ["--model", "m"], ServeConfig: ["m"], FrontendConfig: []}
ALIASES = [
    (WorkerConfig, "tensor_parallel_size", "--tensor-parallel-size", "--tp", 2, 4),
    (WorkerConfig, "max_seq_len", "--max-seq-len", "--max-model-len", 4096, 8192),
    (
        WorkerConfig,
        "free_gpu_memory_fraction",
        "--free-gpu-memory-fraction",
        "--gpu-memory-utilization",
        0.9,
        0.8,
    ),
    (FrontendConfig, "http_port", "--http-port", "--port", 9000, 9001),
    (FrontendConfig, "http_host", "--http-host", "--host", "::", "127.0.0.1"),
    (ServeConfig, "port", "--port", "--http-port", 9000, 9001),
    (ServeConfig, "host", "--host", "--http-host", "::", "127.0.0.1"),
    (ServeConfig, "tensor_parallel_size", "--tensor-parallel-size", "--tp", 2, 4),
]


@each_case(("model", "field", "name", "other_name", "value", "other"), ALIASES)
def test_load_flag_with_two_names_rejects_different_values(
    model, field, name, other_name, value, other
):
    def loaded(*argv):
        return load(model, prog="p", argv=[*REQUIRED[model], *argv], environ={})

    for typed in (
        [f"{other_name}={value}"],
        [other_name, str(value)],
        [name, str(value), other_name, str(value)],
    ):
        assert getattr(loaded(*typed), field) == value
    assert loaded(other_name, str(value)).source_of(field) == f"flag {other_name}"
    # the last one counts
    assert getattr(loaded(name, str(value), name, str(other)), field) == other
    for typed in (
        [name, str(value), other_name, str(other)],
        [f"{other_name}={other}", f"{name}={value}"],
        [f"{name}={value}", f"{other_name}={value}", f"{other_name}={other}"],
        [f"{name}={value}", f"{other_name}={value}", f"{name}={other}"],
    ):
        with pytest.raises(ConfigError, match="set the same and contradict each other") as caught:
            loaded(*typed)
        for part in (name, other_name, str(value), str(other)):
            assert part in caught.value.message


@each_case(("model", "field", "name", "other_name", "value", "other"), ALIASES)
def test_load_variable_with_two_names_rejects_different_values(
    model, field, name, other_name, value, other
):
    first, second = (
        f"DYN_TRTLLM_{flag.removeprefix('--').replace('-', '_').upper()}"
        for flag in (name, other_name)
    )

    def loaded(environ, *argv):
        return load(model, prog="p", argv=[*REQUIRED[model], *argv], environ=environ)

    assert getattr(loaded({second: str(value)}), field) == value
    assert loaded({second: str(value)}).source_of(field) == f"environment {second}"
    both = {first: str(value), second: str(other)}
    assert getattr(loaded(both, name, str(value)), field) == value
    with pytest.raises(
        ConfigError,
        match=f"environment {first} and {second} set the same and contradict each other",
    ):
        loaded(both)


@pytest.mark.parametrize("origins", ["*", "https://a.example", "http://a.example:8080,app://b"])
def test_load_when_origins_are_a_list_or_a_star_then_taken(origins):
    config = load(FrontendConfig, prog="p", argv=["--cors-origins", origins], environ={})
    assert config.allowed_origins == {*origins.split(",")}


def test_load_normalizes_an_origin_like_browsers():
    origins = "https://A.Example:443,HTTP://b:80,http://c:443,http://[::1]:8080"
    config = load(FrontendConfig, prog="p", argv=["--cors-origins", origins], environ={})
    assert config.allowed_origins == {
        "https://a.example",
        "http://b",
        "http://c:443",
        "http://[::1]:8080",
    }


NO_ORIGINS = "a.example https://a/ *,https://a https://*.example https://ä https://u@a https://a:x"


@each_case("origins", NO_ORIGINS.split())
def test_load_when_an_origin_is_none_then_the_error_shows_one(origins):
    with pytest.raises(ConfigError, match=r"like https://chat\.example\.org"):
        load(FrontendConfig, prog="p", argv=["--cors-origins", origins], environ={})


def test_flag_help_has_text_default_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = " ".join(build_parser(WorkerConfig, "p").format_help().split())
    assert "Minimum log level. (default: info; also DYN_LOG)" in shown

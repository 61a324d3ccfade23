"""Variables of NVIDIA Dynamo: each sets an option here, or the process names it as ignored."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config import commands, dynamo_variables
from dynamo_trtllm.config import load as loading
from dynamo_trtllm.config.config_base import Config
from dynamo_trtllm.config.dynamo_variables import FRONTEND, VARIABLES, VLLM, WORKER
from dynamo_trtllm.config.flags import flags_of
from dynamo_trtllm.config.load import ignored_variables, load, warn_of_ignored_variables
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case

ROOT = Path(__file__).parents[3]
MODELS = (FrontendConfig, WorkerConfig)
NAMES = [
    name
    for line in (ROOT / "tests/data/dynamo_variables.txt").read_text().splitlines()
    if not line.startswith("#")
    for name in line.split()
]


def frontend(*argv: str, **environ: str) -> FrontendConfig:
    return load(FrontendConfig, prog="frontend", argv=argv, environ=environ)


def worker(*argv: str, **environ: str) -> WorkerConfig:
    return load(WorkerConfig, prog="worker", argv=["--model", "m", *argv], environ=environ)


def variables(model: type[Config]) -> set[str]:
    return {name for flag in flags_of(model) for name in (*flag.variables(), *flag.env)}


def test_names_set_an_option_or_have_a_reason() -> None:
    assert [name for name, times in Counter(NAMES).items() if times > 1] == []
    # a revision is an option of dynamo-trtllm serve; in Dynamo it is for images only
    ours = variables(FrontendConfig) | variables(WorkerConfig) | {"DYN_TRTLLM_REVISION"}
    for name in NAMES:
        variable = dynamo_variables.find(name)
        assert name in ours or (variable is not None and variable.reason), name


def test_variable_without_reason_is_taken_by_an_option() -> None:
    models = {FRONTEND: FrontendConfig, WORKER: WorkerConfig, VLLM: WorkerConfig}
    for name, variable in VARIABLES.items():
        if not variable.reason:
            assert all(name in variables(models[process]) for process in variable.processes), name


def test_options_of_dynamo_variables_are_in_the_table() -> None:
    models = [value for value in vars(commands).values() if isinstance(value, type)]
    flags = [flag for model in models if issubclass(model, Config) for flag in flags_of(model)]
    taken = {name for flag in flags for name in flag.env if name.startswith("DYN_")}
    assert taken <= set(VARIABLES)


def test_guides_page_counts_the_effective_variables() -> None:
    page = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if "`DYN_ROUTER_MODE`" in line]
    cell = row.split(" | ")[0]
    count = cell.count("`DYN_") + int(cell.rpartition(" and ")[2].split()[0])
    assert count == sum(any(name in variables(m) for m in MODELS) for name in VARIABLES)


FRONTENDS: list[tuple[str, str, str, Any]] = [
    ("DYN_ROUTER_MODE", "kv", "router_mode", "kv"),
    ("DYN_HTTP_HOST", "127.0.0.1", "http_host", "127.0.0.1"),
    ("DYN_HTTP_BODY_LIMIT_MB", "16", "max_body_bytes", 16 << 20),
    ("DYN_MIGRATION_LIMIT", "0", "migration_limit", 0),
    ("DYN_CANARY_WAIT_TIME", "7", "probe_interval_s", 7.0),
    ("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", "1", "unknown_fields", "ignore"),
    ("DYN_LOG", "warn", "log_level", "warning"),
    ("DYN_LOG", "dynamo_llm=debug,error", "log_level", "error"),
    ("DYN_LOG", "TRACE", "log_level", "debug"),
    ("DYN_LOGGING_JSONL", "true", "log_format", "json"),
    ("DYN_LOGGING_CONSOLE_FORMAT", "jsonl", "log_format", "json"),
]


@each_case(("name", "text", "field", "value"), FRONTENDS)
def test_frontend_option_has_the_variable_value(
    name: str, text: str, field: str, value: Any
) -> None:
    config = frontend(**{name: text})
    assert getattr(config, field) == value
    assert config.source_of(field) == f"environment {name}"


WORKERS: list[tuple[str, str, str, Any]] = [
    ("DYN_ENDPOINT", "dyn://a.b.c", "endpoint", "dyn://a.b.c"),
    ("DYN_ENDPOINT", "a.b.c", "endpoint", "dyn://a.b.c"),
    ("DYN_TOOL_CALL_PARSER", "harmony", "dyn_tool_call_parser", "harmony"),
    ("DYN_REASONING_PARSER", "gpt_oss", "dyn_reasoning_parser", "gpt_oss"),
    ("DYN_DUMP_CONFIG_TO", "/x", "dump_config_to", Path("/x")),
    ("DYN_PREFILL_DRAIN_TIMEOUT_S", "9", "drain_timeout_s", 9.0),
    ("DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS", "true", "publish_kv_events", True),
]


@each_case(("name", "text", "field", "value"), WORKERS)
def test_worker_option_has_the_variable_value(name: str, text: str, field: str, value: Any) -> None:
    config = worker(**{name: text})
    assert getattr(config, field) == value
    assert config.source_of(field) == f"environment {name}"


@pytest.mark.parametrize(
    ("name", "text", "role"),
    [
        ("DYN_VLLM_DISAGGREGATION_MODE", "prefill", Role.PREFILL),
        ("DYN_VLLM_DISAGGREGATION_MODE", "agg", Role.AGGREGATED),
        ("DYN_VLLM_IS_PREFILL_WORKER", "true", Role.PREFILL),
        ("DYN_VLLM_IS_PREFILL_WORKER", "false", Role.DECODE),
    ],
)
def test_vllm_variable_is_not_read_by_other_engines(name: str, text: str, role: Role) -> None:
    assert worker("--engine", "vllm", **{name: text}).disaggregation_mode is role
    assert worker(DYN_TRTLLM_ENGINE="vllm", **{name: text}).disaggregation_mode is role
    config = worker("--engine", "torch", **{name: text})
    assert config.disaggregation_mode is Role.AGGREGATED
    assert ignored_variables({name: text}, config) == ""


def test_port_when_dynamo_means_no_server_then_there_is_none() -> None:
    config = worker(DYN_SYSTEM_PORT="-1")
    assert (config.system_port, config.source_of("system_port")) == (None, "default")


def test_own_variable_or_flag_overrides_dynamos() -> None:
    config = frontend(DYN_ROUTER_MODE="direct", DYN_TRTLLM_ROUTER_MODE="kv")
    assert config.source_of("router_mode") == "environment DYN_TRTLLM_ROUTER_MODE"
    assert frontend("--router-mode", "random", DYN_ROUTER_MODE="direct").router_mode == "random"


@each_case(
    ("environ", "wanted"),
    [
        ({"DYN_ROUTER_MODE": "direct"}, "environment DYN_ROUTER_MODE is 'direct': should be"),
        ({"DYN_ROUTER_MODE": ""}, "environment DYN_ROUTER_MODE is empty"),
        ({"DYN_LOG": "loud"}, "environment DYN_LOG is 'loud': expected trace, debug"),
        ({"DYN_LOGGING_JSONL": "maybe"}, "DYN_LOGGING_JSONL is 'maybe': expected true or false"),
        ({"DYN_LOGGING_CONSOLE_FORMAT": "x"}, "CONSOLE_FORMAT is 'x': expected readable or jsonl"),
        ({"DYN_HTTP_BODY_LIMIT_MB": "0"}, "DYN_HTTP_BODY_LIMIT_MB is '0': expected a whole number"),
        ({"DYN_HTTP_BODY_LIMIT_MB": "192"}, "--max-body-bytes is set by environment DYN_HTTP_BODY"),
        ({"DYN_ROUTER_TTL_SECS": "3"}, "--router-ttl-secs is set by environment DYN_ROUTER_TTL"),
        (
            {"DYN_LOGGING_JSONL": "0", "DYN_LOGGING_CONSOLE_FORMAT": "jsonl"},
            "DYN_LOGGING_JSONL and DYN_LOGGING_CONSOLE_FORMAT set the same and contradict",
        ),
    ],
)
def test_wrong_variable_value_is_an_error_that_names_it(
    environ: dict[str, str], wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        frontend(**environ)
    assert wanted in caught.value.message


SHARED = {
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_MODEL_NAME": "/c",
    "DYN_MODEL_PATH": "/k",
    "DYN_SYSTEM_ENABLED": "true",
    "DYN_SGL_DISAGG_CONFIG": "x",
    "DYN_ROUTER_MODE": "kv",
    "DYN_ROUTER_MDOE": "kv",
    "DYN_CANARY_WAIT_TIME": "3",
    "DYN_KVBM_OBJECT_SECRET_KEY": "hidden",
    "DYN_NAMESPACE_WORKER_SUFFIX": "",
}


def test_each_process_names_its_own_ignored_variables() -> None:
    plane = "DYN_REQUEST_PLANE (requests, tokens and events always travel over NATS)"
    unknown = "DYN_ROUTER_MDOE (unknown; did you mean DYN_ROUTER_MODE?)"
    kvbm = "DYN_KVBM_OBJECT_SECRET_KEY (use the engine's own offloading)"
    assert ignored_variables(SHARED, frontend()) == (
        "environment variables without effect: DYN_MODEL_NAME and DYN_MODEL_PATH (workers register"
        f" their models: see --served-model-name); {plane}; {unknown}; unset them"
    )
    line = ignored_variables(SHARED, worker())
    assert all(name in line for name in (plane, unknown, kvbm, "DYN_SYSTEM_ENABLED", "CANARY"))
    assert "DYN_MODEL_NAME" not in line
    assert "hidden" not in line
    both = ignored_variables(SHARED, frontend(), worker())
    assert "DYN_MODEL_NAME" in both
    assert "CANARY" not in both


@each_case(
    ("name", "text"),
    [
        ("DYN_REQUEST_PLANE", "nats"),
        ("DYN_DISCOVERY_BACKEND", "etcd"),
        ("DYN_ENFORCE_DISAGG", "True"),
        ("DYN_NAMESPACE", "blue"),
        ("DYN_TRTLLM_MAX_BATCH_SIZE", "3"),
        ("DYN_A_SERVICE_HOST", "10.0.0.1"),
        ("DYN_A_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("DYN_A_PORT", "tcp://10.0.0.1:8000"),
        ("OTHER", "x"),
    ],
)
def test_effective_and_kubernetes_variables_are_not_named(name: str, text: str) -> None:
    assert ignored_variables({name: text}, frontend(), worker()) == ""


def test_dynamo_variable_with_our_prefix_is_ignored() -> None:
    environ = {"DYN_TRTLLM_MAX_FILE_SIZE_MB": "50"}
    assert "only text models" in ignored_variables(environ, worker(**environ))


def test_print_config_notes_a_variable_without_effect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        frontend("--print-config", DYN_ROUTER_MODE="kv", DYN_MODEL_NAME="/c")
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.startswith("router_mode"))
    assert row == ["router_mode", "kv", "environment", "DYN_ROUTER_MODE"]
    assert "\nnote: environment variables without effect: DYN_MODEL_NAME (" in out


def test_warning_logged_by_the_parent_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading.os, "environ", {"DYN_MODEL_NAME": "/c"})
    with caplog.at_level(logging.WARNING):
        warn_of_ignored_variables(frontend(), worker())
        assert len(caplog.messages) == 1
        monkeypatch.setattr(loading.os, "environ", loading.child_environment())
        warn_of_ignored_variables(frontend())
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("words", [["--request-plane", "nats"], ["--event-plane=nats"]])
def test_flag_for_default_behavior_is_accepted(words: list[str]) -> None:
    assert frontend(*words, "--http-port", "1").http_port == 1
    assert worker(*words, "--max-batch-size", "1").max_batch_size == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--request-plane", "tcp"], "unknown flag --request-plane; leave it out: requests"),
        (["--request-plane=tcp"], "unknown flag --request-plane; leave it out: requests"),
        (["--kv-cache-block-size", "32"], "it is --kv-block-size of dynamo-trtllm worker"),
        (["--store-kv", "mem"], "leave it out: discovery always uses etcd"),
    ],
)
def test_flag_when_it_is_refused_then_the_error_says_what_to_do(
    words: list[str],
    wanted: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        frontend(*words)
    assert wanted in caught.value.message

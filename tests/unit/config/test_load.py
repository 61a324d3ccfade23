import json
import subprocess
import sys

import pytest

from dynamo_trtllm.config.child_settings import to_argv
from dynamo_trtllm.config.commands import DemoConfig, LaunchConfig, VersionConfig
from dynamo_trtllm.config.load import config_table, exit_with, load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case

# Launch lines of the guides, after the module name.
GUIDE_PREFILL = """--model-path /model --served-model-name openai/gpt-oss-120b
  --extra-engine-args engine_configs/gpt_oss/prefill.yaml --dyn-reasoning-parser gpt_oss
  --dyn-tool-call-parser harmony --disaggregation-mode prefill --disaggregation-strategy prefill_first
  --max-num-tokens 20000 --max-batch-size 32 --free-gpu-memory-fraction 0.9 --tensor-parallel-size 4
  --expert-parallel-size 4"""
GUIDE_DECODE = """--model-path /model --served-model-name openai/gpt-oss-120b
  --extra-engine-args engine_configs/gpt_oss/decode.yaml --disaggregation-mode decode
  --disaggregation-strategy prefill_first --max-num-tokens 16384 --free-gpu-memory-fraction 0.9
  --tensor-parallel-size 4 --expert-parallel-size 4"""


def load_worker(line: str = "", environ: dict[str, str] | None = None) -> WorkerConfig:
    return load(WorkerConfig, prog="worker", argv=line.split(), environ=environ or {})


def error_of(line: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_worker(line, environ)
    assert "\n" not in caught.value.message
    return caught.value.message


@each_case("space", ["\n", "\r", "\r\n", " "])
def test_white_space_around_variables_is_no_part_of_them(space: str) -> None:
    environ = {
        "DYN_TRTLLM_MODEL_PATH": "m",
        "DYN_TRTLLM_ENGINE": "mock",
        "DYN_TRTLLM_SYSTEM_HOST": "127.0.0.1",
        "DYN_TRTLLM_API_KEY": "k" * 16,
        "DYN_NAMESPACE": "n",
        "DYN_LOG": "debug",
        "NATS_SERVER": "nats://a:4222",
    }
    spaced = {name: f"{space}{value}{space}" for name, value in environ.items()}
    assert load_worker(environ=spaced) == load_worker(environ=environ)
    # Two names of one setting do not contradict each other.
    assert load_worker(environ=spaced | {"DYN_TRTLLM_MODEL": "m"}).model_path == "m"


def test_load_names_defaults_as_source():
    loaded = load_worker("--model-path /m")
    assert loaded.nats_server == "nats://localhost:4222"
    assert loaded.source_of("nats_server") == "default"
    assert loaded.source_of("model_path") == "flag --model-path"


def test_load_flag_overrides_environment():
    env = {"DYN_TRTLLM_MAX_NUM_TOKENS": "5", "DYN_TRTLLM_MAX_BATCH_SIZE": "6"}
    loaded = load_worker("--model-path /m --max-num-tokens 7", env)
    assert (loaded.max_num_tokens, loaded.source_of("max_num_tokens")) == (
        7,
        "flag --max-num-tokens",
    )
    assert loaded.max_batch_size == 6
    assert loaded.source_of("max_batch_size") == "environment DYN_TRTLLM_MAX_BATCH_SIZE"


@each_case(
    ("name", "ours", "field", "value"),
    [
        ("ETCD_ENDPOINTS", "DYN_TRTLLM_ETCD_ENDPOINTS", "etcd_endpoints", "http://etcd:2379"),
        ("ETCD_AUTH_CA", "DYN_TRTLLM_ETCD_CA", "etcd_ca", "/tls/ca-9.crt"),
        ("ETCD_AUTH_CLIENT_CERT", "DYN_TRTLLM_ETCD_CERT", "etcd_cert", "/tls/client-9.crt"),
        ("ETCD_AUTH_CLIENT_KEY", "DYN_TRTLLM_ETCD_KEY", "etcd_key", "/tls/client-9.key"),
        ("NATS_SERVER", "DYN_TRTLLM_NATS_SERVER", "nats_server", "nats://nats:4222"),
        ("NATS_CA", "DYN_TRTLLM_NATS_CA", "nats_ca", "/tls/ca-9.crt"),
        ("NATS_CERT", "DYN_TRTLLM_NATS_CERT", "nats_cert", "/tls/client-9.crt"),
        ("NATS_KEY", "DYN_TRTLLM_NATS_KEY", "nats_key", "/tls/client-9.key"),
        ("DYN_NAMESPACE", "DYN_TRTLLM_NAMESPACE", "namespace", "blue"),
        ("DYN_SYSTEM_HOST", "DYN_TRTLLM_SYSTEM_HOST", "system_host", "127.0.0.9"),
        ("DYN_SYSTEM_PORT", "DYN_TRTLLM_SYSTEM_PORT", "system_port", "9090"),
    ],
)
def test_load_well_known_variable_is_overridden_by_ours(name, ours, field, value):
    loaded = load_worker("--model m", {name: value})
    assert str(getattr(loaded, field)) == value
    assert loaded.source_of(field) == f"environment {name}"
    other = (
        value.replace("9", "8")
        .replace("4222", "4223")
        .replace("2379", "2380")
        .replace("blue", "red")
    )
    loaded = load_worker("--model m", {name: value, ours: other})
    assert str(getattr(loaded, field)) == other
    assert loaded.source_of(field) == f"environment {ours}"


def test_load_guides_port_variable_sets_the_frontend_port():
    def loaded(*argv: str) -> FrontendConfig:
        return load(FrontendConfig, prog="frontend", argv=argv, environ={"DYN_HTTP_PORT": "8001"})

    assert (loaded().http_port, loaded().source_of("http_port")) == (
        8001,
        "environment DYN_HTTP_PORT",
    )
    assert loaded("--http-port", "9").http_port == 9


@pytest.mark.parametrize(
    ("line", "role"), [(GUIDE_PREFILL, Role.PREFILL), (GUIDE_DECODE, Role.DECODE)]
)
def test_load_when_a_line_of_the_guides_is_given_then_it_parses(line, role):
    config = load_worker(line)
    assert config.disaggregation_mode is role
    assert config.served_model_name == "openai/gpt-oss-120b"
    assert (config.tensor_parallel_size, config.expert_parallel_size) == (4, 4)
    assert config.free_gpu_memory_fraction == 0.9


def test_load_parses_the_guides_frontend_line():
    argv = "--router-mode round-robin --http-port 8000".split()
    assert load(FrontendConfig, prog="f", argv=argv, environ={}).http_port == 8000


def test_load_when_the_flag_has_a_second_spelling_then_both_work():
    assert (
        load_worker("--model a")
        == load_worker("--model-path a")
        == load_worker("", {"DYN_TRTLLM_MODEL": "a"})
    )


@each_case(
    ("line", "role", "source"),
    [
        ("--is-prefill-worker", Role.PREFILL, "flag --is-prefill-worker"),
        ("--is-decode-worker", Role.DECODE, "flag --is-decode-worker"),
        (
            "--is-decode-worker --disaggregation-mode decode",
            Role.DECODE,
            "flag --disaggregation-mode",
        ),
        # what such a worker is to those who know it from Dynamo
        ("--engine vllm", Role.DECODE, "default"),
        (
            "--engine vllm --disaggregation-mode prefill_and_decode",
            Role.AGGREGATED,
            "flag --disaggregation-mode",
        ),
        ("--engine torch", Role.AGGREGATED, "default"),
    ],
)
def test_load_takes_the_role_from_a_word_or_default(line, role, source):
    loaded = load_worker(f"--model m {line}")
    assert (loaded.disaggregation_mode, loaded.source_of("disaggregation_mode")) == (role, source)


@each_case(
    ("line", "wanted"),
    [
        ("--model-pth x", ["--model-pth", "--model-path"]),
        ("--model m --max-num-token=4", ["--max-num-token", "--max-num-tokens"]),
        ("--model m -x", ["unknown flag -x; see --help"]),
        ("--model m stray", ["unexpected argument 'stray'", "--model-path stray"]),
        ("--model m --max-batch-size", ["--max-batch-size", "expected one argument"]),
        ("", ["--model-path is missing", "DYN_TRTLLM_MODEL_PATH"]),
        ("--model=", ["flag --model is empty"]),
        ("--model m --max-num-tokens abc", ["--max-num-tokens", "'abc'", "number of tokens"]),
        ("--model m --max-num-tokens 0", ["--max-num-tokens", "'0'", "greater than 0"]),
        (
            "--model m --lease-ttl-s inf",
            ["--lease-ttl-s", "'inf'", "the digits 0 to 9"],
        ),
        (
            "--model m --disaggregation-mode both",
            ["'both'", "'prefill', 'decode', 'prefill_and_decode' or 'elastic'"],
        ),
        (
            "--model m --disaggregation-strategy both",
            ["'both'", "'prefill_first' or 'decode_first'"],
        ),
        (
            "--model m --engine sglang",
            ["--engine", "built in: trtllm, vllm, torch, mock; installed: none"],
        ),
        (
            "--model m --is-prefill-worker --disaggregation-mode decode",
            [
                "--is-prefill-worker and --disaggregation-mode decode set the same and contradict"
                " each other"
            ],
        ),
        (
            "--model m --is-decode-worker --is-prefill-worker",
            ["--is-decode-worker and --is-prefill-worker set the same"],
        ),
        ("--model m --override-engine-args [1]", ["--override-engine-args", "JSON object"]),
        (
            "--model m --override-engine-args {",
            ["--override-engine-args", "JSON object", "column 2"],
        ),
        *[
            (
                f"--model m --endpoint {endpoint}",
                ["dyn://NAMESPACE.COMPONENT.ENDPOINT", "1 to 256 characters"],
            )
            for endpoint in (
                "backend.generate",
                "dyn://a.b",
                "dyn://a.b.c.d",
                "dyn://a..c",
                "dyn://a.b/x.c",
                "dyn://*.b.c",
            )
        ],
        ("--model m --namespace a.b", ["--namespace", "'a.b'"]),
        ("--model m --etcd-endpoints http://a:1,,", ["--etcd-endpoints", "http://localhost:2379"]),
        ("--model m --nats-server http://a:1", ["--nats-server", "nats://localhost:4222"]),
        # gRPC would take 99999 for port 34463.
        *[
            (f"--model m --{setting} {host}:{port}", [f"--{setting}", "a port from 1 to 65535"])
            for setting, host in (("etcd-endpoints", "http://a:1,b"), ("nats-server", "nats://a"))
            for port in (0, 65536, 99999)
        ],
        ("--model m --etcd-endpoints memory://", ["--etcd-endpoints", "no other process", "etcd"]),
        (
            "--model m --nats-server inproc://a --etcd-endpoints memory://a",
            ["is 'memory://a'", "embedding.md"],
        ),
        (
            "--model m --nats-server inproc://",
            ["--nats-server inproc:// needs --etcd-endpoints memory://"],
        ),
        (
            "--model m --engine mock --kv-transfer-host 0.0.0.0",
            ["other workers cannot connect to 0.0.0.0", "--kv-transfer-bind-host"],
        ),
        (
            "--model m --engine torch --kv-transfer-host ::",
            ["other workers cannot connect to ::", "--kv-transfer-bind-host"],
        ),
        (
            "--model m --engine mock --kv-transfer-bind-host eth0",
            ["--kv-transfer-bind-host", "'eth0'"],
        ),
    ],
)
def test_load_wrong_flag_gives_one_line(line, wanted):
    message = error_of(line)
    for part in wanted:
        assert part in message


@each_case(
    ("model", "line", "wanted"),
    [
        (WorkerConfig, "-tp 2", "use --tensor-parallel-size"),
        (WorkerConfig, "--tensor_parallel=2", "use --tensor-parallel-size"),
        (WorkerConfig, "--tp_size 2", "use --tensor-parallel-size"),
        (WorkerConfig, "--ep 4", "use --expert-parallel-size"),
        (WorkerConfig, "--mem-fraction-static 0.9", "use --free-gpu-memory-fraction"),
        (WorkerConfig, "--context-length 4096", "use --max-seq-len"),
        (WorkerConfig, "--max-num-seqs 8", "use --max-batch-size"),
        (WorkerConfig, "--model-name x", "use --served-model-name"),
        (WorkerConfig, "--enable-lora", "not supported: no engine serves LoRA adapters"),
        (WorkerConfig, "--enable-auto-tool-choice", "leave it out: tools are always accepted"),
        (WorkerConfig, "--chat-template t", "use --custom-jinja-template"),
        (WorkerConfig, "--model_path x", "did you mean --model-path?"),
        (WorkerConfig, "--dtype fp8", "--override-engine-args"),
        (WorkerConfig, "--port 1", "--http-port of dynamo-trtllm frontend"),
        (WorkerConfig, "--http-port 1", "--http-port is a flag of dynamo-trtllm frontend"),
        (WorkerConfig, "serve tiny", "dynamo-trtllm launch DEPLOYMENT.yaml --model tiny"),
        (FrontendConfig, "--tp 2", "--tensor-parallel-size of dynamo-trtllm worker"),
        (FrontendConfig, "--ssl-keyfile k", "use --tls-key-file"),
        (FrontendConfig, "--model m", "it is --model-path of dynamo-trtllm worker"),
        (LaunchConfig, "a.yaml --model-path m", "use --model"),
        (
            LaunchConfig,
            "--deployment a.yaml",
            "DEPLOYMENT is the first argument: type the value without --deployment",
        ),
        (FrontendConfig, "-i", "unknown flag -i; use dynamo-trtllm chat"),
        (FrontendConfig, "--xyzzy", "unknown flag --xyzzy; see --help"),
        (LaunchConfig, "serve tiny --tp 2", "dynamo-trtllm launch DEPLOYMENT.yaml --model tiny"),
        (LaunchConfig, "a.yaml b.yaml", "'b.yaml' is a second DEPLOYMENT"),
        (
            LaunchConfig,
            "a.yaml --tp 2",
            "tensor-parallel-size in the flags of a worker in the deployment file",
        ),
        (DemoConfig, "--tls-cert-file c", "tls-cert-file in frontend in the deployment file"),
    ],
)
def test_load_name_of_another_server_suggests_ours(model, line, wanted):
    with pytest.raises(ConfigError) as caught:
        load(model, prog="p", argv=line.split(), environ={})
    assert wanted in caught.value.message
    assert "--help?" not in caught.value.message


@each_case(
    ("name", "value", "wanted"),
    [
        ("DYN_TRTLLM_MAX_NUM_TOKNES", "1", "did you mean DYN_TRTLLM_MAX_NUM_TOKENS?"),
        (
            "DYN_TRTLLM_IS_PREFILL_WORKER",
            "1",
            "IS_PREFILL_WORKER; set DYN_TRTLLM_DISAGGREGATION_MODE to prefill",
        ),
        ("DYN_TRTLLM_MAX_NUM_TOKENS", "", "environment DYN_TRTLLM_MAX_NUM_TOKENS is empty"),
        ("DYN_TRTLLM_MAX_NUM_TOKENS", "x", "environment DYN_TRTLLM_MAX_NUM_TOKENS is 'x'"),
        ("DYN_TRTLLM_PUBLISH_KV_EVENTS", "maybe", "expected true or false"),
        ("DYN_SYSTEM_PORT", "70000", "environment DYN_SYSTEM_PORT is '70000'"),
    ],
)
def test_load_when_a_variable_is_wrong_then_one_line_names_it(name, value, wanted):
    assert wanted in error_of("--model m", {name: value})


def load_frontend(line: str, environ: dict[str, str]) -> FrontendConfig:
    return load(FrontendConfig, prog="frontend", argv=line.split(), environ=environ)


COLLECTOR = "http://collector:4318"
OTEL = {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_TRACES_SAMPLER_ARG": "0.5"}


@pytest.mark.parametrize(
    ("environ", "endpoint", "ratio", "warning"),
    [
        ({}, COLLECTOR, 0.5, ""),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_SDK_DISABLED": ""},
            COLLECTOR,
            0.5,
            "",
        ),
        ({"OTEL_TRACES_SAMPLER_ARG": ""}, COLLECTOR, 1.0, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, None, 0.5, ""),
        ({"OTEL_SDK_DISABLED": "True"}, None, 1.0, ""),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4317"},
            None,
            1.0,
            "OTLP_ENDPOINT is 'localhost:4317': expected a URL",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://a:4317"},
            None,
            1.0,
            "OTLP_ENDPOINT is 'grpc://a:4317': expected a URL",
        ),
        (
            {"OTEL_TRACES_SAMPLER_ARG": "endpoint=http://a"},
            None,
            1.0,
            "SAMPLER_ARG is 'endpoint=http://a'",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None, 1.0, "OTLP_PROTOCOL is 'grpc'"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "DYN_TRTLLM_OTLP_ENDPOINT": "http://b"},
            "http://b",
            0.5,
            "",
        ),
    ],
)
def test_load_with_unusable_otel_variables_disables_traces(
    environ, endpoint, ratio, warning, caplog
):
    config = load_frontend("", OTEL | environ)
    assert (config.otlp_endpoint, config.trace_sample_ratio) == (endpoint, ratio)
    assert len(caplog.messages) == bool(warning)
    assert warning in "".join(caplog.messages)


def test_load_otlp_flag_is_strict_and_ignores_variables():
    wrong = {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert load_frontend(f"--otlp-endpoint {COLLECTOR}", wrong).otlp_endpoint == COLLECTOR
    with pytest.raises(ConfigError, match="flag --otlp-endpoint is 'localhost:4317'"):
        load_frontend("--otlp-endpoint localhost:4317", {})


def test_load_when_two_fields_are_wrong_then_the_rest_is_counted():
    assert error_of("--model m --max-num-tokens 0 --max-batch-size 0").endswith("(and 1 more)")


@pytest.mark.parametrize("text", ["true", "1", "ON", "Yes"])
def test_load_negative_flag_overrides_boolean_variable(text):
    loaded = load_worker("--model m --no-publish-kv-events", {"DYN_TRTLLM_PUBLISH_KV_EVENTS": text})
    assert loaded.publish_kv_events is False


def test_load_print_config_shows_sources(capsys):
    with pytest.raises(SystemExit) as stop:
        load_worker("--model m --print-config", {"NATS_SERVER": "nats://n:1"})
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(WorkerConfig.model_fields) + 1
    assert ["nats_server", "nats://n:1", "environment", "NATS_SERVER"] in [
        line.split() for line in lines
    ]


@pytest.mark.parametrize(
    "words", [["--nats-server"], ["--model", "m", "--print-config", "--nats-server"]]
)
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("nats://user:secret@n:1", "nats://***@n:1"),
        ("nats://secret@n:1", "nats://***@n:1"),
        ("user:secret@n:1", "***@n:1"),
        ("nats://user:secret@@n:1", "nats://***@n:1"),
        ("nats://user:a secret/with 'all@n:1/path", "nats://***@n:1/path"),
        ("nats://user:secret", "nats://user:***"),
    ],
)
def test_address_password_is_masked(capsys, words, address, shown):
    with pytest.raises((SystemExit, ConfigError)) as stop:
        load(WorkerConfig, prog="w", argv=[*words, address], environ={})
    text = capsys.readouterr().out + str(stop.value)
    assert "secret" not in text
    assert shown in text or "--model" in str(stop.value)


def test_config_table_shows_the_flag_spelling_of_an_enum():
    table = config_table(load_worker("--model m --disaggregation-mode prefill"))
    assert ["disaggregation_mode", "prefill", "flag", "--disaggregation-mode"] in [
        s.split() for s in table.splitlines()
    ]


def test_to_argv_when_read_back_then_the_config_is_the_same():
    values = {
        "model_path": "-odd name",
        "disaggregation_mode": Role.PREFILL,
        "override_engine_args": {"a": {"b": [1, None]}},
        "max_num_tokens": 5,
        "publish_kv_events": False,
        "engine": None,
        "lease_ttl_s": 0.5,
    }
    argv = to_argv(WorkerConfig, values)
    assert load(WorkerConfig, prog="w", argv=argv, environ={}) == WorkerConfig(**values)


def test_exit_with_when_called_then_one_line_and_status_two(capsys):
    with pytest.raises(SystemExit) as stop:
        exit_with("worker", ConfigError("wrong\nvalue"))
    assert stop.value.code == 2
    assert capsys.readouterr().err == "worker: wrong value\n"


@pytest.mark.parametrize(
    ("module", "model"),
    [("models", "WorkerConfig"), ("models", "FrontendConfig"), ("commands", "LaunchConfig")],
)
def test_help_explains_every_flag_without_an_engine_import(module, model):
    code = f"""
import json, sys
for name in ("torch", "transformers", "vllm", "tensorrt_llm", "nixl", "nats", "httptools"):
    sys.modules[name] = None  # an import of it fails
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.{module} import {model}
try:
    load({model}, prog="p", argv=["--help"], environ={{}})
except SystemExit as stop:
    print(json.dumps([stop.code, list({model}.model_fields)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, last = done.stdout.splitlines()
    status, fields = json.loads(last)
    assert status == 0
    for name in fields:
        assert f"--{name.replace('_', '-')}" in done.stdout or name.upper() in done.stdout
    assert "DYN_TRTLLM_" in "\n".join(text)


def test_load_config_knows_the_source_of_values():
    config = load_worker("--model m --max-batch-size 4", {"DYN_TRTLLM_MAX_NUM_TOKENS": "9"})
    assert config.source_of("max_batch_size") == "flag --max-batch-size"
    assert config.source_of("max_num_tokens") == "environment DYN_TRTLLM_MAX_NUM_TOKENS"
    assert config.source_of("max_seq_len") == "default"
    assert (
        config.model_copy(update={"model_path": "other"}).source_of("max_batch_size")
        == "flag --max-batch-size"
    )


def test_source_of_built_config_is_the_configuration():
    config = WorkerConfig(model_path="m", max_batch_size=4)
    assert (config.source_of("max_batch_size"), config.source_of("max_seq_len")) == (
        "configuration",
        "default",
    )


def test_load_print_config_appends_extra_sections(capsys):
    with pytest.raises(SystemExit):
        load(
            WorkerConfig,
            prog="w",
            argv=["--model", "m", "--print-config"],
            environ={},
            extra_text=lambda config: f"more of {config.model_path}\n",
        )
    assert capsys.readouterr().out.endswith("\nmore of m\n")


def test_variable_of_another_command_is_known() -> None:
    environ = {"DYN_TRTLLM_URL": "http://gpu:8000", "DYN_TRTLLM_WATCH": "true", "OTHER": "x"}
    assert load(VersionConfig, prog="x", argv=[], environ=environ)

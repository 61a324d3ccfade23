"""Fuzz the files and command lines with which processes are started."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.config.flags import Flag, flags_of
from dynamo_trtllm.config.layers import Source, as_yaml, merge, nested, read_yaml
from dynamo_trtllm.config.load import config_table, load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.arguments import described_arguments
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY as TRTLLM
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY as VLLM
from dynamo_trtllm.engines.vllm.args import vllm_args
from dynamo_trtllm.protocol.errors import ConfigError
from tests.fuzz.target import Target, check_hides, random_of, secret_for

_Model = type[WorkerConfig] | type[FrontendConfig]
_ROOT = Path(__file__).parents[3]
# Where inputs have them as the value of a setting, a secret is put in their place.
_PASSWORD = "p4ssw0rd-of-etcd"
_API_KEY = "sk-0123456789abcdef"
_PASSWORD_IN_ADDRESS = re.compile(rf":{_PASSWORD}(?=[^@]*@)")
_MAX_ERROR_CHARS = 4_200


@functools.cache
def _path() -> Path:
    """Return the path of a file that belongs to this process alone."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-yaml-")
    _folders.append(folder)
    return Path(folder.name) / "file.yaml"


_folders: list[tempfile.TemporaryDirectory[str]] = []


def _written(data: bytes) -> Path:
    path = _path()
    path.write_bytes(data)
    return path


def _check_error(error: ConfigError) -> None:
    assert len(error.message) <= _MAX_ERROR_CHARS


# --- YAML -------------------------------------------------------------------------------------------


def check_yaml(data: bytes) -> None:
    """Read a file, merge its two halves, and read what is written of the result."""
    path = _written(data)
    try:
        value = read_yaml(path)
        first = dict(list(value.items())[::2])
        merged = merge([Source(value, "YAML"), Source(first, "override")])
    except ConfigError as exc:
        _check_error(exc)
        return
    again = nested(merged.leaves)
    path.write_text(as_yaml(merged.leaves), encoding="utf-8", errors="surrogatepass")
    read = read_yaml(path)
    assert repr(read) == repr(again), f"{read} is read from what was written of {again}"
    for key, leaf in merge([Source(value, "YAML")]).leaves.items():
        assert leaf.source == "YAML", key


def _yaml_files() -> Iterator[bytes]:
    yield b"a: 1\nb:\n  c: [1, 2.5, x]\n  d: {e: null}\n"
    yield b"base: &x {a: 1}\nother:\n  <<: *x\n  b: *x\n"
    yield b'a: !!bool yes\nb: 2026-01-02\nc: 0x1F\nd: .inf\n"e.f": |\n  text\n'
    yield b"a: &a [*a]\n"
    for path in sorted(_ROOT.glob("engine_configs/**/*.yaml"))[:3]:
        yield path.read_bytes()[:1500]


# --- deployments and arguments of engines -----------------------------------------------------------


def check_deployment(data: bytes) -> None:
    """Read the file of a deployment, with a variable in it."""
    path = _written(data)
    try:
        deployment = load_deployment(path, {"NAME": "value", "EMPTY": ""})
    except ConfigError as exc:
        _check_error(exc)
        return
    assert deployment.workers


def _deployments() -> Iterator[bytes]:
    yield b"workers:\n- {name: a, disaggregation_mode: prefill, devices: cpu}\n"
    for path in sorted(_ROOT.glob("deploy/local/*.yaml")):
        yield path.read_bytes()[:2000]


def check_engine_arguments(data: bytes) -> None:
    """Check the arguments in a file for every engine."""
    path = _written(data)
    for engine, schema in (("mock", MockArgs), ("torch", TorchArgs)):
        try:
            described_arguments(_worker(path, engine), schema, engine)
        except ConfigError as exc:
            _check_error(exc)
    for engine, release in (("trtllm", TRTLLM.releases[0]), ("trtllm", TRTLLM.newest)):
        try:
            trtllm_args(_worker(path, engine), release, gpus=())
        except ConfigError as exc:
            _check_error(exc)
    try:
        vllm_args(_worker(path, "vllm"), VLLM.newest)
    except ConfigError as exc:
        _check_error(exc)


def _worker(path: Path, engine: str) -> WorkerConfig:
    return WorkerConfig.model_validate(
        {"model_path": "m", "engine": engine, "extra_engine_args": path, "max_batch_size": 5}
    )


def _engine_files() -> Iterator[bytes]:
    yield b"step_s: 0.5\nenable_prefix_caching: true\n"
    yield b"device: cpu\ndtype: float32\nkv_block_size: 16\n"
    yield b"kv_cache_config: {free_gpu_memory_fraction: 0.5, enable_block_reuse: false}\n"
    yield b"cache_transceiver_config: {backend: UCX}\nmoe_config:\n  backend: TRTLLM\n"
    yield b"tensor_parallel_size: 2\ngpu_memory_utilization: 0.9\ncompilation_config: {mode: 3}\n"
    for path in sorted(_ROOT.glob("engine_configs/**/*.yaml"))[::8]:
        yield path.read_bytes()[:1500]


# --- command lines and environments -----------------------------------------------------------------


def check_command_line(data: bytes) -> None:
    """Load settings from words, one a line; NAME=VALUE is a variable. No output shows a secret."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    words: list[str] = []
    environment = {"DYN_TRTLLM_API_KEY": _API_KEY}
    for line in lines:
        name, separator, value = line.partition("=")
        if separator and not name.startswith("-"):
            environment[name] = value
        else:
            words.append(line)
    # One of them, because each takes long.
    model = random_of(data).choice((WorkerConfig, FrontendConfig))
    secret = secret_for(data)
    words = _with_secret(words, model, secret)
    for name, flag in _variables(model).items():
        if name in environment:
            environment[name] = _secret_value(environment[name], flag, secret)
    _check_settings(model, words, environment, secret)


def _with_secret(words: list[str], model: _Model, secret: str) -> list[str]:
    """Return the words with a secret as the value of flags that have one."""
    flags = {name: flag for flag in flags_of(model) for name in flag.names}
    result: list[str] = []
    before = ""
    for word in words:
        name, separator, value = word.partition("=")
        if before in flags:
            word = _secret_value(word, flags[before], secret)
        elif separator and name in flags:
            word = f"{name}={_secret_value(value, flags[name], secret)}"
        before = word
        result.append(word)
    return result


@functools.cache
def _variables(model: _Model) -> Mapping[str, Flag]:
    """Return the flags of a model by the variables that set them."""
    return {name: flag for flag in flags_of(model) for name in (*flag.variables(), *flag.env)}


def _secret_value(value: str, flag: Flag, secret: str) -> str:
    """Return the value of a setting with a secret in place of its API key or password."""
    if flag.is_secret:
        return value.replace(_API_KEY, secret)
    return _PASSWORD_IN_ADDRESS.sub(f":{secret}", value) if flag.is_address else value


def _check_settings(
    model: _Model, words: list[str], environment: dict[str, str], secret: str
) -> None:
    output = io.StringIO()
    table = ""
    try:
        with contextlib.redirect_stdout(output):
            settings = load(model, prog="fuzz", argv=words, environ=environment)
        table = config_table(settings)
    except ConfigError as exc:
        _check_error(exc)
        table = exc.message
    except SystemExit as exc:
        assert exc.code == 0, "only --help, --version and --print-config exit"
    check_hides(secret, output.getvalue())
    check_hides(secret, table)


def _command_lines() -> Iterator[bytes]:
    worker = (
        *("--model", "m", "--engine", "mock", "--disaggregation-mode", "prefill"),
        *("--max-batch-size", "5", "--override-engine-args", '{"a": {"b": 1}}'),
    )
    frontend = (
        "--http-port",
        "8000",
        "--http-host",
        "0.0.0.0",
        "--retry-limit=2",
        "--etcd-endpoints",
    )
    address = f"http://user:{_PASSWORD}@127.0.0.1:2379"
    yield "\n".join(worker).encode()
    yield "\n".join((*frontend, address)).encode()
    yield f"--nats-server\nnats://user:{_PASSWORD}@127.0.0.1\nDYN_HTTP_PORT=5".encode()
    yield f"--etcd-endpoints=user:{_PASSWORD}@127.0.0.1\n--max-inflight=x".encode()
    yield b"DYN_TRTLLM_MAX_INFLIGHT=5\nDYN_ROUTER_MODE=kv\nOTEL_EXPORTER_OTLP_ENDPOINT=x\n--help"
    yield f"--api-key\n{_API_KEY}\n--print-config".encode()


def _flag_words() -> tuple[bytes, ...]:
    names: list[str] = []
    for model in (WorkerConfig, FrontendConfig):
        names += ["--" + name.replace("_", "-") for name in model.model_fields]
    return tuple(sorted({name.encode() for name in names}))


def _keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys_of(inner)


@functools.cache
def _yaml_words() -> tuple[bytes, ...]:
    keys: set[str] = set(MockArgs.model_fields) | set(TorchArgs.model_fields)
    for path in (*_ROOT.glob("engine_configs/**/*.yaml"), *_ROOT.glob("deploy/local/*.yaml")):
        keys.update(_keys_of(yaml.load(path.read_text(), yaml.CSafeLoader)))
    marks = (b"&a ", b"*a", b"<<: ", b"!!bool ", b"!!int ", b"!!timestamp ", b"? ", b"- ", b"---\n")
    return (*marks, b"${NAME}", b"${X:-d}", b"$$", *sorted(f"{key}: ".encode() for key in keys))


TARGETS = {
    "yaml": Target(
        summary="YAML files: reading, merging, writing",
        check=check_yaml,
        files=("config/layers.py",),
        seeds=_yaml_files,
        words=_yaml_words(),
    ),
    "deployment": Target(
        summary="files of deployments, with all flags in them",
        check=check_deployment,
        files=("config/deployment.py", "config/layers.py"),
        seeds=_deployments,
        words=_yaml_words(),
    ),
    "engine-arguments": Target(
        summary="arguments of all engines in YAML files",
        check=check_engine_arguments,
        files=(
            "engines/arguments.py",
            "engines/argument_schema.py",
            "engines/trtllm/args.py",
            "engines/trtllm/deprecated_arguments.py",
            "engines/trtllm/kernel_profiles.py",
            "engines/vllm/args.py",
        ),
        seeds=_engine_files,
        words=_yaml_words(),
    ),
    "command-line": Target(
        summary="flags and environment variables",
        check=check_command_line,
        files=(
            "config/load.py",
            "config/flags.py",
            "config/parser.py",
            "config/unknown_flags.py",
        ),
        seeds=_command_lines,
        words=(
            *_flag_words(),
            *(b"\n", b"=", b"{", b'"', b"true", b"DYN_TRTLLM_", b"http://", b"nats://", b"@", b","),
            *(_PASSWORD.encode(), _API_KEY.encode()),
        ),
    ),
}

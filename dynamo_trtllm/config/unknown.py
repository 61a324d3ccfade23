"""Explain unknown flags and arguments: name the flag for a name of another server, or say what to do instead.

A name that one command has as a flag stays in OTHER_NAMES for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from dynamo_trtllm.config.base import Config, suggest
from dynamo_trtllm.config.commands import LaunchConfig, ServeConfig
from dynamo_trtllm.config.flags import flags_of
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.parser import CONSOLE
from dynamo_trtllm.errors import ConfigError

_WORKER, _LAUNCHER = f"{CONSOLE} worker", f"{CONSOLE} launch"
_COMMANDS: Mapping[type[Config], str] = {
    WorkerConfig: _WORKER,
    FrontendConfig: f"{CONSOLE} frontend",
    LaunchConfig: _LAUNCHER,
}
_SUBCOMMANDS = frozenset({"api-server", "frontend", "launch", "launch-server", "run", "serve", "server", "worker"})


class OtherName(NamedTuple):
    """The equivalent here of a flag of vLLM, SGLang, Dynamo or TensorRT-LLM."""

    fields: tuple[str, ...] = ()  # fields here; the first that the command has is suggested
    instead: str = ""  # advice if there is no such field


_NO_KEYS = OtherName(
    instead="requests are not authenticated: put a proxy that checks API keys in front of the frontend"
)
_NO_TLS = OtherName(instead="the frontend speaks plain HTTP: put a proxy that terminates TLS in front of it")
_PLANE = OtherName(instead="leave it out: requests and tokens always travel over NATS")
_UNSUPPORTED = OtherName(instead="not supported")
_ENGINE_ARGUMENT = OtherName(
    instead="it is an engine argument: pass it to the worker with --extra-engine-args FILE.yaml or "
    "--override-engine-args '{\"name\": value}', under the engine's own name"
)
_TENSOR = OtherName(("tensor_parallel_size",))
_EXPERT = OtherName(("expert_parallel_size",))
_PIPELINE = OtherName(("pipeline_parallel_size",))
_KV_SHARE = OtherName(("free_gpu_memory_fraction",))
_LENGTH = OtherName(("max_seq_len",))
_BATCH = OtherName(("max_batch_size",))
_TOKENS = OtherName(("max_num_tokens",))
_NAME = OtherName(("served_model_name",))
_PORT = OtherName(("http_port", "port"))
_HOST = OtherName(("http_host", "host"))

OTHER_NAMES: Mapping[str, OtherName] = {
    "api-key": _NO_KEYS,
    "attention-backend": _ENGINE_ARGUMENT,
    "backend": OtherName(("engine",)),
    "block-size": OtherName(("kv_block_size",)),
    "config": OtherName(("extra_engine_args",)),
    "context-length": _LENGTH,
    "data-parallel-size": OtherName(instead="start more workers; the launcher has count for it in the deployment file"),
    "dp": OtherName(instead="start more workers; the launcher has count for it in the deployment file"),
    "disaggregation-bootstrap-port": OtherName(instead="workers find each other through etcd: leave it out"),
    "connector": _UNSUPPORTED,
    "discovery-backend": OtherName(instead="leave it out: discovery always uses etcd"),
    "enable-anthropic-api": _UNSUPPORTED,
    "enable-attention-dp": OtherName(instead="set enable_attention_dp: true in the file of --extra-engine-args"),
    "encode-endpoint": _UNSUPPORTED,
    "enforce-disagg": OtherName(instead="leave it out: it is always on, unless --decode-fallback is given"),
    "event-plane": _PLANE,
    "dtype": _ENGINE_ARGUMENT,
    "enable-expert-parallel": _EXPERT,
    "enforce-eager": _ENGINE_ARGUMENT,
    "ep": _EXPERT,
    "ep-size": _EXPERT,
    "expert-parallel": _EXPERT,
    "extra-llm-api-options": OtherName(("extra_engine_args",)),
    "gpu-memory-utilization": _KV_SHARE,
    "host": _HOST,
    "http-host": _HOST,
    "http-port": _PORT,
    "interactive": OtherName(instead=f"use {CONSOLE} chat"),
    "kserve-grpc-server": _UNSUPPORTED,
    "kv-cache-dtype": _ENGINE_ARGUMENT,
    "kv-cache-free-gpu-memory-fraction": _KV_SHARE,
    "kv-transfer-config": OtherName(
        instead="the worker's role determines the KV transfer: pass --disaggregation-mode to the worker"
    ),
    "max-model-len": _LENGTH,
    "max-num-batched-tokens": _TOKENS,
    "max-num-seqs": _BATCH,
    "max-prefill-tokens": _TOKENS,
    "max-running-requests": _BATCH,
    "mem-fraction-static": _KV_SHARE,
    "modality": _UNSUPPORTED,
    "model": OtherName(("model_path", "model")),
    "model-name": _NAME,
    "model-path": OtherName(("model", "model_path")),
    "nats-url": OtherName(("nats_server",)),
    "page-size": OtherName(("kv_block_size",)),
    "pipeline-parallel": _PIPELINE,
    "port": _PORT,
    "pp": _PIPELINE,
    "pp-size": _PIPELINE,
    "publish-events-and-metrics": OtherName(("publish_kv_events",)),
    "quantization": _ENGINE_ARGUMENT,
    "request-plane": _PLANE,
    "reasoning-parser": OtherName(("dyn_reasoning_parser",)),
    "ssl-certfile": _NO_TLS,
    "ssl-keyfile": _NO_TLS,
    "tensor-parallel": _TENSOR,
    "tls-cert-path": _NO_TLS,
    "tls-key-path": _NO_TLS,
    "tokenizer": OtherName(instead="leave it out: fastokens is used wherever it supports the tokenizer"),
    "tokens-per-block": OtherName(("kv_block_size",)),
    "tool-call-parser": OtherName(("dyn_tool_call_parser",)),
    "tp": _TENSOR,
    "tp-size": _TENSOR,
    "trust-remote-code": _ENGINE_ARGUMENT,
}


def reject_unknown(model: type[Config], positional: str | None, unknown: Sequence[str], known: Sequence[str]) -> None:
    """Reject unknown flags and arguments, and subcommands of other servers. Return if there are none.

    Args:
        model: Settings of the command.
        positional: Value of its positional argument, if it has one.
        unknown: Words that argparse did not recognize, in the order typed.
        known: Flags of the command.

    Raises:
        ConfigError: There is an unknown word. The message says what to type or do instead.
    """
    words = [word for word in (positional, *unknown) if word is not None]
    if words and words[0].replace("_", "-") in _SUBCOMMANDS:
        _reject_subcommand(words)
    if not unknown:
        return
    word = unknown[0]
    if not word.startswith("-"):
        _reject_positional(model, word)
    name = word.partition("=")[0]
    answer = _answer(model, name.lstrip("-").replace("_", "-"))
    if answer is None:
        guess = suggest(name, known)
        answer = f"did you mean {guess}?" if guess else "see --help"
    raise ConfigError(f"unknown flag {name}; {answer}", field=name)


def _reject_subcommand(words: Sequence[str]) -> NoReturn:
    name = words[1] if len(words) > 1 and not words[1].startswith("-") else "MODEL"
    raise ConfigError(
        f"there is no subcommand {words[0]!r}; to serve a model on this machine: {CONSOLE} serve {name}; for a "
        f"deployment file: {_LAUNCHER} DEPLOYMENT.yaml --model {name}; for one worker: {_WORKER} --model-path {name}",
        field=words[0],
    )


def _reject_positional(model: type[Config], word: str) -> NoReturn:
    hint = "every setting is a flag, see --help"
    if positional := next((flag.names[0] for flag in flags_of(model) if flag.positional), None):
        raise ConfigError(f"{word!r} is a second {positional}; give only one", field=word)
    if "model_path" in model.model_fields:
        hint = f"if it is the model, type --model-path {word}"
    raise ConfigError(f"unexpected argument {word!r}; {hint}", field=word)


def _answer(model: type[Config], name: str) -> str | None:
    """Return what to type or do instead of an unknown flag; None if no table has it."""
    own = {field.replace("_", "-"): field for each in (model, *_COMMANDS) for field in each.model_fields}
    other = OTHER_NAMES.get(name) or (OtherName((own[name],)) if name in own else None)
    if other is None:
        return None
    positional = {flag.field: flag.names[0] for flag in flags_of(model) if flag.positional}
    for field in other.fields:
        if field in positional:
            return f"{positional[field]} is the first argument: type the value without --{name}"
        if field in model.model_fields:
            return f"use {_flag(field)}" if _flag(field) != f"--{name}" else None
    for each, command in _COMMANDS.items():
        for field in other.fields:
            if field in each.model_fields:
                return _of_another(model, each, command, field, name)
    return other.instead


def _of_another(model: type[Config], owner: type[Config], command: str, field: str, name: str) -> str:
    flag = _flag(field)
    if model is ServeConfig and owner is WorkerConfig:
        return f"it is a flag of the workers; type it last, after --: -- {flag} VALUE"
    if issubclass(model, LaunchConfig | ServeConfig):
        where = "the flags of a worker" if owner is WorkerConfig else "frontend"
        return f"write {flag.removeprefix('--')} in {where} in the deployment file"
    return f"{flag} is a flag of {command}" if flag == f"--{name}" else f"it is {flag} of {command}"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")

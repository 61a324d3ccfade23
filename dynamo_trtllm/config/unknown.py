"""Explain unknown flags and arguments: name the flag for a name of another server, or say what to do instead.

A name that one command has as a flag stays in the tables for the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

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


# Names of flags in vLLM, SGLang, Dynamo and TensorRT-LLM, by the fields that they are here. The first that the command
# has is suggested.
_OUR_FIELDS: Mapping[tuple[str, ...], Sequence[str]] = {
    ("dyn_reasoning_parser",): ("reasoning-parser",),
    ("dyn_tool_call_parser",): ("tool-call-parser",),
    ("engine",): ("backend",),
    ("expert_parallel_size",): ("enable-expert-parallel", "ep", "ep-size", "expert-parallel"),
    ("extra_engine_args",): ("config", "extra-llm-api-options"),
    ("free_gpu_memory_fraction",): (
        "gpu-memory-utilization",
        "kv-cache-free-gpu-memory-fraction",
        "mem-fraction-static",
    ),
    ("http_host", "host"): ("host", "http-host"),
    ("http_port", "port"): ("http-port", "port"),
    ("kv_block_size",): ("block-size", "page-size", "tokens-per-block"),
    ("max_batch_size",): ("max-num-seqs", "max-running-requests"),
    ("max_num_tokens",): ("max-num-batched-tokens", "max-prefill-tokens"),
    ("max_seq_len",): ("context-length", "max-model-len"),
    ("model_path", "model"): ("model",),
    ("model", "model_path"): ("model-path",),
    ("nats_server",): ("nats-url",),
    ("pipeline_parallel_size",): ("pipeline-parallel", "pp", "pp-size"),
    ("publish_kv_events",): ("publish-events-and-metrics",),
    ("served_model_name",): ("model-name",),
    ("tensor_parallel_size",): ("tensor-parallel", "tp", "tp-size"),
}
# What to do instead of flags of other servers that have no equivalent here.
_ADVICE: Mapping[str, Sequence[str]] = {
    "it is an engine argument: pass it to the worker with --extra-engine-args FILE.yaml or "
    "--override-engine-args '{\"name\": value}', under the engine's own name": (
        "attention-backend",
        "dtype",
        "enforce-eager",
        "kv-cache-dtype",
        "quantization",
        "trust-remote-code",
    ),
    "leave it out: discovery always uses etcd": ("discovery-backend",),
    "leave it out: fastokens is used wherever it supports the tokenizer": ("tokenizer",),
    "leave it out: it is always on, unless --decode-fallback is given": ("enforce-disagg",),
    "leave it out: requests and tokens always travel over NATS": ("event-plane", "request-plane"),
    "not supported": ("connector", "enable-anthropic-api", "encode-endpoint", "kserve-grpc-server", "modality"),
    "requests are not authenticated: put a proxy that checks API keys in front of the frontend": ("api-key",),
    "set enable_attention_dp: true in the file of --extra-engine-args": ("enable-attention-dp",),
    "start more workers; the launcher has count for it in the deployment file": ("data-parallel-size", "dp"),
    "the frontend speaks plain HTTP: put a proxy that terminates TLS in front of it": (
        "ssl-certfile",
        "ssl-keyfile",
        "tls-cert-path",
        "tls-key-path",
    ),
    "the worker's role determines the KV transfer: pass --disaggregation-mode to the worker": ("kv-transfer-config",),
    f"use {CONSOLE} chat": ("interactive",),
    "workers find each other through etcd: leave it out": ("disaggregation-bootstrap-port",),
}


def reject_unknown(
    model: type[Config], given: argparse.Namespace, unknown: Sequence[str], parser: argparse.ArgumentParser
) -> None:
    """Reject unknown flags and arguments, and subcommands of other servers. Return if there are none.

    Args:
        model: Settings of the command.
        given: What the parser recognized.
        unknown: Words that it did not recognize, in the order typed.
        parser: Parser of the command.

    Raises:
        ConfigError: There is an unknown word. The message says what to type or do instead.
    """
    positional = [
        getattr(given, flag.field)[1] for flag in flags_of(model) if flag.positional and hasattr(given, flag.field)
    ]
    words = [*positional, *unknown]
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
        guess = suggest(name, (each for each in parser._option_string_actions if each.startswith("--")))
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
    if advice := next((advice for advice, names in _ADVICE.items() if name in names), None):
        return advice
    own = {field.replace("_", "-"): field for each in (model, *_COMMANDS) for field in each.model_fields}
    fields = next((fields for fields, names in _OUR_FIELDS.items() if name in names), ())
    fields = fields or ((own[name],) if name in own else ())
    positional = {flag.field: flag.names[0] for flag in flags_of(model) if flag.positional}
    for field in fields:
        if field in positional:
            return f"{positional[field]} is the first argument: type the value without --{name}"
        if field in model.model_fields:
            return f"use {_flag(field)}" if _flag(field) != f"--{name}" else None
    for each, command in _COMMANDS.items():
        for field in fields:
            if field in each.model_fields:
                return _of_another(model, each, command, field, name)
    return None


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

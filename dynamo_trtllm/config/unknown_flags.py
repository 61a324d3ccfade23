"""Reject unknown flags and arguments, and say what to type or do instead.

If an unknown flag is one of another server, the error names the flag that does the same here, or
says what to do. `other_servers.yaml` has these flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dynamo_trtllm.config import dynamo_variables
from dynamo_trtllm.config.commands import LaunchConfig, ServeConfig
from dynamo_trtllm.config.config_base import Config
from dynamo_trtllm.config.flags import Flag, flags_of
from dynamo_trtllm.config.http_access import ACCESS_FIELDS
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.split_flags import flag_names
from dynamo_trtllm.config.suggestions import suggest
from dynamo_trtllm.protocol.errors import ConfigError

_WORKER = f"{COMMAND_NAME} worker"
_LAUNCHER = f"{COMMAND_NAME} launch"
_COMMAND_OF: Mapping[type[Config], str] = {
    WorkerConfig: _WORKER,
    FrontendConfig: f"{COMMAND_NAME} frontend",
    LaunchConfig: _LAUNCHER,
}
# Subcommands of other servers, and of ours where a user types one too many.
_SUBCOMMANDS = frozenset(
    {"api-server", "frontend", "launch", "launch-server", "run", "serve", "server", "worker"}
)


def reject_unknown(
    model: type[Config],
    given: argparse.Namespace,
    unknown: Sequence[str],
    parser: argparse.ArgumentParser,
    others: Sequence[type[Config]] = (),
) -> None:
    """Reject unknown flags and arguments, and subcommands of other servers.

    Args:
        model: settings of the command.
        given: what the parser recognized.
        unknown: words that it did not recognize, in the order typed.
        parser: parser of the command.
        others: as for `load`.

    Raises:
        ConfigError: there is an unknown word. The message says what to type or do instead.
    """
    positional = next((flag for flag in flags_of(model) if flag.positional), None)
    words = list(unknown)
    if issubclass(model, LaunchConfig | ServeConfig) and positional is not None:
        # The parser has taken the first word, which may be a subcommand of another server.
        taken = getattr(given, positional.field, {})
        words = [typed.value for typed in taken.values()] + words
    _reject_subcommand(words)
    if not unknown:
        return
    word = unknown[0]
    if not word.startswith("-"):
        if positional is not None:
            name = positional.names[0]
            raise ConfigError(
                f"{word!r} is a second {name}; give only one, and quote it if it contains spaces"
            )
        hint = "every setting is a flag, see --help"
        if "model_path" in model.model_fields:
            hint = f"if it is the model, type --model-path {word}"
        raise ConfigError(f"unexpected argument {word!r}; {hint}")
    name, _, _ = word.partition("=")
    answer = _answer(model, positional, name.lstrip("-").replace("_", "-"))
    if answer is None:
        flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        for other in others:
            flags += [flag for flag in flag_names(other) if flag not in flags]
        guess = suggest(name, flags)
        answer = f"did you mean {guess}?" if guess else "see --help"
    raise ConfigError(f"unknown flag {name}; {answer}")


def _reject_subcommand(words: Sequence[str]) -> None:
    """Raise ConfigError if the first word is a subcommand of another server, or one of ours."""
    if not words or words[0].replace("_", "-") not in _SUBCOMMANDS:
        return
    model_name = "MODEL"
    if len(words) > 1 and not words[1].startswith("-"):
        model_name = words[1]
    raise ConfigError(
        f"there is no subcommand {words[0]!r}; to serve a model on this machine: {COMMAND_NAME}"
        f" serve {model_name}; for a deployment file: {_LAUNCHER} DEPLOYMENT.yaml --model"
        f" {model_name}; for one worker: {_WORKER} --model-path {model_name}"
    )


def without_no_op_flags(model: type[Config], unknown: Sequence[str]) -> list[str]:
    """Leave out flags that change nothing here, such as `--request-plane nats`."""
    words = list(unknown)
    if not issubclass(model, WorkerConfig | FrontendConfig):
        return words
    for flag in ("request-plane", "event-plane", "discovery-backend", "store-kv"):
        variable_name = dynamo_variables.PREFIX + flag.replace("-", "_").upper()
        for value in dynamo_variables.VARIABLES[variable_name].no_op_values:
            words = _without(words, [f"--{flag}={value}"])
            words = _without(words, [f"--{flag}", value])
    return words


def _without(words: list[str], part: list[str]) -> list[str]:
    """Return the words without each occurrence of the words of `part` in a row."""
    kept = list(words)
    # From the end, because a deletion moves only the words that follow it.
    for i in range(len(words) - len(part), -1, -1):
        if kept[i : i + len(part)] == part:
            del kept[i : i + len(part)]
    return kept


def _answer(model: type[Config], positional: Flag | None, name: str) -> str | None:
    """Return what to type or do instead of an unknown flag.

    Return None if nothing is known of it, or if this command has the flag in another form.
    """
    from dynamo_trtllm.config.layers import read_yaml  # PyYAML, which most commands do not need

    # `chat`, `status` and `bench` have --url, because they ask a frontend.
    if name == "url" and {"deployment_name", "etcd_endpoints"} <= model.model_fields.keys():
        return (
            "this command asks etcd and NATS, not a frontend; for a deployment of another machine"
            " pass its --etcd-endpoints, --nats-server and --namespace"
        )
    entries = read_yaml(Path(__file__).with_name("other_servers.yaml"))
    # All flags such as --trtllm.section.key have one entry, "trtllm.".
    section, dot, _ = name.partition(".")
    answer = entries.get(section + dot)
    if isinstance(answer, str) and answer:
        return answer
    # Otherwise the entry is a list of fields. Without an entry, a field may have the name.
    fields = answer or _fields_named(name, (model, *_COMMAND_OF))
    for field in fields:
        if positional is not None and field == positional.field:
            return f"{positional.names[0]} is the first argument: type the value without --{name}"
        if field in model.model_fields:
            flag = _flag(field)
            # If they are equal, the user typed another form, such as --model_path.
            return None if flag == f"--{name}" else f"use {flag}"
    for owner, command in _COMMAND_OF.items():
        for field in fields:
            if field in owner.model_fields:
                return _use_of_another_command(model, owner, command, field, name)
    return None


def _fields_named(flag_name: str, models: Iterable[type[Config]]) -> list[str]:
    """Return the field with this flag in any of the models; none if there is none."""
    field = flag_name.replace("-", "_")
    return [field] if any(field in model.model_fields for model in models) else []


def _use_of_another_command(
    model: type[Config], owner: type[Config], command: str, field: str, name: str
) -> str:
    """Return where to give the unknown flag `name`, which sets a field of another command.

    Args:
        model: settings of the command that was typed.
        owner: settings that have the field.
        command: the command with these settings.
        field: name of the field.
        name: the flag without dashes, as typed. In another server, it may have another name.
    """
    flag = _flag(field)
    if issubclass(model, LaunchConfig | ServeConfig):
        where = "frontend"
        # Workers have the settings of access, too, but clients use the port of the frontend.
        if owner is WorkerConfig and field not in ACCESS_FIELDS:
            where = "the flags of a worker"
        return f"write {flag.removeprefix('--')} in {where} in the deployment file"
    if flag == f"--{name}":
        return f"{flag} is a flag of {command}"
    return f"it is {flag} of {command}"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")

"""The console command `dynamo-trtllm`: a table of subcommands, each of which is loaded only when it runs.

Every subcommand has one implementation, which `python -m` of its module also runs. The flags of a subcommand come from
its settings, so that `--help` and the completion of a shell load no engine and no server.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from dynamo_trtllm.config.environ import command_line, set_command_line
from dynamo_trtllm.config.parser import CONSOLE, CommandParser, command_streams
from dynamo_trtllm.errors import ConfigError, install_hint

_HELP = ("-h", "--help")
_DEPLOY, _PROCESS, _USE, _CHECK, _OTHER = (
    "start a deployment on this machine",
    "start one process",
    "use and watch a deployment",
    "check and measure",
    "other commands",
)


class Command(NamedTuple):
    """One subcommand. `main` is MODULE or MODULE:NAME, in `dynamo_trtllm`; without NAME it is the function `main`."""

    name: str
    group: str
    summary: str
    main: str
    flags: str  # a class in `config.commands`, or a function in the module of `main` that returns the parser


COMMANDS = (
    Command(
        "demo", _DEPLOY, "Start the sample deployment, and send it a request.", "launch.main:demo_main", "DemoConfig"
    ),
    Command("serve", _DEPLOY, "Serve a model with settings chosen for this machine.", "launch.serve", "ServeConfig"),
    Command("launch", _DEPLOY, "Start the processes of a deployment file.", "launch.main", "LaunchConfig"),
    Command("worker", _PROCESS, "Run one worker: an engine with a model.", "worker.main", "WorkerConfig"),
    Command("frontend", _PROCESS, "Run an OpenAI-compatible HTTP frontend.", "frontend.process.main", "FrontendConfig"),
    Command("chat", _USE, "Chat with a running deployment.", "cli.chat", "ChatConfig"),
    Command("status", _USE, "Show processes, health and load of a deployment.", "cli.status", "StatusConfig"),
    Command("explain", _USE, "Show the life of a request, or what is stuck.", "cli.explain", "ExplainConfig"),
    Command(
        "clear-namespace",
        _USE,
        "Remove the records of a deployment that is gone.",
        "cli.clear_namespace",
        "ClearNamespaceConfig",
    ),
    Command("preflight", _CHECK, "Check TensorRT-LLM settings without a GPU.", "cli.preflight", "PreflightConfig"),
    Command("bench", _CHECK, "Run a benchmark, and write a report.", "bench.profile.main", "parser"),
    Command("chaos", _CHECK, "Inject faults under load, and check every response.", "bench.chaos.main", "parser"),
    Command("version", _OTHER, "Show versions, engines, GPUs and servers found here.", "cli.version", "VersionConfig"),
    Command(
        "completion",
        _OTHER,
        "Print a completion script for bash, zsh or fish.",
        "cli.console:completion_main",
        "CompletionConfig",
    ),
)


def main() -> None:
    """Run the command line. Exit with the status of the subcommand, or with 2 for a bad command line."""
    with command_streams(CONSOLE):
        try:
            raise SystemExit(_run(command_line()))
        except ConfigError as exc:
            from dynamo_trtllm.config.load import exit_with

            exit_with(CONSOLE, exc)


def _run(words: Sequence[str]) -> int | None:
    if not words or words[0] in _HELP:
        _overview().print_help()
        return 0 if words else 2
    if words[0] == "--version":
        words = ["version", *words[1:]]
    command = find(words[0])
    set_command_line(f"{CONSOLE} {command.name}", words[1:])
    if any(word in _HELP for word in takewhile(lambda word: word != "--", words[1:])):
        parser_of(command).print_help()
        return 0
    status: int | None = _loaded(command.main)()
    return status


def find(name: str) -> Command:
    """Return the subcommand of this name. Raise ConfigError if there is none."""
    commands = {command.name: command for command in COMMANDS}
    if name in commands:
        return commands[name]
    from dynamo_trtllm.config.base import suggest

    guess = suggest(name, commands)
    raise ConfigError(f"unknown command {name!r}; " + (f"did you mean {guess}?" if guess else "see --help"), field=name)


def _overview() -> CommandParser:
    """Return the parser that prints the list of subcommands. Its arguments are only shown: it parses nothing."""
    parser = CommandParser(
        prog=CONSOLE,
        usage=f"{CONSOLE} COMMAND [flags]",
        description="Serve language models with prefill and decode on separate GPUs.",
        epilog=f"The flags of a command: {CONSOLE} COMMAND --help. First steps: {CONSOLE} demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title in dict.fromkeys(command.group for command in COMMANDS):
        group = parser.add_argument_group(title)
        for command in COMMANDS:
            if command.group == title:
                group.add_argument(command.name, help=command.summary)
    return parser


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Return the argument parser of a subcommand. Raise ConfigError if a package is missing."""
    if command.flags.islower():
        parser: argparse.ArgumentParser = _loaded(f"{command.main}:{command.flags}")()
        return parser
    from dynamo_trtllm.config.flags import build_parser

    settings = _loaded(f"config.commands:{command.flags}")
    return build_parser(settings, f"{CONSOLE} {command.name}", command.summary)


def _loaded(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(f"dynamo_trtllm.{module}"), name or "main")
    except ModuleNotFoundError as exc:
        if not module.startswith("bench."):
            raise
        raise ConfigError(f"the benchmarks need {exc.name}; {install_hint('bench')}") from exc


def completion_main() -> None:
    """Run `dynamo-trtllm completion`. Exit with status 0, or 2 for a bad command line."""
    from dynamo_trtllm.config.commands import CompletionConfig
    from dynamo_trtllm.config.load import load

    config = load(CompletionConfig, prog=f"{CONSOLE} completion")
    sys.stdout.write(completion(config.shell))


def completion(shell: str) -> str:
    """Return a script for this shell that completes subcommands, flags, values and file names."""
    import shtab

    root = argparse.ArgumentParser(prog=CONSOLE)
    commands = root.add_subparsers()
    for command in COMMANDS:
        try:
            parser = parser_of(command)
        except ConfigError:
            continue  # a package of this command is not installed
        if isinstance(parser, CommandParser):
            parser.describe()
            for action, words in parser.values.items():
                if words:
                    action.choices = words
                else:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's own attribute
        commands.add_parser(command.name, help=command.summary, parents=[parser], add_help=False)
    script: str = shtab.complete(root, shell)
    return script

"""The console command `dynamo-trtllm`: a table of subcommands.

Each subcommand is loaded only when it runs. `python -m` of its module runs the same function. The
flags of a subcommand come from its settings, so that `--help` and the completion of a shell load no
engine and no server.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from dynamo_trtllm.config.environ import command_line, set_command_line
from dynamo_trtllm.config.parser import COMMAND_NAME, CommandParser, command_streams
from dynamo_trtllm.protocol.errors import ConfigError, install_hint

_HELP = ("-h", "--help")
_HELP_ABOUT = "--help="
_VERSION = ("--version", "-V", "-v")
# Commands of other programs, and what to type instead.
_OTHER_PROGRAMS = {
    "run": "serve MODEL serves a model, worker runs one worker",
    "start": "serve MODEL serves a model, launch starts a deployment file",
    "up": "launch starts a deployment file, serve MODEL a model",
    "down": "stop ends a deployment of this machine",
    "ps": "status shows the processes of a deployment",
    "list": "status shows the processes of a deployment",
    "benchmark": "bench sends a load and writes a report",
}
_BENCH = "bench."


class Command(NamedTuple):
    """One subcommand.

    The class of its settings is in `config.commands`: its name is that of the subcommand, such as
    `ServeConfig` for `serve`. A benchmark has a function `parser` instead.
    """

    name: str
    summary: str
    module: str  # in `dynamo_trtllm`; its function `main` runs the subcommand


GROUPS = {
    "start a deployment on this machine": (
        Command("demo", "Start the sample deployment, and send it a request.", "cli.demo"),
        Command("serve", "Serve a model with settings chosen for this machine.", "launch.serve"),
        Command("launch", "Start the processes of a deployment file.", "launch.main"),
    ),
    "start one process": (
        Command("worker", "Run one worker: an engine with a model.", "worker.main"),
        Command("frontend", "Run an OpenAI-compatible HTTP frontend.", "frontend.process.main"),
        Command("planner", "Set the shares of elastic workers by the load.", "cli.planner"),
    ),
    "use and watch a deployment": (
        Command("chat", "Chat with a running deployment.", "cli.chat"),
        Command("status", "Show processes, health and load of a deployment.", "cli.status"),
        Command("logs", "Show the output of a deployment's processes.", "cli.logs"),
        Command("stop", "Stop a deployment of this machine.", "cli.stop"),
        Command("explain", "Show the life of a request, or what is stuck.", "cli.explain"),
        Command("shares", "Show and set the shares of elastic workers.", "cli.shares"),
        Command(
            "clear-namespace",
            "Remove the records of a deployment that is gone.",
            "cli.clear_namespace",
        ),
    ),
    "check and measure": (
        Command("preflight", "Check TensorRT-LLM settings without a GPU.", "cli.preflight"),
        Command("simulate", "Run a load on a deployment in virtual time.", "cli.simulate"),
        Command("plan", "Say which topology suits a load, or not to split.", "cli.plan"),
        Command("profile", "Write what a worker has learned, for simulations.", "cli.profile"),
        Command("bench", "Run a benchmark, and write a report.", "bench.profile.main"),
        Command("chaos", "Inject faults under load, and check every response.", "bench.chaos.main"),
    ),
    "other commands": (
        Command("keys", "Add, list and revoke API keys.", "cli.keys"),
        Command("roles", "Set up the users of etcd and NATS.", "cli.roles"),
        Command("version", "Show versions, engines, GPUs and servers found here.", "cli.version"),
        Command("completion", "Print a completion script for bash, zsh or fish.", "cli.completion"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def main() -> None:
    """Run the command line.

    Exit with the status of the subcommand, or with 2 for a bad command line.
    """
    with command_streams(COMMAND_NAME):
        try:
            raise SystemExit(_run(command_line()))
        except ConfigError as exc:
            from dynamo_trtllm.config.load import exit_with

            exit_with(COMMAND_NAME, exc)


def _run(words: Sequence[str]) -> int | None:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in (*_HELP, "help"):
        _overview().print_help()
        return 0 if words else 2
    name, *flags = words
    if name in _VERSION:
        name = "version"
    command = find(name)
    set_command_line(f"{COMMAND_NAME} {command.name}", flags)
    if not set(flags).isdisjoint(_HELP):
        parser_of(command).print_help()
        return 0
    searched = [flag.partition("=")[2] for flag in flags if flag.startswith(_HELP_ABOUT)]
    parser = parser_of(command) if searched else None
    # The parser of a benchmark can't search: the benchmark itself rejects --help=WORD.
    if isinstance(parser, CommandParser):
        parser.print_help_about(searched[0])
        return 0
    status: int | None = _loaded(f"{command.module}:main")()
    return status


def find(name: str) -> Command:
    """Return the subcommand of this name. Raise ConfigError if there is none."""
    if name in COMMANDS:
        return COMMANDS[name]
    if name in _OTHER_PROGRAMS:
        raise ConfigError(f"unknown command {name!r}; {_OTHER_PROGRAMS[name]}")
    from dynamo_trtllm.config.suggestions import suggest

    guess = suggest(name, COMMANDS)
    hint = f"did you mean {guess}?" if guess else "see --help"
    raise ConfigError(f"unknown command {name!r}; {hint}")


def _overview() -> CommandParser:
    """Return the parser that prints the list of subcommands.

    Its arguments are only shown: it parses nothing.
    """
    parser = CommandParser(
        prog=COMMAND_NAME,
        usage=f"{COMMAND_NAME} COMMAND [flags]",
        description="Serve language models with prefill and decode on separate GPUs.",
        epilog=f"The flags of a command: {COMMAND_NAME} COMMAND --help; those with a word:"
        f" {COMMAND_NAME} COMMAND --help=WORD. First steps: {COMMAND_NAME} demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, commands in GROUPS.items():
        group = parser.add_argument_group(title)
        for command in commands:
            group.add_argument(command.name, help=command.summary)
    return parser


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Return the argument parser of a subcommand. Raise ConfigError if a package is missing."""
    if command.module.startswith(_BENCH):
        parser: argparse.ArgumentParser = _loaded(f"{command.module}:parser")()
        return parser
    from dynamo_trtllm.config.flags import build_parser

    # The settings of `clear-namespace` are `ClearNamespaceConfig`.
    class_name = command.name.title().replace("-", "") + "Config"
    settings = _loaded(f"config.commands:{class_name}")
    return build_parser(settings, f"{COMMAND_NAME} {command.name}", command.summary)


def _loaded(path: str) -> Any:
    """Return the function or class at MODULE:NAME. Raise ConfigError if a package is missing."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(f"dynamo_trtllm.{module}"), name)
    except ModuleNotFoundError as exc:
        if not module.startswith(_BENCH):
            raise
        raise ConfigError(f"the benchmarks need {exc.name}; {install_hint('bench')}") from exc

"""Print a script that completes the command line in a shell (`dynamo-trtllm completion`)."""

from __future__ import annotations

import argparse
import sys

from dynamo_trtllm.cli.console import COMMANDS, parser_of
from dynamo_trtllm.config.commands import CompletionConfig
from dynamo_trtllm.config.engine_names import engine_entry_points
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME, CommandParser
from dynamo_trtllm.protocol.errors import ConfigError, install_hint


@command(CompletionConfig, f"{COMMAND_NAME} completion")
def main(config: CompletionConfig) -> None:
    """Run the command. Exit with status 0, or 2 for a bad command line."""
    sys.stdout.write(completion(config.shell))


def completion(shell: str) -> str:
    """Return a script for this shell that completes subcommands, flags, values and file names.

    Raises:
        ConfigError: the extra `cli` is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as exc:
        raise ConfigError(f"completion needs {exc.name}; {install_hint('cli')}") from exc
    root = argparse.ArgumentParser(prog=COMMAND_NAME)
    commands = root.add_subparsers()
    for subcommand in COMMANDS.values():
        try:
            parser = parser_of(subcommand)
        except ConfigError:
            continue  # a package of this command is not installed
        if isinstance(parser, CommandParser):
            for action, words in parser.values.items():
                if action.dest == "engine":
                    words = (*words, *(entry.name for entry in engine_entry_points()))
                if words:
                    action.choices = words
                else:
                    # shtab defines this attribute.
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        commands.add_parser(
            subcommand.name, help=subcommand.summary, parents=[parser], add_help=False
        )
    script: str = shtab.complete(root, shell)
    return script


if __name__ == "__main__":
    main()

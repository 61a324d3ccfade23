"""Define the argument parser of all commands. It imports little, because `dynamo-trtllm --help` needs no more."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from dynamo_trtllm.errors import ConfigError

CONSOLE = "dynamo-trtllm"


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of exiting, and prints its help in color on a terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # for the completion of a shell: the words that an argument allows; (): it is a file
        self.values: dict[argparse.Action, tuple[str, ...]] = {}

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print the help. A pipe gets plain text, and so does a terminal if NO_COLOR is set."""
        if (file or sys.stdout).isatty():
            from rich_argparse import RawDescriptionRichHelpFormatter

            # its settings are of the class; its own would capitalize titles, and read [words] as markup
            RawDescriptionRichHelpFormatter.group_name_formatter = str
            RawDescriptionRichHelpFormatter.text_markup = RawDescriptionRichHelpFormatter.help_markup = False
            self.formatter_class = RawDescriptionRichHelpFormatter
        super().print_help(file)

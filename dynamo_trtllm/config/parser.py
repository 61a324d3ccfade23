"""Define the argument parser of all commands, and how an interrupted command ends.

Ctrl-C interrupts a command, and so does an output that can't be written.

The module imports little, because `dynamo-trtllm --help` needs no more.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from dynamo_trtllm.protocol.errors import ConfigError

COMMAND_NAME = "dynamo-trtllm"
_FAILED = 1
_INTERRUPTED = 130


def is_installed(package: str) -> bool:
    """Return True if a package of the extra `cli` is installed. Without it, output is plain."""
    return importlib.util.find_spec(package) is not None


@contextmanager
def command_streams(prog: str) -> Iterator[None]:
    """Run a command in this context: it ends without a traceback if it is interrupted.

    A standard stream that is closed at the start is replaced by the null device. Characters that
    the encoding of stdout lacks are escaped.

    Args:
        prog: name of the command, for the error.

    Raises:
        SystemExit: with status 1 if the output can't be written, silently if its reader has exited,
            otherwise with one line on stderr; and with 130 after Ctrl-C.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # an error is raised here and not in the interpreter
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    except OSError:
        failure = _write_error()
        # stdout has not failed, so the error is another one.
        if failure is None:
            raise
        # The interpreter writes the rest at its exit, which would fail again.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        if not isinstance(failure, BrokenPipeError):
            with suppress(OSError):
                sys.stderr.write(f"{prog}: the output can't be written: {failure.strerror}\n")
        raise SystemExit(_FAILED) from None


def run_module(module: str, prog: str) -> None:
    """Import the module of a command and run its `main`, both within `command_streams`."""
    with command_streams(prog):
        importlib.import_module(module).main()


def _write_error() -> OSError | None:
    """Write a line break to stdout. Return the error if that fails, otherwise None."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as exc:
        return exc
    return None


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of exiting.

    On a terminal it prints its help in color.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # For the completion of a shell: the words that an argument allows. (): it is a file.
        self.values: dict[argparse.Action, tuple[str, ...]] = {}

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print the help. A pipe gets plain text, and so does a terminal if NO_COLOR is set."""
        if (file or sys.stdout).isatty() and is_installed("rich_argparse"):
            from rich_argparse import RawDescriptionRichHelpFormatter as Formatter

            # Without these settings, which are of the class, the formatter would capitalize titles,
            # and read [words] as markup.
            Formatter.group_name_formatter = str
            Formatter.text_markup = False
            Formatter.help_markup = False
            self.formatter_class = Formatter
        super().print_help(file)

    def print_help_about(self, word: str) -> None:
        """Print the part of the help that names a word, in a flag or in its text.

        Raises:
            ConfigError: no flag does.
        """
        formatter = self._get_formatter()
        is_known = False
        for group in self._action_groups:
            matching = [
                action
                for action in group._group_actions
                if word.lower() in f"{' '.join(action.option_strings)} {action.help}".lower()
            ]
            if matching:
                is_known = True
                formatter.start_section(group.title)
                formatter.add_arguments(matching)
                formatter.end_section()
        if not is_known:
            raise ConfigError(f"no flag of {self.prog} contains {word!r}; see --help")
        self._print_message(formatter.format_help(), sys.stdout)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores an error of this write, but a command must exit with 1 after it.
        (file or sys.stderr).write(message)

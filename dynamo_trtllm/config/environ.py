"""Write the process environment and the command line.

The environment is for libraries that take a setting no other way, the command line for subcommands.
No other module writes them. A variable that the user has set keeps its value.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)


def export(name: str, value: str, *, wanted_by: str) -> str:
    """Set the variable unless the user has set it; return the value in effect.

    Args:
        name: name of the variable.
        value: value to set.
        wanted_by: library that needs it, for the log.
    """
    present = os.environ.get(name)
    if present is not None and present != value:
        log.warning(
            "%s=%r is set by the user, but %s needs %r; unset it", name, present, wanted_by, value
        )
        return present
    os.environ[name] = value
    return value


def prefer(values: Mapping[str, str]) -> None:
    """Set each variable unless the user has set it, to whatever value."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def replace(values: Mapping[str, str]) -> None:
    """Set each variable, even if it is set. Only this program uses these, so no user sets them."""
    os.environ.update(values)


def command_line() -> list[str]:
    """Return the words that follow the program name."""
    return sys.argv[1:]


def set_command_line(program: str, words: Sequence[str]) -> None:
    """Set the name and the arguments of this process, as if only they had been typed."""
    sys.argv[:] = [program, *words]

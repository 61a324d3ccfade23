"""Convert values of NVIDIA Dynamo's environment variables to values of our options.

Each conversion takes the value and the name of the variable. It returns None if the value asks for
the default, and raises a ConfigError that names the variable if the value is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dynamo_trtllm.protocol.errors import ConfigError

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "off": "error",
}


def log_level(text: str, name: str) -> str | None:
    """Return the level of a filter like `info,module=debug`; None if it has modules only."""
    parts = [part.strip().lower() for part in text.split(",")]
    without_module = [part for part in parts if "=" not in part]
    if not without_module:
        return None
    level = without_module[-1]
    if level not in _LEVELS:
        expected = "trace, debug, info, warn or error"
        raise ConfigError(f"environment {name} is {text!r}: expected {expected}")
    return _LEVELS[level]


def bytes_of_mebibytes(text: str, name: str) -> str:
    """Return the number of bytes for a number of MiB."""
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text.strip()):
        expected = "a whole number of MiB, at least 1"
        raise ConfigError(f"environment {name} is {text!r}: expected {expected}")
    return str(int(text) << 20)


def seconds_of_milliseconds(text: str, name: str) -> str:
    """Return the number of seconds for a whole number of milliseconds."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise ConfigError(f"environment {name} is {text!r}: expected a number of milliseconds")
    return str(int(text) / 1000)


def endpoint(text: str, name: str) -> str:
    """Return an endpoint with the prefix, which Dynamo allows to leave out."""
    return text if text.startswith("dyn://") else f"dyn://{text}"


def port(text: str, name: str) -> str | None:
    """Return the port; None for -1, which in Dynamo means that there is no server."""
    return None if text.strip() == "-1" else text


def word(if_true: str, if_false: str | None) -> Callable[[str, str], str | None]:
    """Return a conversion of a boolean into one of two values."""

    def convert(text: str, name: str) -> str | None:
        given = text.strip().lower()
        if given not in (*TRUE, *FALSE):
            raise ConfigError(f"environment {name} is {text!r}: expected true or false")
        return if_true if given in TRUE else if_false

    return convert


def console_format(text: str, name: str) -> str:
    """Return our name of a format of log lines."""
    formats = {"readable": "text", "jsonl": "json"}
    given = text.strip().lower()
    if given not in formats:
        raise ConfigError(f"environment {name} is {text!r}: expected readable or jsonl")
    return formats[given]

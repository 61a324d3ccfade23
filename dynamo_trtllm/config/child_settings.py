"""Pass settings to child processes: most as flags, secrets in their environment.

Every user of the host can read a command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dynamo_trtllm.config.config_base import Config
from dynamo_trtllm.config.flags import flags_of


def to_argv(model: type[Config], values: Mapping[str, Any]) -> list[str]:
    """Return the flags that set these values, so that `load` returns them.

    Secrets and None values are left out.

    Args:
        model: class of the settings.
        values: values by field name.
    """
    words: list[str] = []
    flags = {flag.field: flag for flag in flags_of(model)}
    for field, value in values.items():
        flag = flags[field]
        name = flag.names[0]
        if flag.is_secret or value is None:
            continue
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name.removeprefix('--')}")
        elif flag.kind is tuple:
            words += [f"{name}={part}" for part in value]
        else:
            words.append(f"{name}={text_of(value)}")
    return words


def to_environ(model: type[Config], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that set the secrets among these values. Arguments as for `to_argv`."""
    variables: dict[str, str] = {}
    for flag in flags_of(model):
        value = values.get(flag.field)
        if flag.is_secret and value:
            variables[flag.variables()[0]] = text_of(value)
    return variables


def text_of(value: Any) -> str:
    """Return a value as it is written in a variable, or after a flag."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)

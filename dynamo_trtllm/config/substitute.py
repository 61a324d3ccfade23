"""`${NAME}` and `${NAME:-default}` in a YAML file's values, as shells write them. Pure: the environment is given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dynamo_trtllm.errors import ConfigError

_REFERENCE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}|(?P<bad>\{[^}]*\}?))")


def expand_env(value: Any, environ: Mapping[str, str], where: str) -> Any:
    """The same lists and mappings, every text with its references replaced; keys stay as they are.

    As in a shell a variable that is empty counts as not set where there is a default; `$$` is a dollar sign. Raises
    ConfigError, with `where` in front, for one that is not set and has none.
    """
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: _value(match, environ, where), value)
    if isinstance(value, Mapping):
        return {key: expand_env(each, environ, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [expand_env(each, environ, f"{where}[{i}]") for i, each in enumerate(value)]
    return value


def _value(match: re.Match[str], environ: Mapping[str, str], where: str) -> str:
    name, default = match["name"], match["default"]
    if match["bad"]:
        raise ConfigError(f"{where}: {match[0]!r} is not ${{NAME}} or ${{NAME:-default}}; write $$ for a dollar sign")
    if name is None:
        return "$"
    if default is None:
        if name not in environ:
            raise ConfigError(f"{where}: {name} is not set in the environment, and {match[0]} has no default")
        return environ[name]
    return environ.get(name) or default

"""Check arguments against `AsyncEngineArgs` of the pinned vLLM, as listed in the JSON file in `releases`.

scripts/vllm_manifest generates that file; do not edit it. vLLM is not imported.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple, NoReturn

from dynamo_trtllm.config.base import suggest
from dynamo_trtllm.errors import ConfigError

VERSION = "0.24.0"
ROOT = "AsyncEngineArgs"

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "mapping": "a mapping (key: value)",
    "null": "null",
}


class VllmArgument(NamedTuple):
    """One argument.

    An empty `allowed` does not restrict the value. `config` names the class whose fields a mapping may have.
    """

    kinds: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    config: str = ""
    default: Any = None


@functools.cache
def classes() -> Mapping[str, Mapping[str, VllmArgument]]:
    """Return the arguments by class name and argument name."""
    text = (resources.files(__package__) / "releases" / f"{VERSION}.json").read_text(encoding="utf-8")
    listed = json.loads(text)["classes"]
    return {
        owner: {
            name: VllmArgument(
                tuple(entry["kinds"]),
                tuple(entry.get("allowed", ())),
                entry.get("config", ""),
                entry.get("default"),
            )
            for name, entry in fields.items()
        }
        for owner, fields in listed.items()
    }


def find(key: str) -> VllmArgument | None:
    """Return the argument with this dotted key, or None if vLLM lacks it or accepts any key there."""
    owner, argument = ROOT, None
    for part in key.split("."):
        argument = classes().get(owner, {}).get(part)
        if argument is None:
            return None
        owner = argument.config
    return argument


def check(values: Mapping[str, Any], where: str) -> None:
    """Check arguments, nested ones included.

    Args:
        values: The arguments.
        where: Their source, the start of the error text.

    Raises:
        ConfigError: vLLM lacks a key or does not accept its value.
    """
    for key, value, field in _walk(values, ROOT, ""):
        if field is None:
            _raise_unknown(key, where)
        if not _fits(value, field):
            raise ConfigError(f"{where}: {key} is {value!r}: expected {_expected(field)}", field=key)


def _walk(values: Mapping[str, Any], owner: str, prefix: str) -> Iterator[tuple[str, Any, VllmArgument | None]]:
    fields = classes()[owner]
    for name, value in values.items():
        field = fields.get(name)
        yield f"{prefix}{name}", value, field
        if field is not None and field.config and isinstance(value, Mapping):
            yield from _walk(value, field.config, f"{prefix}{name}.")


def _raise_unknown(key: str, where: str) -> NoReturn:
    parent, _, name = key.rpartition(".")
    above = find(parent) if parent else None
    names = classes()[above.config if above is not None else ROOT]
    guess = suggest(name, names)
    inside = f"{parent}." if parent else ""
    hint = f"did you mean {inside + guess!r}?" if guess else f"see the arguments of vLLM {VERSION}"
    raise ConfigError(f"{where}: unknown key {key!r}; {hint}", field=key)


def _fits(value: Any, field: VllmArgument) -> bool:
    if isinstance(value, str) and field.allowed:
        return value.lower() in field.allowed or "any" in field.kinds
    return "any" in field.kinds or any(_is(value, kind) for kind in field.kinds)


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "list":
            return isinstance(value, list)
        case "null":
            return value is None
        case _:
            return isinstance(value, Mapping)


def _expected(field: VllmArgument) -> str:
    if field.allowed:
        others = [_WORDS[kind] for kind in field.kinds if kind != "str"]
        return " or ".join([f"one of {', '.join(field.allowed)}", *others])
    return " or ".join(_WORDS[kind] for kind in field.kinds)

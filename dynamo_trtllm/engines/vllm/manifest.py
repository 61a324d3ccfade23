"""What `AsyncEngineArgs` of the pinned vLLM takes, read from the file beside this one: names, kinds of value, words.

The file is made by scripts/vllm_manifest and never edited by hand. Imports no vendor.
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
    """One argument. An empty `allowed` does not limit it; `config` names the class whose fields a mapping has."""

    kinds: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    config: str = ""
    default: Any = None


@functools.cache
def classes() -> Mapping[str, Mapping[str, VllmArgument]]:
    """Class name -> argument -> what it may be."""
    text = (resources.files(__package__) / "releases" / f"{VERSION}.json").read_text(encoding="utf-8")
    found = json.loads(text)["classes"]
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
        for owner, fields in found.items()
    }


def find(key: str) -> VllmArgument | None:
    """The argument with this dotted key; None: there is none, or it is inside a mapping with keys of its own."""
    owner, found = ROOT, None
    for part in key.split("."):
        found = classes().get(owner, {}).get(part)
        if found is None:
            return None
        owner = found.config
    return found


def check(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError, beginning with `where`, for the first key that vLLM lacks or value that it can't take."""
    for key, value, field in _walk(values, ROOT, ""):
        if field is None:
            _refuse(key, where)
        if not _fits(value, field):
            raise ConfigError(f"{where}: {key} is {value!r}: expected {_expected(field)}", field=key)


def _walk(values: Mapping[str, Any], owner: str, prefix: str) -> Iterator[tuple[str, Any, VllmArgument | None]]:
    fields = classes()[owner]
    for name, value in values.items():
        field = fields.get(name)
        yield f"{prefix}{name}", value, field
        if field is not None and field.config and isinstance(value, Mapping):
            yield from _walk(value, field.config, f"{prefix}{name}.")


def _refuse(key: str, where: str) -> NoReturn:
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

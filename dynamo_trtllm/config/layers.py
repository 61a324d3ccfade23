"""Engine arguments from several places, merged leaf by leaf with the place that won. Pure but for reading the YAML.

Knows no engine: which keys exist is the engine's business, handed to `check_keys`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dynamo_trtllm.errors import ConfigError

YAML_SOURCE = "YAML file"
FLAG_SOURCE = "flag"
OVERRIDE_SOURCE = "--override-engine-args"


class Layered(NamedTuple):
    """One leaf and the place its value comes from."""

    value: Any
    source: str


def merge_engine_args(
    yaml: Mapping[str, Any], flags: Mapping[str, Any], override: Mapping[str, Any]
) -> dict[str, Layered]:
    """Leaves by dotted key: YAML file < flags typed < override JSON.

    Mappings are merged, anything else replaces what stood there, a whole subtree included.
    """
    merged: dict[str, Layered] = {}
    for layer, source in ((yaml, YAML_SOURCE), (flags, FLAG_SOURCE), (override, OVERRIDE_SOURCE)):
        for key, value in _leaves(layer):
            if value == {} and any(known.startswith(f"{key}.") for known in merged):
                continue  # merging nothing into a mapping
            _drop_contradicted(merged, key)
            merged[key] = Layered(value, source)
    return merged


def nested(merged: Mapping[str, Layered]) -> dict[str, Any]:
    """The merged leaves as the mapping an engine takes."""
    result: dict[str, Any] = {}
    for key, leaf in merged.items():
        *parents, last = key.split(".")
        level = result
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = leaf.value
    return result


def _leaves(layer: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in layer.items():
        if isinstance(value, Mapping) and value and all(isinstance(k, str) and "." not in k for k in value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _drop_contradicted(merged: dict[str, Layered], key: str) -> None:
    """Removes leaves that can't stand beside `key`: those above it (now a mapping) and below it (replaced)."""
    parts = key.split(".")
    above = {".".join(parts[:i]) for i in range(1, len(parts))}
    for known in [k for k in merged if k in above or k.startswith(f"{key}.")]:
        del merged[known]


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name most like `name`, if one is alike at all."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return found[0] if found else None


def check_keys(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raises ConfigError for the first given key that is not allowed, naming the nearest one. `where`: for people."""
    names = sorted(allowed)
    for key in given:
        if key in names:
            continue
        guess = nearest(str(key), names)
        hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names) or 'none'}"
        raise ConfigError(f"{where}: unknown key {str(key)!r}; {hint}", field=str(key))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, which plain YAML loading answers by dropping the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def located(path: Path) -> Path:
    """`path` in the working directory, else the file of that name that came with the package, else `path` as it is."""
    shipped = Path(__file__).parent.parent / path
    return shipped if not path.exists() and shipped.exists() else path


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty for an empty file. Raises ConfigError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: can't be read: {getattr(exc, 'strerror', None) or exc}") from exc
    try:
        value = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{where}: {getattr(exc, 'problem', None) or exc}") from exc
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:1: expected a mapping (key: value), found {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: key {key!r} is not text; quote it")
    return value

"""Engine arguments from several places, merged leaf by leaf with the place that won. Pure but for reading the YAML.

Knows no engine: the caller of `check_keys` passes the keys that the engine accepts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dynamo_trtllm.config.base import suggest
from dynamo_trtllm.errors import ConfigError

OVERRIDE_SOURCE = "--override-engine-args"
MAX_YAML_BYTES = 256 << 10
MAX_YAML_VALUES = 10_000  # takes a second or two to read; engine arguments have a few hundred
MAX_YAML_DEPTH = 64
CONFIG_FOLDERS = ("engine_configs", "kernels_config")  # they travel in the wheel

_log = logging.getLogger(__name__)


class Sourced(NamedTuple):
    """One leaf and the place its value comes from."""

    value: Any
    source: str


class Source(NamedTuple):
    """What one place sets."""

    values: Mapping[str, Any]
    source: str
    is_default: bool = False  # advice: overriding it is not logged


class Merged(NamedTuple):
    """Leaves by dotted key, and a line for each value that somebody set and somebody else beat with another."""

    leaves: dict[str, Sourced]
    notes: list[str]


def merge(layers: Iterable[Source]) -> Merged:
    """Later layers beat earlier ones, leaf by leaf.

    Mappings are merged, anything else replaces what stood there, a whole subtree included.
    """
    merged: dict[str, Sourced] = {}
    defaults: set[str] = set()
    notes = []
    for layer in layers:
        for key, value in _leaves(layer.values):
            if value == {} and any(known.startswith(f"{key}.") for known in merged):
                continue  # merging nothing into a mapping
            for overridden in _overridden_keys(merged, key):
                old = merged.pop(overridden)
                if old.value != value and old.source not in defaults:
                    loser = f"{overridden} {_text(old.value)} of {old.source}"
                    notes.append(f"{_source_name(layer.source)} {_text(value)} overrides {loser}")
            merged[key] = Sourced(value, layer.source)
        if layer.is_default:
            defaults.add(layer.source)
    return Merged(merged, notes)


def _source_name(source: str) -> str:
    return source.removeprefix("flag ")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def nested(merged: Mapping[str, Sourced]) -> dict[str, Any]:
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


def _overridden_keys(merged: Mapping[str, Sourced], key: str) -> list[str]:
    """Leaves that can't stand beside a new `key`: itself, those above it (now a mapping) and below it (replaced)."""
    parts = key.split(".")
    above = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return [known for known in merged if known in above or known.startswith(f"{key}.")]


def check_keys(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raises ConfigError for the first given key that is not allowed, naming the nearest one. `where`: for people."""
    names = sorted(allowed)
    for key in given:
        if key in names:
            continue
        guess = suggest(str(key), names)
        hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names) or 'none'}"
        raise ConfigError(f"{where}: unknown key {str(key)!r}; {hint}", field=str(key))


class _StrictLoader(yaml.SafeLoader):
    """Rejects documents that plain YAML loading accepts: with a key that is given twice, of which it would drop the
    first, or too large or deep once aliases are expanded. Nine lines of aliases can expand to a billion values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._extents: dict[int, _Extent] = {}  # by id() of each complete node; the document keeps these alive

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._level += 1
        _check_extent(_Extent(values=len(self._extents), depth=self._level), mark)  # before more is read
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._level -= 1
        if is_alias and id(node) not in self._extents:
            raise yaml.composer.ComposerError(None, None, "an alias stands within what it refers to", mark)
        if node is not None and not is_alias:
            inner = [self._extents[id(child)] for child in _children(node)]
            extent = _Extent(1 + sum(each.values for each in inner), 1 + max((each.depth for each in inner), default=0))
            _check_extent(extent, mark)
            self._extents[id(node)] = extent
        return node

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


class _Extent(NamedTuple):
    """The size of a part of a document, with aliases expanded."""

    values: int
    depth: int


def _check_extent(extent: _Extent, mark: yaml.Mark) -> None:
    if extent.values > MAX_YAML_VALUES:
        problem = f"more than {MAX_YAML_VALUES} values, each alias written out; give a smaller file"
        raise yaml.composer.ComposerError(None, None, problem, mark)
    if extent.depth > MAX_YAML_DEPTH:
        raise yaml.composer.ComposerError(None, None, f"more than {MAX_YAML_DEPTH} levels; nest less", mark)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair


def find_file(path: Path) -> Path:
    """`path` in the working directory, else the file of that name that came with the package, else `path` as it is.

    The paths that the guides use name our files too.
    """
    ours = _alias(path)
    for candidate in dict.fromkeys((path, ours)):
        for found in (candidate, *_shipped(candidate)):
            if found.exists():
                if candidate != path:
                    _log.info("%s is not here; taken as %s", path, ours)
                return found
    return path


def _shipped(path: Path) -> list[Path]:
    """Where the package would have it: in the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent.parent
    return [package / path] + ([package.parent / path] if path.parts[:1] and path.parts[0] in CONFIG_FOLDERS else [])


def _alias(path: Path) -> Path:
    """Our name of a file that the guides name by the place it has in Dynamo's tree or container; else `path`."""
    parts = list(path.parts)
    if parts[:2] == ["/", "workspace"]:
        parts = parts[2:]
        parts = parts[1:] if parts[:1] == ["dynamo"] else parts
    if parts[:3] in (["examples", "backends", "trtllm"], ["components", "backends", "trtllm"]):
        parts = parts[3:]
    if parts[:1] != ["engine_configs"]:
        return path
    if parts[1:2] == ["gpt_oss"]:
        parts[1:2] = ["gpt-oss-120b", "v0.5"]
    return Path(*parts)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty for an empty file. Raises ConfigError naming file and line, also for a file
    that is too large, too deep, or too large with its aliases written out."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_YAML_BYTES} bytes; give a smaller file")
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: can't be read: {getattr(exc, 'strerror', None) or exc}") from exc
    try:
        value = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{where}: {getattr(exc, 'problem', None) or exc}") from exc
    except ValueError as exc:  # a value looks like a date but is invalid, or is too long an integer
        raise ConfigError(f"{path}: {exc}; quote the value") from exc
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:1: expected a mapping (key: value), found {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: key {key!r} is not text; quote it")
    return value


def as_yaml(leaves: Mapping[str, Sourced]) -> str:
    """The leaves as YAML that `read_yaml` reads back, each with its source as comment."""
    return "".join(_yaml_lines(nested({key: Sourced(leaf, "") for key, leaf in leaves.items()}), ""))


def _yaml_lines(level: Mapping[str, Any], indent: str) -> Iterable[str]:
    for key, value in level.items():
        name = _flow(key)
        if isinstance(value, Sourced):
            yield f"{indent}{name}: {_flow(value.value)}  # {value.source}\n"
        else:
            yield f"{indent}{name}:\n"
            yield from _yaml_lines(value, indent + "  ")


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").strip()

"""Merge engine arguments from several sources leaf by leaf, and read and write their YAML files.

The module is independent of engines: the caller of `check_keys` passes the keys that the engine
accepts.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dynamo_trtllm.config.suggestions import suggest
from dynamo_trtllm.protocol.errors import ConfigError

OVERRIDE_SOURCE = "--override-engine-args"
MAX_YAML_BYTES = 256 << 10
# So many values are read in one to two seconds. Engine arguments have a few hundred values.
MAX_YAML_VALUES = 10_000
MAX_YAML_DEPTH = 64
_MAX_KEY_SHOWN = 40  # most characters of a key in an error
CONFIG_FOLDERS = ("engine_configs", "kernels_config", "deploy")  # packaged in the wheel

log = logging.getLogger(__name__)
# Paths in Dynamo's container and source tree, as its guides write them:
#   /workspace/examples/backends/trtllm/engine_configs/gpt_oss/decode.yaml
#   components/backends/trtllm/engine_configs/decode.yaml
# `_alias` replaces the match, which ends with "engine_configs" or "engine_configs/gpt_oss".
_GUIDE_PATH = re.compile(
    r"""
    ( /workspace/ (dynamo/)? )?                     # the container
    ( (examples|components) /backends/trtllm/ )?    # the source tree
    engine_configs
    (?P<gpt_oss> /gpt_oss (?=/|\Z) )?               # as a whole part of the path
    (?=/|\Z)                                        # the match ends with a whole part of the path
    """,
    re.VERBOSE,
)


class SourcedValue(NamedTuple):
    """The value of one leaf and its source."""

    value: Any
    source: str


class Source(NamedTuple):
    """The arguments of one source."""

    values: Mapping[str, Any]
    name: str
    is_default: bool = False  # overriding a default is not logged


class Merged(NamedTuple):
    """The result of `merge`.

    `leaves` has the merged leaves by dotted key, `notes` a text for each overridden value.
    """

    leaves: dict[str, SourcedValue]
    notes: list[str]


def merge(sources: Iterable[Source]) -> Merged:
    """Merge the sources leaf by leaf. A later source overrides an earlier one.

    Mappings are merged. Any other value replaces the earlier value or subtree. A dot in a key of a
    source separates levels.

    Raises:
        ConfigError: a value has more than MAX_YAML_DEPTH levels. Each dot in its key counts as a
            level.
    """
    merged: dict[str, SourcedValue] = {}
    defaults: set[str] = set()
    notes = []
    for source in sources:
        for key, value in _leaves(source.values):
            _check_depth(key, value, source.name)
            if value == {} and any(known.startswith(f"{key}.") for known in merged):
                continue  # `key` is a mapping already, and an empty mapping adds nothing to it
            for overridden in _overridden_keys(merged, key):
                old = merged.pop(overridden)
                if old.value != value and old.source not in defaults:
                    # The winner mostly is a flag. The name of a flag says which key it sets, so the
                    # note does not repeat the key, as in "--max-num-tokens 20000 overrides
                    # max_num_tokens 16384 of YAML d.yaml".
                    winner = f"{source.name.removeprefix('flag ')} {_text(value)}"
                    loser = f"{overridden} {_text(old.value)} of {old.source}"
                    notes.append(f"{winner} overrides {loser}")
            merged[key] = SourcedValue(value, source.name)
        if source.is_default:
            defaults.add(source.name)
    return Merged(merged, notes)


def _check_depth(key: str, value: Any, source: str) -> None:
    """Raise ConfigError if `as_yaml` would write a leaf that is too deep for `read_yaml`."""
    num_keys = key.count(".") + 1
    if num_keys + _depth(value) > MAX_YAML_DEPTH:
        raise ConfigError(
            f"{source}: {key[:_MAX_KEY_SHOWN]!r} has more than {MAX_YAML_DEPTH} levels; nest less,"
            " and use fewer dots in keys"
        )


def _depth(value: Any) -> int:
    """Return the number of levels of a value. A plain value has one level."""
    if isinstance(value, Mapping):
        children = [*value.keys(), *value.values()]  # a key may be a tuple, which has levels, too
    elif isinstance(value, list | tuple | set):
        children = [*value]
    else:
        children = []
    return 1 + max(map(_depth, children), default=0)


def _text(value: Any) -> str:
    """Return a value as text for a note."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except TypeError:
        return str(value)  # JSON has no keys like a date or a tuple, which YAML has


def nested(merged: Mapping[str, SourcedValue]) -> dict[str, Any]:
    """Return the values of merged leaves as a nested mapping."""
    return _nested({key: leaf.value for key, leaf in merged.items()})


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values, which are given by dotted key, as a nested mapping."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        level = result
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return result


def _leaves(layer: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in layer.items():
        if isinstance(value, Mapping) and value and _has_plain_keys(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _has_plain_keys(level: Mapping[Any, Any]) -> bool:
    """Return True if all keys can be parts of a dotted key."""
    return all(isinstance(key, str) and "." not in key for key in level)


def _overridden_keys(merged: Mapping[str, SourcedValue], key: str) -> list[str]:
    """Return the keys of the leaves that a new leaf replaces.

    These are the leaf with the same key, leaves above it (`a` if `a.b` is new) and leaves below it
    (`a.b` if `a` is new).
    """
    parts = key.split(".")
    same_and_above = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    below = f"{key}."
    return [known for known in merged if known in same_and_above or known.startswith(below)]


def unknown_key(given: Iterable[str], allowed: Iterable[str]) -> str:
    """Return an error text for the first key that is not allowed, or "" if all are allowed.

    The text suggests the most similar allowed key.
    """
    names = sorted(allowed)
    for key in given:
        if key in names:
            continue
        guess = suggest(str(key), names)
        if guess:
            hint = f"did you mean {guess!r}?"
        else:
            hint = f"known: {', '.join(names) or 'none'}"
        return f"unknown key {str(key)!r}; {hint}"
    return ""


def check_keys(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Check that all given keys are allowed.

    Args:
        given: the keys to check.
        allowed: the known keys.
        where: place of the keys, which begins the error text.

    Raises:
        ConfigError: a key is not allowed. The message suggests the most similar allowed key.
    """
    for key in given:
        problem = unknown_key([key], allowed)
        if problem:
            raise ConfigError(f"{where}: {problem}", field=str(key))


_MERGE_TAG = "tag:yaml.org,2002:merge"
_VALUE_TAG = "tag:yaml.org,2002:value"


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that also rejects duplicate keys, and documents that are too large or too deep.

    PyYAML would use only the last of two equal keys. Nine lines of aliases can expand to a billion
    values. Therefore an alias counts as all the values for which it stands.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0  # of the node that is being read
        # The extents of complete nodes, by id() of the node. The document refers to all nodes, so
        # no id() is used twice.
        self._extents: dict[int, _Extent] = {}
        # Mappings whose keys were checked, by id() of the node.
        self._checked: set[int] = set()

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        # PyYAML looks up to 1,024 characters ahead for the end of a key. Each token among these
        # characters takes time in proportion to the number of open brackets. So the number of open
        # brackets is limited here, before any node is composed.
        if self.flow_level >= MAX_YAML_DEPTH:
            problem = f"more than {MAX_YAML_DEPTH} levels; nest less"
            raise yaml.scanner.ScannerError(None, None, problem, self.get_mark())
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._level += 1
        # The limits are checked before each node is read. Otherwise a document that is too large
        # would be read to its end before it is rejected.
        num_complete_nodes = len(self._extents)
        _check_limits(num_values=num_complete_nodes, depth=self._level, mark=mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._level -= 1
        if is_alias and id(node) not in self._extents:
            raise yaml.composer.ComposerError(
                None, None, "an alias refers to a value that contains it", mark
            )
        if node is not None and not is_alias:
            children = [self._extents[id(child)] for child in _children(node)]
            extent = _Extent(
                num_values=1 + sum(child.num_values for child in children),
                depth=1 + max((child.depth for child in children), default=0),
            )
            _check_limits(num_values=extent.num_values, depth=extent.depth, mark=mark)
            self._extents[id(node)] = extent
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # PyYAML calls this method before it reads a mapping, and before it merges a mapping into
        # another one with `<<`. The method adds the merged keys to the node. So only at the first
        # call does the node have the keys as they are written.
        if id(node) not in self._checked:
            self._checked.add(id(node))
            self._check_keys(node)
        super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Raise ConstructorError if two keys have the same value, like 1 and 0x1."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            # `<<` may be repeated, because it is not a key: it merges a mapping.
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE_TAG:
                continue
            if key_node.tag == _VALUE_TAG:
                # The key is "=". `construct_object` would fail, because PyYAML turns this key into
                # a text only later, in `flatten_mapping`.
                key = key_node.value
            else:
                key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key)


class _Extent(NamedTuple):
    """The size of a node, with aliases expanded."""

    num_values: int
    depth: int


def _check_limits(*, num_values: int, depth: int, mark: yaml.Mark) -> None:
    """Raise ComposerError if the node at `mark` exceeds a limit."""
    if num_values > MAX_YAML_VALUES:
        problem = f"more than {MAX_YAML_VALUES} values with aliases expanded; give a smaller file"
        raise yaml.composer.ComposerError(None, None, problem, mark)
    if depth > MAX_YAML_DEPTH:
        problem = f"more than {MAX_YAML_DEPTH} levels; nest less"
        raise yaml.composer.ComposerError(None, None, problem, mark)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair


def find_file(path: Path) -> Path:
    """Find a file in the working directory, or else in the package.

    Paths of NVIDIA Dynamo's gpt-oss-120b guides are mapped to the files of this package.

    Returns:
        Path of the existing file, or `path` itself if no file exists.
    """
    ours = _alias(path)
    candidates = (path,) if ours == path else (path, ours)
    for candidate in candidates:
        for file in (candidate, *_packaged(candidate)):
            if os.path.exists(file):  # `Path.exists` raises if the name is too long
                if candidate != path:
                    log.info("%s does not exist; using %s", path, ours)
                return file
    return path


def _packaged(path: Path) -> list[Path]:
    """Return where a packaged file may be: in the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent.parent
    places = [package / path]
    if path.parts and path.parts[0] in CONFIG_FOLDERS:
        places.append(package.parent / path)
    return places


def _alias(path: Path) -> Path:
    """Map a path in Dynamo's source tree or container, as its guides write it, to our path.

    Any other path is returned unchanged.
    """
    text = str(path)
    match = _GUIDE_PATH.match(text)
    if match is None:
        return path
    folder = "engine_configs/gpt-oss-120b/v0.5" if match["gpt_oss"] else "engine_configs"
    return Path(folder + text[match.end() :])


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. An empty file counts as an empty mapping.

    Raises:
        ConfigError: the file can't be read, is not a mapping, has a duplicate key, or with aliases
            expanded is too large or too deep. The message names the file, and the line if it is
            known.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_YAML_BYTES} bytes; give a smaller file")
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{path}: can't be read: {reason}") from exc
    try:
        value = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(exc, "problem", None) or exc
        raise ConfigError(f"{where}: {problem}") from exc
    except (ValueError, KeyError, AttributeError, IndexError) as exc:
        # PyYAML raises these for an impossible date, for an integer with too many digits, and for a
        # value that does not fit its tag (!!bool x).
        raise ConfigError(f"{path}: {exc}; quote the value") from exc
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:1: expected a mapping (key: value), got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: key {key!r} is not text; quote it")
    return value


def as_yaml(leaves: Mapping[str, SourcedValue]) -> str:
    """Return the leaves as YAML that `read_yaml` accepts, each with its source as a comment."""
    return "".join(_yaml_lines(_nested(leaves), ""))


def _yaml_lines(level: Mapping[str, Any], indent: str) -> Iterable[str]:
    for key, child in level.items():
        name = _key(key)
        if isinstance(child, SourcedValue):
            yield f"{indent}{name}: {_flow(child.value)}  # {child.source}\n"
        else:
            yield f"{indent}{name}:\n"
            yield from _yaml_lines(child, indent + "  ")


def _key(key: str) -> str:
    """Return a key as YAML in one line, because a key with `:` behind it must not have more."""
    if "\n" not in key:
        return _flow(key)
    text: str = yaml.safe_dump(key, default_style='"', width=float("inf"))
    return text.strip()


def _flow(value: Any) -> str:
    """Return a value as YAML that fits into one line, unless a text in it has line breaks."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    # If a document is only a scalar, PyYAML ends the document with "...".
    return text.removesuffix("...\n").strip()

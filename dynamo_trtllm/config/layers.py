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
MAX_YAML_VALUES = 10_000  # read in one to two seconds; engine arguments have a few hundred values
MAX_YAML_DEPTH = 64
_MAX_KEY_SHOWN = 40  # characters, in an error
CONFIG_FOLDERS = ("engine_configs", "kernels_config", "deploy")  # packaged in the wheel

log = logging.getLogger(__name__)
# Paths in Dynamo's container and source tree, as its guides write them:
#   /workspace/examples/backends/trtllm/engine_configs/gpt_oss/decode.yaml
#   components/backends/trtllm/engine_configs/decode.yaml
# The match is what `_alias` replaces: up to "engine_configs", with "/gpt_oss" if that follows.
_GUIDE_PATH = re.compile(
    r"""
    ( /workspace/ (dynamo/)? )?                     # the container
    ( (examples|components) /backends/trtllm/ )?    # the source tree
    engine_configs
    (?P<gpt_oss> /gpt_oss (?=/|\Z) )?               # as a whole part of the path
    (?=/|\Z)                                        # "engine_configs" is a whole part, too
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
    """Merged leaves by dotted key, and a note for each value that a later source overrides."""

    leaves: dict[str, SourcedValue]
    notes: list[str]


def merge(sources: Iterable[Source]) -> Merged:
    """Merge the sources; a later one overrides an earlier one, leaf by leaf.

    Mappings are merged. Any other value replaces the earlier value or subtree. A dot in a key of a
    source separates levels.

    Raises:
        ConfigError: a value has more than MAX_YAML_DEPTH levels, with those of the dots in its key.
    """
    merged: dict[str, SourcedValue] = {}
    defaults: set[str] = set()
    notes = []
    for source in sources:
        for key, value in _leaves(source.values):
            _check_depth(key, value, source.name)
            if value == {} and any(known.startswith(f"{key}.") for known in merged):
                continue  # merging nothing into a mapping
            for overridden in _overridden_keys(merged, key):
                old = merged.pop(overridden)
                if old.value != value and old.source not in defaults:
                    # A note begins with the name of the flag: "--tp-size 4 overrides ...".
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
    """Return the number of levels of a value. That of a plain value is 1."""
    if isinstance(value, Mapping):
        children = [*value.keys(), *value.values()]  # a key may be a tuple
    elif isinstance(value, list | tuple | set):
        children = [*value]
    else:
        children = []
    return 1 + max(map(_depth, children), default=0)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def nested(merged: Mapping[str, SourcedValue]) -> dict[str, Any]:
    """Return the merged leaves as a nested mapping."""
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
        if isinstance(value, Mapping) and value and _has_plain_keys(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _has_plain_keys(level: Mapping[Any, Any]) -> bool:
    """Return True if all keys can be parts of a dotted key."""
    return all(isinstance(key, str) and "." not in key for key in level)


def _overridden_keys(merged: Mapping[str, SourcedValue], key: str) -> list[str]:
    """Return the leaves that a new `key` replaces: itself, those above and those below it.

    If `a` was a leaf and `a.b` comes, `a` becomes a mapping.
    """
    parts = key.split(".")
    above = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return [known for known in merged if known in above or known.startswith(f"{key}.")]


def unknown_key(given: Iterable[str], allowed: Iterable[str]) -> str:
    """Return an error text for the first key that is not allowed; "" if there is none.

    It names the most similar key.
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
        ConfigError: a key is not allowed. The message suggests the most similar one.
    """
    for key in given:
        problem = unknown_key([key], allowed)
        if problem:
            raise ConfigError(f"{where}: {problem}", field=str(key))


_MERGE_TAG = "tag:yaml.org,2002:merge"
_VALUE_TAG = "tag:yaml.org,2002:value"


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that also rejects duplicate keys, and too large or deep documents.

    PyYAML keeps only the last of two equal keys. Nine lines of aliases can expand to a billion
    values, so the size is that with aliases expanded.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        # The extents of complete nodes, by id() of the node. The document keeps the nodes alive.
        self._extents: dict[int, _Extent] = {}
        # Mappings whose keys were checked, by id() of the node.
        self._checked: set[int] = set()

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        # PyYAML looks up to 1,024 characters ahead for the end of a key. Each token on this way
        # takes time in proportion to the number of open brackets, so that is limited here, before
        # any node is composed.
        if self.flow_level >= MAX_YAML_DEPTH:
            problem = f"more than {MAX_YAML_DEPTH} levels; nest less"
            raise yaml.scanner.ScannerError(None, None, problem, self.get_mark())
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._level += 1
        # The limits of size and depth are checked before a node is read, so a document that is too
        # large is not read whole.
        num_complete_nodes = len(self._extents)
        _check_extent(_Extent(values=num_complete_nodes, depth=self._level), mark)
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
                values=1 + sum(child.values for child in children),
                depth=1 + max((child.depth for child in children), default=0),
            )
            _check_extent(extent, mark)
            self._extents[id(node)] = extent
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # PyYAML calls this before it reads a mapping, and before it merges one with `<<` into
        # another. It adds the merged keys to the node, so only the first call has the keys as they
        # are written.
        if id(node) not in self._checked:
            self._checked.add(id(node))
            self._check_keys(node)
        super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Raise ConstructorError if two keys have the same value, like 1 and 0x1."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            # `<<` may be repeated: it merges a mapping, and is no key.
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE_TAG:
                continue
            if key_node.tag == _VALUE_TAG:
                key = key_node.value  # PyYAML reads "=" as a text, but only in `flatten_mapping`
            else:
                key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key)


class _Extent(NamedTuple):
    """The size of a node, with aliases expanded."""

    values: int
    depth: int


def _check_extent(extent: _Extent, mark: yaml.Mark) -> None:
    if extent.values > MAX_YAML_VALUES:
        problem = f"more than {MAX_YAML_VALUES} values with aliases expanded; give a smaller file"
        raise yaml.composer.ComposerError(None, None, problem, mark)
    if extent.depth > MAX_YAML_DEPTH:
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
        Path of the existing file, or `path` itself if there is none.
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
    """Return the places of a packaged file: in the wheel, and beside the package in a checkout."""
    package = Path(__file__).parent.parent
    places = [package / path]
    if path.parts and path.parts[0] in CONFIG_FOLDERS:
        places.append(package.parent / path)
    return places


def _alias(path: Path) -> Path:
    """Map a path of Dynamo's guides, in its source tree or container, to ours.

    Others are returned unchanged.
    """
    text = str(path)
    theirs = _GUIDE_PATH.match(text)
    if theirs is None:
        return path
    folder = "engine_configs/gpt-oss-120b/v0.5" if theirs["gpt_oss"] else "engine_configs"
    return Path(folder + text[theirs.end() :])


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; an empty file gives an empty mapping.

    Raises:
        ConfigError: the file can't be read, is not a mapping, has a duplicate key, or is too large
            or too deep with aliases expanded. The message names file and line.
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
    # `nested` replaces each leaf by its value. Here, this value is the leaf with its source, so the
    # source stays.
    wrapped = {key: SourcedValue(leaf, "") for key, leaf in leaves.items()}
    return "".join(_yaml_lines(nested(wrapped), ""))


def _yaml_lines(level: Mapping[str, Any], indent: str) -> Iterable[str]:
    for key, value in level.items():
        name = _flow(key)
        if isinstance(value, SourcedValue):
            yield f"{indent}{name}: {_flow(value.value)}  # {value.source}\n"
        else:
            yield f"{indent}{name}:\n"
            yield from _yaml_lines(value, indent + "  ")


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    # PyYAML ends a document that is one scalar with "...".
    return text.removesuffix("...\n").strip()

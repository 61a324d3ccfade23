"""What TensorRT-LLM's public Python API is, release by release, read from the manifests beside this file.

The JSON files were taken from the releases' published sources and are never edited by hand. Imports no vendor.
"""

from __future__ import annotations

import ast
import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any

from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

# Release -> its manifests. The 1.3 candidates were read in two builds: what is built with, and what is called.
_MANIFESTS = {
    "1.0.0": ("1.0.0",),
    "1.1.0": ("1.1.0",),
    "1.2.1": ("1.2.1",),
    "1.3.0rc": ("1.3.0rc27", "1.3.0rc29"),
}
_READ_AS = {"1.3.0rc": "1.3.0rc (arguments as of 1.3.0rc27, calls as of 1.3.0rc29)"}
_DEVELOPMENT = "1.3.0rc-unpinned"  # names only, of a commit that is no release


class Presence(StrEnum):
    """Whether a release has a name."""

    PRESENT = "present"
    ABSENT = "absent"
    NOT_READ = "not read"  # that part of the release was not read, so it is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestField:
    """One field of a class, or one parameter of a method."""

    name: str
    type: str  # as the source writes it
    required: bool
    default: Any  # a Python value; an enumeration member is its name; None where it was not read
    default_known: bool
    is_built: bool  # the default is an object made per instance, whose own fields say what is in it
    allowed: tuple[Any, ...]  # the values of its Literal; empty: not limited by one
    kind: str | None = None  # of a parameter: positional_or_keyword, keyword_only, var_keyword, …


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiManifest:
    """One release. An owner is a class (`KvCacheConfig`) or a method (`LLM.generate_async`)."""

    name: str
    owners: Mapping[str, Mapping[str, ManifestField]]
    members: frozenset[str]  # `CompletionOutput.length`: properties and methods that are known by name only
    mentioned: frozenset[str]  # every word of the types
    enums: Mapping[str, tuple[str, ...]]
    not_read: frozenset[str]

    @property
    def title(self) -> str:
        """The name as it is shown to people: it says what was read where that is not the release itself."""
        return _READ_AS.get(self.name, self.name)

    def presence(self, owner: str, name: str) -> Presence:
        """Whether `owner` has the field, parameter or method `name`."""
        dotted = f"{owner}.{name}"
        if name in self.owners.get(owner, ()) or dotted in self.owners or dotted in self.members:
            return Presence.PRESENT
        if self.not_read & {owner, dotted, f"{owner} in part"}:
            return Presence.NOT_READ
        if self._has_read(owner):
            return Presence.ABSENT
        # A class that this manifest is silent about exists if another release has it; no release has a misspelt one.
        return Presence.NOT_READ if any(other.speaks_of(owner) for other in releases()) else Presence.ABSENT

    def speaks_of(self, owner: str) -> bool:
        """Whether the manifest names the class or method at all: as read, as not read, or as the type of something."""
        return self._has_read(owner) or owner in self.not_read or owner in self.mentioned

    def _has_read(self, owner: str) -> bool:
        return owner in self.owners or any(member.startswith(f"{owner}.") for member in self.members)

    def fields(self, owner: str) -> Mapping[str, ManifestField]:
        """The fields or parameters by name, in their order; empty for an owner that was not read or is not there."""
        return self.owners.get(owner, {})

    def values(self, enum: str) -> tuple[str, ...]:
        """The members of an enumeration, as far as read."""
        return self.enums.get(enum, ())


def releases() -> tuple[ApiManifest, ...]:
    """All known releases, oldest first."""
    return tuple(_release(name) for name in _MANIFESTS)


def release_for(version: str) -> ApiManifest:
    """The release whose API an installed `version` is taken to have.

    The same minor line decides; newer than all known ones is taken as the newest, and said on the log.
    Raises ConfigError for a version before 1.0 and for text that is no version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(f"TensorRT-LLM's version {version!r} is not one; reinstall it")
    line = (int(match[1]), int(match[2]))
    lines = {(int(name.split(".")[0]), int(name.split(".")[1])): name for name in _MANIFESTS}
    below = [known for known in lines if known <= line]
    if not below:
        raise ConfigError(f"TensorRT-LLM {version} is too old; install 1.0.0 or newer")
    release = _release(lines[max(below)])
    if max(below) != line:
        _log.warning("TensorRT-LLM %s is not known here; taken as the newest known, %s", version, release.title)
    elif version != release.name:
        _log.info("TensorRT-LLM %s is taken as %s", version, release.title)
    return release


def newest() -> ApiManifest:
    """The newest known release."""
    return releases()[-1]


def in_development(owner: str, name: str) -> bool:
    """Whether a development commit of the 1.3 line names it. Proves nothing about a release."""
    return name in _read(_DEVELOPMENT)["classes"].get(owner, {}) or any(
        field["name"] == name for field in _read(_DEVELOPMENT)["classes"].get(owner, {}).get("fields", ())
    )


@functools.cache
def _release(name: str) -> ApiManifest:
    owners: dict[str, Mapping[str, ManifestField]] = {}
    enums: dict[str, tuple[str, ...]] = {}
    not_read: set[str] = set()
    for manifest in map(_read, _MANIFESTS[name]):
        for cls, entry in manifest["classes"].items():
            _add_owners(owners, cls, entry)
        enums.update({enum: tuple(values) for enum, values in manifest["enums"].items()})
        not_read |= {_in_part(text) for text in manifest["not_read"]}
    types = " ".join(field.type for fields in owners.values() for field in fields.values())
    return ApiManifest(
        name=name,
        owners=owners,
        members=_members(enums),
        mentioned=frozenset(re.findall(r"\w+", types)),
        enums=enums,
        not_read=frozenset(not_read - owners.keys()),
    )


def _add_owners(owners: dict[str, Mapping[str, ManifestField]], cls: str, entry: Mapping[str, Any]) -> None:
    owners[cls] = {item["name"]: _field(item) for item in entry.get("fields", ())}
    for method, described in entry.items():
        if isinstance(described, dict):
            owners[f"{cls}.{method}"] = {item["name"]: _field(item) for item in described["params"]}


def _members(enums: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """What a manifest lists by bare name: `CompletionOutput.properties` and the like."""
    listed = [(enum.partition("."), value) for enum, values in enums.items() for value in values]
    return frozenset(
        f"{cls}.{part.partition('(')[0]}"
        for (cls, _, kind), value in listed
        if kind in ("properties", "members")
        for part in value.split("/")
    )


def _field(item: Mapping[str, Any]) -> ManifestField:
    required = bool(item.get("required", not item.get("has_default", True)))
    return ManifestField(
        name=item["name"],
        type=item["type"],
        required=required,
        default=_value(item.get("default")),
        default_known=item.get("default_known", True) and not required,
        is_built=str(item.get("default")).startswith("<factory"),
        allowed=tuple(item.get("allowed", ())),
        kind=item.get("kind"),
    )


def _value(text: str | None) -> Any:
    """A default as written in the source: `'auto'`, `0.9`, `LoadFormat.AUTO`, `<factory X>`, `1024**3`."""
    if text is None or text.startswith("<factory"):
        return None
    power = re.fullmatch(r"(\d+)\*\*(\d+)", text)
    if power:
        return int(power[1]) ** int(power[2])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text.rpartition(".")[2]


def _in_part(text: str) -> str:
    """`KvCacheConfig after use_kv_cache_manager_v2` is a class that was read in part."""
    owner, space, _ = text.partition(" ")
    return f"{owner} in part" if space else owner


@functools.cache
def _read(manifest: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath(f"{manifest}.json").read_bytes())
    return found

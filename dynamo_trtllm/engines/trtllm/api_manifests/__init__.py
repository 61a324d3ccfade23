"""Describe TensorRT-LLM's public Python API, release by release, from the JSON manifests in this folder.

The manifests are extracted from the published sources of the releases and are not edited by hand.
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

# Release -> its manifests. For the 1.3 candidates rc27 covers the constructor arguments and rc29 the calls.
_MANIFESTS = {
    "1.0.0": ("1.0.0",),
    "1.1.0": ("1.1.0",),
    "1.2.1": ("1.2.1",),
    "1.3.0rc": ("1.3.0rc27", "1.3.0rc29"),
}
_READ_AS = {"1.3.0rc": "1.3.0rc (arguments as of 1.3.0rc27, calls as of 1.3.0rc29)"}
_DEVELOPMENT = "1.3.0rc-unpinned"  # names only, of an unreleased commit


class Presence(StrEnum):
    """Presence of a name in a release."""

    PRESENT = "present"
    ABSENT = "absent"
    NOT_READ = "not read"  # unknown: no manifest covers that part of the release


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestField:
    """One field of a class, or one parameter of a method."""

    name: str
    type: str  # annotation in the source
    required: bool
    default: Any  # an enumeration member is represented by its name; None if unknown
    default_known: bool
    is_built: bool  # the default is an object from a factory; its fields have defaults of their own
    allowed: tuple[Any, ...]  # values of its Literal; empty for other types
    kind: str | None = None  # of a parameter: positional_or_keyword, keyword_only, var_keyword, …


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiManifest:
    """The API of one release. An owner is a class (`KvCacheConfig`) or a method (`LLM.generate_async`)."""

    name: str
    owners: Mapping[str, Mapping[str, ManifestField]]
    members: frozenset[str]  # properties and methods with unknown types: `CompletionOutput.length`
    mentioned: frozenset[str]  # every name in the annotations
    enums: Mapping[str, tuple[str, ...]]
    not_read: frozenset[str]  # owners that no manifest covers; "… in part" for partly covered ones

    @property
    def title(self) -> str:
        """Name for messages, with the builds that the manifests cover if they differ from the release."""
        return _READ_AS.get(self.name, self.name)

    def presence(self, owner: str, name: str) -> Presence:
        """Return the presence of the field, parameter or method `name` in `owner`."""
        dotted = f"{owner}.{name}"
        if name in self.owners.get(owner, ()) or dotted in self.owners or dotted in self.members:
            return Presence.PRESENT
        if self.not_read & {owner, dotted, f"{owner} in part"}:
            return Presence.NOT_READ
        if self._has_read(owner):
            return Presence.ABSENT
        # A class that another release has may exist here too; a name that no release has is a misspelling.
        return Presence.NOT_READ if any(other.speaks_of(owner) for other in releases()) else Presence.ABSENT

    def speaks_of(self, owner: str) -> bool:
        """Return True if the manifest mentions the class or method: as read, as not read, or in an annotation."""
        return self._has_read(owner) or owner in self.not_read or owner in self.mentioned

    def _has_read(self, owner: str) -> bool:
        return owner in self.owners or any(member.startswith(f"{owner}.") for member in self.members)

    def fields(self, owner: str) -> Mapping[str, ManifestField]:
        """Return the fields or parameters by name, in order; empty for an unknown owner."""
        return self.owners.get(owner, {})

    def values(self, enum: str) -> tuple[str, ...]:
        """Return the known members of an enumeration."""
        return self.enums.get(enum, ())


def releases() -> tuple[ApiManifest, ...]:
    """Return all known releases, oldest first."""
    return tuple(_release(name) for name in _MANIFESTS)


def release_for(version: str) -> ApiManifest:
    """Return the known release of the same minor line; log a warning and return the newest for newer versions.

    Args:
        version: installed version of TensorRT-LLM.

    Raises:
        ConfigError: the version is older than 1.0 or not a version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(f"Invalid TensorRT-LLM version {version!r}: expected a release such as 1.2.1")
    line = (int(match[1]), int(match[2]))
    lines = {(int(name.split(".")[0]), int(name.split(".")[1])): name for name in _MANIFESTS}
    below = [known for known in lines if known <= line]
    if not below:
        raise ConfigError(f"TensorRT-LLM {version} is too old. Install 1.0.0 or newer.")
    release = _release(lines[max(below)])
    if max(below) != line:
        _log.warning(
            "TensorRT-LLM %s is unknown; using the argument schema of %s. Check docs/trtllm.md", version, release.title
        )
    elif version != release.name:
        _log.info("Using the argument schema of TensorRT-LLM %s for %s", release.title, version)
    return release


def newest() -> ApiManifest:
    """Return the newest known release."""
    return releases()[-1]


def in_development(owner: str, name: str) -> bool:
    """Return True if an unreleased commit of the 1.3 line has the name. A release may still lack it."""
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
    """Return the members that a manifest lists without types, as in `CompletionOutput.properties`."""
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
    """Parse a default from the source: `'auto'`, `0.9`, `LoadFormat.AUTO`, `<factory X>`, `1024**3`."""
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
    """Mark a partly covered class: "KvCacheConfig after use_kv_cache_manager_v2" → "KvCacheConfig in part"."""
    owner, space, _ = text.partition(" ")
    return f"{owner} in part" if space else owner


@functools.cache
def _read(manifest: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath(f"{manifest}.json").read_bytes())
    return found

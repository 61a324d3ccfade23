"""Describe the public Python API of a library, release by release, from manifests in JSON.

Manifests are extracted from a library's published sources or from the installed package and are not
edited by hand. What the manifests do not say is in a file library.yaml beside them. The library
itself is not imported.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any

import msgspec


class Presence(StrEnum):
    """Presence of a name in a release."""

    PRESENT = "present"
    ABSENT = "absent"
    NOT_READ = "not read"  # unknown: no manifest covers that part of the release


class ManifestField:
    """One field of a class, or one parameter of a method, from its entry in a manifest."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.name: str = item["name"]
        self.type: str = item["type"]  # annotation in the source
        self.required = bool(item.get("required", not item.get("has_default", True)))
        # An enumeration member is represented by its name; None if unknown.
        self.default = _value(item.get("default"))
        self.default_known = item.get("default_known", True) and not self.required
        # The default is an object from a factory; its fields have defaults of their own.
        self.default_is_object = str(item.get("default")).startswith("<factory")


@dataclass(frozen=True, kw_only=True, eq=False)
class LibraryReleases:
    """A library, the manifests of its releases, and what annotations do not say about its
    arguments.
    """

    name: str  # for messages
    package: str  # Python package of the JSON files
    root: str  # class of the engine arguments
    # Release -> its manifests. The release's own manifest comes last, after those that fill its
    # gaps. The oldest release comes first.
    manifests: dict[str, tuple[str, ...]]
    development: str | None = None  # manifest of an unreleased commit
    # key -> the smallest and the largest value of a number, or of each item of a list
    ranges: dict[str, tuple[int | float, int | float | None]]
    # types for whose values upper and lower case do not matter: names of enumerations, or "Literal"
    # for all literals
    any_case: frozenset[str]
    flags: dict[str, str]  # setting of the worker -> argument
    # argument that only the engine sets -> what to do instead, or the reason
    engine_set: dict[str, str]
    # argument of another library -> what replaces it
    foreign: dict[str, str] = field(default_factory=dict)
    unsupported: frozenset[str] = frozenset()  # arguments that must be unset or false
    moved: dict[str, str] = field(default_factory=dict)  # deprecated argument -> its replacement
    # argument -> value that newer releases lack -> what to set instead
    removed_values: dict[str, dict[str, str]] = field(default_factory=dict)
    # class -> the modules that may define it, depending on the release
    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # names without which the engine can't run
    needed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # names used only if the release has them
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # pattern in the text of an error -> what to do
    error_hints: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, package: str) -> LibraryReleases:
        """Read the file library.yaml of a package. `package` also has the manifests."""
        data = msgspec.yaml.decode(resources.files(package).joinpath("library.yaml").read_bytes())
        return msgspec.convert({**data, "package": package}, cls)

    @functools.cached_property
    def releases(self) -> tuple[ApiManifest, ...]:
        """All known releases, oldest first."""
        return tuple(
            ApiManifest(self, name, manifests) for name, manifests in self.manifests.items()
        )

    @property
    def newest(self) -> ApiManifest:
        """The newest known release."""
        return self.releases[-1]

    @functools.cached_property
    def unreleased(self) -> ApiManifest | None:
        """An unreleased commit, which may have names that the next release lacks."""
        return ApiManifest(self, self.development, [self.development]) if self.development else None


class ApiManifest:
    """The API of one release.

    An owner is a class (`KvCacheConfig`) or a method (`LLM.generate_async`).

    Classes and enumerations that were not read of a release are taken from the manifest of another
    release. They count as read in part: they may have more names and more values in this release.
    """

    def __init__(self, library: LibraryReleases, name: str, manifests: Iterable[str]) -> None:
        """Read manifests of a library.

        Args:
            library: the library.
            name: the release.
            manifests: names of the files. A later manifest replaces classes of an earlier one. The
                manifest with the name of the release is the release's own.
        """
        self.library = library
        # The API that stands for this release, if this release was not read (see `as_nearest`).
        self.nearest_read: ApiManifest | None = None
        self.name = name
        self.title = name  # for messages
        self.owners: dict[str, Mapping[str, ManifestField]] = {}
        self.enums: dict[str, tuple[str, ...]] = {}
        not_read: set[str] = set()
        in_part: set[str] = set()  # owners and enumerations that were read in part
        for file in manifests:
            manifest = json.loads(
                resources.files(library.package).joinpath(f"{file}.json").read_bytes()
            )
            gaps = {_in_part(text) for text in manifest["not_read"]}
            owners = _owners(manifest["classes"])
            for owner in owners.keys() & self.owners.keys():
                # If this manifest has only some names of the owner, the other names stay as they
                # are.
                if f"{owner} in part" in gaps:
                    owners[owner] = {**self.owners[owner], **owners[owner]}
            self.owners.update(owners)
            self.enums.update({enum: tuple(values) for enum, values in manifest["enums"].items()})
            found = owners.keys() | manifest["enums"].keys()
            is_own = file == name
            # What another release's manifest has counts as read in part.
            complete: set[str] = set()
            if is_own:
                complete = {owner for owner in found if f"{owner} in part" not in gaps}
            in_part = (in_part | found) - complete
            not_read |= {gap for gap in gaps if not gap.endswith(" in part")}
        # The names of owners that no manifest covers, and "… in part" for owners that were read in
        # part.
        self.not_read = frozenset(not_read - self.owners.keys() - self.enums.keys())
        self.not_read |= {f"{owner} in part" for owner in in_part & self.owners.keys()}
        self.open_enums = frozenset(in_part & self.enums.keys())
        # Properties and methods with unknown types, such as `CompletionOutput.length`.
        self.members = _members(self.enums)
        types = " ".join(field.type for fields in self.owners.values() for field in fields.values())
        self.mentioned = frozenset(re.findall(r"\w+", types))  # every name in the annotations

    def as_nearest(self) -> ApiManifest:
        """Return this API for a similar release that was not read: all of it counts as read in
        part.
        """
        nearest = copy.copy(self)
        nearest.nearest_read = self
        nearest.title = f"{self.name} (the nearest release that was read)"
        nearest.not_read = self.not_read | {f"{owner} in part" for owner in self.owners}
        nearest.open_enums = frozenset(self.enums)
        return nearest

    def is_in_part(self, owner: str) -> bool:
        """Return True if the class or method may have more names and values than the manifest."""
        return f"{owner} in part" in self.not_read

    def presence(self, owner: str, name: str) -> Presence:
        """Return the presence of the field, parameter or method `name` in `owner`."""
        dotted = f"{owner}.{name}"
        if name in self.owners.get(owner, ()) or dotted in self.owners or dotted in self.members:
            return Presence.PRESENT
        if self.not_read & {owner, dotted} or self.is_in_part(owner):
            return Presence.NOT_READ
        if self._has_read(owner):
            return Presence.ABSENT
        # A class that another release has may exist here too; a name that no release has is a
        # misspelling.
        mentioned = any(other.mentions(owner) for other in self.library.releases)
        return Presence.NOT_READ if mentioned else Presence.ABSENT

    def mentions(self, owner: str) -> bool:
        """Return True if the manifest mentions the class or method: as read, as not read, or in an
        annotation.
        """
        return self._has_read(owner) or owner in self.not_read or owner in self.mentioned

    def _has_read(self, owner: str) -> bool:
        return owner in self.owners or any(
            member.startswith(f"{owner}.") for member in self.members
        )

    def fields(self, owner: str) -> Mapping[str, ManifestField]:
        """Return the fields or parameters by name, in order; empty for an unknown owner."""
        return self.owners.get(owner, {})

    def values(self, enum: str) -> tuple[str, ...]:
        """Return the known members of an enumeration."""
        return self.enums.get(enum, ())


def _owners(classes: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, ManifestField]]:
    """Return the fields of each class and the parameters of each method in the section "classes" of
    a manifest.
    """
    owners: dict[str, Mapping[str, ManifestField]] = {}
    for cls, entry in classes.items():
        owners[cls] = {item["name"]: ManifestField(item) for item in entry.get("fields", ())}
        for method, described in entry.items():
            if isinstance(described, dict):
                owners[f"{cls}.{method}"] = {
                    item["name"]: ManifestField(item) for item in described["params"]
                }
    return owners


def _members(enums: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """Return the members that a manifest lists without types, as in
    `CompletionOutput.properties`.
    """
    members: set[str] = set()
    for enum, values in enums.items():
        cls, _, kind = enum.partition(".")
        if kind not in ("properties", "members"):
            continue
        for value in values:
            # A value may list several members, and a method with its parameters: "a/b(x)".
            names = [part.partition("(")[0] for part in value.split("/")]
            members.update(f"{cls}.{name}" for name in names)
    return frozenset(members)


def _value(text: str | None) -> Any:
    """Parse a default from the source: `'auto'`, `0.9`, `LoadFormat.AUTO`, `<factory X>`,
    `1024**3`.
    """
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
    """Return the mark of a class that was read in part: "KvCacheConfig in part" for "KvCacheConfig
    after use_kv_cache_manager_v2". Return the name of a class that was not read at all as it is.
    """
    owner, space, _ = text.partition(" ")
    return f"{owner} in part" if space else owner

"""Check arguments of a library against the manifest of a release: names, types, allowed values and
ranges.

Arguments are named by dotted keys, as in the YAML: `kv_cache_config.dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from dynamo_trtllm.config.suggestions import suggest
from dynamo_trtllm.engines import value_types
from dynamo_trtllm.engines.manifests import ApiManifest, LibraryReleases, ManifestField, Presence
from dynamo_trtllm.protocol.errors import ConfigError

_MAX_INT64 = 2**63 - 1


class Found(NamedTuple):
    """Result of a search for a key in a release."""

    presence: Presence
    field: ManifestField | None = None  # None also for a key of a mapping without a schema
    owner: str = ""  # class of the field


@lru_cache(maxsize=8192)  # a preflight asks for the same keys of the same releases in each rule
def find(release: ApiManifest, key: str) -> Found:
    """Look an argument up in a release by its dotted key."""
    classes: tuple[str, ...] = (release.library.root,)
    found = Found(Presence.PRESENT)
    for part in key.split("."):
        if not classes:
            return Found(Presence.PRESENT)  # inside a mapping without a schema
        owner = next((name for name in classes if part in release.fields(name)), None)
        if owner is None:
            unread = any(release.presence(name, part) is Presence.NOT_READ for name in classes)
            return Found(Presence.NOT_READ if unread else Presence.ABSENT)
        field = release.fields(owner)[part]
        found = Found(Presence.PRESENT, field, owner)
        classes = owners(release, field)
    return found


def check(values: Mapping[str, Any], release: ApiManifest, where: str) -> list[str]:
    """Check the arguments of one source.

    Args:
        values: nested arguments.
        release: API of the library.
        where: name of the source; error texts begin with it.

    Returns:
        A note for each key that the manifests do not cover, and for each value that the release may
            allow although the manifests do not list it.

    Raises:
        ConfigError: names the first invalid key.
    """
    return list(_check(values, release, where, ""))


def default(release: ApiManifest, key: str, given: Mapping[str, Any]) -> Any:
    """Return the release's default of a dotted key; None if there is no default, if the default is
    unknown, or if the key's section is null.

    Args:
        release: API of the library.
        key: the dotted key.
        given: the arguments that are set. A section exists if one of its keys is set.
    """
    parent, _, _ = key.rpartition(".")
    # A section of which no key is set exists only if the default of the section is an object.
    while parent and parent not in given:
        above = find(release, parent).field
        if above is None or not above.default_is_object:
            return None
        parent = parent.rpartition(".")[0]
    field = find(release, key).field
    return field.default if field is not None else None


def every_key(release: ApiManifest, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted key of each known argument.

    A section that is null, by default or in `given`, is one key.
    """
    for name, field in release.fields(release.library.root).items():
        is_section = isinstance(given[name], Mapping) if name in given else field.default_is_object
        parts: list[str] = []
        if is_section:
            for owner in owners(release, field):
                parts += release.fields(owner)
        if parts:
            yield from (f"{name}.{part}" for part in parts)
        else:
            yield name


def is_known(library: LibraryReleases, key: str) -> bool:
    """Return True if a known release or an unreleased commit has the argument."""
    return _known_places(library, key) != ""


def removed(release: ApiManifest, key: str) -> str:
    """Return the names of the releases that have an argument which this release probably lacks.

    A release probably lacks an argument if the API of the release was not read, and the nearest
    release that was read lacks the argument. Return "" in all other cases, and if no release has
    the argument.
    """
    return _releases_with(release.library, key) if _is_probably_missing(release, key) else ""


def _is_probably_missing(release: ApiManifest, key: str) -> bool:
    """Return True if a release was not read, and the nearest one has no such argument."""
    nearest = release.nearest_read
    return nearest is not None and find(nearest, key).presence is Presence.ABSENT


def _check(
    values: Mapping[str, Any], release: ApiManifest, where: str, prefix: str
) -> Iterator[str]:
    """Yield the notes that `check` returns. Raises ConfigError for the first invalid key."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        presence, field, owner = find(release, key)
        if presence is Presence.ABSENT:
            _reject(key, release, where)
        if presence is Presence.NOT_READ:
            places = _known_places(release.library, key)
            seen = f" (it is {places})" if places else ""
            library = f"{release.library.name} {release.title}"
            why = f"its schema in {library} is unknown"
            if _is_probably_missing(release, key):
                why = f"{library} has no such argument"
            yield f"{key} is passed on unchecked: {why}{seen}"
        elif field is not None and _is_open(key, value, field, owner, release):
            library = f"{release.library.name} {release.title}"
            yield f"{key} {value!r} is passed on unchecked: {library} may have more values"
        elif field is not None:
            _check_value(key, value, field, release, where)
            if isinstance(value, Mapping) and owners(release, field):
                yield from _check(value, release, where, f"{key}.")


def _reject(key: str, release: ApiManifest, where: str) -> NoReturn:
    releases_with = _releases_with(release.library, key)
    if releases_with:
        fix = f"Remove it, or install a release that has it ({releases_with})."
        raise ConfigError(
            f"{where}: {release.library.name} {release.title} has no {key}. {fix}", field=key
        )
    parent, _, name = key.rpartition(".")
    field = find(release, parent).field if parent else None
    classes = owners(release, field) if field is not None else (release.library.root,)
    names = [known for owner in classes for known in release.fields(owner)]
    guess = suggest(name, names)
    inside = f"{parent}." if field is not None else ""
    listed = (
        f"known: {', '.join(sorted(names))}" if inside else "--print-config lists the known keys"
    )
    hint = f"did you mean {inside + guess!r}?" if guess else listed
    raise ConfigError(f"{where}: unknown key {key!r}; {hint}", field=key)


def _releases_with(library: LibraryReleases, key: str) -> str:
    """Return the names of the releases that have the argument."""
    return ", ".join(
        release.name
        for release in library.releases
        if find(release, key).presence is Presence.PRESENT
    )


def _known_places(library: LibraryReleases, key: str) -> str:
    """Return where the argument is known; "" if nowhere."""
    releases_with = _releases_with(library, key)
    if releases_with:
        return f"in {releases_with}"
    if library.unreleased is None:
        return ""
    parent, _, name = key.rpartition(".")
    for class_name in _classes_of(library, parent):
        if name in library.unreleased.fields(class_name):
            return "in an unreleased commit"
    return ""


def _classes_of(library: LibraryReleases, parent: str) -> set[str]:
    """Return the classes whose fields stand under a key in any release; the root class if there are
    none.
    """
    classes: set[str] = set()
    if parent:
        for release in library.releases:
            field = find(release, parent).field
            if field is not None:
                classes.update(value_types.config_classes(field.type))
    return classes or {library.root}


def _is_open(key: str, value: Any, field: ManifestField, owner: str, release: ApiManifest) -> bool:
    """Return True if the manifest does not list a value, but the release may allow it, because not
    all its allowed values were read.

    Return False for a value that is known to be removed.
    """
    is_removed = str(value) in release.library.removed_values.get(key, {})
    if is_removed or value_types.fits(value, field.type, release):
        return False
    return value_types.may_fit(value, field.type, release, is_in_part=release.is_in_part(owner))


def _check_value(
    key: str, value: Any, field: ManifestField, release: ApiManifest, where: str
) -> None:
    low, high = release.library.ranges.get(key, (None, None))
    if isinstance(value, int) and abs(value) > _MAX_INT64:
        raise ConfigError(
            f"{where}: {key} has {len(str(abs(value)))} digits: expected a number of 64 bits",
            field=key,
        )
    if not value_types.fits(value, field.type, release):
        expected = value_types.description(field.type, release)
    elif low is not None and not _is_within(value, low, high):
        span = f"{low} to {high}" if high is not None else f"{low} or more"
        expected = f"a list of numbers, each {span}" if isinstance(value, list) else span
    else:
        return
    raise ConfigError(f"{where}: {key} is {value!r}: expected {expected}", field=key)


def _is_within(value: Any, low: float, high: float | None) -> bool:
    """Return True if a number, or each item of a list with items, is in the range.

    Other values have no range.
    """
    if isinstance(value, list):
        return bool(value) and all(_is_within(item, low, high) for item in value)
    if not isinstance(value, (int, float)):
        return True
    return value >= low and (high is None or value <= high)


def owners(release: ApiManifest, field: ManifestField) -> tuple[str, ...]:
    """Return the configuration classes that describe the keys of a mapping. If the manifest has
    fields of any of them, return only those.
    """
    named = value_types.config_classes(field.type)
    return tuple(name for name in named if release.fields(name)) or named

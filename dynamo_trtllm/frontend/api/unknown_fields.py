"""Collect the unknown fields of a request, and find out which of them are misspelled."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Final, Literal

MAX_IGNORED: Final = 16  # ignored fields of a request that are reported
_MAX_NAME: Final = 64  # characters of a reported name
# Least number of characters of a known name that `misspelled` compares by edits. A shorter name,
# such as "n", is one edit away from too many names.
_SHORTEST: Final = 3
# Unknown fields of a request that are compared, each with all known names.
_MAX_COMPARED: Final = 128
# Fields of other APIs that are near a known name, but stand for something else.
_FOREIGN: Final = frozenset({"isError", "mode", "models", "speed", "typ_p"})


class IgnoredFields:
    """The names of the fields of a request that have no effect.

    It has only the first MAX_IGNORED names, each once, and cuts long names.

    Args:
        rejects_misspelled: `meant` finds misspelled names, so that their fields are rejected.
    """

    def __init__(self, *, rejects_misspelled: bool = False) -> None:
        self._names: dict[str, None] = {}
        self._rejects_misspelled = rejects_misspelled
        # Unknown names that were compared, each with the known names of the place where it was
        # found.
        self._compared: set[tuple[str, Hashable]] = set()

    def add(self, names: Iterable[str]) -> None:
        """Add names."""
        for name in itertools.islice(names, MAX_IGNORED):
            if len(self._names) < MAX_IGNORED:
                self._names[name[:_MAX_NAME]] = None

    @property
    def is_full(self) -> bool:
        """Whether further unknown fields are neither reported nor compared with known names."""
        compares_no_more = not self._rejects_misspelled or len(self._compared) >= _MAX_COMPARED
        return compares_no_more and len(self._names) >= MAX_IGNORED

    def meant(self, name: str, known: frozenset[str]) -> str | None:
        """Return the known name that a misspelled one stands for.

        None: the name is not misspelled, or misspelled names are ignored like all unknown names.

        Only the first unknown fields of a request are compared, so that its cost stays in
        proportion to its size.
        """
        if not self._rejects_misspelled or len(self._compared) >= _MAX_COMPARED:
            return None
        if len(name) > _MAX_NAME or name in _FOREIGN or (name, known) in self._compared:
            return None
        self._compared.add((name, known))
        return misspelled(name, known)

    def __bool__(self) -> bool:
        return bool(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


def collector(mode: Literal["reject", "warn", "ignore"]) -> IgnoredFields | None:
    """Return a collector of the ignored fields of a request. `mode` is that of `--unknown-fields`.

    None: all unknown fields are rejected.
    """
    return None if mode == "reject" else IgnoredFields(rejects_misspelled=mode == "warn")


def misspelled(name: str, known: Collection[str]) -> str | None:
    """Return the known name from which a name differs by one edit, or only by case, underscores and
    hyphens.
    """
    plain = _plain(name)
    for other in known:
        is_near = len(other) >= _SHORTEST and abs(len(other) - len(name)) <= 1
        if is_near and _is_one_edit(name, other):
            return other
        if plain == _plain(other):
            return other
    return None


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _is_one_edit(one: str, other: str) -> bool:
    """Return True if the names differ by one character that is missing, added or replaced, or by
    two neighbors that are swapped.
    """
    begin = 0
    shortest = min(len(one), len(other))
    while begin < shortest and one[begin] == other[begin]:
        begin += 1
    rest = one[begin:]
    other_rest = other[begin:]
    if rest[1:] == other_rest[1:]:
        return True  # another character
    if rest[1:] == other_rest or rest == other_rest[1:]:
        return True  # one too many, or one is missing
    swapped = other_rest[1:2] + other_rest[:1]
    return rest[:2] == swapped and rest[2:] == other_rest[2:]

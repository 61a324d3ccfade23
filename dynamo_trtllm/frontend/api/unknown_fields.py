"""Collect the unknown fields of a request, and find out which of them are misspelled."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Final, Literal

MAX_IGNORED: Final = 16  # ignored fields of a request that are reported
_MAX_NAME: Final = 64  # characters of each
# Characters of a known name. A shorter one, such as "n", is one edit away from too many names.
_SHORTEST: Final = 3
_MAX_COMPARED: Final = 128  # unknown fields of a request; each is compared with all known ones


# Fields of other APIs that are near a known name, but stand for something else.
_FOREIGN: Final = frozenset({"isError", "mode", "models", "speed", "typ_p"})


class IgnoredFields:
    """The names of the fields of a request that have no effect.

    Each name is there once. Only the first MAX_IGNORED names are there, and long ones are cut.

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
        """Whether further unknown fields are neither reported nor compared with known ones."""
        compares_no_more = not self._rejects_misspelled or len(self._compared) >= _MAX_COMPARED
        return compares_no_more and len(self._names) >= MAX_IGNORED

    def meant(self, name: str, known: frozenset[str]) -> str | None:
        """Return the known name that a misspelled one stands for.

        None: the name is not misspelled, or misspelled names are ignored like other unknown ones.

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
    """Return what collects the ignored fields of a request, as `--unknown-fields` says.

    None: all are rejected.
    """
    return None if mode == "reject" else IgnoredFields(rejects_misspelled=mode == "warn")


def misspelled(name: str, known: Collection[str]) -> str | None:
    """Return the known name from which a name differs by one edit, or by case and underscores
    only.
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
    """Return True if one character is missing, too many or another one, or two neighbors are
    swapped.
    """
    begin = 0
    shortest = min(len(one), len(other))
    while begin < shortest and one[begin] == other[begin]:
        begin += 1
    rest = one[begin:]
    others = other[begin:]
    if rest[1:] == others[1:]:
        return True  # another character
    if rest[1:] == others or rest == others[1:]:
        return True  # one too many, or one is missing
    swapped = others[1:2] + others[:1]
    return rest[:2] == swapped and rest[2:] == others[2:]

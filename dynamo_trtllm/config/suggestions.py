"""Suggest the name that was probably meant by a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Equal words have a similarity of 1. With 0.6, `suggest` returns --help for --tp.
_MIN_SIMILARITY = 0.7


def suggest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that is most similar to `name`, or None if none is similar.

    The comparison ignores case, leading dashes, and the difference between dash and underscore.
    """
    plain = {_plain(known): known for known in allowed}
    matches = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=_MIN_SIMILARITY)
    return plain[matches[0]] if matches else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()

"""Remember the latest keys of a mapping."""

from __future__ import annotations

from typing import TypeVar

# Most keys that `remember` keeps. What refers to a key again, such as a repeated opening of a
# stream, arrives soon after the first time.
_MAX_REMEMBERED = 16_384

K = TypeVar("K")
V = TypeVar("V")


def remember(latest: dict[K, V], key: K, value: V) -> None:
    """Put the key last. If there are more than _MAX_REMEMBERED keys, drop the first one."""
    latest.pop(key, None)
    latest[key] = value
    if len(latest) > _MAX_REMEMBERED:
        del latest[next(iter(latest))]

"""Find the first stop string in streamed text, however the text is divided into deltas."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class _Match(NamedTuple):
    """Where a stop string is in a text."""

    begin: int
    end: int


class _StopSearch:
    """The search for one stop string in streamed text (Knuth-Morris-Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._borders = _borders(stop)
        # How many characters of the stop string the text ends with.
        self.num_matched = 0

    def end_in(self, text: str) -> int | None:
        """Return the position after the stop string in the next part of the text.

        None: the stop string does not end in this part.
        """
        stop = self.stop
        matched = self.num_matched
        position = 0
        while position < len(text):
            if not matched:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            while matched and stop[matched] != text[position]:
                matched = self._borders[matched - 1]
            if stop[matched] == text[position]:
                matched += 1
            position += 1
            if matched == len(stop):
                return position
        self.num_matched = matched
        return None


class StopStrings:
    """A search for the first stop string in streamed text.

    It holds back text that could be the start of a stop string. Each character is read once,
    however the text is divided into deltas.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._searches = [_StopSearch(stop) for stop in stops]
        self._pending = ""  # the text that is held back
        first_chars = "".join({stop[0] for stop in stops})
        self._find_start = re.compile(f"[{re.escape(first_chars)}]").search
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and True if a stop string follows it."""
        # Most text has no character with which a stop string begins. One search shows that for all.
        if not self._pending and self._find_start(text) is None:
            return text, False
        num_pending = len(self._pending)
        matches: list[_Match] = []
        for search in self._searches:
            end_in_text = search.end_in(text)
            if end_in_text is not None:
                end = num_pending + end_in_text
                matches.append(_Match(end - len(search.stop), end))
        text = self._pending + text
        if matches:
            # Take the match that ends first. Of several that end together, take the longest.
            first = min(matches, key=lambda match: (match.end, match.begin))
            self._pending = ""
            self.found = text[first.begin : first.end]
            return text[: first.begin], True
        num_pending = max(search.num_matched for search in self._searches)
        num_shown = len(text) - num_pending
        self._pending = text[num_shown:]
        return text[:num_shown], False

    def flush(self) -> str:
        """Return the text that is held back. A stop string that began in it does not go on."""
        pending = self._pending
        self._pending = ""
        for search in self._searches:
            search.num_matched = 0
        return pending


@functools.lru_cache(maxsize=64)
def _borders(stop: str) -> tuple[int, ...]:
    """Return the borders of all prefixes of `stop`.

    A border is the length of the longest proper prefix that is also a suffix.
    """
    borders = [0]
    matched = 0
    for char in stop[1:]:
        while matched and stop[matched] != char:
            matched = borders[matched - 1]
        if stop[matched] == char:
            matched += 1
        borders.append(matched)
    return tuple(borders)

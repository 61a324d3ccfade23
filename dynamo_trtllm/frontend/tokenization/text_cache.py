"""Cache what is made of long texts, for all requests of a process."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

V = TypeVar("V")

MAX_BYTES: Final = 16 << 20
MIN_CACHED_CHARS: Final = 256  # encoding a shorter text is as fast as a lookup


class TextCache(Generic[V]):
    """Thread-safe LRU cache from texts to what is made of them. Callers must not modify the values.

    All clients of a process share it. From the time of a request, a client can learn that a text
    was sent before, but only if it sends the same text.

    Args:
        make: makes the value of a text, for example its token ids.
        max_bytes: maximum size of the texts and their values together.
        min_chars: the values of shorter texts are made each time.
    """

    def __init__(
        self,
        make: Callable[[str], V],
        max_bytes: int = MAX_BYTES,
        min_chars: int = MIN_CACHED_CHARS,
    ) -> None:
        self._make = make
        self._max_bytes = max_bytes
        self._min_chars = min_chars
        self._cached: OrderedDict[str, tuple[V, int]] = OrderedDict()  # values and bytes by text
        self._lock = threading.Lock()  # large bodies are rendered in threads
        self.num_bytes = 0

    def get(self, text: str) -> V:
        """Return the value of the text, from the cache or made."""
        if len(text) < self._min_chars:
            return self._make(text)
        with self._lock:
            cached = self._cached.get(text)
            if cached is not None:
                self._cached.move_to_end(text)
                return cached[0]
        value = self._make(text)
        with self._lock:
            self._put(text, value)
        return value

    def _put(self, text: str, value: V) -> None:
        num_bytes = sys.getsizeof(text) + sys.getsizeof(value)
        if text in self._cached or num_bytes > self._max_bytes:
            return
        self._cached[text] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, (_, num_bytes) = self._cached.popitem(last=False)
            self.num_bytes -= num_bytes

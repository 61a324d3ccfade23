"""Ids of texts that were encoded before: a conversation comes again with every turn, longer by two messages.

Exact: whole texts are the keys, and a text's ids depend on nothing else. Bounded by bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dynamo_trtllm.messages import TokenIds

MAX_BYTES: Final = 16 << 20
_MIN_CHARS: Final = 256  # shorter texts are encoded as fast as they are looked up and kept


class TokenizationCache:
    """The texts used last. For any thread; the ids it gives must not be changed."""

    def __init__(self, encode: Callable[[str], TokenIds], max_bytes: int = MAX_BYTES) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, TokenIds] = OrderedDict()
        self._lock = threading.Lock()  # large bodies are rendered in threads
        self.num_bytes = 0

    def ids(self, text: str) -> TokenIds:
        if len(text) < _MIN_CHARS:
            return self._encode(text)
        with self._lock:
            ids = self._known.get(text)
            if ids is not None:
                self._known.move_to_end(text)
                return ids
        ids = self._encode(text)
        with self._lock:
            self._keep(text, ids)
        return ids

    def _keep(self, text: str, ids: TokenIds) -> None:
        if text in self._known or _cost(text, ids) > self._max_bytes:
            return
        self._known[text] = ids
        self.num_bytes += _cost(text, ids)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _cost(*self._known.popitem(last=False))


def _cost(text: str, ids: TokenIds) -> int:
    """Bytes, at least what they take: a character takes up to four."""
    return 4 * len(text) + ids.itemsize * len(ids)

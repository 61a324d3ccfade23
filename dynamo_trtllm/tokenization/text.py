"""Decode tokens to text incrementally, in complete UTF-8 characters and in linear time.

The module also holds two caches: `TokenTextCache` for the text of tokens, `TokenizationCache` for the tokens of texts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from typing import Final

from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.tokenization.base import Delta

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS: Final = 4  # a UTF-8 character has at most four bytes


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


class TokenTextCache(dict[int, Delta | None]):
    """The delta of each token that is complete UTF-8 by itself; None for any other token.

    Entries are added at first use, so the cache grows up to the size of the vocabulary. All requests of a model
    share it.

    Args:
        token_bytes: Returns the bytes of a token.
        is_reasoning: The deltas hold reasoning instead of content.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, is_reasoning: bool = False) -> None:
        self._token_bytes = token_bytes
        self._is_reasoning = is_reasoning

    def __missing__(self, token_id: int) -> Delta | None:
        try:
            text = self._token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = ""
        if self._is_reasoning:
            delta = Delta(reasoning=text, reasoning_tokens=1)
        else:
            delta = Delta(content=text)
        return self.setdefault(token_id, delta if text else None)


class BytesTextParser:
    """OutputParser for vocabularies whose tokens are byte strings; all text is content."""

    def __init__(self, token_bytes: Callable[[int], bytes], token_texts: TokenTextCache) -> None:
        self._token_bytes = token_bytes  # returns b"" for hidden tokens
        self._token_texts = token_texts
        self._decoder = Utf8Decoder(errors="replace")

    def push(self, token_ids: TokenIds) -> Delta:
        if len(token_ids) == 1 and not self._decoder.buffer and (delta := self._token_texts[token_ids[0]]) is not None:
            return delta
        return Delta(content=self._decoder.decode(b"".join(map(self._token_bytes, token_ids))))

    def finish(self) -> Delta:
        return Delta(content=self._decoder.decode(b"", final=True))


class WindowTextParser:
    """OutputParser for vocabularies in which a token's text depends on the tokens before it.

    Examples are leading spaces and byte fallback. The parser decodes a short window: the tokens of the last emitted
    text, as context, and the tokens after them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden  # special tokens, which are omitted
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: TokenIds) -> Delta:
        parts: list[str] = []
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            self._held.append(token_id)
            text = self._new_text()
            if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
                continue
            parts.append(text)
            self._context, self._held = self._held, []
        return Delta(content="".join(parts))

    def finish(self) -> Delta:
        return Delta(content=self._new_text() if self._held else "")

    def _new_text(self) -> str:
        return self._decode([*self._context, *self._held])[len(self._decode(self._context)) :]


MAX_BYTES: Final = 16 << 20
_MIN_CHARS: Final = 256  # encoding a shorter text is as fast as a lookup


class TokenizationCache:
    """Thread-safe LRU cache from texts to token ids. Callers must not modify the ids.

    Args:
        encode: Tokenizes a text.
        max_bytes: Maximum size in bytes, as estimated by `_cost`.
    """

    def __init__(self, encode: Callable[[str], TokenIds], max_bytes: int = MAX_BYTES) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._cached: OrderedDict[str, TokenIds] = OrderedDict()
        self._lock = threading.Lock()  # large bodies are rendered in threads
        self.num_bytes = 0

    def ids(self, text: str) -> TokenIds:
        """Return the token ids of the text, from the cache or encoded."""
        if len(text) < _MIN_CHARS:
            return self._encode(text)
        with self._lock:
            ids = self._cached.get(text)
            if ids is not None:
                self._cached.move_to_end(text)
                return ids
        ids = self._encode(text)
        with self._lock:
            self._put(text, ids)
        return ids

    def _put(self, text: str, ids: TokenIds) -> None:
        if text in self._cached or _cost(text, ids) > self._max_bytes:
            return
        self._cached[text] = ids
        self.num_bytes += _cost(text, ids)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _cost(*self._cached.popitem(last=False))


def _cost(text: str, ids: TokenIds) -> int:
    """Return an upper bound of the bytes of a text and its ids; a character takes up to four bytes."""
    return 4 * len(text) + ids.itemsize * len(ids)

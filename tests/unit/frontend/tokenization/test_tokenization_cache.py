from __future__ import annotations

import sys
from array import array

import pytest

from dynamo_trtllm.frontend.tokenization.text_cache import TextCache
from dynamo_trtllm.protocol.messages import TokenIds, token_ids


class Counting:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> TokenIds:
        self.texts.append(text)
        return token_ids(map(ord, text))


def size(text: str) -> int:
    """The bytes of a text and of the ids that `Counting` makes of it."""
    return sys.getsizeof(text) + sys.getsizeof(token_ids(map(ord, text)))


def test_get_encodes_a_repeated_text_once() -> None:
    encode = Counting()
    known = TextCache(encode)
    for text in ("x" * 300, "y" * 300, "x" * 300, "x" * 299):
        assert known.get(text) == array("I", map(ord, text))
    assert [len(text) for text in encode.texts] == [300, 300, 299]


def test_get_over_byte_limit_drops_least_recently_used() -> None:
    encode = Counting()
    known = TextCache(encode, max_bytes=3 * size("a" * 300))
    for letter in "abcadaeb":  # a is used all the time
        known.get(letter * 300)
        assert known.num_bytes <= 3 * size("a" * 300)
    assert [text[0] for text in encode.texts] == ["a", "b", "c", "d", "e", "b"]


def test_get_counts_wide_characters_in_bytes() -> None:
    for text in ("a" * 300, "é" * 300, "中" * 300, "🧑" * 300):
        known = TextCache(Counting())
        known.get(text)
        assert known.num_bytes == size(text)


def test_get_of_too_large_text_drops_nothing() -> None:
    encode = Counting()
    known = TextCache(encode, max_bytes=size("a" * 300))
    for text in ("a" * 300, "b" * 301, "a" * 300):
        known.get(text)
    assert len(encode.texts) == 2


@pytest.mark.parametrize("size", [0, 1, 255])
def test_get_when_the_text_is_short_then_nothing_is_kept(size: int) -> None:
    known = TextCache(Counting())
    known.get("a" * size)
    assert known.num_bytes == 0

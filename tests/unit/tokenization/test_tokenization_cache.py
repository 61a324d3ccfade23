from __future__ import annotations

import random
from array import array

import pytest

from dynamo_trtllm.messages import TokenIds, token_ids
from dynamo_trtllm.tokenization import vocabulary
from dynamo_trtllm.tokenization.text import TokenizationCache

SAMPLES = (
    "The quick brown fox jumps over the lazy dog. It's 3,141,592 o'clock; DON'T panic!",
    "Быстрая коричневая лиса. Łódź, Zürich, naïve café\u0301, ﬁ ligature, İstanbul, ǅ \u0149",
    "敏捷的棕色狐狸跳过懒狗。日本語のテキスト、ｶﾀｶﾅ。한국어 문장도 있습니다. ไทยไม่มีช่องว่าง हिन्दी देवनागरी العَرَبِيَّة עִבְרִית",
    "🧑‍🚀👩🏽‍💻🇪🇺 emoji, 𒀀𒁀 cuneiform, \u200b\ufeff\u00a0\u2028 odd spaces, \x00\x01 controls",
    "def f(x: int) -> str:\n\treturn f'{x:>10}'  # comment\n\n\n    if a != b and (c || d):\r\n        pass\r\n",
    '# Title\n\n* item **bold** `code`\n\n```python\nprint("hi")\n```\n| a | b |\n|---|---|\n| 1 | 22222222 |\n',
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9\\n"}}',
    "<|start|>user<|message|>not a marker<|end|><|reserved_200013|><|endoftext|> <|retur",
    "https://example.com/a/b?c=d&e=%20f#g user@example.com 2026-11-21T19:23:45.678Z 0xDEADBEEF 1e-9",
    "a" * 3000,
    " " * 500 + "\n" * 300 + "\t \t " * 100,
    "zqxjkvbpygfwmucldrhsnioate" * 40,
    "lone \ud83d surrogate \udc00",
)


def mixed(count: int) -> list[str]:
    """Pieces of all samples in random order and cut anywhere, and random characters of all planes."""
    made, draw = list(SAMPLES), random.Random(7)
    while len(made) < count:
        parts = []
        for _ in range(draw.randint(1, 12)):
            sample = draw.choice(SAMPLES)
            at = draw.randrange(len(sample))
            parts.append(sample[at : at + draw.randint(1, 60)])
        parts.append("".join(chr(draw.randrange(0x20, draw.choice((0x7F, 0x2FF, 0xD7FF, 0x1FAFF)))) for _ in range(8)))
        made.append("".join(parts))
    return made


def test_encode_text_then_the_ids_are_those_of_both_libraries() -> None:
    encoding, harmony = vocabulary.load_tiktoken(), vocabulary.load_harmony()
    for text in mixed(1500):
        ids = vocabulary.encode_text(encoding, text).tolist()
        assert ids == encoding.encode_ordinary(text), text
        well_formed = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert ids == harmony.encode(well_formed, allowed_special=set(), disallowed_special=()), text


class Counting:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> TokenIds:
        self.texts.append(text)
        return token_ids(map(ord, text))


def test_ids_when_a_text_comes_again_then_it_is_not_encoded_again_and_the_ids_are_equal() -> None:
    encode = Counting()
    known = TokenizationCache(encode)
    for text in ("x" * 300, "y" * 300, "x" * 300, "x" * 299):
        assert known.ids(text) == array("I", map(ord, text))
    assert [len(text) for text in encode.texts] == [300, 300, 299]


def test_ids_when_there_are_too_many_bytes_then_the_texts_used_longest_ago_go() -> None:
    encode = Counting()
    known = TokenizationCache(encode, max_bytes=3 * 300 * 8)
    for letter in "abcadaeb":  # a is used all the time
        known.ids(letter * 300)
        assert known.num_bytes <= 3 * 300 * 8
    assert [text[0] for text in encode.texts] == ["a", "b", "c", "d", "e", "b"]


def test_ids_when_a_text_alone_is_too_large_then_it_is_not_kept_and_drives_out_nothing() -> None:
    encode = Counting()
    known = TokenizationCache(encode, max_bytes=300 * 8)
    for text in ("a" * 300, "b" * 301, "a" * 300):
        known.ids(text)
    assert len(encode.texts) == 2


@pytest.mark.parametrize("size", [0, 1, 255])
def test_ids_when_the_text_is_short_then_nothing_is_kept(size: int) -> None:
    known = TokenizationCache(Counting())
    known.ids("a" * size)
    assert known.num_bytes == 0

"""fastokens gives the ids of openai-harmony and of tokenizers for texts of all kinds, in linear
time and one thread.
"""

from __future__ import annotations

import functools
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.o200k_tokenizer import O200kTokenizer
from dynamo_trtllm.frontend.tokenization.tokenizer import (
    FastTokenizer,
    SlowJsonTokenizer,
    load_json_tokenizer,
    run_finder,
)
from dynamo_trtllm.models import vocabulary
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from tests.kit.cases import each_case

SAMPLES = (
    "The quick brown fox jumps over the lazy dog. It's 3,141,592 o'clock; DON'T panic!",
    "Быстрая коричневая лиса. Łódź, Zürich, naïve café\u0301, ﬁ ligature, İstanbul, ǅ \u0149",
    (
        "敏捷的棕色狐狸跳过懒狗。日本語のテキスト、ｶﾀｶﾅ。한국어 문장도 있습니다. ไทยไม่มีช่องว่าง"
        " हिन्दी देवनागरी العَرَبِيَّة עִבְרִית"
    ),
    "🧑‍🚀👩🏽‍💻🇪🇺 emoji, 𒀀𒁀 cuneiform, \u200b\ufeff\u00a0\u2028 odd spaces, \x00\x01 controls",
    (
        "def f(x: int) -> str:\n\treturn f'{x:>10}'  # comment\n\n\n    if a != b and (c || d):\r\n"
        "        pass\r\n"
    ),
    (
        '# Title\n\n* item **bold** `code`\n\n```python\nprint("hi")\n```\n| a | b |\n|---|---|\n|'
        " 1 | 22222222 |\n"
    ),
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9\\n"}}',
    "<|start|>user<|message|>not a marker<|end|><|reserved_200013|><|endoftext|> <|retur",
    (
        "https://example.com/a/b?c=d&e=%20f#g user@example.com 2026-11-21T19:23:45.678Z 0xDEADBEEF"
        " 1e-9"
    ),
    "a" * 3000,
    " " * 500 + "\n" * 300 + "\t \t " * 100,
    "zqxjkvbpygfwmucldrhsnioate" * 40,
    "lone \ud83d surrogate \udc00",
)


def mixed(count: int) -> list[str]:
    """Pieces of all samples in random order and cut anywhere, and random characters of all
    planes.
    """
    made = list(SAMPLES)
    draw = random.Random(7)
    while len(made) < count:
        parts = []
        for _ in range(draw.randint(1, 12)):
            sample = draw.choice(SAMPLES)
            at = draw.randrange(len(sample))
            parts.append(sample[at : at + draw.randint(1, 60)])
        parts.append(
            "".join(
                chr(draw.randrange(0x20, draw.choice((0x7F, 0x2FF, 0xD7FF, 0x1FAFF))))
                for _ in range(8)
            )
        )
        made.append("".join(parts))
    return made


def files() -> list[str]:
    """The project's documents, and some of its code."""
    root = Path(__file__).parents[4]
    return [
        path.read_text()
        for pattern in ("docs/*.md", "dynamo_trtllm/frontend/tokenization/*.py")
        for path in root.glob(pattern)
    ]


def replaced(text: str) -> str:
    """With U+FFFD for lone surrogates, which openai-harmony and tokenizers do not take."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.fixture(scope="module")
def o200k() -> O200kTokenizer:
    loaded = o200k_tokenizer.load_tokenizer()
    loaded.load()
    return loaded


# which checks the file at each call
harmony = functools.cache(lambda: o200k_tokenizer.load_tokenizer().harmony)


def reference(text: str) -> list[int]:
    ids: list[int] = harmony().encode(replaced(text), disallowed_special=())
    return ids


def test_encode_of_all_text_kinds_equals_openai_harmony(o200k: O200kTokenizer) -> None:
    for text in (*mixed(600), *files(), "", " ", "\n"):
        assert o200k.encode(text).tolist() == reference(text), text[:200]


def test_encode_when_text_spells_a_special_token_then_it_is_text(o200k: O200kTokenizer) -> None:
    for marker in vocabulary.harmony_specials():
        text = f"{marker} a{marker}b{marker[:-1]}"
        ids = o200k.encode(text)
        assert ids.tolist() == reference(text)
        assert max(ids) < vocabulary.FIRST_SPECIAL
        assert o200k.decode(ids) == text


def test_encode_tokens_join_to_the_bytes_of_the_text(o200k: O200kTokenizer) -> None:
    for text in mixed(300):
        ids = o200k.encode(text)
        assert b"".join(map(o200k.token_bytes, ids)).decode() == o200k.decode(ids) == replaced(text)


def test_token_bytes_are_those_of_the_vocabulary(o200k: O200kTokenizer) -> None:
    for token, token_id in vocabulary.mergeable_ranks().items():
        assert o200k.token_bytes(token_id) == token
    for token_id in (*vocabulary.harmony_specials().values(), 4_000_000_000):
        assert o200k.token_bytes(token_id) == b""


@pytest.mark.parametrize("character", ["a", " ", "!", "中"])
def test_encode_of_one_repeated_character_takes_linear_time(
    o200k: O200kTokenizer, character: str
) -> None:
    def seconds(count: int) -> float:
        text = character * count
        began_s = time.thread_time()
        ids = o200k.encode(text)
        spent_s = time.thread_time() - began_s
        assert len(b"".join(map(o200k.token_bytes, ids))) == count * len(character.encode())
        return spent_s

    # The fastest of some is that which other processes disturbed least. Other lengths, because
    # words are cached.
    shorter_s, longer_s = (min(seconds(count + i) for i in range(2)) for count in (2_000, 200_000))
    assert longer_s < 1_000 * shorter_s  # linear is 100 times, quadratic 10,000 times


def test_encode_when_text_is_long_then_no_thread_is_started(o200k: O200kTokenizer) -> None:
    text = " ".join(files())
    before = psutil.Process().num_threads()
    o200k.encode(text)
    assert psutil.Process().num_threads() <= before


@pytest.mark.parametrize("run", ["a", " ", "!"])
def test_encode_of_run_longer_than_context_is_invalid(o200k: O200kTokenizer, run: str) -> None:
    with pytest.raises(InvalidRequest, match="1000000 characters"):
        o200k.encode("x 1 " + run * 2_000_000)


class Loads:
    """A `FastTokenizer` that counts its loads and returns one that is loaded already."""

    def __init__(self, loaded: FastTokenizer) -> None:
        self.loaded = loaded
        self.count = 0

    def __call__(self, load: Callable[[], Any]) -> FastTokenizer:
        time.sleep(0.05)  # so that threads which load at once would meet
        self.count += 1
        return self.loaded


@pytest.fixture
def loads(o200k: O200kTokenizer, monkeypatch: pytest.MonkeyPatch) -> Loads:
    made = Loads(o200k.load())
    monkeypatch.setattr(o200k_tokenizer, "FastTokenizer", made)
    return made


@pytest.fixture
def fresh(o200k: O200kTokenizer, loads: Loads, monkeypatch: pytest.MonkeyPatch) -> O200kTokenizer:
    """A tokenizer that has not loaded fastokens. To create one takes 0.5 s of CPU time."""
    monkeypatch.setattr(o200k, "_fast", None)
    return o200k


def test_encode_of_short_texts_does_not_load_fastokens(fresh: O200kTokenizer, loads: Loads) -> None:
    for text in mixed(100):
        short = text[: o200k_tokenizer.SHORT_CHARS]
        assert fresh.encode(short).tolist() == reference(short)
    assert not fresh.is_loaded
    assert loads.count == 0


@each_case(
    "piece",
    ["ก\u0e31", "क\u094d", "a\u0301", "_", "!_", "/\n", "!\x1c", "\U00031350", "😀", "中", " \n"],
)
def test_run_finder_finds_long_pieces_of_any_characters(piece: str) -> None:
    assert run_finder(128)((piece * 256)[:256] + " ")


@each_case(
    "text",
    [
        *SAMPLES[:5],
        "今天的天气很好、我们去公园散步吧。",
        "int a_b = f(x); // note\n",
        "+" * 127 + "a",
    ],
)
def test_run_finder_when_pieces_are_short_then_none_is_found(text: str) -> None:
    assert not run_finder(128)(text * 50)


def test_run_finder_takes_little_memory_for_punctuation() -> None:
    text = "!" * 2_000_001
    tracemalloc.start()
    try:
        assert run_finder(1_000_000)(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(text)


WIDE = "a long text, naïve and wide "


def test_encode_of_long_text_does_not_wait_for_fastokens(
    fresh: O200kTokenizer, loads: Loads
) -> None:
    assert fresh.encode(WIDE * 500).tolist() == reference(WIDE * 500)
    assert loads.count == 0


@pytest.mark.parametrize(
    "text", ["ก" * 2_000, WIDE * 5_000], ids=["a long word", "a very long text"]
)
def test_encode_of_slow_text_loads_fastokens_once(
    fresh: O200kTokenizer, loads: Loads, text: str
) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [ids.tolist() for ids in pool.map(fresh.encode, [text, text])] == [
            reference(text)
        ] * 2
    assert fresh.is_loaded
    assert loads.count == 1


L3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CJK = r"[一-龥\u3040-\u30ff]+"
BEGIN = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


def split(*patterns: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def byte_level(
    before: Any = None,
    normalizer: Any = None,
    after: Any = None,
    added: Iterator[Any] | tuple[Any, ...] = (),
) -> dict[str, Any]:
    """A tokenizer.json that is trained on a few texts."""
    made = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([replaced(sample) for sample in SAMPLES] * 3, trainer)
    for token in added:
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    if after is not None:
        made.post_processor = after
    file: dict[str, Any] = json.loads(made.to_str())
    return file


def of_model(fields: dict[str, Any]) -> dict[str, Any]:
    file = byte_level()
    file["model"] |= fields
    return file


THINK = (AddedToken("<think>", normalized=False), AddedToken("foo", single_word=True))
MASK = (
    AddedToken("<mask>", lstrip=True, special=True),
    AddedToken("<r>", rstrip=True, special=True),
)
SUPPORTED = {
    "gpt2": byte_level,
    "prefix space": functools.partial(byte_level, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": functools.partial(byte_level, split(L3), after=BEGIN),
    "qwen": functools.partial(
        byte_level, split(L3.replace("{1,3}", "")), normalizers.NFC(), added=THINK
    ),
    "deepseek": functools.partial(byte_level, split(r"\p{N}{1,3}", CJK, L3)),
    "o200k": functools.partial(byte_level, split(vocabulary.O200K_PATTERN), added=MASK),
    "digits": functools.partial(
        byte_level,
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
        ),
    ),
    "words without merges": functools.partial(of_model, {"ignore_merges": True}),
}
UNSUPPORTED = {
    "NFKC": functools.partial(byte_level, normalizer=normalizers.NFKC()),
    "Bert's ends": functools.partial(
        byte_level, after=processors.BertProcessing(("<|im_end|>", 2), ("<s>", 0))
    ),
    "dropout": functools.partial(of_model, {"dropout": 0.5}),
}
TEXTS = (
    "<s>a<|im_start|>",
    "a <mask> b <r> c foo food xfoo <think>a",
    "<|im_end|> \n",
    "e\u0301 Ａ①ﬁ",
    "",
)


def library(file: dict[str, Any], *, is_plain: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(json.dumps(file))
    made.encode_special_tokens = is_plain
    return made


@each_case("kind", SUPPORTED)
def test_json_tokenizer_with_fastokens_equals_tokenizers(kind: str) -> None:
    file = SUPPORTED[kind]()
    made, is_byte_level = load_json_tokenizer(json.dumps(file).encode())
    assert made.is_fast
    assert is_byte_level
    chat = library(file, is_plain=False)
    plain = library(file, is_plain=True)
    for text in (*mixed(40), *TEXTS):
        expected = chat.encode(replaced(text), add_special_tokens=False).ids
        assert made.encode(text).tolist() == expected, text
        assert made.encode(text, is_plain=True).tolist() == plain.encode(replaced(text)).ids, text
        assert made.decode(expected) == chat.decode(expected, skip_special_tokens=False)
    added = chat.get_added_tokens_decoder()
    assert made.added == {token_id: token.content for token_id, token in added.items()}
    assert set(made.special) == {token_id for token_id, token in added.items() if token.special}
    for token_id in range(chat.get_vocab_size() + 1):
        assert made.id_to_token(token_id) == chat.id_to_token(token_id)


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_json_tokenizer_without_fastokens_uses_tokenizers(kind: str) -> None:
    made, is_byte_level = load_json_tokenizer(json.dumps(UNSUPPORTED[kind]()).encode())
    assert not made.is_fast
    assert is_byte_level
    assert made.decode(made.encode("the quick fox <s>").tolist()) == "the quick fox <s>"
    ids = made.encode("the quick fox <s>", is_plain=True).tolist()
    assert made.decode(ids).removeprefix("<s>").removesuffix("<|im_end|>") == "the quick fox <s>"
    assert ids.count(0) == (kind == "Bert's ends")  # the one that begins the prompt


def sentencepiece(
    *, scheme: str = "always", normalizer: Any = None, **fields: Any
) -> dict[str, Any]:
    """A tokenizer.json whose words begin with U+2581, with added tokens of all kinds."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "[A]", "[A][A]"], show_progress=False
    )
    made.train_from_iterator([replaced(sample) for sample in SAMPLES] * 2, trainer)
    for options in ({"lstrip": True}, {"rstrip": True}, {"special": True}, {"normalized": True}):
        made.add_tokens(
            [AddedToken(f"<{next(iter(options))}>", **({"normalized": False} | options))]
        )
    made.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("[A", normalized=False)])
    file: dict[str, Any] = json.loads(made.to_str())
    return file | fields


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
WHOLE = {"direction": "Right", "max_length": 50, "strategy": "LongestFirst", "stride": 0}
SLOW = UNSUPPORTED | {
    "words begin everywhere": sentencepiece,
    "only the first word begins": functools.partial(sentencepiece, scheme="first"),
    "prepended": functools.partial(sentencepiece, scheme="never", normalizer=PREPEND),
    "truncated": functools.partial(sentencepiece, truncation=WHOLE),
}
del SLOW["dropout"]  # its ids are random


def prompts() -> Iterator[str]:
    """Prompts of short and long messages between added tokens.

    Each one begins as an earlier one.
    """
    draw = random.Random(3)
    texts = ["", " ", *(text * 9 for text in mixed(40)), *(f"{text[:300]}  " for text in SAMPLES)]
    marks = (
        "[A]",
        "[A][A]",
        "[A",
        "<lstrip>",
        "<rstrip>",
        "<special>",
        "<normalized>",
        "<s>",
        "<|im_end|>",
        "\n\n",
    )
    begun = [""]
    for _ in range(30):
        more = (
            draw.choice(marks) + draw.choice((texts[0], draw.choice(texts)[:400])) for _ in range(6)
        )
        begun.append(draw.choice(begun)[:1500] + "".join(more))
        yield begun[-1]


@each_case("kind", SLOW)
def test_json_tokenizer_cached_parts_equal_the_uncached(kind: str) -> None:
    file = SLOW[kind]()
    made, _ = load_json_tokenizer(json.dumps(file).encode())
    chat = library(file, is_plain=False)
    assert not made.is_fast
    for text in prompts():
        assert (
            made.encode(text).tolist() == chat.encode(replaced(text), add_special_tokens=False).ids
        ), text


def test_json_tokenizer_encodes_only_a_new_turn() -> None:
    made, _ = load_json_tokenizer(json.dumps(sentencepiece()).encode())
    assert isinstance(made, SlowJsonTokenizer)
    encoded: list[str] = []

    class Noting:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            encoded.extend(texts)
            return inner.encode_batch_fast(texts, **options)

    inner = made._library
    made._library = Noting()  # type: ignore[assignment]
    first = "[A]system" + "[A]user" + "one two " * 50 + "[A]assistant"
    made.encode(first)
    encoded.clear()
    made.encode(first + "three" + "[A]user" + "four " * 80 + "[A]assistant")
    assert encoded == ["[A]system", "[A]assistantthree", "[A]user" + "four " * 80, "[A]assistant"]


@pytest.mark.parametrize("source", [b"", b"[]", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_json_tokenizer_when_the_file_is_broken_then_it_is_named(source: bytes) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be read"):
        load_json_tokenizer(source)


def test_encode_in_threads_gives_each_its_ids(o200k: O200kTokenizer) -> None:
    texts = mixed(400)
    expected = [o200k.encode(text).tolist() for text in texts]
    with ThreadPoolExecutor(2) as pool:
        assert [ids.tolist() for ids in pool.map(o200k.encode, texts)] == expected

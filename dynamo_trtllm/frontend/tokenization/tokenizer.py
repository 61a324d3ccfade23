"""Tokenize text with fastokens, and with the library tokenizers where fastokens does not support a
model.

fastokens is ten to forty times faster. Each thread that encodes with it takes 32 MiB for a cache of
words, and up to 110 MiB after much varied text.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import fastokens
import msgspec

from dynamo_trtllm.config import environ
from dynamo_trtllm.frontend.tokenization.text_cache import MIN_CACHED_CHARS, TextCache
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from dynamo_trtllm.protocol.messages import TokenIds, token_ids
from dynamo_trtllm.support.freed_memory import return_freed_memory

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
_MAX_RUN_CHARS: Final = 1_000_000


# Characters that end a word: blanks, digits, and punctuation of ASCII and Chinese. All others count
# as parts of words, also marks, such as the vowels of Thai and Hindi, and characters that `re` does
# not know.
_WORD_ENDS: Final = (
    r"\s\d!-/:-@\[-`{-~"
    r"\u201c\u201d\u3001\u3002\u300a-\u300f\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
)


def run_finder(chars: int) -> Callable[[str], bool]:
    """Return a function that returns whether a text has a long word, or another long run.

    A run consists of characters of words, of blanks, or of other characters.

    Runs are matched only at multiples of `chars`, which takes linear time. So a run of at least
    twice `chars` characters is always found, and a run of fewer than `chars` characters never. New
    lines count as blanks and as other characters, because tokenizers encode "/" and new lines as
    one piece.
    """
    word_or_blanks = re.compile(rf"[^{_WORD_ENDS}]{{{chars}}}|\s{{{chars}}}")
    # This also matches blanks that are no new lines, which `is_run` rejects. To exclude them, the
    # pattern would need an alternative for each character, which takes 15 bytes and eight times as
    # long.
    no_word = re.compile(rf"[\W_]{{{chars}}}")

    def is_run(text: str, start: int) -> bool:
        if word_or_blanks.match(text, start):
            return True
        found = no_word.match(text, start)
        return found is not None and " " not in found[0] and "\t" not in found[0]

    return lambda text: any(is_run(text, start) for start in range(0, len(text) - chars, chars))


_has_endless_run: Final = run_finder(_MAX_RUN_CHARS)


class FastTokenizer:
    """A tokenizer of fastokens.

    Args:
        load: loads the tokenizer. This may take seconds, and releases the GIL.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        # fastokens would start threads for long texts. A frontend is meant to use one core, and
        # threads take memory.
        environ.export("FASTOKENS_BPE_THREADS", "1", wanted_by="the frontend")
        self.library = load()
        # The first call takes up to 0.2 s: it builds a table of all tokens. The calling thread gets
        # a copy of the table, so the call is made here, in a thread that frees the copy at its end.
        first_call = threading.Thread(target=self.library.encode_batch_flat, args=(["a"],))
        first_call.start()
        first_call.join()
        # Otherwise, glibc would keep 50 to 90 MiB of freed memory.
        return_freed_memory()

    def encode(self, text: str, *, is_plain: bool = False, is_prompt: bool = True) -> TokenIds:
        """Tokenize a text. This releases the GIL. A lone surrogate becomes U+FFFD.

        Args:
            text: the text.
            is_plain: encode special tokens in the text as text.
            is_prompt: with `is_plain`: add the special tokens with which the model's prompts begin.

        Raises:
            InvalidRequest: a word or a run of blanks is longer than any context. For a run that is
                ten times as long, fastokens would take seconds and 400 MB.
        """
        if _has_endless_run(text):
            raise InvalidRequest(
                f"a text can't be tokenized: it has a word or a run of blanks of {_MAX_RUN_CHARS}"
                " characters; shorten it"
            )
        adds_special = is_plain and is_prompt
        try:
            packed, _ = self.library.encode_batch_flat([text], adds_special, is_plain)
        except UnicodeEncodeError:
            text = _well_formed(text)
            packed, _ = self.library.encode_batch_flat([text], adds_special, is_plain)
        ids = token_ids()
        ids.frombytes(packed)
        return ids


def load_json_tokenizer(source: bytes) -> tuple[JsonTokenizer, bool]:
    """Load a tokenizer.json, with fastokens if it supports the file.

    Returns:
        The tokenizer, and whether the file's tokens are sequences of bytes, written in GPT-2's
            alphabet.

    Raises:
        ConfigError: the file can't be read.
    """
    try:
        file = msgspec.json.decode(source, type=_TokenizerFile)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{TOKENIZER} can't be read: {exc}") from exc
    is_byte_level = file.decoder is not None and file.decoder.type == _BYTE_LEVEL
    if is_byte_level and file.is_plain_bpe():
        try:
            return FastJsonTokenizer(source.decode()), True
        except ValueError as exc:
            log.info(
                "tokenizers, which is slower than fastokens, encodes this model's prompts: %s", exc
            )
    return SlowJsonTokenizer(source, file), is_byte_level


_BYTE_LEVEL: Final = "ByteLevel"


class _Part(msgspec.Struct):
    type: str = ""
    pretokenizers: list[_Part] = []
    dropout: float | None = None


class _AddedToken(msgspec.Struct):
    content: str
    single_word: bool = False
    lstrip: bool = False
    normalized: bool = True


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that decide which library encodes, and where a text can be
    split. The rest is skipped.
    """

    model: _Part
    pre_tokenizer: _Part | None = None
    decoder: _Part | None = None
    added_tokens: list[_AddedToken] = []
    truncation: dict[str, Any] | None = None
    padding: dict[str, Any] | None = None

    def is_plain_bpe(self) -> bool:
        """Whether fastokens returns the same ids as tokenizers, unless it rejects a part of the
        file.
        """
        first = self.pre_tokenizer or _Part()
        is_bytes = any(part.type == _BYTE_LEVEL for part in (first, *first.pretokenizers))
        return is_bytes and self.model.type == "BPE" and not self.model.dropout


class FastJsonTokenizer(FastTokenizer):
    """The tokenizer of a tokenizer.json, by fastokens.

    Raises ValueError for a part that fastokens does not support.
    """

    is_fast = True

    def __init__(self, source: str) -> None:
        super().__init__(functools.partial(fastokens.Tokenizer.from_json_str, source))
        added = self.library.added_tokens()
        # Added tokens, which are not tokens of the BPE model.
        self.added: Mapping[int, str] = {token["id"]: token["content"] for token in added}
        # The added tokens that are left out of the text of answers.
        self.special = frozenset(token["id"] for token in added if token["special"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included."""
        text: str = self.library.decode(list(ids), skip_special_tokens=False)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the file has it, None for an unknown id."""
        token: str | None = self.library.id_to_token(token_id)
        return token


class _Segments:
    """Splits a prompt into texts that can be encoded one by one: together, their ids are those of
    the prompt.

    tokenizers finds the added tokens of a text before it normalizes and encodes what is between
    them. So a text can be split before such a token. It can't be split if its ids depend on more
    than the text between two added tokens.
    """

    def __init__(self, file: _TokenizerFile) -> None:
        # The added tokens that are found before the text is normalized.
        found_first = [
            token for token in file.added_tokens if token.content and not token.normalized
        ]
        needs_whole_text = bool(file.truncation or file.padding or file.model.dropout)
        needs_neighbors = any(token.single_word for token in found_first)
        is_splittable = not (needs_whole_text or needs_neighbors)
        # A token with `lstrip` takes blanks from the text before it.
        self._starts = {token.content for token in found_first if not token.lstrip}
        longest_first = sorted((token.content for token in found_first), key=len, reverse=True)
        pattern = r"\Z"  # finds no token
        if is_splittable and self._starts:
            pattern = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(pattern)

    def split(self, text: str) -> Iterator[str]:
        """Yield the texts.

        A long text is never joined with the texts around it. Its ids are cached, and other prompts
        may have the same long text between other texts.
        """
        begin = 0  # where the text begins that was not yielded yet
        last = 0  # the last place where that text can be split
        found = (
            match.start() for match in self._pattern.finditer(text) if match[0] in self._starts
        )
        for at in (*found, len(text)):
            if at - last >= MIN_CACHED_CHARS:
                if last > begin:
                    yield text[begin:last]
                yield text[last:at]
                begin = at
            last = at
        if begin < len(text):
            yield text[begin:]


class SlowJsonTokenizer:
    """The tokenizer of a tokenizer.json, by tokenizers, with the methods of `FastJsonTokenizer`.

    Raises ConfigError.

    It caches the ids of a prompt's parts, so only the new part of the next turn of a conversation
    is encoded. Encoding 8000 tokens takes 15 to 30 ms, and looking them up 0.1 ms.
    """

    is_fast = False

    def __init__(self, source: bytes, file: _TokenizerFile) -> None:
        self._source = source
        self._segments = _Segments(file)
        self._cache = TextCache(functools.partial(self._encode, is_plain=False))
        self._library = self._load()
        added = self._library.get_added_tokens_decoder()
        self.added: Mapping[int, str] = {
            token_id: token.content for token_id, token in added.items()
        }
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, is_plain: bool = False, is_prompt: bool = True) -> TokenIds:
        if is_plain:
            return self._encode(text, is_plain=True, is_prompt=is_prompt)
        ids = token_ids()
        for segment in self._segments.split(text):
            ids.extend(self._cache.get(segment))
        return ids

    def _encode(self, text: str, *, is_plain: bool, is_prompt: bool = True) -> TokenIds:
        library = self._plain_library if is_plain else self._library
        adds_special = is_plain and is_prompt
        # Unlike `encode`, this releases the GIL and computes no offsets.
        (encoding,) = library.encode_batch_fast(
            [_well_formed(text)], add_special_tokens=adds_special
        )
        return array("I", encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id)

    @functools.cached_property
    def _plain_library(self) -> tokenizers.Tokenizer:
        """The tokenizer for plain texts, in which special tokens are text.

        It is a second one, because `encode_special_tokens` is a switch of the whole tokenizer, and
        requests of both kinds overlap.
        """
        library = self._load()
        library.encode_special_tokens = True
        return library

    def _load(self) -> tokenizers.Tokenizer:
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_buffer(self._source)
        except ValueError as exc:
            raise ConfigError(f"{TOKENIZER} can't be read: {exc}") from exc


JsonTokenizer: TypeAlias = FastJsonTokenizer | SlowJsonTokenizer


def _well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

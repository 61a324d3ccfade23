"""Convert text to the tokens of the o200k vocabulary, and back."""

from __future__ import annotations

import binascii
import threading
from functools import cache, partial
from pathlib import Path
from typing import Final

import fastokens
import openai_harmony

from dynamo_trtllm.config import environ
from dynamo_trtllm.frontend.tokenization.tokenizer import FastTokenizer, run_finder
from dynamo_trtllm.models.byte_level import CHARACTER_OF
from dynamo_trtllm.models.vocabulary import (
    FIRST_SPECIAL,
    O200K_FILE,
    O200K_PATTERN,
    harmony_specials,
    o200k_ranks_path,
)
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from dynamo_trtllm.protocol.messages import TokenIds, token_ids

# Without this lock, two threads may load at once, and each would keep a copy of 50 MB.
_LOADING: Final = threading.Lock()
_READ_BYTES: Final = 1 << 16
# openai-harmony encodes a text of this length in 0.4 ms, or in at most 5 ms if it is one word.
SHORT_CHARS: Final = 1000
# Until fastokens is loaded, openai-harmony encodes longer texts, too: in 18 ms, and at most 0.12 s.
# This time grows with the square of the length of a word (a text of one word would take 24 s), and
# it holds the GIL.
_LONG_CHARS: Final = 64 << 10
_has_long_run: Final = run_finder(128)
_SPECIAL_TEXTS: Final = {number: text for text, number in harmony_specials().items()}


def load_tokenizer(cache_dir: Path | None = None) -> O200kTokenizer:
    """Return the tokenizer of the cached file. There is one per process and folder."""
    path = o200k_ranks_path(cache_dir)
    with _LOADING:
        return _load_tokenizer(path)


class O200kTokenizer:
    """Converts text to the ids of ordinary tokens, and ids to bytes.

    fastokens takes 2 to 3 s of CPU time to load, and 110 MiB. So it is loaded by `load`, or for the
    first text that would take openai-harmony too long. Until then, openai-harmony encodes.

    Args:
        path: the vocabulary file, whose hash was checked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.harmony: openai_harmony.HarmonyEncoding = _load_harmony(path)
        self._fast: FastTokenizer | None = None
        self._loading = threading.Lock()
        # Line n of the file is token n: its bytes in base64, and n. The file is read in parts:
        # reading it at once would leave holes of 12 MiB in the memory.
        self._tokens: list[bytes] = []
        with path.open("rb") as file:
            while lines := file.readlines(_READ_BYTES):
                self._tokens += map(binascii.a2b_base64, b"".join(lines).split()[::2])

    @property
    def is_loaded(self) -> bool:
        """Whether long texts are encoded fast."""
        return self._fast is not None

    def load(self) -> FastTokenizer:
        """Load fastokens, unless it is loaded. This takes seconds and releases the GIL."""
        with self._loading:
            if self._fast is None:
                path = o200k_ranks_path(self._path.parent)  # checks the file again
                # Without special tokens in its vocabulary, no text of a client can become one.
                arguments = {"pattern": O200K_PATTERN, "special_tokens": {}}
                self._fast = FastTokenizer(
                    partial(fastokens.Tokenizer.from_tiktoken, str(path), **arguments)
                )
            return self._fast

    def encode(self, text: str) -> TokenIds:
        """Tokenize plain text.

        Special tokens in it are encoded as text. Raises InvalidRequest, see `FastTokenizer`.
        """
        fast = self._fast
        if fast is None:
            is_short = len(text) <= SHORT_CHARS
            if is_short or (len(text) <= _LONG_CHARS and not _has_long_run(text)):
                return token_ids(self.harmony.encode(text, disallowed_special=()))
            fast = self.load()
        return fast.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" for special tokens and for ids outside the
        vocabulary.
        """
        return self._tokens[token_id] if token_id < FIRST_SPECIAL else b""

    def all_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special tokens included; b"" for ids outside the
        vocabulary.
        """
        return self.token_bytes(token_id) or _SPECIAL_TEXTS.get(token_id, "").encode()

    def token_text(self, token_id: int) -> str:
        """Return one token in GPT-2's alphabet of bytes; "" for ids outside the vocabulary."""
        if token_id >= FIRST_SPECIAL:
            return _SPECIAL_TEXTS.get(token_id, "")
        return "".join(map(CHARACTER_OF.__getitem__, self.token_bytes(token_id)))

    def decode(self, ids: TokenIds) -> str:
        """Return the text of the ids, special tokens included.

        Raise InvalidRequest for an unknown id.
        """
        try:
            parts = [self.token_bytes(token) or _SPECIAL_TEXTS[token].encode() for token in ids]
        except KeyError as exc:
            raise InvalidRequest(f"token id {exc} is not in the vocabulary") from exc
        return b"".join(parts).decode(errors="replace")


_load_tokenizer = cache(O200kTokenizer)


def _load_harmony(path: Path) -> openai_harmony.HarmonyEncoding:
    """Return openai-harmony's encoding, from the cached file."""
    used = environ.export("TIKTOKEN_ENCODINGS_BASE", str(path.parent), wanted_by="openai-harmony")
    try:
        return openai_harmony.load_harmony_encoding(
            openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
        )
    except openai_harmony.HarmonyError as exc:
        raise ConfigError(
            f"openai-harmony can't load {O200K_FILE} from TIKTOKEN_ENCODINGS_BASE={used}: {exc}; "
            "unset TIKTOKEN_ENCODINGS_BASE, or put the right file there"
        ) from exc

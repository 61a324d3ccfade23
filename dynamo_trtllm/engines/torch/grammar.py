"""Holds output to a JSON Schema. The only module that knows llguidance, which it loads at the first guided request.

A guide's state is a function of the output's tokens alone, so a decode worker rebuilds it from the ticket's first one.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import OutputFormat, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger(__name__)

# Between the parts of a JSON text; without a bound a model can write blanks until its budget is spent.
_WHITESPACE: Final = r"(\n[ \t]{0,40}| )?"
_QUOTED: Final = re.compile(r"\n\s*1 \| start: ")  # where an error goes on with the grammar
_ANY_OBJECT: Final = {"type": "object"}


def is_available() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class GrammarMatcher:
    """The state of one request. Not thread-safe; `failure` is set once the grammar can't be followed any more."""

    def __init__(self, matcher: LLMatcher, trigger_ids: tuple[int, ...], stop_ids: tuple[int, ...], size: int) -> None:
        self.failure: str | None = None
        self._matcher = matcher
        self._trigger_ids = trigger_ids
        self._stop_ids = list(stop_ids)
        self._free: list[int] | None = [] if trigger_ids else None  # the last tokens before the guided part
        self._words = np.zeros((size + 31) // 32, dtype=np.int32)
        self._size = size

    def accept_token(self, token_id: int) -> None:
        """The next token of the output."""
        if self._free is not None:
            self._free = [*self._free, token_id][-len(self._trigger_ids) :]
            if tuple(self._free) == self._trigger_ids:
                self._free = None
        elif token_id not in self._stop_ids and not self._matcher.consume_token(token_id):
            self.failure = self._matcher.get_error() or "a token came that the form does not allow"

    def apply_mask(self, logits: Tensor) -> None:
        """Rules out, in place, the tokens that can't come next. `logits`: [vocabulary]."""
        if self._free is not None:
            return
        allowed = self._allowed()
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def _allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        is_over = self.failure is not None or self._matcher.is_stopped()
        can_end = is_over or self._matcher.is_accepting()
        if is_over:
            allowed = np.zeros(self._size, dtype=np.bool_)
        else:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
            allowed = bits[: self._size].view(np.bool_)
        if can_end:
            allowed[self._stop_ids] = True
        if self._matcher.is_error():
            self.failure = self._matcher.get_error()
        return allowed


class GrammarCompiler:
    """Makes guides for one model. `compile` from any thread."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._building = threading.Lock()  # building takes a second and 100 MB: once is enough
        self._tokenizer: LLTokenizer | None = None
        self._specials: dict[str, int] = {}

    def compile(self, guided: StructuredOutput, stop_ids: tuple[int, ...]) -> GrammarMatcher:
        """Blocking. Raises RequestRejected for a schema that can't be followed, with the reason."""
        import llguidance

        tokenizer = self._ready()
        if not stop_ids:
            raise RequestRejected("guided output ends with a stop token, and this request has none", field="ignore_eos")
        try:
            grammar = _grammar(guided.alternatives, self._specials)
        except (ValueError, TypeError) as exc:
            raise RequestRejected(f"the JSON schema is not one: {exc}", field="guided") from exc
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestRejected(f"the JSON schema can't be followed: {_reason(matcher)}", field="guided")
        return GrammarMatcher(matcher, tuple(guided.trigger_ids), stop_ids, self._vocab_size)

    def _ready(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                began = time.monotonic()
                self._tokenizer, self._specials = _tokenizer(self._path, self._vocab_size, self._eos_token_ids)
                _log.info("guided decoding is ready after %.1f s", time.monotonic() - began)
            return self._tokenizer


def _reason(matcher: LLMatcher) -> str:
    """In one line, without the grammar around the schema, which the client did not write."""
    said = _QUOTED.split(matcher.get_error(), maxsplit=1)[0]
    return " ".join(said.split()).rpartition("failed to compile JSON schema: ")[2]


def _grammar(alternatives: tuple[OutputFormat, ...], specials: Mapping[str, int]) -> str:
    """Lark, as llguidance reads it: each alternative is its literal and then JSON."""
    numbers = range(len(alternatives))
    lines = ["start: " + " | ".join(f"form{n}" for n in numbers)]
    for n, alternative in zip(numbers, alternatives, strict=True):
        schema = json.loads(alternative.json_schema) or _ANY_OBJECT
        if not isinstance(schema, dict):
            raise ValueError("it must be an object")
        options = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
        lines.append(f"form{n}: {_quoted_prefix(alternative.prefix, specials)} json{n}")
        lines.append(f"json{n}: %json {json.dumps(schema | {'x-guidance': options})}")
    return "\n".join(lines)


def _quoted_prefix(text: str, specials: Mapping[str, int]) -> str:
    """Quoted text, with the control tokens in it as token ids."""
    parts = re.split(f"({'|'.join(map(re.escape, specials))})", text) if specials else [text]
    return " ".join(f"<[{specials[part]}]>" if part in specials else json.dumps(part) for part in parts if part)


# --- tokenizer ---------------------------------------------------------------------------------------------


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _File(msgspec.Struct):
    """What is needed of tokenizer.json; the merges, most of it, are skipped."""

    model: _Model
    decoder: dict[str, Any] | None = None


class _Vocabulary:
    """What llguidance's wrapper asks of a tokenizer. Encoding is greedy, which any spelling of a literal may be."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(text.decode(errors="replace"))


def _tokenizer(path: Path, size: int, eos_token_ids: tuple[int, ...]) -> tuple[LLTokenizer, dict[str, int]]:
    """Return llguidance's tokenizer, and the control tokens by text.

    Byte-level vocabularies, which nearly all models have, are passed as bytes. For gpt-oss this takes 1.1 s and 150 MB
    at its peak; llguidance's own reader takes 2.2 s and 380 MB. Other vocabularies go through that reader.
    """
    import llguidance

    try:
        specials, tokens = _read(path, size)
        if tokens is None:
            return llguidance.LLTokenizer(str(path), n_vocab=size, eos_token=list(eos_token_ids)), specials
    except (OSError, ValueError) as exc:  # msgspec's and llguidance's errors are ValueErrors
        raise RequestRejected(f"guided decoding needs a tokenizer, and {path} can't be read: {exc}") from exc
    vocabulary = _Vocabulary(tokens, sorted(specials.values()), eos_token_ids[0])
    wrapper = llguidance.TokenizerWrapper(vocabulary)
    vocabulary.tokenizer = tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_token_ids))
    vocabulary.tokens = wrapper.tokens = []  # copied
    return tokenizer, specials


class _OnlyAdded(msgspec.Struct):
    added_tokens: list[_Added] = []


def _read(path: Path, size: int) -> tuple[dict[str, int], list[bytes] | None]:
    """Control tokens by spelling, and the bytes of each token; None for a vocabulary that is not byte-level."""
    data = path.read_bytes()
    added = msgspec.json.decode(data, type=_OnlyAdded).added_tokens
    specials = {token.content: token.id for token in added if token.special and token.id < size}
    try:
        file = msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError:
        return specials, None
    del data  # 28 MB of gpt-oss; the worker is at its height here
    if (file.decoder or {}).get("type") != "ByteLevel":
        return specials, None
    tokens = _token_bytes(file.model.vocab, size)
    for token in added:
        if token.id < size:
            tokens[token.id] = token.content.encode()
    return specials, tokens


def _token_bytes(vocab: dict[str, int], size: int) -> list[bytes]:
    """Empties `vocab`: to hold both whole would take tens of MB more."""
    byte_of = _byte_level_alphabet()
    tokens = [b""] * size
    while vocab:
        token_text, token_id = vocab.popitem()
        if token_id < size:
            tokens[token_id] = bytes(byte_of.get(char, 0x3F) for char in token_text)
    return tokens


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}

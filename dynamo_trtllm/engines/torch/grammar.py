"""Constrain output to a format with llguidance, which is imported at the first request that needs it.

The state of a grammar depends on the output tokens alone. A decode worker rebuilds it from the first token, which is
in the KV transfer parameters.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import OutputFormat, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

# Whitespace between JSON tokens. Without a limit a model can produce whitespace until it reaches max_tokens.
_WHITESPACE: Final = r"(\n[ \t]{0,40}| )?"
LEFT_FORMAT: Final = "the output does not follow this format, which may be too complex; simplify it, or try again"
_PLACE: Final = re.compile(r"^at \d+\(\d+\): |\n\s*\d+ \| .*", re.DOTALL)  # of an error within the whole grammar
_SLASHES: Final = re.compile(r"\\.|/|\n")
_ANY_OBJECT: Final = {"type": "object"}


def is_available() -> bool:
    """Return whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class Triggered(NamedTuple):
    """A grammar that begins after some tokens."""

    trigger_ids: tuple[int, ...]  # empty: it begins with the first token
    matcher: LLMatcher


class GrammarMatcher:
    """The grammar state of one request. Not thread-safe.

    `failure` is the reason once the output can no longer follow the grammar.

    Args:
        grammars: At least one. The output follows the one whose trigger comes first.
        stop_ids: Tokens that end the output where the grammar does.
        unfinished_ids: Tokens that may not come before the trigger.
        size: Of the vocabulary.
    """

    def __init__(
        self,
        grammars: Sequence[Triggered],
        stop_ids: tuple[int, ...],
        unfinished_ids: tuple[int, ...],
        size: int,
    ) -> None:
        self.failure: str | None = None
        self._grammars = grammars
        self._matcher = grammars[0].matcher
        self._stop_ids = list(stop_ids)
        self._unfinished_ids = list(unfinished_ids)
        # The last tokens before a trigger; None after it.
        self._free: list[int] | None = [] if grammars[0].trigger_ids else None
        self._most_free = max(len(each.trigger_ids) for each in grammars)
        self._words = np.zeros((size + 31) // 32, dtype=np.int32)
        self._size = size

    def accept_token(self, token_id: int) -> None:
        """Advance the state by the next output token."""
        if self._free is not None:
            self._free = [*self._free, token_id][-self._most_free :]
            for trigger_ids, matcher in self._grammars:
                if tuple(self._free[-len(trigger_ids) :]) == trigger_ids:
                    self._matcher, self._free = matcher, None
                    return
        elif token_id not in self._stop_ids and not self._matcher.consume_token(token_id):
            self.failure = self._matcher.get_error() or f"token {token_id} is not allowed by the grammar"

    def apply_mask(self, logits: Tensor) -> None:
        """Set the logits, [vocabulary], of tokens that the grammar does not allow next to -inf, in place."""
        if self._free is not None:
            if self._unfinished_ids:
                logits[self._unfinished_ids] = -torch.inf
            return
        allowed = self._allowed()
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def _allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return the mask of allowed tokens, bool [vocabulary]."""
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
    """The grammar compiler of one model. `compile` is thread-safe."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._building = threading.Lock()  # building takes a second and 100 MB, so it is done once
        self._tokenizer: tuple[LLTokenizer, dict[str, int]] | None = None  # with the ids of its control tokens

    def compile(self, guided: StructuredOutput, stop_ids: tuple[int, ...]) -> GrammarMatcher:
        """Compile the output format of a request. Blocks the caller; the first call builds the tokenizer.

        Raises:
            RequestRejected: The schema can't be compiled, or the request has no stop token.
        """
        import llguidance

        tokenizer, specials = self._ready()
        if not stop_ids:
            raise RequestRejected(
                "guided decoding needs a stop token, and this request has none; set ignore_eos to false",
                field="ignore_eos",
            )
        grammars = []
        part: StructuredOutput | None = guided
        while part is not None:
            try:
                grammar = _grammar(part.alternatives, specials)
            except (ValueError, TypeError) as exc:
                raise RequestRejected(f"the output format is invalid: {exc}", field="guided") from exc
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise RequestRejected(f"the output format is not supported: {_reason(matcher)}", field="guided")
            grammars.append(Triggered(tuple(part.trigger_ids), matcher))
            part = part.otherwise
        return GrammarMatcher(grammars, stop_ids, guided.unfinished_ids, self._vocab_size)

    def _ready(self) -> tuple[LLTokenizer, dict[str, int]]:
        with self._building:
            if self._tokenizer is None:
                began = time.monotonic()
                self._tokenizer = _tokenizer(self._path, self._vocab_size, self._eos_token_ids)
                log.info("loaded the tokenizer for guided decoding in %.1f s", time.monotonic() - began)
            return self._tokenizer


def _reason(matcher: LLMatcher) -> str:
    """Return llguidance's error in one line, without the grammar that this module wrapped around the format."""
    message = _PLACE.sub("", matcher.get_error())
    return " ".join(message.split()).rpartition("failed to compile JSON schema: ")[2]


def _grammar(alternatives: tuple[OutputFormat, ...], specials: Mapping[str, int]) -> str:
    """Return the grammar in llguidance's Lark syntax: each alternative is its prefix, followed by its content."""
    numbers = range(len(alternatives))
    lines = ["start: " + " | ".join(f"form{n}" for n in numbers)]
    for n, alternative in zip(numbers, alternatives, strict=True):
        lines.append(f"form{n}: {_quoted_prefix(alternative.prefix, specials)} content{n}")
        lines.append(f"content{n}: {_content(alternative)}")
    return "\n".join(lines) + "\n"


def _content(alternative: OutputFormat) -> str:
    """Return the content of an alternative as the right side of a Lark rule."""
    if alternative.grammar:
        return f"%lark {{\n{_to_lark(alternative.grammar)}\n}}"
    if alternative.regex:
        return f"/{_SLASHES.sub(_escaped, alternative.regex)}/"
    schema = json.loads(alternative.json_schema) or _ANY_OBJECT
    if not isinstance(schema, dict):
        raise ValueError("the JSON schema must be an object")
    schema = closed(schema)
    options = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    return f"%json {json.dumps(schema | {'x-guidance': options})}"


_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # by name
_LISTS: Final = ("anyOf", "oneOf", "prefixItems")
_OPEN: Final = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref")


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names, unless it says otherwise.

    XGrammar, which vLLM and TensorRT-LLM use, has this rule by default (`strict_mode`). Without it, a model may add
    properties until it reaches max_tokens. Schemas within `allOf` stay open: each names a part of the properties.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _SCHEMAS:
        if isinstance(named := schema.get(name), dict):
            found[name] = {key: closed(each) for key, each in named.items()}
    for name in _LISTS:
        if isinstance(listed := schema.get(name), list):
            found[name] = [closed(each) for each in listed]
    if isinstance(schema.get("items"), dict):
        found["items"] = closed(schema["items"])
    is_composed = any(name in schema for name in ("anyOf", "oneOf", "if"))
    if "properties" in schema and not is_composed and not any(name in schema for name in _OPEN):
        found["additionalProperties"] = False
    return found


def _escaped(found: re.Match[str]) -> str:
    """Escape a slash or a line break for a regular expression in Lark syntax. An escaped character stays as it is."""
    return {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group())


def _to_lark(grammar: str) -> str:
    """Convert EBNF to Lark syntax. A grammar in Lark syntax is returned unchanged."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as exc:
        raise ValueError(f"the grammar can't be read: {exc}") from exc


def _quoted_prefix(text: str, specials: Mapping[str, int]) -> str:
    """Return the text as quoted Lark terminals, with control tokens as token ids."""
    parts = re.split(f"({'|'.join(map(re.escape, specials))})", text) if specials else [text]
    return " ".join(f"<[{specials[part]}]>" if part in specials else json.dumps(part) for part in parts if part)


# --- tokenizer ---------------------------------------------------------------------------------------------


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}  # a list if tokens have scores


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _File(msgspec.Struct):
    """The fields of tokenizer.json that are needed. Merges, the largest part, are skipped."""

    model: _Model
    decoder: dict[str, Any] | None = None
    added_tokens: list[_Added] = []


class _Vocabulary:
    """The tokenizer interface that llguidance's wrapper expects.

    Encoding is greedy: a prefix may be tokenized in any way.
    """

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(text.decode(errors="replace"))


def _tokenizer(path: Path, size: int, eos_token_ids: tuple[int, ...]) -> tuple[LLTokenizer, dict[str, int]]:
    """Return llguidance's tokenizer, and the ids of the control tokens by text.

    Byte-level vocabularies, which most models have, are passed as bytes. For gpt-oss this takes 1.1 s and 150 MB at its
    peak; llguidance's own reader takes 2.2 s and 380 MB. Other vocabularies use that reader.
    """
    import llguidance

    try:
        specials, tokens = _read(path, size)
        if tokens is None:
            return llguidance.LLTokenizer(str(path), n_vocab=size, eos_token=list(eos_token_ids)), specials
    except (OSError, ValueError) as exc:  # msgspec's and llguidance's errors are ValueErrors
        raise RequestRejected(f"guided decoding can't read the tokenizer {path}: {exc}") from exc
    vocabulary = _Vocabulary(tokens, sorted(specials.values()), eos_token_ids[0])
    wrapper = llguidance.TokenizerWrapper(vocabulary)
    vocabulary.tokenizer = tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_token_ids))
    vocabulary.tokens = wrapper.tokens = []  # llguidance has copied them
    return tokenizer, specials


def _read(path: Path, size: int) -> tuple[dict[str, int], list[bytes] | None]:
    """Return the ids of the control tokens by text, and the bytes of each token.

    The latter is None if the vocabulary is not byte-level.
    """
    data = path.read_bytes()
    file = msgspec.json.decode(data, type=_File)
    del data  # 28 MB for gpt-oss, and the worker's memory use peaks here
    specials = {token.content: token.id for token in file.added_tokens if token.special and token.id < size}
    vocab = file.model.vocab
    if isinstance(vocab, list) or (file.decoder or {}).get("type") != "ByteLevel":
        return specials, None
    tokens = _token_bytes(vocab, size)
    for token in file.added_tokens:
        if token.id < size:
            tokens[token.id] = token.content.encode()
    return specials, tokens


def _token_bytes(vocab: dict[str, int], size: int) -> list[bytes]:
    """Return the bytes of each token. Empties `vocab`, which saves tens of MB."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # importing transformers takes seconds

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    tokens = [b""] * size
    while vocab:
        token_text, token_id = vocab.popitem()
        if token_id < size:
            tokens[token_id] = bytes(byte_of.get(char, 0x3F) for char in token_text)
    return tokens

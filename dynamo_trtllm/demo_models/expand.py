"""Expand the compact demo model into a folder that transformers can load, once, in a cache folder.

The compact file contains only the vocabulary rows that training changed, and one row for all
others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import load, save_file

from dynamo_trtllm.byte_level import BYTE_OF
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.tokenization.vocabulary import (
    O200K_PATTERN,
    default_cache_dir,
    harmony_specials,
    mergeable_ranks,
)


def write_tokenizer(folder: Path, *, context_length: int) -> None:
    """Write tokenizer.json (28 MB) and tokenizer_config.json.

    Those of the package lack what is computed here.

    Args:
        folder: Folder to write to.
        context_length: Maximum tokens, as `model_max_length`.
    """
    tokenizer, config = (
        json.loads((data_folder() / name).read_text(encoding="utf-8"))
        for name in (TOKENIZER, TOKENIZER_CONFIG)
    )
    ranks, letters = mergeable_ranks(), {byte: letter for letter, byte in BYTE_OF.items()}
    texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = O200K_PATTERN
    tokenizer["model"]["vocab"] = {texts[token]: rank for token, rank in ranks.items()}
    tokenizer["model"]["merges"] = [[texts[left], texts[right]] for left, right in merges(ranks)]
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    specials = sorted(harmony_specials().items(), key=itemgetter(1))
    tokenizer["added_tokens"] = [
        {"id": number, "content": content} | flags for content, number in specials
    ]
    config["model_max_length"] = context_length
    (folder / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the BPE merges of a vocabulary: each pair of tokens that joins to a token, ordered by
    that token's rank.

    Args:
        ranks: Rank by token bytes.
    """
    result: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in ranks and token[cut:] in ranks
        ]
        result.extend(sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])))
    return result


WEIGHTS: Final = "weights.safetensors"
WEIGHTS_HASH: Final = "weights.sha256"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOUCHED_IDS: Final = "touched_ids"
# Tensors with one row per touched id, in that order, and a last row for all other ids.
VOCABULARY_TENSORS: Final = ("model.embed_tokens.weight", "lm_head.weight")

_FORMAT: Final = "1"  # increment when the expanded folder changes for the same weights
log = logging.getLogger(__name__)


def data_folder() -> Path:
    """Return the folder of the compact model in this package."""
    return Path(str(resources.files(__package__) / "tiny_gpt_oss"))


def tiny_gpt_oss(*, cache_dir: Path | None = None, source: Path | None = None) -> Path:
    """Return the folder of the expanded model, and write it first if it does not exist.

    Processes may race: each writes its own temporary folder and renames it; the later ones delete
    theirs.

    Args:
        cache_dir: Cache folder. Default: `default_cache_dir()`.
        source: Folder of the compact model. Default: `data_folder()`.

    Raises:
        ConfigError: The hash of the compact file is wrong, or the cache can't be written.
    """
    compact = data_folder() if source is None else source
    data = _checked_weights(compact)
    config_text = (compact / "config.json").read_text(encoding="utf-8")
    name = hashlib.sha256(b"\0".join((data, config_text.encode(), _FORMAT.encode()))).hexdigest()[
        :8
    ]
    models = (default_cache_dir() if cache_dir is None else cache_dir) / "models"
    folder = models / f"tiny-gpt-oss-{name}"
    if folder.is_dir():
        return folder
    started = time.monotonic()
    log.info("expanding tiny-gpt-oss into %s (about 120 MB, only at first use)", folder)
    try:
        models.mkdir(parents=True, exist_ok=True)
        _write_folder(folder, data, config_text)
    except OSError as exc:
        raise ConfigError(
            f"can't expand tiny-gpt-oss into {models}: {exc}; free space or make it writable"
        ) from exc
    log.info("expanded tiny-gpt-oss into %s in %.1f s", folder, time.monotonic() - started)
    return folder


def expand_weights(compact: dict[str, np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """Return all tensors in fp32, with `vocab_size` rows in the vocabulary tensors.

    Args:
        compact: Tensors of the compact file by name. Vocabulary tensors are [touched ids + 1,
            hidden size].
        vocab_size: Number of rows of the result, [vocab_size, hidden size].
    """
    full = {
        name: tensor.astype(np.float32) for name, tensor in compact.items() if name != TOUCHED_IDS
    }
    for name in full.keys() & VOCABULARY_TENSORS:
        values = full[name]
        full[name] = np.broadcast_to(values[-1], (vocab_size, values.shape[1])).copy()
        full[name][compact[TOUCHED_IDS]] = values[:-1]
    return full


def _checked_weights(compact: Path) -> bytes:
    path = compact / WEIGHTS
    try:
        data = path.read_bytes()
        expected = (compact / WEIGHTS_HASH).read_text(encoding="ascii").split()[0]
    except OSError as exc:
        raise ConfigError(f"the demo model can't be read: {exc}; reinstall dynamo_trtllm") from exc
    actual = hashlib.sha256(data).hexdigest()
    if actual != expected:
        raise ConfigError(
            f"{path} has sha256 {actual}, expected {expected}; reinstall dynamo_trtllm"
        )
    return data


def _write_folder(folder: Path, data: bytes, config_text: str) -> None:
    config = json.loads(config_text)
    prefix = f".{folder.name}."
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=prefix, ignore_cleanup_errors=True
    ) as name:
        temporary = Path(name)
        temporary.chmod(0o755)  # a temporary folder allows only its owner
        tensors = temporary / "model.safetensors"
        save_file(
            expand_weights(load(data), config["vocab_size"]), tensors, metadata={"format": "pt"}
        )
        tensors.chmod(0o644)  # safetensors allows only its owner
        (temporary / "config.json").write_text(config_text, encoding="utf-8")
        generation = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        } | {"do_sample": False}
        (temporary / "generation_config.json").write_text(
            json.dumps(generation, indent=2) + "\n", encoding="utf-8"
        )
        write_tokenizer(temporary, context_length=config["max_position_embeddings"])
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, with the same content
                raise

"""Expand the compact demo model, once, into a cache folder that transformers can load.

The compact file contains only the vocabulary rows that training changed, and one row for all other
tokens.
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

from dynamo_trtllm.models.byte_level import CHARACTER_OF
from dynamo_trtllm.models.vocabulary import (
    O200K_PATTERN,
    default_cache_dir,
    harmony_specials,
    mergeable_ranks,
)
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

WEIGHTS: Final = "weights.safetensors"
WEIGHTS_HASH: Final = "weights.sha256"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOUCHED_IDS: Final = "touched_ids"
# Tensors with one row per touched id, in that order, and a last row for all other ids.
VOCABULARY_TENSORS: Final = ("model.embed_tokens.weight", "lm_head.weight")
_FORMAT: Final = "1"  # increment when the expanded folder changes for the same weights


def write_tokenizer(folder: Path, *, context_length: int) -> None:
    """Write tokenizer.json (28 MB) and tokenizer_config.json.

    The files in the package lack the vocabulary, the merges and the special tokens.

    Args:
        folder: folder to write to.
        context_length: maximum tokens, as `model_max_length`.
    """
    tokenizer = json.loads((data_folder() / TOKENIZER).read_text(encoding="utf-8"))
    config = json.loads((data_folder() / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    ranks = mergeable_ranks()
    texts = {token: "".join(CHARACTER_OF[byte] for byte in token) for token in ranks}
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = O200K_PATTERN
    tokenizer["model"]["vocab"] = {texts[token]: rank for token, rank in ranks.items()}
    tokenizer["model"]["merges"] = [[texts[left], texts[right]] for left, right in merges(ranks)]
    tokenizer["added_tokens"] = [
        {
            "id": number,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for content, number in sorted(harmony_specials().items(), key=itemgetter(1))
    ]
    config["model_max_length"] = context_length
    (folder / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the BPE merges of a vocabulary: all pairs of tokens whose bytes together are a token.

    The pairs are ordered by the rank of this joined token.

    Args:
        ranks: rank by token bytes.
    """

    def ranks_of_parts(pair: tuple[bytes, bytes]) -> tuple[int, int]:
        left, right = pair
        return ranks[left], ranks[right]

    result: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = []
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in ranks and right in ranks:
                pairs.append((left, right))
        result.extend(sorted(pairs, key=ranks_of_parts))
    return result


def data_folder() -> Path:
    """Return the folder of the compact model in this package."""
    return Path(str(resources.files(__package__) / "tiny_gpt_oss"))


def tiny_gpt_oss(*, cache_dir: Path | None = None, source: Path | None = None) -> Path:
    """Return the folder of the expanded model, and write it first if it does not exist.

    Several processes may write at once: each writes a temporary folder of its own and renames it.
    Processes that are later than the first one delete their folders.

    Args:
        cache_dir: cache folder. Default: `default_cache_dir()`.
        source: folder of the compact model. Default: `data_folder()`.

    Raises:
        ConfigError: the hash of the compact file is wrong, or the cache can't be written.
    """
    compact = data_folder() if source is None else source
    data = _checked_weights(compact)
    config_text = (compact / "config.json").read_text(encoding="utf-8")
    content = b"\0".join((data, config_text.encode(), _FORMAT.encode()))
    short_hash = hashlib.sha256(content).hexdigest()[:8]
    if cache_dir is None:
        cache_dir = default_cache_dir()
    models = cache_dir / "models"
    folder = models / f"tiny-gpt-oss-{short_hash}"
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
        compact: tensors of the compact file by name. Vocabulary tensors are [touched ids + 1,
            hidden size].
        vocab_size: number of rows of the result, [vocab_size, hidden size].
    """
    full = {
        name: tensor.astype(np.float32) for name, tensor in compact.items() if name != TOUCHED_IDS
    }
    for name in VOCABULARY_TENSORS:
        if name not in full:
            continue
        values = full[name]
        touched_rows = values[:-1]
        common_row = values[-1]
        rows = np.broadcast_to(common_row, (vocab_size, len(common_row))).copy()
        rows[compact[TOUCHED_IDS]] = touched_rows
        full[name] = rows
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
    # The temporary folder is renamed below, so it is usually missing when it should be removed.
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=prefix, ignore_cleanup_errors=True
    ) as name:
        temporary = Path(name)
        temporary.chmod(0o755)  # a temporary folder allows only its owner
        tensors = expand_weights(load(data), config["vocab_size"])
        weights = temporary / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors allows only its owner
        (temporary / "config.json").write_text(config_text, encoding="utf-8")
        generation = {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "pad_token_id": config["pad_token_id"],
            "do_sample": False,
        }
        generation_text = json.dumps(generation, indent=2) + "\n"
        (temporary / "generation_config.json").write_text(generation_text, encoding="utf-8")
        write_tokenizer(temporary, context_length=config["max_position_embeddings"])
        try:
            temporary.rename(folder)
        except OSError:
            # If the folder exists, another process was first, with the same content.
            if not folder.is_dir():
                raise

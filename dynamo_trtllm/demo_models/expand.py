"""Expands the compact demo model into a folder that transformers loads; once, in a cache folder.

The compact file holds only the vocabulary rows that training touched, and one row for all the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.tokenization.vocabulary import O200K_PATTERN, default_cache_dir, harmony_specials, mergeable_ranks

_END_OF_TEXT: Final = "<|endoftext|>"
_START_OF_TEXT: Final = "<|startoftext|>"
_RETURN: Final = "<|return|>"


def write_tokenizer(folder: Path, *, context_length: int) -> None:
    """Writes tokenizer.json (28 MB) and tokenizer_config.json."""
    text = json.dumps(_tokenizer(mergeable_ranks()), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _START_OF_TEXT,
        "eos_token": _RETURN,
        "pad_token": _END_OF_TEXT,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tokenizer(ranks: dict[bytes, int]) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": O200K_PATTERN}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    letters = byte_letters()
    token_texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(content, number) for content, number in sorted(harmony_specials().items(), key=_by_id)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token_texts[token]: rank for token, rank in ranks.items()},
            "merges": [[token_texts[left], token_texts[right]] for left, right in merges(ranks)],
        },
    }


def _by_id(item: tuple[str, int]) -> int:
    return item[1]


def _added(content: str, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content} | flags


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that joins to a token, by the rank of what it joins to."""
    found: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks
        ]
        found.extend(sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])))
    return found


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


WEIGHTS: Final = "weights.safetensors"
WEIGHTS_HASH: Final = "weights.sha256"
TOUCHED_IDS: Final = "touched_ids"
# Tensors with one row per touched id, in that order, and the row for every other id at the end.
VOCABULARY_TENSORS: Final = ("model.embed_tokens.weight", "lm_head.weight")

_FORMAT: Final = "1"  # raise it when the expanded folder changes for the same weights
_log = logging.getLogger(__name__)


def data_folder() -> Path:
    """Where the compact model lies in this package."""
    return Path(str(resources.files(__package__) / "tiny_gpt_oss"))


def tiny_gpt_oss(*, cache_dir: Path | None = None, source: Path | None = None) -> Path:
    """The expanded model's folder, written first if it is not there. `source` is a compact model's folder.

    Processes may race: each writes a folder of its own and moves it in place; the last to arrive drops its copy.
    Raises ConfigError when the compact file is not the recorded one or the cache can't be written.
    """
    compact = data_folder() if source is None else source
    data = _checked_weights(compact)
    config_text = (compact / "config.json").read_text(encoding="utf-8")
    name = hashlib.sha256(b"\0".join((data, config_text.encode(), _FORMAT.encode()))).hexdigest()[:8]
    models = (default_cache_dir() if cache_dir is None else cache_dir) / "models"
    folder = models / f"tiny-gpt-oss-{name}"
    if folder.is_dir():
        return folder
    started = time.monotonic()
    _log.info("first use of tiny-gpt-oss: expanding it into %s (about 120 MB, once)", folder)
    try:
        models.mkdir(parents=True, exist_ok=True)
        _write_folder(folder, data, config_text)
    except OSError as exc:
        raise ConfigError(f"can't expand tiny-gpt-oss into {models}: {exc}; free space or name another cache") from exc
    _log.info("tiny-gpt-oss is ready in %s after %.1f s", folder, time.monotonic() - started)
    return folder


def expand_weights(compact: dict[str, np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """All tensors in fp32, the vocabulary tensors with `vocab_size` rows."""
    touched = compact[TOUCHED_IDS]
    full: dict[str, np.ndarray] = {}
    for name, tensor in compact.items():
        if name == TOUCHED_IDS:
            continue
        values = tensor.astype(np.float32)
        if name in VOCABULARY_TENSORS:
            rows = np.broadcast_to(values[-1], (vocab_size, values.shape[1])).copy()
            rows[touched] = values[:-1]
            values = rows
        full[name] = values
    return full


def _checked_weights(compact: Path) -> bytes:
    path = compact / WEIGHTS
    try:
        data = path.read_bytes()
        expected = (compact / WEIGHTS_HASH).read_text(encoding="ascii").split()[0]
    except OSError as exc:
        raise ConfigError(f"the demo model can't be read: {exc}; reinstall dynamo_trtllm") from exc
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ConfigError(f"{path} has sha256 {found}, expected {expected}; reinstall dynamo_trtllm")
    return data


def _write_folder(folder: Path, data: bytes, config_text: str) -> None:
    config = json.loads(config_text)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        temporary.chmod(0o755)  # mkdtemp keeps it to its owner
        try:
            weights = expand_weights(load(data), config["vocab_size"])
        except SafetensorError as exc:
            raise ConfigError(f"the demo model's {WEIGHTS} is damaged: {exc}; reinstall dynamo_trtllm") from exc
        tensors = temporary / "model.safetensors"
        save_file(weights, tensors, metadata={"format": "pt"})
        tensors.chmod(0o644)  # safetensors keeps it to its owner
        (temporary / "config.json").write_text(config_text, encoding="utf-8")
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {
            "do_sample": False
        }
        (temporary / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        write_tokenizer(temporary, context_length=config["max_position_embeddings"])
        _move_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_in_place(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # another process was first: its folder holds the same
            raise

"""Writes o200k_harmony as a Hugging Face tokenizer, from the ranks. The ids are those of gpt-oss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dynamo_trtllm.tokenization.vocabulary import O200K_PATTERN, harmony_specials, mergeable_ranks

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

"""Writes a small byte-level tokenizer, for tests that need the text of tokens."""

from __future__ import annotations

import json
from pathlib import Path

CONTROL = {"<|end|>": 300, "<|channel|>": 301, "<|message|>": 302, "<|call|>": 303}
WORDS = ('{"', '":', '",', "true", "false", "null", "final", "city", "12", " get", "_weather", '"}')


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json with a token for each byte, for `WORDS` (from 256 on) and for
    `CONTROL`.
    """
    letters = _letters()
    vocab = {letters[byte]: byte for byte in range(256)}
    vocab |= {
        "".join(letters[byte] for byte in word.encode()): 256 + at for at, word in enumerate(WORDS)
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added = [{"id": number, "content": text} | flags for text, number in CONTROL.items()]
    decoder = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    file = {
        "added_tokens": added,
        "pre_tokenizer": decoder,
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file), encoding="utf-8")
    return path


def spell(ids: list[int]) -> str:
    """Return the text of these token ids."""
    control = {number: text for text, number in CONTROL.items()}
    parts = (
        (
            bytes([i])
            if i < 256
            else WORDS[i - 256].encode()
            if i < 256 + len(WORDS)
            else control[i].encode()
        )
        for i in ids
    )
    return b"".join(parts).decode(errors="replace")


def _letters() -> list[str]:
    """Return GPT-2's table of printable characters by byte."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]

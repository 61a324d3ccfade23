"""Which parsers each output format has. Light: a worker asks it, and a worker loads no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# renderer -> parsers by the card's field, the one meant when none is named first
PARSERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "harmony": {"reasoning_parser": ("gpt_oss", "none"), "tool_call_parser": ("harmony", "none")},
    "chat_template": {
        "reasoning_parser": ("none", "basic", "deepseek_r1"),
        "tool_call_parser": ("none", "hermes", "json"),
    },
}

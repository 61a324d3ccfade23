"""List the renderers, and the parsers of the output of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# By renderer and field of the model's card: the names of the parsers. The default is the first.
PARSERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "harmony": {"reasoning_parser": ("gpt_oss", "none"), "tool_call_parser": ("harmony", "none")},
    "chat_template": {
        "reasoning_parser": ("none", "basic", "deepseek_r1"),
        "tool_call_parser": ("none", "hermes", "json"),
    },
}

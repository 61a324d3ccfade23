"""List the renderers, and for each renderer the parsers of the model's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# The names of the parsers, by renderer and by field of the model's card. The first one is the
# default.
PARSERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "harmony": {"reasoning_parser": ("gpt_oss", "none"), "tool_call_parser": ("harmony", "none")},
    "chat_template": {
        "reasoning_parser": ("none", "basic", "deepseek_r1"),
        "tool_call_parser": ("none", "hermes", "json"),
    },
}

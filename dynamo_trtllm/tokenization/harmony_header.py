"""Reads the header of a Harmony message. Pure text in, values out; no tokens.

It takes what gpt-oss writes and refuses what is no header, so that the caller can show it instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dynamo_trtllm.tokenization.base import TOOL_NAME

ASSISTANT: Final = "assistant"
CHANNELS: Final = ("analysis", "commentary", "final")
_FUNCTIONS: Final = "functions."
_TO: Final = "to="
_PEOPLE: Final = frozenset(("all", "user", ASSISTANT))
_OWN_TOOL: Final = re.compile(r"(python|browser|container)(\..*)?\Z")  # trained in, and not here


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who speaks to whom on which channel; empty where the header does not say."""

    role: str = ASSISTANT
    channel: str = ""
    recipient: str = ""

    @property
    def call(self) -> str | None:
        """The name of the function that is called, if one is: a call without a usable name is none, nor is one of the
        tools that gpt-oss was trained with and that no client offers under that name."""
        if self.role != ASSISTANT or self.recipient in _PEOPLE:
            return None
        name = self.recipient.removeprefix(_FUNCTIONS)
        is_own = name == self.recipient and _OWN_TOOL.match(name) is not None
        return name if TOOL_NAME.match(name) and not is_own else None

    @property
    def is_reasoning(self) -> bool:
        return self.role == ASSISTANT and self.channel == "analysis" and self.recipient in {"", *_PEOPLE}


def read_header(sender: str, channel: str | None, content_type: str | None, *, is_started: bool) -> Header | None:
    """The header whose text is `sender<|channel|>channel<|constrain|>content_type`; None for a part that is not
    there. `is_started`: the role is in it (`<|start|>` came before). None if it is no header."""
    sent, addressed = sender.split(), (channel or "").split()
    role = sent.pop(0) if is_started and sent else ASSISTANT
    name = addressed.pop(0) if addressed else ""
    recipients = {word.removeprefix(_TO) for word in (*sent, *addressed) if _is_recipient(word)}
    others = [word for word in addressed if not _is_recipient(word)]
    if not all(map(_is_recipient, sent)) or len(recipients) > 1 or len(others) > 1:
        return None
    if (content_type is not None and len(content_type.split()) > 1) or _is_recipient(name):
        return None
    return Header(role=role, channel=name, recipient="".join(recipients))


def could_become_header(header: Header | None) -> bool:
    """Whether what was cut off is the beginning of a header that the model would have ended well."""
    if header is None or not ASSISTANT.startswith(header.role):
        return False
    return any(channel.startswith(header.channel) for channel in CHANNELS)


def _is_recipient(word: str) -> bool:
    return word.startswith((_TO, _FUNCTIONS))

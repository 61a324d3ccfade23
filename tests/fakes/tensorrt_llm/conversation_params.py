"""`ConversationParams`: the conversation that a request belongs to.

Releases after 1.3.0rc20 have it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ConversationParams:
    conversation_id: str

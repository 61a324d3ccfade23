"""Translate the names that wire version 3 has for some values.

Version 4 gave new names to error codes, a finish reason and a phase. Processes of version 3 send
and expect the former ones. No field of a message was renamed. This module goes with support for
version 3.
"""

from __future__ import annotations

from typing import Final

LAST_VERSION: Final = 3
"""The last wire version with the former names."""

FORMER_CODES: Final = {
    "kv_transfer": "handoff",
    "transfer_timeout": "handoff_timeout",
    "transfer_expired": "ticket_expired",
    "transfer_mismatch": "ticket_mismatch",
    "transfer_failed": "transfer",
    "engine_rejected": "engine_refused",
    "request_plane": "plane",
}
_CURRENT_CODES: Final = {former: current for current, former in FORMER_CODES.items()}

FORMER_KV_TRANSFER: Final = "handoff"
"""The former value of `FinishReason.KV_TRANSFER`."""

FORMER_AGGREGATED: Final = "whole"
"""The former value of `Phase.AGGREGATED`."""


def code_for(code: str, wire: int) -> str:
    """Return an error code as a process of wire version `wire` knows it."""
    return FORMER_CODES.get(code, code) if wire <= LAST_VERSION else code


def current_code(code: str) -> str:
    """Return the code of this version for a code from a peer of any version."""
    return _CURRENT_CODES.get(code, code)

"""Show what each API key got of the workers, in `dynamo-trtllm status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.observability.metrics import read_client_loads
from dynamo_trtllm.protocol.sanitize import escape_controls

KEY_HEAD: Final = ("API key", "weight", "tokens in 60 s", "part", "share", "waiting", "running")


class KeyStatus(msgspec.Struct, kw_only=True):
    """What one API key uses of the workers."""

    name: str
    weight: float
    tokens_last_minute: int  # tokens, as they count for shares
    waiting: int  # requests that wait
    running: int  # choices that run


def keys_of(page: str) -> list[KeyStatus]:
    """Return the API keys in the metrics of a frontend."""
    loads = read_client_loads(page)
    return [
        KeyStatus(
            name=name,
            weight=load.weight,
            tokens_last_minute=load.tokens,
            waiting=load.waiting,
            running=load.running,
        )
        for name, load in sorted(loads.items(), key=lambda item: -item[1].tokens)
    ]


def key_rows(keys: Sequence[KeyStatus]) -> list[tuple[str, ...]]:
    """Return the rows of the API keys of a frontend.

    The part of a key is how much of all tokens the key got. The share of a key is how much it would
    get if all keys had requests that wait.
    """
    tokens = sum(key.tokens_last_minute for key in keys) or 1
    weights = sum(key.weight for key in keys)
    return [
        (
            escape_controls(key.name),
            f"{key.weight:g}",
            f"{key.tokens_last_minute:,}",
            f"{key.tokens_last_minute / tokens:.0%}",
            f"{key.weight / weights:.0%}",
            str(key.waiting),
            str(key.running),
        )
        for key in keys
    ]


def key_table(keys: Sequence[KeyStatus]) -> str:
    """Return the table of the API keys of a frontend as plain lines; "" without keys."""
    return format_table([KEY_HEAD, *key_rows(keys)]) if keys else ""

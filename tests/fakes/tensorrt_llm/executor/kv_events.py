"""The buffer of events of the prefix cache: which full and partial blocks of prompts can be reused.

The torch engine reuses nothing: the blocks are those that TensorRT-LLM would have in its reuse tree.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_BLOCKS = 1000
_MOST_EVENTS = 1 << 20
_BLOCK_TOKENS = 32


class EventBuffer:
    """Its oldest events are lost when it is full: then their numbers leave a gap."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        kv = args["kv_cache_config"] or {}
        self._window = args["max_seq_len"] or 0
        self._block_tokens = kv.get("tokens_per_block") or _BLOCK_TOKENS
        self._most_blocks = (kv.get("max_tokens") or _BLOCKS * self._block_tokens) // self._block_tokens
        self._is_on = bool(kv.get("event_buffer_max_size")) and kv.get("enable_block_reuse", True)
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=kv.get("event_buffer_max_size"))
        self._numbers = itertools.count()
        self._blocks: dict[int, None] = {}  # hashes of the blocks that can be reused, the oldest first
        self._news = threading.Condition()
        self._add({"type": "created", "num_blocks_per_cache_level": [self._most_blocks, 0]}, 0)

    def store(self, tokens: Sequence[int], salt: str | None, rank: int) -> None:
        """Adds what is new of a finished request's prompt; blocks that have no place remove the oldest ones."""
        parent, first_parent, new, place = None, None, [], b"" if salt is None else salt.encode()
        for begin in range(0, len(tokens), self._block_tokens):
            ids = list(tokens[begin : begin + self._block_tokens])
            place = hashlib.blake2b(place + repr(ids).encode(), digest_size=8).digest()
            number = int.from_bytes(place, "little")
            if number in self._blocks:
                parent = number
                continue
            if not new:
                first_parent = parent
            self._blocks[number] = None
            shown = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in ids]
            block = {"type": "stored_block", "block_hash": number, "tokens": shown, "cache_level": 0, "priority": 35}
            new.append(block if salt is None else block | {"cache_salt": salt})
            parent = number
        if new:
            self._add({"type": "stored", "parent_hash": first_parent, "blocks": new}, rank)
        gone = list(self._blocks)[: max(0, len(self._blocks) - self._most_blocks)]
        if gone:
            for each in gone:
                del self._blocks[each]
            self._add({"type": "removed", "block_hashes": gone}, rank)

    def _add(self, data: dict[str, Any], rank: int) -> None:
        if self._is_on:
            event: dict[str, Any] = {"event_id": next(self._numbers), "data": data, "window_size": self._window}
            with self._news:
                self._events.append(event | {"attention_dp_rank": rank})
                self._news.notify_all()

    def take(self, timeout: float, most: int = _MOST_EVENTS) -> list[dict[str, Any]]:
        """Blocks up to the time-out when there is nothing new."""
        deadline = time.monotonic() + timeout
        with self._news:
            while not self._events and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            return [self._events.popleft() for _ in range(min(most, len(self._events)))]

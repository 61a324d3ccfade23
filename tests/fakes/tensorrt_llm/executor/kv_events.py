"""The buffer of events of the prefix cache: which full and partial blocks of prompts can be reused.

The torch engine reuses nothing: the blocks are those that TensorRT-LLM would have in its reuse
tree.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorrt_llm.standin import traps

_BLOCKS = 1000
_MAX_EVENTS = 1 << 20
_BLOCK_TOKENS = 32


class EventBuffer:
    """A buffer of KV events. When it is full, it loses the oldest events with their numbers."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        kv = args["kv_cache_config"] or {}
        self._window = args["max_seq_len"] or 0
        self._block_tokens = kv.get("tokens_per_block") or _BLOCK_TOKENS
        self._most_blocks = (
            kv.get("max_tokens") or _BLOCKS * self._block_tokens
        ) // self._block_tokens
        self._is_on = bool(kv.get("event_buffer_max_size")) and kv.get("enable_block_reuse", True)
        self._algorithm = kv.get("kv_cache_event_hash_algo") or "auto"
        self._events: collections.deque[dict[str, Any]] = collections.deque(
            maxlen=kv.get("event_buffer_max_size")
        )
        self._numbers = itertools.count()
        # hashes of the blocks that can be reused, the oldest first
        self._blocks: dict[int, None] = {}
        self._second_group: set[int] = set()  # those of them that the second layer group has
        self._news = threading.Condition()
        created = {"type": "created", "num_blocks_per_cache_level": [self._most_blocks, 0]}
        self._add(created, 0, self._groups())

    def store(self, tokens: Sequence[int], salt: str | None, rank: int) -> None:
        """Adds what is new of a finished request's prompt; blocks that have no place remove the
        oldest ones.
        """
        parent = None
        first_parent = None
        new = []
        place = b"" if salt is None else salt.encode()
        prompt: set[int] = set()
        for begin in range(0, len(tokens), self._block_tokens):
            ids = list(tokens[begin : begin + self._block_tokens])
            place = hashlib.blake2b(place + repr(ids).encode(), digest_size=8).digest()
            number = int.from_bytes(place, "little")
            prompt.add(number)
            if number in self._blocks:
                parent = number
                continue
            if not new:
                first_parent = parent
            self._blocks[number] = None
            shown = [
                {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in ids
            ]
            block: dict[str, Any] = {
                "type": "stored_block",
                "block_hash": self._name(number),
                "tokens": shown,
            }
            block |= {"cache_level": 0, "priority": 35}
            new.append(block if salt is None else block | {"cache_salt": salt})
            self._second_group.add(number)
            parent = number
        if new:
            before = None if first_parent is None else self._name(first_parent)
            self._add(
                {"type": "stored", "parent_hash": before, "blocks": new}, rank, self._groups()
            )
        self._remove(
            [name for name in self._second_group if name not in prompt], rank, self._groups()[1:]
        )
        gone = list(self._blocks)[: max(0, len(self._blocks) - self._most_blocks)]
        for name in gone:
            del self._blocks[name]
        self._remove(
            [name for name in gone if name in self._second_group], rank, self._groups()[1:]
        )
        self._remove(gone, rank, self._groups()[:1])

    def _groups(self) -> list[int | None]:
        """The layer groups of the blocks. Without such groups, None."""
        return [0, 1] if traps.is_on("layer_groups") else [None]

    def _name(self, number: int) -> int | str:
        """What the algorithm of the played release makes of a block's key."""
        if self._algorithm in ("auto", "v2_sha256") and traps.is_on("text_hashes"):
            return hashlib.sha256(number.to_bytes(8, "big")).hexdigest()
        return number

    def _remove(self, numbers: Sequence[int], rank: int, groups: Sequence[int | None]) -> None:
        if numbers and groups:
            self._add(
                {"type": "removed", "block_hashes": [self._name(number) for number in numbers]},
                rank,
                groups,
            )
            if groups[0] == 1:
                self._second_group -= set(numbers)

    def _add(self, data: dict[str, Any], rank: int, groups: Sequence[int | None] = (None,)) -> None:
        for group in groups if self._is_on else ():
            event: dict[str, Any] = {
                "event_id": next(self._numbers),
                "data": data,
                "window_size": self._window,
            }
            event["attention_dp_rank"] = rank
            if traps.is_on("malformed_event"):
                del event["data"]
            with self._news:
                self._events.append(event if group is None else event | {"layer_group_id": group})
                self._news.notify_all()

    def take(self, timeout: float, most: int = _MAX_EVENTS) -> list[dict[str, Any]]:
        """Blocks up to the time-out when there is nothing new."""
        deadline = time.monotonic() + timeout
        with self._news:
            while not self._events and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            return [self._events.popleft() for _ in range(min(most, len(self._events)))]

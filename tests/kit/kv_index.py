"""A reader of KV events for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo_trtllm.protocol.kv_events import BlocksRemoved, BlocksStored, KvEvent
from dynamo_trtllm.protocol.messages import TokenIds
from tests.kit.waiting import SOON_S


class KvIndex:
    """An index that a reader builds from KV events: the blocks that can be reused, by hash, with
    the one before.
    """

    def __init__(self, block_tokens: int = 32) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = {}
        self.removed = 0
        self.changed = asyncio.Event()

    def on_events(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                parent = event.parent
                assert parent is None or parent in self.blocks
                for block in event.blocks:
                    self.blocks[block.hash] = (parent, tuple(block.token_ids), event.cache_salt)
                    parent = block.hash
            elif isinstance(event, BlocksRemoved):
                self.removed += sum(
                    self.blocks.pop(name, None) is not None for name in event.hashes
                )
            else:
                self.blocks.clear()
        self.changed.set()

    def cached_tokens(self, prompt: TokenIds, salt: str | None = None) -> int:
        known = {(parent, ids, tag): number for number, (parent, ids, tag) in self.blocks.items()}
        parent: int | None = None
        for begin in range(0, len(prompt), self.block_tokens):
            parent = known.get((parent, tuple(prompt[begin : begin + self.block_tokens]), salt))
            if parent is None:
                return begin
        return len(prompt)

    async def until(self, prompt: TokenIds, cached_tokens: int, salt: str | None = None) -> None:
        async with asyncio.timeout(SOON_S):
            while self.cached_tokens(prompt, salt) != cached_tokens:
                self.changed.clear()
                await self.changed.wait()

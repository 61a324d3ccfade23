"""Runs a worker like `python -m dynamo_trtllm`, whose mock engine writes down what its prefix cache had of each prompt.

The file that the environment variable REUSED_FILE names gets a line per prompt: its tokens, and those in the cache.
"""

from __future__ import annotations

import os
from pathlib import Path

from dynamo_trtllm.engines.mock import engine
from dynamo_trtllm.engines.prefix_cache import PrefixCache, ReservedBlocks
from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.worker import main

REUSED_FILE = "REUSED_FILE"


class WritingCache(PrefixCache):
    """A prefix cache that writes down what it reuses."""

    def reserve(self, prompt: TokenIds, salt: str | None, num_blocks: int, num_free: int) -> ReservedBlocks | None:
        """See `PrefixCache.reserve`."""
        reserved = super().reserve(prompt, salt, num_blocks, num_free)
        if reserved is not None:
            with Path(os.environ[REUSED_FILE]).open("a", encoding="ascii") as file:
                file.write(f"{len(prompt)} {len(reserved.reused) * self._block_tokens}\n")
        return reserved


if __name__ == "__main__":
    engine.PrefixCache = WritingCache  # type: ignore[attr-defined]  # for measurements, so no flag names it
    main.main()

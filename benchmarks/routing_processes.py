"""Run a process of this project with a change that measurements of routing need.

    python -m benchmarks.routing_processes worker ...
    python -m benchmarks.routing_processes frontend ...

worker: the mock engine writes down what its prefix cache had of each prompt. The file that the
environment variable REUSED_FILE names gets a line per prompt: its tokens, and those in the cache.
Answers have text from the second token on, as those of Dynamo's decode workers, which generate the
first token again.

frontend: some updates of prefix caches are lost.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dynamo_trtllm.engines.block_manager import BlockManager, BlockTable
from dynamo_trtllm.engines.mock import scheduler, stream
from dynamo_trtllm.frontend.process import main as frontend
from dynamo_trtllm.frontend.process import routing_setup
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes
from dynamo_trtllm.protocol.kv_events import KvCacheUpdate
from dynamo_trtllm.protocol.messages import TokenIds
from dynamo_trtllm.worker import main as worker

REUSED_FILE = "REUSED_FILE"
_LOST = 20  # one of this many updates is lost
# <|message|> of the Harmony format. The token after it is the first one with text.
_MESSAGE = 200008


class WritingManager(BlockManager):
    """A block manager that writes down what it reuses."""

    def reserve(
        self, table: BlockTable, prompt: TokenIds | None, salt: str | None, num_blocks: int
    ) -> bool:
        """See `BlockManager.reserve`."""
        is_reserved = super().reserve(table, prompt, salt, num_blocks)
        if is_reserved:
            prompt_tokens = 0 if prompt is None else len(prompt)
            cached_tokens = len(table.chain) * self._block_tokens
            with Path(os.environ[REUSED_FILE]).open("a", encoding="ascii") as file:
                file.write(f"{prompt_tokens} {cached_tokens}\n")
        return is_reserved


class LossyPrefixes(ClusterPrefixes):
    """Loses updates with blocks, as if NATS had dropped them."""

    def on_update(self, update: KvCacheUpdate) -> None:
        """See `ClusterPrefixes.on_update`."""
        has_new_blocks = update.stored and not update.snapshot
        if has_new_blocks and update.number % _LOST == 1:
            return
        super().on_update(update)


if __name__ == "__main__":
    # These changes are only for measurements, so there are no flags for them.
    scheduler.BlockManager = WritingManager  # type: ignore[attr-defined]
    stream._HARMONY_PREFIX = (_MESSAGE,)  # type: ignore[assignment]
    routing_setup.ClusterPrefixes = LossyPrefixes  # type: ignore[attr-defined]
    mains = {"worker": worker.main, "frontend": frontend.main}
    run_main = mains[sys.argv.pop(1)]
    run_main()

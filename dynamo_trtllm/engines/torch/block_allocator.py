"""Reserve KV blocks for sequences, and count those whose KV waits to be fetched."""

from __future__ import annotations

from collections import Counter

import torch

from dynamo_trtllm.engines.block_manager import BlockManager
from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.sequence import TorchSequence


class AwaitingFetch:
    """The prefilled sequences whose KV is in the transfer buffer.

    A block that several of these sequences share counts once.
    """

    def __init__(self) -> None:
        self.sequences: dict[TorchSequence, list[int]] = {}  # numbers of the blocks, by sequence
        self.blocks: Counter[int] = Counter()  # number of these sequences, by number of the block

    def add(self, seq: TorchSequence) -> None:
        numbers = seq.block_table.numbers
        self.sequences[seq] = numbers
        self.blocks.update(numbers)

    def discard(self, seq: TorchSequence) -> None:
        for number in self.sequences.pop(seq, ()):
            self.blocks[number] -= 1
            if self.blocks[number] == 0:
                del self.blocks[number]


class BlockAllocator:
    """Reserves KV blocks for sequences, and decides which blocks later sequences may reuse.

    Args:
        pool: the memory of the blocks.
        has_prefix_cache: False if no blocks are reused.
    """

    def __init__(self, pool: KvPool, *, has_prefix_cache: bool) -> None:
        self.manager = BlockManager(
            pool.num_blocks, pool.block_tokens, has_prefix_cache=has_prefix_cache
        )
        self._pool = pool

    def reserve(self, seq: TorchSequence) -> bool:
        """Reserve the blocks of a sequence. Its tokens whose KV is cached count as computed.

        Returns:
            False if too few blocks are free.
        """
        pool = self._pool
        request = seq.request
        # Fetched KV needs blocks of its own, and scores need the logits of all prompt tokens.
        can_reuse = request.kv_params is None and not seq.scores_prompt
        prompt = request.token_ids if can_reuse else None
        needed = pool.blocks_for(seq.kv_tokens)
        if not self.manager.reserve(seq.block_table, prompt, request.cache_salt, needed):
            return False
        seq.blocks = torch.tensor(seq.block_table.numbers, dtype=torch.long, device=pool.device)
        num_reused = len(seq.block_table.chain)
        seq.num_computed_tokens = num_reused * pool.block_tokens
        seq.phases.cached_tokens = seq.num_computed_tokens
        # Reused blocks are checked, because a fault may have changed their memory. Then only this
        # sequence fails.
        if num_reused > 0:
            seq.finite = pool.keys_are_finite(seq.blocks[:num_reused])
        return True

    def store(self, seq: TorchSequence) -> None:
        """Let later sequences reuse the full blocks of a sequence whose KV is computed.

        With sliding windows, fetched KV lacks the tokens that the next token does not see. Blocks
        of the prompt without this KV must not be reused, and the blocks after them can't be.
        """
        prompt_tokens = seq.prompt_tokens
        if seq.num_computed_tokens == prompt_tokens:
            is_fetched = seq.request.kv_params is not None
            can_store = not is_fetched or self._pool.transfers_all_rows(prompt_tokens)
        else:
            # Blocks of the output can be found only if all full blocks of the prompt are stored.
            can_store = len(seq.block_table.chain) == prompt_tokens // self._pool.block_tokens
        if can_store:
            ids = (seq.request.token_ids + seq.output_ids)[: seq.num_computed_tokens]
            self.manager.store(seq.block_table, ids, seq.request.cache_salt)

"""Compute one step: a forward pass over sequences and chunks of prompts, and the next tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.kv import ForwardBatch, KvPool, SequenceSlice
from dynamo_trtllm.engines.torch.sampler import SampledToken, prompt_chunk, sample
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.protocol.messages import Chunk


class PrefillChunk(NamedTuple):
    """The part of a prompt that one step computes."""

    seq: TorchSequence
    num_tokens: int


class ModelRunnerOutput(NamedTuple):
    """What one step has computed."""

    batch: ForwardBatch
    sampled: list[TorchSequence]  # sequences whose prompt is computed, and which get a token
    tokens: list[SampledToken | None]  # tokens of `sampled`; None: see `sample`
    prompt_chunks: list[tuple[TorchSequence, Chunk]]  # log-probabilities of prompts


class ModelRunner:
    """Runs the model on the scheduler's thread.

    Args:
        module: the model.
        pool: the memory of its KV.
    """

    def __init__(self, module: Any, pool: KvPool) -> None:
        self.module = module
        self._pool = pool

    def run(self, decoding: list[TorchSequence], chunks: list[PrefillChunk]) -> ModelRunnerOutput:
        """Compute a step.

        Args:
            decoding: sequences that get their next token.
            chunks: the parts of prompts to compute. After its last part, a prompt gets a token.
        """
        ids = [seq.output_ids[-1] for seq in decoding]
        for seq, count in chunks:
            first = seq.num_computed_tokens
            ids += seq.request.token_ids[first : first + count]
        batch = self._forward_batch(decoding, chunks)
        sampled = list(decoding)
        sampled_rows = list(range(len(decoding)))
        scored = [chunk for chunk in chunks if chunk.seq.scores_prompt]
        scored_rows: list[int] = []
        row = len(decoding)
        for seq, count in chunks:
            if seq.scores_prompt:
                scored_rows += range(row, row + count)
            row += count
            # `_forward_batch` has counted this part as computed.
            if seq.num_computed_tokens == seq.prompt_tokens:
                sampled.append(seq)
                sampled_rows.append(row - 1)
        logits = self._forward(ids, batch, sampled_rows + scored_rows)
        prompt_chunks = []
        row = len(sampled)
        for seq, count in scored:
            prompt_chunks.append((seq, prompt_chunk(seq, logits[row : row + count])))
            row += count
        finite = self._finite(batch, decoding, chunks)
        tokens = sample(logits[: len(sampled)], sampled, finite) if sampled else []
        return ModelRunnerOutput(batch, sampled, tokens, prompt_chunks)

    def _forward_batch(
        self, decoding: list[TorchSequence], chunks: list[PrefillChunk]
    ) -> ForwardBatch:
        """Plan the pass over these sequences, and count their tokens as computed."""
        batch = ForwardBatch(
            self._pool.keys,
            self._pool.values,
            [SequenceSlice(seq.blocks, seq.num_computed_tokens, 1) for seq in decoding],
            [SequenceSlice(seq.blocks, seq.num_computed_tokens, count) for seq, count in chunks],
        )
        if batch.partial_blocks:
            self._pool.scrub(torch.cat(batch.partial_blocks))
        for seq in decoding:
            seq.num_computed_tokens += 1
        for seq, count in chunks:
            seq.num_computed_tokens += count
        return batch

    def _finite(
        self, batch: ForwardBatch, decoding: list[TorchSequence], chunks: list[PrefillChunk]
    ) -> Tensor:
        """Return for each sequence that is sampled whether its keys are finite.

        For a prompt, all its chunks count. `seq.finite` has the result of the earlier chunks.

        Returns:
            bool [rows], on the device.
        """
        are_finite = self._pool.finite_keys(batch.slots)  # for each token of this step
        rows = [are_finite[: len(decoding)]]
        row = len(decoding)
        for seq, count in chunks:
            is_chunk_finite = are_finite[row : row + count].all(dim=0, keepdim=True)
            seq.finite = is_chunk_finite if seq.finite is None else seq.finite & is_chunk_finite
            row += count
            if seq.num_computed_tokens == seq.prompt_tokens:
                rows.append(seq.finite)
        return torch.cat(rows)

    def _forward(self, ids: list[int], batch: ForwardBatch, rows: list[int]) -> Tensor:
        """Return the logits of the given rows, [rows, vocabulary]."""
        device = batch.keys.device
        output = self.module(
            input_ids=torch.tensor([ids], device=device),
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
            step=batch,
        )
        logits: Tensor = output.logits[0]
        return logits

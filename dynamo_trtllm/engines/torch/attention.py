"""Implement paged attention for transformers models over the engine's KV pool, with one packed row of tokens per step.

`paged_attention` is registered as NAME with transformers' attention interface. The plan of the step arrives as the
keyword `step`. Under this name transformers builds no masks and keeps no KV cache of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAME = "dynamo_paged"
# Elements of one attention matrix, to bound the memory of a long prompt: in float32 8 MB on CPU and 128 MB on a GPU,
# where each further matrix costs kernel launches.
MAX_SCORE_ELEMENTS = {"cpu": 2 << 20, "cuda": 32 << 20}


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step: `count` new tokens, of which the first has position `start`."""

    blocks: Tensor  # int64 [blocks]: block numbers of the sequence, in order
    start: int
    count: int

    def partial_blocks(self, block_tokens: int) -> Tensor | None:
        """Return the number of the block that this slice begins to fill but does not complete, int64 [1], or None."""
        end = self.start + self.count
        last = (end - 1) // block_tokens
        is_entered = end % block_tokens > 0 and self.start <= last * block_tokens
        return self.blocks[last : last + 1] if is_entered else None


class _View(NamedTuple):
    """The KV blocks that the decode tokens read, and the bias that is added to their scores."""

    tables: Tensor  # int64 [sequences, blocks]
    bias: Tensor  # [sequences, 1, 1, 1, tokens]


@dataclass(slots=True)
class ForwardBatch:
    """The plan of one forward pass: first all slices of one token (decode), then the prompt chunks."""

    keys: Tensor  # [layers, blocks, block_tokens, kv_heads, head_dim]
    values: Tensor  # as keys
    decodes: list[SequenceSlice]
    chunks: list[SequenceSlice]
    slots: Tensor = field(init=False)  # int64 [tokens]: where KV goes, block * block_tokens + offset
    positions: Tensor = field(init=False)  # int64 [tokens]
    # Blocks to zero before the pass, each int64 [1]: attention needs finite KV in masked positions too.
    partial_blocks: list[Tensor] = field(init=False)
    _views: dict[int | None, _View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        block, device = self.keys.shape[2], self.keys.device
        positions, slots = [], []
        for span in (*self.decodes, *self.chunks):
            rows = torch.arange(span.start, span.start + span.count, device=device)
            positions.append(rows)
            slots.append(span.blocks[rows // block] * block + rows % block)
        self.positions, self.slots = torch.cat(positions), torch.cat(slots)
        partial = (span.partial_blocks(block) for span in (*self.decodes, *self.chunks))
        self.partial_blocks = [number for number in partial if number is not None]

    def decode_view(self, window: int | None) -> _View:
        """Return the block tables and the bias of the decode tokens, for all layers with this window in tokens."""
        view = self._views.get(window)
        if view is None:
            view = self._views[window] = self._make_view(window)
        return view

    def _make_view(self, window: int | None) -> _View:
        block, device = self.keys.shape[2], self.keys.device
        firsts = [first_block(span.start, window, block) for span in self.decodes]
        needed = [
            span.blocks[first : span.start // block + 1] for span, first in zip(self.decodes, firsts, strict=True)
        ]
        # Padding is masked, but 0 * NaN is NaN. Pad each sequence with its own first block, which holds finite KV.
        padded = torch.nn.utils.rnn.pad_sequence(needed, batch_first=True, padding_value=-1)
        tables = torch.where(padded < 0, padded[:, :1], padded)
        at = torch.arange(tables.shape[1] * block, device=device) + torch.tensor(firsts, device=device)[:, None] * block
        now = torch.tensor([span.start for span in self.decodes], device=device)[:, None]
        return _View(tables, _bias(at, now, window, self.keys.dtype)[:, None, None, None, :])


def first_block(position: int, window: int | None, block_tokens: int) -> int:
    """Return the index of the first block of a sequence that a query at `position` sees.

    `window` is in tokens; None means full attention.
    """
    return 0 if window is None else max(position - window + 1, 0) // block_tokens


def _bias(at: Tensor, now: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the attention bias: 0 where a query sees a key, otherwise the lowest value of `dtype`.

    Args:
        at: Positions of the keys, int64, broadcastable with `now`.
        now: Positions of the queries, int64.
        window: Tokens that a query sees, itself included; None for full attention.
        dtype: The data type of the result.
    """
    hidden = at > now
    if window is not None:
        hidden |= at <= now - window
    return torch.zeros(hidden.shape, dtype=dtype, device=at.device).masked_fill_(hidden, torch.finfo(dtype).min)


def paged_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Write the new KV into the pool and return the attention output, as a transformers attention layer expects it.

    Args:
        module: The attention layer; `layer_idx` selects its part of the pool.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: As `key`.
        kwargs: `step` (ForwardBatch) and `scaling`; optionally `sliding_window` in tokens, `softcap`, `s_aux` (sinks).

    Returns:
        [1, tokens, heads, head_dim], and None in place of the attention weights.
    """
    step: ForwardBatch = kwargs["step"]
    window: int | None = kwargs.get("sliding_window")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = step.keys[layer], step.values[layer]
    keys.view(-1, *keys.shape[2:])[step.slots] = key[0].transpose(0, 1)
    values.view(-1, *values.shape[2:])[step.slots] = value[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[1]
    rows = query[0].reshape(key.shape[1], groups, -1, query.shape[3])  # [kv_heads, groups, rows, head_dim]
    attend = _Attend(kwargs["scaling"], kwargs.get("softcap"), kwargs.get("s_aux"))
    out = []
    begin = len(step.decodes)
    if begin:
        view = step.decode_view(window)
        mine = rows[:, :, :begin].permute(2, 0, 1, 3).unsqueeze(3)
        got = attend(mine, keys[view.tables].flatten(1, 2), values[view.tables].flatten(1, 2), view.bias)
        out.append(got.flatten(1))
    for span in step.chunks:
        out += _chunk(attend, rows[:, :, begin : begin + span.count], (keys, values), span, window)
        begin += span.count
    return torch.cat(out).view(1, query.shape[2], query.shape[1], -1), None


def _chunk(
    attend: _Attend, rows: Tensor, pool: tuple[Tensor, Tensor], span: SequenceSlice, window: int | None
) -> list[Tensor]:
    """Compute the attention of one prompt chunk in parts of at most MAX_SCORE_ELEMENTS scores.

    Args:
        rows: Queries, [kv_heads, groups, tokens, head_dim].
        pool: Keys and values of the layer, each [blocks, block_tokens, kv_heads, head_dim].

    Returns:
        The output of each part, [tokens, heads * head_dim].
    """
    block, out = pool[0].shape[1], []
    most = MAX_SCORE_ELEMENTS[rows.device.type]
    per_part = max(1, most // (rows.shape[0] * rows.shape[1] * (span.start + span.count)))
    for offset in range(0, span.count, per_part):
        count = min(per_part, span.count - offset)
        begin = span.start + offset
        first = first_block(begin, window, block)
        blocks = span.blocks[first : (begin + count - 1) // block + 1]
        at = torch.arange(first * block, (first + len(blocks)) * block, device=blocks.device)
        now = torch.arange(begin, begin + count, device=blocks.device)[:, None]
        keys, values = (half[blocks].flatten(0, 1).unsqueeze(0) for half in pool)
        got = attend(rows[None, :, :, offset : offset + count], keys, values, _bias(at, now, window, keys.dtype))
        out.append(got[0].permute(2, 0, 1, 3).flatten(1))
    return out


class _Attend(NamedTuple):
    """Scaled dot-product attention with the layer's scaling, softcap and sinks."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [heads]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Return the attention output, in the shape of `query`.

        Args:
            query: [n, kv_heads, groups, tokens, head_dim].
            keys: [n, keys, kv_heads, head_dim].
            values: As `keys`.
            bias: Broadcastable to [n, kv_heads, groups, tokens, keys].
        """
        scores = torch.matmul(query.flatten(2, 3), keys.permute(0, 2, 3, 1)).mul_(self.scaling)
        scores = scores.view(*query.shape[:4], keys.shape[1])
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + bias
        if self.sinks is None:
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        else:
            sinks = self.sinks.view(1, query.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
        return torch.matmul(weights.to(values.dtype).flatten(2, 3), values.permute(0, 2, 1, 3)).view(
            *query.shape[:4], values.shape[3]
        )

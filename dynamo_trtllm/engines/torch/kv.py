"""Hold the KV cache of one engine in a pool of blocks, with paged attention over it.

The attention is for transformers models. Every layer stores all tokens of a sequence. A layer with
sliding-window attention reads only its window, so only the blocks of the window are transferred.
The scheduler's thread owns the pool.

`paged_attention` is registered as NAME with transformers' attention interface, and takes one packed
row of tokens per step. The plan of the step arrives as the keyword `step`. Under this name
transformers builds no masks and keeps no KV cache of its own.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.messages import KvLayout
from dynamo_trtllm.protocol.number_types import ceil_div

NAME = "dynamo_paged"
# The most elements of one attention matrix, which limit the memory that a long prompt takes. In
# float32, a matrix takes 8 MB on a CPU. On a GPU, each further matrix costs kernel launches, so
# matrices are larger: 128 MB.
MAX_SCORE_ELEMENTS = {"cpu": 2 << 20, "cuda": 32 << 20}


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step: `count` new tokens, the first at position `start`."""

    blocks: Tensor  # int64 [blocks]: block numbers of the sequence, in order
    start: int
    count: int

    @property
    def attention_pairs(self) -> float:
        """The number of pairs of a new token and a token before it.

        Each new token has `start` tokens of earlier steps before it, and on average half of the
        new tokens.
        """
        return self.count * (self.start + self.count / 2)

    def partial_block(self, block_tokens: int) -> Tensor | None:
        """Return the number of the block that this slice begins to fill but does not complete.

        Returns:
            int64 [1], or None if there is no such block.
        """
        end = self.start + self.count
        last = (end - 1) // block_tokens
        is_incomplete = end % block_tokens > 0
        is_begun_here = self.start <= last * block_tokens
        if is_incomplete and is_begun_here:
            return self.blocks[last : last + 1]
        return None


class _View(NamedTuple):
    """The KV blocks that the decode tokens read, and the bias that is added to their scores."""

    tables: Tensor  # int64 [sequences, blocks]
    bias: Tensor  # [sequences, 1, 1, 1, tokens]


@dataclass(slots=True)
class ForwardBatch:
    """The plan of one forward pass: slices of one token (decode), then the prompt chunks."""

    keys: Tensor  # [layers, blocks, block_tokens, kv_heads, head_dim]
    values: Tensor  # the same shape as `keys`
    decodes: list[SequenceSlice]
    chunks: list[SequenceSlice]
    # int64 [tokens]: where KV goes, as block * block_tokens + offset.
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)  # int64 [tokens]
    # Blocks to fill with zeros before the pass, each int64 [1]. Masked positions of a block are
    # read, too, and attention needs finite KV there.
    partial_blocks: list[Tensor] = field(init=False)
    _views: dict[int | None, _View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        block_tokens = self.keys.shape[2]
        device = self.keys.device
        all_positions = []
        all_slots = []
        self.partial_blocks = []
        for span in (*self.decodes, *self.chunks):
            positions = torch.arange(span.start, span.start + span.count, device=device)
            all_positions.append(positions)
            block_numbers = span.blocks[positions // block_tokens]
            all_slots.append(block_numbers * block_tokens + positions % block_tokens)
            partial_block = span.partial_block(block_tokens)
            if partial_block is not None:
                self.partial_blocks.append(partial_block)
        self.positions = torch.cat(all_positions)
        self.slots = torch.cat(all_slots)

    def measured(self, seconds: float) -> StepSample:
        """Return what the pass computed, with its time."""
        return StepSample(
            seconds,
            decode_requests=len(self.decodes),
            context_tokens=sum(span.start + 1 for span in self.decodes),
            prefill_tokens=sum(span.count for span in self.chunks),
            attention_pairs=sum(span.attention_pairs for span in self.chunks),
        )

    def decode_view(self, window: int | None) -> _View:
        """Return what the decode tokens read in all layers with this window in tokens."""
        if window in self._views:
            return self._views[window]
        block_tokens = self.keys.shape[2]
        device = self.keys.device
        firsts = [first_block(span.start, window, block_tokens) for span in self.decodes]
        needed = [
            span.blocks[first : span.start // block_tokens + 1]
            for span, first in zip(self.decodes, firsts, strict=True)
        ]
        # Padding is masked, but must be finite, because 0 * NaN is NaN. So each sequence is padded
        # with its own first block, whose KV is finite.
        padded = torch.nn.utils.rnn.pad_sequence(needed, batch_first=True, padding_value=-1)
        tables = torch.where(padded < 0, padded[:, :1], padded)
        offsets = torch.arange(tables.shape[1] * block_tokens, device=device)
        begins = torch.tensor(firsts, device=device)[:, None] * block_tokens
        key_positions = offsets + begins
        query_positions = torch.tensor([span.start for span in self.decodes], device=device)
        bias = _bias(key_positions, query_positions[:, None], window, self.keys.dtype)
        view = _View(tables, bias[:, None, None, None, :])
        self._views[window] = view
        return view


def first_block(position: int, window: int | None, block_tokens: int) -> int:
    """Return the index of the first block of a sequence that a query at `position` sees.

    `window` is in tokens; None means full attention.
    """
    if window is None:
        return 0
    first_position = max(position - window + 1, 0)
    return first_position // block_tokens


def _bias(
    key_positions: Tensor, query_positions: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the attention bias: 0 where a query sees a key, otherwise the lowest value of `dtype`.

    Args:
        key_positions: int64, broadcastable with `query_positions`.
        query_positions: int64.
        window: tokens that a query sees, itself included; None for full attention.
        dtype: the data type of the result.
    """
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return bias.masked_fill_(hidden, torch.finfo(dtype).min)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new KV into the pool and return the attention output.

    The parameters are those of transformers' attention interface.

    Args:
        module: the attention layer; `layer_idx` selects its part of the pool.
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: as `key`.
        kwargs: `step` (ForwardBatch) and `scaling`; optionally `sliding_window` in tokens,
            `softcap`, `s_aux` (sinks).

    Returns:
        [1, tokens, heads, head_dim], and None in place of the attention weights.
    """
    step: ForwardBatch = kwargs["step"]
    window: int | None = kwargs.get("sliding_window")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys = step.keys[layer]
    values = step.values[layer]
    # Views of the pool with one row for each token: [blocks * block_tokens, kv_heads, head_dim].
    token_keys = keys.view(-1, *keys.shape[2:])
    token_values = values.view(-1, *values.shape[2:])
    token_keys[step.slots] = key[0].transpose(0, 1)
    token_values[step.slots] = value[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[1]  # query heads per KV head
    # [kv_heads, groups, rows, head_dim]
    rows = query[0].reshape(key.shape[1], groups, -1, query.shape[3])
    attend = _Attend(kwargs["scaling"], kwargs.get("softcap"), kwargs.get("s_aux"))
    out = []
    begin = len(step.decodes)
    if begin:
        view = step.decode_view(window)
        out.append(_decode(attend, rows[:, :, :begin], (keys, values), view))
    for span in step.chunks:
        chunk_rows = rows[:, :, begin : begin + span.count]
        out += _chunk(attend, chunk_rows, (keys, values), span, window)
        begin += span.count
    return torch.cat(out).view(1, query.shape[2], query.shape[1], -1), None


def _decode(attend: _Attend, rows: Tensor, pool: tuple[Tensor, Tensor], view: _View) -> Tensor:
    """Compute the attention of the decode tokens.

    Args:
        rows: queries, [kv_heads, groups, sequences, head_dim].
        pool: keys and values of the layer, each [blocks, block_tokens, kv_heads, head_dim].

    Returns:
        [sequences, heads * head_dim].
    """
    pool_keys, pool_values = pool
    # [sequences, kv_heads, groups, 1, head_dim]
    query = rows.permute(2, 0, 1, 3).unsqueeze(3)
    # [sequences, tokens, kv_heads, head_dim]
    keys = pool_keys[view.tables].flatten(1, 2)
    values = pool_values[view.tables].flatten(1, 2)
    return attend(query, keys, values, view.bias).flatten(1)


def _chunk(
    attend: _Attend,
    rows: Tensor,
    pool: tuple[Tensor, Tensor],
    span: SequenceSlice,
    window: int | None,
) -> list[Tensor]:
    """Compute the attention of one prompt chunk in parts of at most MAX_SCORE_ELEMENTS scores.

    Args:
        rows: queries, [kv_heads, groups, tokens, head_dim].
        pool: keys and values of the layer, each [blocks, block_tokens, kv_heads, head_dim].

    Returns:
        The output of each part, [tokens, heads * head_dim].
    """
    pool_keys, pool_values = pool
    block_tokens = pool_keys.shape[1]
    heads = rows.shape[0] * rows.shape[1]
    scores_per_row = heads * (span.start + span.count)
    rows_per_part = max(1, MAX_SCORE_ELEMENTS[rows.device.type] // scores_per_row)
    out = []
    for offset in range(0, span.count, rows_per_part):
        count = min(rows_per_part, span.count - offset)
        begin = span.start + offset
        end = begin + count
        first = first_block(begin, window, block_tokens)
        blocks = span.blocks[first : (end - 1) // block_tokens + 1]
        keys_begin = first * block_tokens
        keys_end = keys_begin + len(blocks) * block_tokens
        key_positions = torch.arange(keys_begin, keys_end, device=blocks.device)
        query_positions = torch.arange(begin, end, device=blocks.device)[:, None]
        keys = pool_keys[blocks].flatten(0, 1).unsqueeze(0)
        values = pool_values[blocks].flatten(0, 1).unsqueeze(0)
        bias = _bias(key_positions, query_positions, window, keys.dtype)
        attended = attend(rows[None, :, :, offset : offset + count], keys, values, bias)
        out.append(attended[0].permute(2, 0, 1, 3).flatten(1))
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
            values: as `keys`.
            bias: broadcastable to [n, kv_heads, groups, tokens, keys].
        """
        scores = torch.matmul(query.flatten(2, 3), keys.permute(0, 2, 3, 1)).mul_(self.scaling)
        scores = scores.view(*query.shape[:4], keys.shape[1])
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + bias
        if self.sinks is None:
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        else:
            # One more score for each query: the sinks take a part of the attention, and have no
            # values.
            sinks_per_head = self.sinks.view(1, query.shape[1], -1, 1, 1)
            sinks = sinks_per_head.expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1]
        weights = weights.to(values.dtype).flatten(2, 3)
        out = torch.matmul(weights, values.permute(0, 2, 1, 3))
        return out.view(*query.shape[:4], values.shape[3])


_CHECKED_BYTES = 64 << 20  # the most bytes of KV that are checked at once
# Types with elements of 16 bytes, 8 bytes, and so on down to 1 byte.
_WIDE_DTYPES = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


class KvPool:
    """The KV blocks of one engine, in one tensor.

    Its shape is [layers, 2, blocks, block_tokens, kv_heads, head_dim]; the second dimension has
    keys at index 0 and values at index 1. A row is one block of the keys, or of the values, of one
    layer: `row_bytes` bytes. `all_rows` views the same memory as [layers * 2 * blocks, elements],
    with elements of type `row_dtype`.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        *,
        windows: Sequence[int | None],
        device: torch.device,
    ) -> None:
        shape = (
            layout.num_layers,
            2,
            num_blocks,
            layout.block_tokens,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        memory = zeros(math.prod(shape) * self.dtype.itemsize, device)
        self._pool = memory.view(self.dtype).view(shape)
        # Each is [layers, blocks, block_tokens, kv_heads, head_dim].
        self.keys = self._pool[:, 0]
        self.values = self._pool[:, 1]
        self.device = device
        self.num_blocks = num_blocks
        self.block_tokens = layout.block_tokens
        self.row_bytes: int = math.prod(shape[3:]) * self.dtype.itemsize
        # The widest dtype that divides a row. Narrower elements make `index_select` slower than the
        # memory.
        self.row_dtype = next(wide for wide in _WIDE_DTYPES if self.row_bytes % wide.itemsize == 0)
        elements_per_row = self.row_bytes // self.row_dtype.itemsize
        self.all_rows = memory.view(self.row_dtype).view(-1, elements_per_row)
        self._groups = _groups(windows, num_blocks, device)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return ceil_div(tokens, self.block_tokens)

    def scrub(self, blocks: Tensor) -> None:
        """Queue a write of zeros to `blocks`, int64 [blocks], in all layers."""
        self._pool.index_fill_(2, blocks, 0)

    def is_finite(self, blocks: Tensor, tokens: int) -> bool:
        """Return whether all KV that the next token can see is finite.

        Waits for the device.

        Args:
            blocks: the block numbers of the sequence, int64 [blocks].
            tokens: the number of tokens whose KV is in the blocks.
        """
        rows_at_once = max(1, _CHECKED_BYTES // self.row_bytes)
        parts = torch.split(self.rows(blocks, tokens), rows_at_once)
        # The lowest and the highest number of each part; both are NaN if the part has a NaN.
        extremes = [
            torch.stack(torch.aminmax(self.all_rows[part].view(self.dtype))) for part in parts
        ]
        return bool(torch.stack(extremes).isfinite().all())

    def finite_keys(self, slots: Tensor) -> Tensor:
        """Return for each slot whether its keys are finite in all layers.

        Does not wait for the device.

        The logits do not reveal every infinite key: the score of a token with an infinite key may
        be -inf, and attention then skips this token.

        Args:
            slots: token slots, int64 [tokens]: block number * block_tokens + offset in the block.

        Returns:
            bool [tokens], on the device.
        """
        keys = self.keys.flatten(1, 2)[:, slots].flatten(2)  # [layers, tokens, elements]
        return keys.abs().amax(dim=(0, 2)).isfinite()

    def keys_are_finite(self, blocks: Tensor) -> Tensor:
        """Return whether all keys of full blocks, int64 [blocks], are finite.

        Does not wait for the device.

        Returns:
            bool [1], on the device.
        """
        bytes_per_block = self.row_bytes * len(self.keys)
        blocks_at_once = max(1, _CHECKED_BYTES // bytes_per_block)
        parts = torch.split(blocks, blocks_at_once)
        extremes = [torch.stack(torch.aminmax(self.keys[:, part])) for part in parts]
        return torch.stack(extremes).isfinite().all().view(1)

    def num_rows(self, tokens: int) -> int:
        """Return how many rows the token after `tokens` tokens can see. Thread-safe."""
        num_rows = 0
        for group in self._groups:
            _, num_blocks = self._visible_blocks(group.window, tokens)
            num_rows += len(group.rows_of_block_0) * num_blocks
        return num_rows

    def transfers_all_rows(self, tokens: int) -> bool:
        """Return whether a prompt of `tokens` tokens transfers all rows of its blocks.

        Thread-safe.
        """
        return self.num_rows(tokens) == 2 * len(self.keys) * self.blocks_for(tokens)

    def moved_bytes(self, tokens: int) -> int:
        """Return how many bytes of KV are transferred for a prompt of `tokens` tokens.

        Thread-safe.
        """
        return self.num_rows(tokens) * self.row_bytes

    def rows(self, blocks: Tensor, tokens: int) -> Tensor:
        """Return the rows that the token after `tokens` tokens can see.

        The order of the rows is the same in every pool of this layout, also in a pool with another
        number of blocks.

        Args:
            blocks: the block numbers of the sequence, int64 [blocks].
            tokens: the number of tokens whose KV is in the blocks.

        Returns:
            Indices into `all_rows`, int64 [rows].
        """
        parts = []
        for group in self._groups:
            first, count = self._visible_blocks(group.window, tokens)
            visible = blocks[first : first + count]
            # The rows of a layer are in the order of the block numbers.
            parts.append((group.rows_of_block_0[:, None] + visible[None, :]).flatten())
        return torch.cat(parts)

    def _visible_blocks(self, window: int | None, tokens: int) -> tuple[int, int]:
        """Return the index of a sequence's first visible block, and how many are visible."""
        first = first_block(tokens, window, self.block_tokens)
        return first, self.blocks_for(tokens) - first


class _LayerGroup(NamedTuple):
    """The layers that have the same window."""

    window: int | None  # in tokens; None: full attention
    # int64 [2 * layers]: the row of block 0 for the keys of each layer, and for its values.
    rows_of_block_0: Tensor


def _groups(
    windows: Sequence[int | None], num_blocks: int, device: torch.device
) -> list[_LayerGroup]:
    """Group the layers by window, in order of appearance."""
    groups = []
    for window in dict.fromkeys(windows):
        rows = []
        for layer, layer_window in enumerate(windows):
            if layer_window == window:
                keys_row = 2 * layer * num_blocks
                values_row = keys_row + num_blocks
                rows += [keys_row, values_row]
        groups.append(_LayerGroup(window, torch.tensor(rows, dtype=torch.long, device=device)))
    return groups


def block_bytes(layout: KvLayout) -> int:
    """Return the size in bytes of the keys and values of one block in all layers."""
    per_token = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
    item_bytes: int = getattr(torch, layout.dtype).itemsize
    return per_token * layout.block_tokens * item_bytes


def most_bytes(layout: KvLayout, windows: Sequence[int | None], tokens: int) -> int:
    """Return the most bytes of KV that a prompt of up to `tokens` tokens can transfer."""
    prompt_blocks = ceil_div(tokens, layout.block_tokens)
    blocks = 0  # the sum over the layers
    for window in windows:
        if window is None:
            blocks += prompt_blocks
        else:
            # A window may begin in the middle of a block.
            blocks += min(prompt_blocks, ceil_div(window, layout.block_tokens) + 1)
    block_bytes_per_layer = block_bytes(layout) // layout.num_layers
    return blocks * block_bytes_per_layer


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Return `num_bytes` zero bytes, uint8 [num_bytes].

    On CPU the bytes take no physical memory until they are written. torch.zeros (torch 2.13) would
    write all of them.
    """
    # A mapping of no bytes is not possible.
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)

"""Sample the next token of every sequence of a step.

A random draw is a function of the seed and the index of the token in the output. A decode worker
therefore needs only the seed to continue the random sequence of a prefill worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.random_numbers import uniform
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.protocol.messages import Chunk, TokenLogprob

# The most logits from which tokens are drawn at once on a CPU. For larger tensors, torch takes
# memory from the system in each step, which is slow: 8 rows of 201,088 take 18 ms one after the
# other, and 40 ms together (torch 2.13).
_MAX_CPU_DRAW = 1 << 18
# Below this temperature, sampling is greedy, as in vLLM. Logits that are divided by a much lower
# temperature are infinite in float32.
MIN_TEMPERATURE: Final = 1e-5


class SampledToken(NamedTuple):
    """A sampled token, with its log-probability if the request asks for it."""

    token_id: int
    logprob: TokenLogprob | None


def sample(
    logits: Tensor, rows: Sequence[TorchSequence], finite: Tensor | None = None
) -> list[SampledToken | None]:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary].
        rows: the sequence of each row.
        finite: bool [rows]; a row with False gets no token. If it is None, all rows may get one.

    Returns:
        The token of each row, with log-probabilities of the unmodified logits. None for a row that
        `finite` excludes, and for a row whose unmodified logits contain NaN or +inf or no finite
        number.
    """
    logits = logits.float()
    unmodified = logits
    is_valid = logits.amax(dim=-1).isfinite()  # also False for a row with a NaN
    if finite is not None:
        is_valid = is_valid & finite
    below_minimum = [
        (row, seq.stop_ids)
        for row, seq in enumerate(rows)
        if seq.num_output_tokens < seq.request.sampling.min_tokens
    ]
    processed = [
        (row, seq.logits_processor)
        for row, seq in enumerate(rows)
        if seq.logits_processor is not None
    ]
    if below_minimum or processed:
        logits = logits.clone()
        for row, logits_processor in processed:
            logits_processor.apply(logits[row])
        for row, stop_ids in below_minimum:
            logits[row, list(stop_ids)] = -torch.inf
    drawn = [row for row, seq in enumerate(rows) if _is_drawn(seq)]
    if len(drawn) == len(rows):
        picked = _draw(logits, rows)
    else:
        picked = _likeliest(logits)
        if drawn:
            picked[drawn] = _draw(logits[drawn], [rows[row] for row in drawn])
    ids: list[int] = torch.where(is_valid, picked, -1).tolist()
    # The number of alternatives of each row whose log-probabilities are requested.
    tops = {
        row: seq.request.sampling.logprobs
        for row, seq in enumerate(rows)
        if seq.request.sampling.logprobs is not None and ids[row] >= 0
    }
    logprobs: dict[int, TokenLogprob] = {}  # the log-probabilities, by row
    if tops:
        scored_rows = list(tops)
        scored_ids = [ids[row] for row in scored_rows]
        scores = score(unmodified[scored_rows], scored_ids, list(tops.values()))
        logprobs = dict(zip(scored_rows, scores, strict=True))
    return [
        None if token_id < 0 else SampledToken(token_id, logprobs.get(row))
        for row, token_id in enumerate(ids)
    ]


def _is_drawn(seq: TorchSequence) -> bool:
    """Return whether tokens of a sequence are drawn at random. Otherwise the likeliest is taken."""
    return seq.request.sampling.temperature >= MIN_TEMPERATURE


def _likeliest(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row, int64 [rows]."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # numpy uses vector instructions: 0.02 ms for a row of 201,088 instead of 0.3 ms (torch 2.13).
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _draw(logits: Tensor, rows: Sequence[TorchSequence]) -> Tensor:
    """Draw one token per row at random, int64 [rows]."""
    if logits.device.type != "cpu":
        return _draw_together(logits, rows)
    at_once = max(1, _MAX_CPU_DRAW // logits.shape[-1])
    parts = [
        _draw_together(part, rows[number * at_once : (number + 1) * at_once])
        for number, part in enumerate(torch.split(logits, at_once))
    ]
    return torch.cat(parts)


def _draw_together(logits: Tensor, rows: Sequence[TorchSequence]) -> Tensor:
    """Do the same as `_draw`, for all rows at once."""
    device = logits.device
    samplings = [seq.request.sampling for seq in rows]
    logits = logits / _column([sampling.temperature for sampling in samplings], device)
    if any(sampling.min_p > 0 for sampling in samplings):
        min_p = _column([sampling.min_p for sampling in samplings], device)
        lowest = logits.amax(dim=-1, keepdim=True) + min_p.log()
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    order: Tensor | None = None
    if any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in samplings):
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        size = logits.shape[-1]
        ranks = torch.arange(size, device=device)
        # A top_k of 0 allows all tokens.
        top_k = _column([sampling.top_k or size for sampling in samplings], device)
        logits = logits.masked_fill(ranks >= top_k, -torch.inf)
        top_p = _column([sampling.top_p for sampling in samplings], device)
        weights = torch.softmax(logits, dim=-1)
        # For each token, the probability of all likelier tokens together.
        likelier = weights.cumsum(dim=-1) - weights
        # The likeliest token always stays.
        logits = logits.masked_fill((likelier >= top_p) & (ranks > 0), -torch.inf)
    cumulated = torch.softmax(logits, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    numbers = [
        uniform(seq.seed, seq.request.num_resumed_output_tokens + seq.num_output_tokens)
        for seq in rows
    ]
    # The numbers are scaled by the last sum, because it is not exactly 1.
    draws = _column(numbers, device, torch.float64) * cumulated[:, -1:]
    picked = torch.searchsorted(cumulated, draws, right=True)
    picked = picked.clamp_(max=logits.shape[-1] - 1)
    if order is not None:
        picked = order.gather(1, picked)
    return picked.squeeze(1)


def _column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return one value per row, [rows, 1]."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def score(logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probability of one token per row, and of its likeliest alternatives.

    Args:
        logits: [rows, vocabulary].
        ids: the token of each row.
        tops: the number of alternatives of each row.
    """
    logs = torch.log_softmax(logits.float(), dim=-1)
    likeliest = logs.topk(min(max(tops, default=0), logs.shape[-1]))
    chosen = torch.tensor(ids, dtype=torch.long, device=logs.device)[:, None]
    logprobs = logs.gather(1, chosen).squeeze(1).tolist()
    likeliest_ids = likeliest.indices.tolist()
    likeliest_values = likeliest.values.tolist()
    scored = []
    for row, (token_id, top) in enumerate(zip(ids, tops, strict=True)):
        top_ids = likeliest_ids[row][:top]
        top_values = likeliest_values[row][:top]
        alternatives = tuple(zip(top_ids, top_values, strict=True))
        scored.append(TokenLogprob(token_id, logprobs[row], alternatives))
    return scored


def prompt_chunk(seq: TorchSequence, logits: Tensor) -> Chunk:
    """Return the log-probabilities of the prompt tokens that follow those of the last step.

    Args:
        seq: a sequence that requests them.
        logits: the logits of its prompt tokens of the last step, [tokens, vocabulary].
    """
    ids = seq.request.token_ids
    end = seq.num_computed_tokens
    begin = end - len(logits)
    # The last logits of the prompt have no following token in the prompt.
    following = ids[begin + 1 : end + 1].tolist()
    tops = [seq.request.sampling.prompt_logprobs or 0] * len(following)
    scored = score(logits[: len(following)], following, tops)
    # Nothing precedes the first token, so it has no log-probability.
    if begin == 0:
        scored.insert(0, TokenLogprob(ids[0], math.nan))
    return Chunk(prompt_logprobs=tuple(scored))

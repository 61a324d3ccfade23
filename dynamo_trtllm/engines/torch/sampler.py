"""Sample the next token of every sequence of a step.

A random draw is a function of the seed and the index of the token in the output. A decode worker
therefore needs only the seed to continue the random sequence of a prefill worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.grammar import GrammarMatcher
from dynamo_trtllm.messages import GenerateRequest, Sampling, TokenIds, TokenLogprob

if TYPE_CHECKING:
    from dynamo_trtllm.engines.torch.sequence import TorchSequence


class LogitsProcessor:
    """Penalties, logit bias and grammar of one request. Used on the scheduler's thread only."""

    def __init__(
        self, sampling: Sampling, prompt: TokenIds, grammar_matcher: GrammarMatcher | None
    ) -> None:
        self._sampling = sampling
        self._grammar_matcher = grammar_matcher
        is_counted = sampling.frequency_penalty or sampling.presence_penalty
        # of the output tokens
        self._counts: Counter[int] | None = Counter() if is_counted else None
        self._repeated = dict.fromkeys(prompt) if sampling.repetition_penalty != 1 else None

    @property
    def failure(self) -> str | None:
        """Return why the output can no longer follow the grammar, or None while it can."""
        return None if self._grammar_matcher is None else self._grammar_matcher.failure

    def accept_token(self, token_id: int) -> None:
        """Add the next output token to the state. Call it once per token, in order."""
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._repeated is not None:
            self._repeated[token_id] = None
        if self._grammar_matcher is not None:
            self._grammar_matcher.accept_token(token_id)

    def apply(self, logits: Tensor) -> None:
        """Change `logits`, [vocabulary], in place.

        The grammar's mask comes last, so a logit bias can't allow a token that the grammar
        excludes.
        """
        sampling = self._sampling
        if self._repeated:
            ids = _ids(self._repeated, logits)
            values, penalty = logits[ids], sampling.repetition_penalty
            logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            counts = torch.tensor(
                list(self._counts.values()), dtype=logits.dtype, device=logits.device
            )
            penalties = counts * sampling.frequency_penalty + sampling.presence_penalty
            logits[_ids(self._counts, logits)] -= penalties
        if sampling.logit_bias:
            biases = dict(sampling.logit_bias)
            added = torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)
            logits[_ids(biases, logits)] += added
        if self._grammar_matcher is not None:
            self._grammar_matcher.apply_mask(logits)


def logits_processor_for(
    request: GenerateRequest, grammar_matcher: GrammarMatcher | None
) -> LogitsProcessor | None:
    """Return the request's processor, or None if its logits need no change."""
    sampling = request.sampling
    penalized = (
        sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    )
    if not (penalized or sampling.logit_bias or grammar_matcher is not None):
        return None
    logits_processor = LogitsProcessor(sampling, request.token_ids, grammar_matcher)
    for token_id in request.token_ids[len(request.token_ids) - request.num_resumed_output_tokens :]:
        logits_processor.accept_token(token_id)
    return logits_processor


def _ids(ids: Iterable[int], logits: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=logits.device)


MASK_64 = (1 << 64) - 1  # of unsigned 64 bits


class SampledToken(NamedTuple):
    """A sampled token, with its log-probability if the request asks for it."""

    token_id: int
    logprob: TokenLogprob | None


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) for output token `index` under `seed` (SplitMix64 over a
    mixed seed).
    """
    return (split_mix(split_mix(seed & MASK_64) + index * 0x9E3779B97F4A7C15) >> 11) / (1 << 53)


def split_mix(state: int) -> int:
    """Return the number that SplitMix64 generates in this state, unsigned 64 bits."""
    state = (state + 0x9E3779B97F4A7C15) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)


def sample(
    logits: Tensor, rows: Sequence[TorchSequence], finite: Tensor | None = None
) -> list[SampledToken | None]:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary].
        rows: The sequence of each row.
        finite: bool [rows]; a row with False gets no token. None: all rows may get one.

    Returns:
        The token of each row, with log-probabilities of the unmodified logits. None for a row that
            `finite` excludes,
        and for a row whose unmodified logits contain NaN or +inf or no finite number.
    """
    logits = logits.float()
    raw = logits
    highest, picked = logits.max(dim=-1)  # NaN where the row has one
    finite = highest.isfinite() if finite is None else highest.isfinite() & finite
    below_minimum = [
        (n, row.stop_ids)
        for n, row in enumerate(rows)
        if row.num_output_tokens < row.request.sampling.min_tokens
    ]
    shaped = [
        (n, row.logits_processor) for n, row in enumerate(rows) if row.logits_processor is not None
    ]
    if below_minimum or shaped:
        logits = logits.clone()
        for n, logits_processor in shaped:
            logits_processor.apply(logits[n])
        for n, stop_ids in below_minimum:
            logits[n, list(stop_ids)] = -torch.inf
        picked = logits.argmax(dim=-1)
    drawn = [n for n, row in enumerate(rows) if row.request.sampling.temperature > 0]
    if drawn:
        picked[drawn] = _draw(logits[drawn], [rows[n] for n in drawn])
    ids = torch.where(finite, picked, -1).tolist()
    wanted = [
        n for n, row in enumerate(rows) if row.request.sampling.logprobs is not None and ids[n] >= 0
    ]
    logprobs: dict[int, TokenLogprob] = {}
    if wanted:
        tops = [rows[n].request.sampling.logprobs or 0 for n in wanted]
        logprobs = dict(
            zip(wanted, score(raw[wanted], [ids[n] for n in wanted], tops), strict=True)
        )
    return [
        None if token < 0 else SampledToken(token, logprobs.get(n)) for n, token in enumerate(ids)
    ]


def _draw(logits: Tensor, rows: Sequence[TorchSequence]) -> Tensor:
    device = logits.device
    logits = (
        logits
        / torch.tensor([row.request.sampling.temperature for row in rows], device=device)[:, None]
    )
    if any(row.request.sampling.min_p > 0 for row in rows):
        min_p = torch.tensor([row.request.sampling.min_p for row in rows], device=device)[:, None]
        logits = logits.masked_fill(
            logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf
        )
    order: Tensor | None = None
    if any(row.request.sampling.top_k > 0 or row.request.sampling.top_p < 1 for row in rows):
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        size = logits.shape[-1]
        ranks = torch.arange(size, device=device)
        top_k = torch.tensor([row.request.sampling.top_k or size for row in rows], device=device)[
            :, None
        ]
        logits = logits.masked_fill(ranks >= top_k, -torch.inf)
        top_p = torch.tensor([row.request.sampling.top_p for row in rows], device=device)[:, None]
        weights = torch.softmax(logits, dim=-1)
        before = weights.cumsum(dim=-1) - weights
        logits = logits.masked_fill((before >= top_p) & (ranks > 0), -torch.inf)
    cumulated = torch.softmax(logits, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    draws = torch.tensor(
        [
            uniform(row.seed, row.request.num_resumed_output_tokens + row.num_output_tokens)
            for row in rows
        ],
        dtype=torch.float64,
        device=device,
    )[:, None]
    picked = torch.searchsorted(cumulated, draws * cumulated[:, -1:], right=True).clamp_(
        max=logits.shape[-1] - 1
    )
    return (picked if order is None else order.gather(1, picked)).squeeze(1)


def score(logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probability of one token per row, and of its likeliest alternatives.

    Args:
        logits: [rows, vocabulary].
        ids: the token of each row.
        tops: the number of alternatives of each row.
    """
    logs = torch.log_softmax(logits.float(), dim=-1)
    likeliest = logs.topk(min(max(tops, default=0), logs.shape[-1]))
    own = (
        logs.gather(1, torch.tensor(ids, dtype=torch.long, device=logs.device)[:, None])
        .squeeze(1)
        .tolist()
    )
    alternatives = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [
        TokenLogprob(token_id, logprob, tuple(zip(top_ids[:top], values[:top], strict=True)))
        for token_id, logprob, top, (top_ids, values) in zip(
            ids, own, tops, alternatives, strict=True
        )
    ]

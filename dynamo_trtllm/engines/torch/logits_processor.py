"""Change the logits of one request before its next token is sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.grammar import GrammarMatcher
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, TokenIds

# A smaller repetition penalty counts as this one. Logits that are divided by this value are finite
# in float32.
MIN_PENALTY: Final = 1e-5


class LogitsProcessor:
    """Penalties, logit bias and grammar of one request. Used on the scheduler's thread only."""

    def __init__(
        self, sampling: Sampling, prompt: TokenIds, grammar_matcher: GrammarMatcher | None
    ) -> None:
        self._sampling = sampling
        self._grammar_matcher = grammar_matcher
        is_counted = sampling.frequency_penalty or sampling.presence_penalty
        # How often each token is in the output.
        self._counts: Counter[int] | None = Counter() if is_counted else None
        # The tokens of prompt and output, as keys. The values are not used.
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
            values = logits[ids]
            penalty = max(sampling.repetition_penalty, MIN_PENALTY)
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
    is_penalized = (
        sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    )
    if not (is_penalized or sampling.logit_bias or grammar_matcher is not None):
        return None
    logits_processor = LogitsProcessor(sampling, request.token_ids, grammar_matcher)
    # Tokens that an earlier worker generated follow the client's prompt, but count as output.
    prompt_tokens = len(request.token_ids) - request.num_resumed_output_tokens
    for token_id in request.token_ids[prompt_tokens:]:
        logits_processor.accept_token(token_id)
    return logits_processor


def _ids(ids: Iterable[int], logits: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=logits.device)

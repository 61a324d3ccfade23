"""What one request does to its logits before a token is chosen: penalties, biases, guided decoding.

Its state is a function of the prompt and of the answer's tokens, so a decode worker goes on where prefill ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.grammar import GrammarMatcher
from dynamo_trtllm.messages import GenerateRequest, Sampling, TokenIds


class LogitsProcessor:
    """Lives on the scheduler's thread, which tells it each token of the answer once."""

    def __init__(self, sampling: Sampling, prompt: TokenIds, guide: GrammarMatcher | None) -> None:
        self._sampling = sampling
        self._guide = guide
        self._counts: Counter[int] = Counter()  # of the answer's tokens, as far as a penalty needs them
        self._counted = bool(sampling.frequency_penalty or sampling.presence_penalty)
        self._repeated = dict.fromkeys(prompt) if sampling.repetition_penalty != 1 else None

    @property
    def failure(self) -> str | None:
        """Why the guided form can't be followed any more; None: it can."""
        return None if self._guide is None else self._guide.failure

    def note(self, token_id: int) -> None:
        """The next token of the answer."""
        if self._counted:
            self._counts[token_id] += 1
        if self._repeated is not None:
            self._repeated[token_id] = None
        if self._guide is not None:
            self._guide.note(token_id)

    def apply(self, logits: Tensor) -> None:
        """Changes one row, [vocabulary], in place. Tokens that a guide rules out are ruled out whatever their bias."""
        sampling = self._sampling
        if self._repeated:
            ids = _ids(self._repeated, logits)
            values, penalty = logits[ids], sampling.repetition_penalty
            logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts:
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
            penalties = counts * sampling.frequency_penalty + sampling.presence_penalty
            logits[_ids(self._counts, logits)] -= penalties
        if sampling.logit_bias:
            biases = dict(sampling.logit_bias)
            added = torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)
            logits[_ids(biases, logits)] += added
        if self._guide is not None:
            self._guide.apply(logits)


def logits_processor_for(request: GenerateRequest, guide: GrammarMatcher | None) -> LogitsProcessor | None:
    """None for a request whose logits stay as they are: it costs nothing."""
    sampling = request.sampling
    penalized = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    if not (penalized or sampling.logit_bias or guide is not None):
        return None
    shaping = LogitsProcessor(sampling, request.token_ids, guide)
    for token_id in request.token_ids[len(request.token_ids) - request.resumed_tokens :]:
        shaping.note(token_id)
    return shaping


def _ids(ids: Iterable[int], logits: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=logits.device)

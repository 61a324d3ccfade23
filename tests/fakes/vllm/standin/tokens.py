"""Fake tokens that depend on what a real model's depend on: the text so far, and how sampling is
asked for.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any


def next_token(prompt: list[int], output: list[int], sampling: Any, vocab_size: int) -> int:
    """Penalties count the answer only, a seed's sequence begins with the answer: as in vLLM."""
    if sampling.logit_bias:
        token, bias = max(sampling.logit_bias.items(), key=lambda pair: pair[1])
        held_back = token in sampling.stop_token_ids and len(output) < sampling.min_tokens
        if bias >= 100 and not held_back:
            return int(token)
    what: list[object] = [prompt + output]
    if sampling.frequency_penalty or sampling.presence_penalty:
        what.append(
            ("penalty", sampling.frequency_penalty, sampling.presence_penalty, sorted(output))
        )
    if sampling.repetition_penalty != 1:
        what.append(("repetition", sampling.repetition_penalty))
    if sampling.temperature > 0:
        what.append(("random", sampling.seed, len(output)))
    if sampling.structured_outputs is not None:
        what.append(("form", str(vars(sampling.structured_outputs)), len(output)))
    lowest = 16  # below are the ids that end answers
    return lowest + zlib.crc32(repr(what).encode()) % (vocab_size - lowest)


def logprobs(token: int, wanted: int) -> dict[int, Any]:
    likeliest = {token + n: SimpleNamespace(logprob=-0.5 - n, rank=n + 1) for n in range(wanted)}
    return {token: SimpleNamespace(logprob=-0.5, rank=1), **likeliest}

"""Compute how long the steps of the mock engine take."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.mock.stream import MockStream
from dynamo_trtllm.protocol.cost_model import decode_features, prefill_features


class StepTimes:
    """The times of the steps of one engine.

    Args:
        args: the arguments of the engine.
        seed: of the noise. None: it differs from run to run.
    """

    def __init__(self, args: MockArgs, seed: int | None) -> None:
        # Only a shortcut: the costs give the same time, but only after a sum over all streams.
        self._constant_s = args.step_s if args.is_constant else None
        self._costs = args.cost_prior
        self._noise = args.step_noise
        self._random = random.Random(seed)

    def seconds(self, prompts: Mapping[MockStream, int], decoding: Sequence[MockStream]) -> float:
        """Return how long a step takes.

        Args:
            prompts: how many tokens of which prompts it computes.
            decoding: the streams of which it generates a token.
        """
        if self._constant_s is not None:
            return self._constant_s
        num_decoding = len(decoding)
        context_tokens = sum(stream.prompt_tokens + stream.num_output for stream in decoding)
        costs = self._costs
        if prompts:
            tokens = sum(prompts.values())
            pairs = sum(stream.attention_pairs(count) for stream, count in prompts.items())
            assert costs.prefill is not None
            features = prefill_features(num_decoding, context_tokens, tokens, pairs)
            seconds = costs.prefill.predict(features)
        else:
            assert costs.decode is not None
            seconds = costs.decode.predict(decode_features(num_decoding, context_tokens))
        if self._noise:
            seconds *= max(0.0, self._random.gauss(1.0, self._noise))
        return seconds

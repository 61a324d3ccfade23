"""From vLLM's outputs to what is new in them. Pure: reads plain attributes.

Outputs are differences (`RequestOutputKind.DELTA`); several steps that were not read one by one come as one output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynamo_trtllm.engines.outputs import EngineOutput
from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import TokenLogprob


class VllmCompletion(Protocol):
    """What is read of the vendor's `CompletionOutput`."""

    token_ids: Sequence[int]
    logprobs: Sequence[Any] | None
    finish_reason: str | None


class VllmOutputCursor:
    """Turns the outputs of one call into steps. One per call; `read` is called once per output."""

    def __init__(
        self, *, alternatives: int | None, first: tuple[int, ...] = (), first_logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        """`alternatives` per token; None: no log-probabilities. `first`: tokens to emit before the engine's own, in
        its first step. `first_logprobs`: those of the answer's first token, from either engine."""
        self._alternatives = alternatives
        self._first = first
        self._first_logprobs = first_logprobs
        self.seen = 0

    def read(self, output: VllmCompletion) -> EngineOutput:
        tokens = [int(token) for token in output.token_ids]
        logprobs = self._logprobs(tokens, output.logprobs or ())
        if self.seen == 0 and (tokens or output.finish_reason is not None):
            tokens = [*self._first, *tokens]
            logprobs = self._with_first(tokens, logprobs)
        self.seen += len(tokens)
        return EngineOutput(token_ids=tokens, logprobs=logprobs, finish=output.finish_reason)

    def _with_first(self, tokens: list[int], logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """The prefill engine's for the first token, unless this engine has made another one of it."""
        reported = self._first_logprobs
        if self._alternatives is None or not reported or not tokens or reported[0].token_id != tokens[0]:
            return logprobs
        return (reported[0], *logprobs[0 if self._first else 1 :])

    def _logprobs(self, tokens: list[int], reported: Sequence[Any]) -> tuple[TokenLogprob, ...]:
        if self._alternatives is None:
            return ()
        if len(reported) < len(tokens):
            raise RequestRejected("vLLM gave no log-probability for a token; ask without", field="logprobs")
        return tuple(token_logprob(token, reported[n], self._alternatives) for n, token in enumerate(tokens))


def token_logprob(token: int, entry: Mapping[int, Any], alternatives: int) -> TokenLogprob:
    """One token's entry: token id to an object with `logprob`, the chosen one among the likeliest or behind them."""
    values = {int(each): float(reported.logprob) for each, reported in entry.items()}
    likeliest = sorted(values.items(), key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprob(token, values[token], tuple(likeliest))

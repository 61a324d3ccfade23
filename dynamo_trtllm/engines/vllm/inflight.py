"""One call of `AsyncLLM.generate` under way: its deadline, and why it was ended when it did not end by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dynamo_trtllm.engines.external import EngineOutput, phase_timings
from dynamo_trtllm.errors import DynamoError, RequestRejected
from dynamo_trtllm.messages import GenerateRequest, PhaseTimings, TokenLogprob


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


class VllmInflightRequest:
    """`end` asks the engine to abort the call; its stream then ends, and the reason is here."""

    def __init__(self, request: GenerateRequest, call_id: str, end: Callable[[str], None]) -> None:
        self.call_id = call_id
        self.reason: Callable[[], DynamoError] | None = None
        self.finished = False  # the engine has said the last word
        self.started = False  # an output has come: of a decode call, its KV has arrived
        self._request = request
        self._end = end
        self._created_at = self._started_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def due_in(self, left_s: float, reason: Callable[[], DynamoError]) -> None:
        """Ends the call then. One timer per phase of a request, not one per token."""
        self.close()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.abort, reason)

    def abort(self, reason: Callable[[], DynamoError]) -> None:
        if self.reason is None and not self.finished:
            self.reason = reason
            self._end(self.call_id)

    def start(self) -> None:
        self.started = True
        self._started_at = time.monotonic()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def age_s(self) -> float:
        return time.monotonic() - self._created_at

    def stats(self, *, cached_tokens: int) -> PhaseTimings:
        return phase_timings(self._request, self._started_at - self._created_at, cached_tokens=cached_tokens)

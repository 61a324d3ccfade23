"""Follow one call of `AsyncLLM.generate`: its outputs, its deadline, and the reason if it was aborted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dynamo_trtllm.engines.external.engine import EngineOutput, phase_timings
from dynamo_trtllm.errors import DynamoError, RequestRejected
from dynamo_trtllm.messages import GenerateRequest, PhaseTimings, TokenLogprob


class VllmCompletion(Protocol):
    """The fields that are read of vLLM's `CompletionOutput`."""

    token_ids: Sequence[int]
    logprobs: Sequence[Any] | None
    finish_reason: str | None


class VllmOutputCursor:
    """The conversion of one call's outputs to `EngineOutput`."""

    def __init__(
        self, *, alternatives: int | None, first: tuple[int, ...] = (), first_logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        """Create the cursor of one call.

        Args:
            alternatives: The number of log-probabilities per token; None: none.
            first: Tokens to emit before the engine's own, in its first step.
            first_logprobs: Log-probabilities of the first output token, from the prefill engine.
        """
        self._alternatives = alternatives
        self._first = first
        self._first_logprobs = first_logprobs
        self.seen = 0  # output tokens so far

    def read(self, output: VllmCompletion) -> EngineOutput:
        """Convert the call's next output. Call it once per output, in order."""
        tokens = [int(token) for token in output.token_ids]
        logprobs = self._logprobs(tokens, output.logprobs or ())
        if self.seen == 0 and (tokens or output.finish_reason is not None):
            tokens = [*self._first, *tokens]
            logprobs = self._with_first(tokens, logprobs)
        self.seen += len(tokens)
        return EngineOutput(token_ids=tokens, logprobs=logprobs, finish=output.finish_reason)

    def _with_first(self, tokens: list[int], logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities, with the prefill engine's for the first token if both engines agree on it."""
        reported = self._first_logprobs
        if self._alternatives is None or not reported or not tokens or reported[0].token_id != tokens[0]:
            return logprobs
        return (reported[0], *logprobs[0 if self._first else 1 :])

    def _logprobs(self, tokens: list[int], reported: Sequence[Any]) -> tuple[TokenLogprob, ...]:
        if self._alternatives is None:
            return ()
        if len(reported) < len(tokens):
            raise RequestRejected(
                "vLLM returned no log-probability for a token; retry without logprobs", field="logprobs"
            )
        return tuple(token_logprob(token, reported[n], self._alternatives) for n, token in enumerate(tokens))


def token_logprob(token: int, entry: Mapping[int, Any], alternatives: int) -> TokenLogprob:
    """Convert vLLM's log-probabilities of one token.

    Args:
        token: The sampled token's id.
        entry: Token id -> object with `logprob`, the sampled token included.
        alternatives: The number of alternatives to return.
    """
    values = {int(each): float(reported.logprob) for each, reported in entry.items()}
    likeliest = sorted(values.items(), key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprob(token, values[token], tuple(likeliest))


class VllmInflightRequest:
    """One call in progress. `end` asks the engine to abort it; its stream then ends, and `reason` has the error."""

    def __init__(self, request: GenerateRequest, call_id: str, end: Callable[[str], None]) -> None:
        self.call_id = call_id
        self.reason: Callable[[], DynamoError] | None = None
        self.finished = False  # the engine has sent its last output
        self.started = False  # an output was received, so a decode call has its KV
        self._request = request
        self._end = end
        self._created_at = self._started_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def due_in(self, left_s: float, reason: Callable[[], DynamoError]) -> None:
        """Abort the call after `left_s` seconds. Replaces the timer of the phase before."""
        self.close()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.abort, reason)

    def abort(self, reason: Callable[[], DynamoError]) -> None:
        """Abort the call with `reason`, unless it has ended."""
        if self.reason is None and not self.finished:
            self.reason = reason
            self._end(self.call_id)

    def start(self) -> None:
        """Note that the first output was received."""
        self.started = True
        self._started_at = time.monotonic()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def age_s(self) -> float:
        """Return the seconds since the call was submitted."""
        return time.monotonic() - self._created_at

    def stats(self, *, cached_tokens: int) -> PhaseTimings:
        return phase_timings(self._request, self._started_at - self._created_at, cached_tokens=cached_tokens)

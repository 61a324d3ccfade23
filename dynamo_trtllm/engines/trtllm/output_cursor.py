"""From TensorRT-LLM's results to what is new in them. Pure: reads a completion's plain attributes.

The vendor yields the same object again and again, with all tokens so far: what is needed is copied at once, and
counted here, because its own difference properties skip the first token of some releases' decode calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynamo_trtllm.engines.outputs import EngineOutput
from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import TokenLogprob

# After a context-only call both of these mean "go on to decode": the vendor forces its max_tokens to 1.
KV_PENDING = frozenset({"length", "not_finished"})


class TrtllmCompletion(Protocol):
    """What is read of the vendor's `CompletionOutput`."""

    token_ids: Sequence[int]
    logprobs: Sequence[Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class TrtllmOutputCursor:
    """Turns the results of one call into steps. One per call; `read` is called once per result."""

    def __init__(
        self,
        *,
        stop_ids: frozenset[int],
        end_id: int | None,
        logprobs: int | None,
        first: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """`logprobs`: alternatives per token; None: none at all. `first`: those of tokens that a ticket brought."""
        self._stop_ids = stop_ids
        self._end_id = end_id
        self._alternatives = logprobs
        self._first = first
        self._seen = 0
        self._last: int | None = None
        self._untold = 0  # tokens at the start for which the vendor gives no log-probability

    def read(self, output: TrtllmCompletion) -> EngineOutput:
        new = list(output.token_ids[self._seen :])
        start = self._seen
        if self._seen == 0 and new and output.logprobs is not None:
            self._untold = max(0, len(output.token_ids) - len(output.logprobs))
        if output.finish_reason == "stop":
            new += self._cut_off(new[-1] if new else self._last, output.stop_reason)
        self._seen += len(new)
        self._last = new[-1] if new else self._last
        return EngineOutput(token_ids=new, logprobs=self._logprobs(output, start, new), finish=output.finish_reason)

    def _cut_off(self, last: int | None, stop_reason: int | str | None) -> list[int]:
        """The stop token, where the vendor took it off the end: our streams end with it."""
        if last is not None and last in self._stop_ids:
            return []
        if isinstance(stop_reason, int):
            return [stop_reason]
        return [] if self._end_id is None else [self._end_id]

    def _logprobs(self, output: TrtllmCompletion, start: int, new: list[int]) -> tuple[TokenLogprob, ...]:
        if self._alternatives is None:
            return ()
        reported = output.logprobs or ()
        return tuple(self._logprob(reported, start + n, token) for n, token in enumerate(new))

    def _logprob(self, reported: Sequence[Any], position: int, token: int) -> TokenLogprob:
        if position < len(self._first):
            return self._first[position]
        index = position - self._untold
        if 0 <= index < len(reported):
            return token_logprob(token, reported[index], self._alternatives or 0)
        if token in self._stop_ids:
            return TokenLogprob(token, -math.inf)  # cut off together with its entry: it is not known
        raise RequestRejected("TensorRT-LLM gave no log-probability for a token; ask without", field="logprobs")


def token_logprob(token: int, entry: Any, alternatives: int) -> TokenLogprob:
    """One token's entry: a mapping of token id to an object with `logprob`, or the bare number."""
    if not isinstance(entry, Mapping):
        return TokenLogprob(token, float(entry))
    values = {int(each): _value(reported) for each, reported in entry.items()}
    if token not in values:
        raise RequestRejected("TensorRT-LLM gave no log-probability for a token; ask without", field="logprobs")
    likeliest = sorted(values.items(), key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprob(token, values[token], tuple(likeliest))


def _value(reported: Any) -> float:
    return float(reported) if isinstance(reported, (int, float)) else float(reported.logprob)

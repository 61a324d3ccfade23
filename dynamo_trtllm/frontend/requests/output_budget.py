"""Limit the memory of unsent output: tokens that were generated, but not sent to the client yet.

All output of an answer that is not streamed is unsent until its end. A stream has unsent output
while its client reads slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from dynamo_trtllm.frontend.requests.choice import ChoiceDelta
from dynamo_trtllm.frontend.requests.preprocess import GenerationPlan
from dynamo_trtllm.protocol.errors import DynamoError, Overloaded, PayloadTooLarge
from dynamo_trtllm.protocol.number_types import ceil_div

MAX_OUTPUT_BYTES: Final = 64 << 20  # limit of the unsent output of one request
MAX_TOTAL_OUTPUT_BYTES: Final = 512 << 20  # limit of the unsent output of all requests
# Estimated memory of one token's text in a list. A delta takes the same again for itself.
TOKEN_BYTES: Final = 64
# Smaller changes of a request's output are not counted, to save CPU time. In units of TOKEN_BYTES.
MIN_COUNTED_CHANGE: Final = 256
# Memory of one log-probability: of the token itself, or of one of its alternatives.
_LOGPROB_BYTES: Final = 120
_FIX = "lower n, best_of, {max_tokens} or the number of alternatives, or set stream to true"

_End: TypeAlias = Callable[[DynamoError, bool], None]
"""A function that ends a request with an error.

The flag says whether it also drops the unsent output.
"""


def _do_nothing(error: DynamoError, drops_output: bool) -> None: ...


def memory_units(delta: ChoiceDelta) -> int:
    """Return the memory that a delta takes with its log-probabilities, in units of TOKEN_BYTES."""
    num_logprobs = len(delta.prompt_logprobs) + sum(
        len(scored.top) for scored in delta.prompt_logprobs
    )
    for part in delta.deltas:
        if part.logprobs:
            num_logprobs += len(part.logprobs) + sum(len(scored.top) for scored in part.logprobs)
    delta_units = 1
    logprob_units = (num_logprobs * _LOGPROB_BYTES) // TOKEN_BYTES
    return delta.tokens + delta_units + logprob_units


def check_answer_size(plan: GenerationPlan) -> None:
    """Check that an answer that is not streamed stays within the limit.

    Each choice may have `max_tokens` tokens. A request without `max_tokens` passes: nearly all
    answers end long before the context does, and their output is counted as it grows.

    Raises:
        PayloadTooLarge: the answer could exceed the limit; `field` is the API's name of
            `max_tokens`.
    """
    first = plan.choices[0]
    if not first.options.sampling.max_tokens:
        return
    max_bytes = 0
    for choice in plan.choices:
        sampling = choice.request.sampling
        token_bytes = TOKEN_BYTES
        if sampling.logprobs is not None and choice.shows_logprobs:
            token_bytes += (1 + sampling.logprobs) * _LOGPROB_BYTES
        max_bytes += sampling.max_tokens * token_bytes
    if max_bytes > MAX_OUTPUT_BYTES:
        name = first.options.name("max_tokens")
        max_mib = ceil_div(max_bytes, 1 << 20)
        raise PayloadTooLarge(
            f"{len(plan.choices)} choices of {first.request.sampling.max_tokens} tokens may take"
            f" {max_mib} MiB of memory; an answer that is not streamed may take"
            f" {MAX_OUTPUT_BYTES >> 20}: " + _FIX.format(max_tokens=name),
            field=name,
        )


class Output:
    """The unsent output of one request.

    Args:
        budget: counts the output of all requests.
        end: called with an error when the request has to end, and with True if its unsent output is
            to be dropped.
        is_streamed: whether the response is a stream.
        max_tokens_name: the API's name of `max_tokens`, for errors.
    """

    def __init__(
        self, budget: OutputBudget, end: _End, *, is_streamed: bool, max_tokens_name: str
    ) -> None:
        self._budget = budget
        self._end = end
        self._is_streamed = is_streamed
        self._max_tokens_name = max_tokens_name
        self.in_use = 0  # bytes of this output

    def set(self, num_bytes: int) -> None:
        """Set the number of bytes.

        If they exceed a limit, end this request or the one with the most output.
        """
        added = num_bytes - self.in_use
        self._budget.in_use += added
        self.in_use = num_bytes
        if added <= 0:
            return
        if self.in_use > MAX_OUTPUT_BYTES:
            # The output that waits is sent before the error.
            drops_output = False
            self._end(self._too_large(), drops_output)
        elif self._budget.in_use > MAX_TOTAL_OUTPUT_BYTES:
            self._budget.end_largest()

    def drop(self, error: DynamoError) -> None:
        """Drop the output, and end the request with an error."""
        self.set(0)
        drops_output = True
        self._end(error, drops_output)

    def close(self) -> None:
        """Stop counting this request."""
        if self.in_use:
            self.set(0)
        # The function belongs to an object that refers to this one. Dropping it ends the reference
        # cycle.
        self._end = _do_nothing
        self._budget.outputs.discard(self)

    def _too_large(self) -> DynamoError:
        limit = f"{MAX_OUTPUT_BYTES >> 20} MiB of memory"
        if self._is_streamed:
            return Overloaded(
                f"the client reads too slowly: its pending output takes more than {limit}"
            )
        text = _FIX.format(max_tokens=self._max_tokens_name)
        return PayloadTooLarge(
            f"the answer, which is not streamed, takes more than {limit}: {text}"
        )


class OutputBudget:
    """The unsent output of all requests."""

    def __init__(self) -> None:
        self.in_use = 0  # bytes of all outputs
        self.outputs: set[Output] = set()

    def open(self, end: _End, *, is_streamed: bool, max_tokens_name: str) -> Output:
        """Return the object that counts the output of a request. Call its `close` at the end.

        Arguments as for `Output`.
        """
        output = Output(self, end, is_streamed=is_streamed, max_tokens_name=max_tokens_name)
        self.outputs.add(output)
        return output

    def end_largest(self) -> None:
        """End the request whose unsent output takes the most memory."""
        largest = max(self.outputs, key=lambda output: output.in_use)
        largest.drop(
            Overloaded(
                f"output that is not sent yet takes more than {MAX_TOTAL_OUTPUT_BYTES >> 20} MiB of"
                " memory, and this request has the most of it; try again later, or set stream to"
                " true and read faster"
            )
        )

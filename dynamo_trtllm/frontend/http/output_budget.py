"""Limit the memory for output that is not sent yet: of answers that are not streamed, and of streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from dynamo_trtllm.errors import DynamoError, Overloaded, PayloadTooLarge
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan

MAX_OUTPUT_BYTES: Final = 64 << 20  # of one request
MAX_TOTAL_OUTPUT_BYTES: Final = 512 << 20  # of all requests
COUNTED_BYTES: Final = 16 << 10  # changes of one request's output below this are not counted, to save CPU time
_TOKEN_BYTES: Final = 64  # of memory: its text in a list
_LOGPROB_BYTES: Final = 120  # the token or one of its alternatives
_End: TypeAlias = Callable[[DynamoError, bool], None]
_LOWER = "lower n, best_of, {max_tokens} or the number of alternatives, or set stream to true"


def _nothing(error: DynamoError, drops_output: bool) -> None: ...


def plain_bytes(delta: ChoiceDelta) -> int:
    """Return the memory that a delta without log-probabilities takes."""
    return (delta.tokens + 1) * _TOKEN_BYTES


def scored_bytes(delta: ChoiceDelta) -> int:
    """Return the memory that a delta takes, with its log-probabilities."""
    entries = len(delta.prompt_logprobs) + sum(len(scored.top) for scored in delta.prompt_logprobs)
    for part in delta.deltas:
        if part.logprobs:
            entries += len(part.logprobs) + sum(len(scored.top) for scored in part.logprobs)
    return plain_bytes(delta) + entries * _LOGPROB_BYTES


def check_answer(plan: GenerationPlan) -> None:
    """Check that an answer that is not streamed is within the limit, if it has the length that the client allows.

    Without `max_tokens`, nearly all answers end long before the context does. They are counted as they grow.

    Raises:
        PayloadTooLarge: it might be larger; `field` is that of the tokens of a choice.
    """
    first = plan.choices[0]
    if not first.options.sampling.max_tokens:
        return
    max_bytes = 0
    for choice in plan.choices:
        sampling = choice.request.sampling
        entries = 0 if sampling.logprobs is None or not choice.shows_logprobs else 1 + sampling.logprobs
        max_bytes += sampling.max_tokens * (_TOKEN_BYTES + entries * _LOGPROB_BYTES)
    if max_bytes > MAX_OUTPUT_BYTES:
        name = first.options.name("max_tokens")
        raise PayloadTooLarge(
            f"{len(plan.choices)} choices of {first.request.sampling.max_tokens} tokens may take {max_bytes >> 20} MiB "
            f"of memory; an answer that is not streamed may take {MAX_OUTPUT_BYTES >> 20}: "
            + _LOWER.format(max_tokens=name),
            field=name,
        )


class Output:
    """The output of one request that was generated and is not sent yet.

    Args:
        is_streamed: the response is.
        end: ends the request with an error. True: and drops the output.
    """

    def __init__(self, budget: OutputBudget, end: _End, *, is_streamed: bool) -> None:
        self._budget = budget
        self._end = end
        self._is_streamed = is_streamed
        self.in_use = 0  # bytes

    def set(self, num_bytes: int) -> None:
        """Set how many bytes there are. Ends this request or another one if they exceed a limit."""
        added = num_bytes - self.in_use
        self._budget.in_use += added
        self.in_use = num_bytes
        if added <= 0:
            return
        if self.in_use > MAX_OUTPUT_BYTES:
            self._end(self._too_large(), False)
        elif self._budget.in_use > MAX_TOTAL_OUTPUT_BYTES:
            self._budget.end_largest()

    def drop(self, error: DynamoError) -> None:
        """Drop the output, and end the request with an error."""
        self.set(0)
        self._end(error, True)

    def close(self) -> None:
        """Count nothing any more."""
        self.set(0)
        self._end = _nothing  # it refers to this object: a cycle
        self._budget.outputs.discard(self)

    def _too_large(self) -> DynamoError:
        limit = f"{MAX_OUTPUT_BYTES >> 20} MiB of memory"
        if self._is_streamed:
            return Overloaded(f"the client reads too slowly: its pending output takes more than {limit}")
        text = _LOWER.format(max_tokens="max_tokens")
        return PayloadTooLarge(f"the answer, which is not streamed, takes more than {limit}: {text}")


class OutputBudget:
    """The output of all requests that was generated and is not sent yet."""

    def __init__(self) -> None:
        self.in_use = 0  # bytes
        self.outputs: set[Output] = set()

    def open(self, end: _End, *, is_streamed: bool) -> Output:
        """Return the account of a request. Arguments as for `Output`."""
        output = Output(self, end, is_streamed=is_streamed)
        self.outputs.add(output)
        return output

    def end_largest(self) -> None:
        """End the request whose output takes most memory."""
        largest = max(self.outputs, key=lambda output: output.in_use)
        largest.drop(
            Overloaded(
                f"output that is not sent yet takes more than {MAX_TOTAL_OUTPUT_BYTES >> 20} MiB of memory, most of it "
                "that of this request; try again later, or set stream to true and read faster"
            )
        )

"""Define the parsed output of a request: the deltas of a step, their parser, and their builder."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Final, Protocol

import msgspec

from dynamo_trtllm.protocol.messages import TokenIds, TokenLogprob


class Channel(StrEnum):
    """The part of an answer that a text belongs to.

    It is a key of dicts that are read per token. A string is hashed in a fifth of an Enum's time.
    """

    REASONING = auto()
    COMMENTARY = auto()  # text for the user before calls or before the final answer
    FINAL = auto()  # the final answer, in a format that marks commentary
    CONTENT = auto()  # all text for the user, in a format that does not mark commentary
    CALL = auto()  # the arguments of a tool call


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The text that some tokens add to one channel.

    It has no markers and no incomplete UTF-8 characters.
    It is empty if a call begins without arguments, or if there are only log-probabilities.
    Creating a msgspec struct takes a tenth of the time of a frozen dataclass.
    """

    channel: Channel
    text: str = ""
    call_index: int = 0  # index of the tool call
    # Name of the called function; only the first delta of a tool call has it.
    name: str | None = None
    # Log-probabilities of the tokens of the text; parsers leave it empty.
    logprobs: tuple[TokenLogprob, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The output of one step. Consecutive deltas differ in their channel or their call."""

    deltas: tuple[Delta, ...] = ()  # deltas in the order of generation
    reasoning_tokens: int = 0  # number of tokens that are reasoning
    num_calls: int = 0  # number of tool calls that begin


NO_OUTPUT: Final = StepOutput()


class OutputParser(Protocol):
    """Incremental parser of one request's output. Its cost is linear in the number of tokens.

    The deltas of all steps, joined, do not depend on how the tokens are divided into steps.
    """

    def push(self, token_ids: TokenIds) -> StepOutput:
        """Return the output of these tokens. Text that may be part of a marker is withheld."""

    def finish(self) -> StepOutput:
        """Return the withheld text. Call it once, after the last push."""


class DeltaBuilder:
    """Collects the text of a step, and builds a delta of each run in one channel."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._num_calls = 0
        self._deltas: list[Delta] = []  # the deltas before the current one
        self._channel: Channel | None = None  # the channel of the current delta
        self._call_index = 0
        self._name: str | None = None
        self._texts: list[str] = []

    def add(self, channel: Channel, text: str) -> None:
        """Add text to a channel, except to that of calls."""
        if text:
            if self._channel is not channel:
                self._begin(channel)
            self._texts.append(text)

    def begin_call(self, index: int, name: str) -> None:
        """Begin a tool call."""
        self._begin(Channel.CALL, index, name)
        self._num_calls += 1

    def add_arguments(self, index: int, text: str) -> None:
        """Add text to the arguments of a call."""
        if text:
            if self._channel is not Channel.CALL or self._call_index != index:
                self._begin(Channel.CALL, index)
            self._texts.append(text)

    def take(self) -> StepOutput:
        """Return what was added since the last call."""
        if self._channel is None and not self.reasoning_tokens:
            return NO_OUTPUT
        self._end()
        deltas = tuple(self._deltas)
        num_reasoning = self.reasoning_tokens
        step = StepOutput(deltas=deltas, reasoning_tokens=num_reasoning, num_calls=self._num_calls)
        self._channel = None
        self.reasoning_tokens = 0
        self._num_calls = 0
        self._deltas.clear()
        return step

    def _begin(self, channel: Channel, call_index: int = 0, name: str | None = None) -> None:
        self._end()
        self._channel = channel
        self._call_index = call_index
        self._name = name

    def _end(self) -> None:
        if self._channel is not None:
            text = "".join(self._texts)
            index = self._call_index
            delta = Delta(channel=self._channel, text=text, call_index=index, name=self._name)
            self._deltas.append(delta)
            self._texts.clear()


def joined(deltas: Sequence[Delta]) -> tuple[Delta, ...]:
    """Return the deltas with each run in one channel, or of one call, as one delta."""
    if len(deltas) < 2:
        return tuple(deltas)
    runs: list[list[Delta]] = []
    for delta in deltas:
        if runs and delta.name is None and _place(runs[-1][0]) == _place(delta):
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return tuple(_one_delta(run) for run in runs)


def _place(delta: Delta) -> tuple[Channel, int]:
    return delta.channel, delta.call_index


def _one_delta(run: Sequence[Delta]) -> Delta:
    if len(run) == 1:
        return run[0]
    text = "".join(delta.text for delta in run)
    logprobs = tuple(logprob for delta in run for logprob in delta.logprobs)
    return msgspec.structs.replace(run[0], text=text, logprobs=logprobs)

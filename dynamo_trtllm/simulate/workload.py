"""The requests of a simulation: from a trace, or of one shape at random times.

A trace has the format of Mooncake (https://github.com/kvcache-ai/Mooncake): a JSON object per line
with `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`. This is a list
with a number for each block of 512 tokens of the prompt. If two prompts have the same number for a
block, they are equal up to the end of this block.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import math
import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.config.token_counts import parse_tokens
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import TokenIds, token_ids

TRACE_BLOCK_TOKENS: Final = 512
# The tokens of a block come from its number: two digits to this base, each of which is a token id.
_TOKENS: Final = 200_000
# The blocks of a shape have this number and higher numbers. Blocks of a trace have lower numbers.
_FIRST_OF_SHAPE: Final = 1 << 31
# The timestamps of Mooncake's traces are multiples of 3 s, or at most 3 ms beside one.
_TICK_S: Final = 3.0
_TICK_ERROR_S: Final = 0.01
# The longest virtual time of a simulation. It takes about a minute, even without requests, because
# workers report and a planner decides every second.
_MAX_SIMULATED_S: Final = 30 * 24 * 3600.0


class Arrival(NamedTuple):
    """A request that comes at a time."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # the prompt: a number for each block of TRACE_BLOCK_TOKENS tokens

    def prompt(self) -> TokenIds:
        """Return the tokens of the prompt. A block repeats the two digits of its number."""
        ids = token_ids()
        for block in self.blocks:
            digits = array(ids.typecode, divmod(block, _TOKENS))
            ids.extend(digits * (TRACE_BLOCK_TOKENS // 2))
        return ids[: self.input_tokens]


class Shape(NamedTuple):
    """The numbers of tokens of a prompt and of its answer."""

    input_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens}"


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def parse_shape(text: str) -> Shape:
    """Read a shape such as `8192/256` or `8K/256`.

    Raises:
        ConfigError: the text is no shape.
    """
    try:
        input_tokens, output_tokens = map(parse_tokens, text.split("/"))
    except ValueError:
        input_tokens = output_tokens = 0
    if input_tokens < 1 or output_tokens < 1:
        raise ConfigError(
            f"{text!r} is not a shape; write the tokens of a prompt and of its answer as 8192/256"
            " or 8K/256"
        )
    return Shape(input_tokens, output_tokens)


def poisson_arrivals(shape: Shape, rate: float, num_requests: int, seed: int) -> list[Arrival]:
    """Return requests that come independently of each other.

    Args:
        shape: the shape of each request.
        rate: requests per second.
        num_requests: number of requests.
        seed: the seed of the times.

    Raises:
        ConfigError: the rate is not positive.
    """
    if not rate > 0:
        raise ConfigError(f"the rate is {rate:g} requests per second; it must be above 0")
    source = random.Random(seed)
    gaps_s = (source.expovariate(rate) for _ in range(num_requests))
    return arrivals_at(shape, list(itertools.accumulate(gaps_s)))


def arrivals_at(shape: Shape, times_s: Sequence[float]) -> list[Arrival]:
    """Return requests that come at these times. Their prompts have nothing in common."""
    return [_arrival_at(shape, at_s, number) for number, at_s in enumerate(times_s)]


def _arrival_at(shape: Shape, at_s: float, number: int) -> Arrival:
    """Return a request whose prompt has nothing in common with those of other numbers."""
    num_blocks = -(-shape.input_tokens // TRACE_BLOCK_TOKENS)
    return Arrival(at_s, *shape, (_FIRST_OF_SHAPE + number,) * num_blocks)


def varied_arrivals(shape: Shape, least_part: float, num_requests: int, seed: int) -> list[Arrival]:
    """Return requests that all come at once, with prompts and answers of different lengths.

    Args:
        shape: the most tokens of a prompt and of an answer.
        least_part: the least tokens, as a fraction of the most. All lengths from the least to the
            most are equally frequent.
        num_requests: how many.
        seed: the seed of the lengths.
    """
    source = random.Random(seed)

    def length(most: int) -> int:
        return source.randint(max(1, int(least_part * most)), most)

    return [
        _arrival_at(Shape(length(shape.input_tokens), length(shape.output_tokens)), 0.0, number)
        for number in range(num_requests)
    ]


def read_trace(path: Path, num_requests: int | None = None, speed: float = 1.0) -> list[Arrival]:
    """Read the first requests of a trace. A file that ends with .gz is decompressed.

    Requests of one timestamp keep the order of their lines. They come at once, except in Mooncake's
    own traces, whose timestamps are rounded to 3 s. There, requests are spread evenly over the 3 s.

    Args:
        path: the file.
        num_requests: the most requests. None: all.
        speed: how many times as fast as in the trace requests come.

    Raises:
        ConfigError: the file can't be read, or has no request; or a line, which the error names, is
            not a request or comes before the one above it.
    """
    if not speed > 0:
        raise ConfigError(f"the speed of the trace is {speed:g}; it must be above 0")
    arrivals: list[Arrival] = []
    try:
        for number, line in enumerate(_lines(path), start=1):
            if num_requests is not None and len(arrivals) >= num_requests:
                break
            arrival = _arrival(line, f"{path}: line {number}")
            if arrivals and arrival.at_s < arrivals[-1].at_s:
                raise ConfigError(
                    f"{path}: line {number} has a timestamp before that of the line above; sort the"
                    " trace by timestamp"
                )
            arrivals.append(arrival)
    except (OSError, EOFError, zlib.error) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else None
        raise ConfigError(f"{path} can't be read: {reason or exc}; pass another file") from exc
    if not arrivals:
        raise ConfigError(f"{path} has no request")
    if _is_rounded(arrivals):
        arrivals = _spread(arrivals)
    return [arrival._replace(at_s=arrival.at_s / speed) for arrival in arrivals]


def _is_rounded(arrivals: Sequence[Arrival]) -> bool:
    """Return whether the times were rounded to _TICK_S.

    Times that are multiples of a longer time are not: then the client has sent batches.
    """
    ticks = [_tick(arrival) for arrival in arrivals]
    errors_s = (
        abs(arrival.at_s - tick * _TICK_S) for arrival, tick in zip(arrivals, ticks, strict=True)
    )
    return math.gcd(*ticks) == 1 and max(errors_s) <= _TICK_ERROR_S


def _spread(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the requests of a trace with rounded times, those of each tick spread evenly."""
    spread: list[Arrival] = []
    for _, group in itertools.groupby(arrivals, key=_tick):
        together = list(group)
        spread += [
            arrival._replace(at_s=together[0].at_s + _TICK_S * number / len(together))
            for number, arrival in enumerate(together)
        ]
    # A tick may begin a few ms early, before the last of many requests of the tick before it.
    return sorted(spread, key=lambda arrival: arrival.at_s)


def _tick(arrival: Arrival) -> int:
    return round(arrival.at_s / _TICK_S)


def _lines(path: Path) -> Iterator[bytes]:
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        if first := file.readline().removeprefix(codecs.BOM_UTF8):
            yield first
        yield from file


def _arrival(line: bytes, where: str) -> Arrival:
    """Return the request of a line, at a speed of 1. `where`: its file and number, for errors."""
    try:
        request = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where} is not a request: {exc}") from exc
    input_tokens = request.input_length
    if input_tokens < 1 or request.output_length < 1 or not request.timestamp >= 0:
        raise ConfigError(
            f"{where} is not a request: input_length and output_length must be at least 1, and"
            " timestamp at least 0"
        )
    num_blocks = -(-input_tokens // TRACE_BLOCK_TOKENS)
    blocks = tuple(request.hash_ids)
    if len(blocks) != num_blocks or not all(0 <= block < _FIRST_OF_SHAPE for block in blocks):
        raise ConfigError(
            f"{where} is not a request: {input_tokens} tokens need {num_blocks} hash_ids from 0 to"
            f" {_FIRST_OF_SHAPE - 1}"
        )
    return Arrival(request.timestamp / 1000, input_tokens, request.output_length, blocks)


def check_duration(arrivals: Sequence[Arrival]) -> None:
    """Check that the requests come within the time that can be simulated.

    Raises:
        ConfigError: the last one comes later.
    """
    last_s = arrivals[-1].at_s
    if not last_s <= _MAX_SIMULATED_S:
        raise ConfigError(
            f"the last request would come after {last_s:.3g} s, and a simulation has at most"
            f" {_MAX_SIMULATED_S:.3g} s; raise the rate, the speed of the trace, or send fewer"
            " requests"
        )


def check_context(arrivals: Sequence[Arrival], context_tokens: int) -> None:
    """Check that each request fits into the context of the model.

    Raises:
        ConfigError: one does not; the error has its number.
    """
    for number, arrival in enumerate(arrivals, start=1):
        total = arrival.input_tokens + arrival.output_tokens
        if total > context_tokens:
            raise ConfigError(
                f"request {number} has {arrival.input_tokens} prompt and {arrival.output_tokens}"
                f" output tokens, and the context of the workers is {context_tokens}; raise their"
                " context, or leave the request out"
            )

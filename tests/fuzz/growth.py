"""Check that the time and the memory of a target grow no faster than its input.

An input is made larger in one place, twice: to a few kilobytes, and to sixteen times as much. This
finds quadratic time without a machine that is quiet: sixteen times the work takes sixteen times as
long, give or take the noise, and quadratic work takes 256 times as long.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Final

import msgspec

from tests.fuzz import mutations
from tests.fuzz.target import Form, Target

_SMALL_BYTES: Final = 2 << 10
_TIMES: Final = 16  # bytes of the larger input for each byte of the smaller one
_SLACK: Final = 4  # the larger input may take this many times what is proportional
_NOTICED_S: Final = 0.1  # less CPU time is not compared
_MAX_SMALL_S: Final = 2.0  # 1 ms a byte is too long for any input
_TRIES: Final = 3  # the fastest one counts
# A list of numbers or an empty object in JSON takes about 100 bytes of Python objects a byte.
_MEMORY_BYTES: Final = 16 << 20
_MEMORY_PER_BYTE: Final = 1500
_SLOWEST: Final = 200  # times the median CPU time per byte of the inputs so far
_KEPT: Final = 500  # times of inputs

cpu_clock: Callable[[], float] = time.thread_time


class TooMuchWork(AssertionError):
    """The time or the memory of a target is not in proportion to its input."""


class InputTimes:
    """The CPU times of a target's inputs. Finds one that takes far longer per byte than others."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._per_byte: list[float] = []

    def run(self, data: bytes) -> None:
        """Run the target. Raise TooMuchWork if it took too long, also when it is repeated."""
        seconds = _cpu_s(self._target, data)
        per_byte = seconds / (len(data) + 64)  # every input has a fixed part
        if seconds > _NOTICED_S and len(self._per_byte) == _KEPT:
            most = _SLOWEST * median(self._per_byte) * (len(data) + 64)
            if seconds > most and _fastest_s(self._target, data) > most:
                raise TooMuchWork(f"{len(data)} bytes take {seconds:.2f} s, more than {most:.2f} s")
        if len(self._per_byte) < _KEPT:
            self._per_byte.append(per_byte)


def check_growth(target: Target, data: bytes, draw: random.Random) -> None:
    """Run the target with two larger variants of an input. `draw` chooses what becomes larger.

    Raises:
        TooMuchWork: the larger one takes too much time or memory.
    """
    grown = _grower(target, data, draw)
    if grown is None:
        return
    times = max(1, _SMALL_BYTES // max(1, len(data)))
    small = grown(times)
    large = grown(times * _TIMES)
    if not small or len(large) < 4 * len(small):
        return
    ratio = len(large) / len(small)
    small_s = _cpu_s(target, small)
    if small_s > _MAX_SMALL_S:
        small_s = _fastest_s(target, small)  # the first time, a tokenizer may have been loaded
    if small_s > _MAX_SMALL_S:
        raise TooMuchWork(f"{small_s:.1f} s for {len(small)} bytes: {small[:200]!r}")
    large_s = _cpu_s(target, large)
    most_s = max(_NOTICED_S, small_s * ratio * _SLACK)
    if large_s > most_s:
        small_s = _fastest_s(target, small)
        large_s = _fastest_s(target, large)
        if large_s > max(_NOTICED_S, small_s * ratio * _SLACK):
            raise TooMuchWork(
                f"{ratio:.0f} times the bytes take {large_s / small_s:.0f} times as long, from"
                f" {small_s:.4f} s to {large_s:.2f} s: {small[:200]!r}"
            )
    peak = _peak_bytes(target, large)
    if peak > _MEMORY_BYTES + _MEMORY_PER_BYTE * len(large):
        raise TooMuchWork(f"{len(large)} bytes take {peak >> 20} MiB: {small[:200]!r}")


def _grower(target: Target, data: bytes, draw: random.Random) -> Callable[[int], bytes] | None:
    """Return a function of a number of times that makes a part of an input so much larger."""
    if target.form is Form.BYTES or draw.random() < 0.3:
        at = draw.randint(0, len(data))
        end = draw.randint(at, len(data))
        return lambda times: data[:at] + data[at:end] * times + data[end:]
    try:
        value = mutations.read(data, target.form)
    except (ValueError, RecursionError, msgspec.DecodeError):
        return None
    grown = mutations.grow(value, draw)
    return lambda times: mutations.write(grown(times), target.form)


def _cpu_s(target: Target, data: bytes) -> float:
    begun = cpu_clock()
    target.check(data)
    return cpu_clock() - begun


def _fastest_s(target: Target, data: bytes) -> float:
    return min(_cpu_s(target, data) for _ in range(_TRIES))


def _peak_bytes(target: Target, data: bytes) -> int:
    tracemalloc.start()
    try:
        target.check(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

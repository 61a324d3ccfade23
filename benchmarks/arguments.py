"""Types of command-line arguments: what they accept, and what they say otherwise."""

from __future__ import annotations

from argparse import ArgumentTypeError

from dynamo_trtllm.protocol.number_text import parse_float, parse_int

LONGEST_S = 24 * 3600.0  # more is a mistake


def count(text: str) -> int:
    """Return a number that is at least 1."""
    try:
        value = parse_int(text)
    except ValueError as exc:
        raise ArgumentTypeError(f"{text!r} is no whole number") from exc
    if value < 1:
        raise ArgumentTypeError(f"{text!r}: expected 1 or more")
    return value


def seconds(text: str) -> float:
    """Return a number of seconds that can be waited for."""
    try:
        value = parse_float(text)
    except ValueError as exc:
        raise ArgumentTypeError(f"{text!r} is no number") from exc
    if not 0 < value <= LONGEST_S:
        raise ArgumentTypeError(f"{text!r}: expected above 0, and at most {LONGEST_S:g} (a day)")
    return value

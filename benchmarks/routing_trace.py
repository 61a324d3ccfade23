"""Traces for `benchmarks.routing replay`: when requests come, and which blocks of tokens their prompts consist of.

Reads the format of Mooncake's traces (https://github.com/kvcache-ai/Mooncake): per line a JSON object with `timestamp`
(ms), `output_length` (tokens) and `hash_ids`, one number per block of 512 tokens of the prompt; equal prompts have
equal numbers. Each block becomes BLOCK_TOKENS words, which depend on its number only.
"""

from __future__ import annotations

import gzip
import random
from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.engines.prefix_cache import PrefixCache

from .client import WORDS

BLOCK_TOKENS: Final = 32
SCALE: Final = 512 // BLOCK_TOKENS  # tokens of a trace per token sent
_TICK_MS = 3000  # Mooncake's timestamps are multiples of it
_NEW = -1  # stands for the tokens after the last block, which no other prompt has


class TraceRequest(NamedTuple):
    """One request of a trace."""

    at_s: float
    blocks: tuple[int, ...]
    output_tokens: int

    def prompt(self) -> str:
        """Return a text with BLOCK_TOKENS tokens per block."""
        return "".join(" " + " ".join(random.Random(block).choices(WORDS, k=BLOCK_TOKENS)) for block in self.blocks)


class _Line(msgspec.Struct):
    timestamp: float
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int, rate: float) -> list[TraceRequest]:
    """Read about `count` requests: all of some conversations, spread over the whole trace, and `rate` per second.

    The first two blocks identify a conversation, because all of them may share the first one.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        lines = [msgspec.json.decode(line, type=_Line) for line in file]
    rnd, share = random.Random(1), count / len(lines)
    is_used: dict[tuple[int, ...], bool] = {}
    found = []
    for line in lines:
        if is_used.setdefault(tuple(line.hash_ids[:2]), rnd.random() < share):
            output_tokens = max(2, line.output_length // SCALE)
            found.append(TraceRequest(line.timestamp + rnd.random() * _TICK_MS, tuple(line.hash_ids), output_tokens))
    return _at_rate(found, rate)


def synthetic_trace(count: int, rate: float) -> list[TraceRequest]:
    """Generate a trace of the same shape.

    All prompts share their first block. Conversations have 1 to 12 turns. Over a third of the blocks of prompts were in
    the turn before. The length of prompts has a median of 19 blocks and a long tail.
    """
    rnd, found = random.Random(1), list[TraceRequest]()
    number = 0

    def new_blocks(median: float) -> tuple[int, ...]:
        nonlocal number
        begin, number = number + 1, number + min(230, max(1, int(rnd.lognormvariate(0, 1.0) * median)))
        return tuple(range(begin, number + 1))

    while len(found) < count:
        at_s, blocks = rnd.random(), (0, *new_blocks(14))
        for _ in range(min(12, 1 + int(rnd.expovariate(0.8)))):
            if at_s < 1:
                found.append(TraceRequest(at_s, blocks, max(2, int(rnd.expovariate(1 / 22)))))
            at_s, blocks = at_s + rnd.lognormvariate(0, 1.0) * 0.05, blocks + new_blocks(3)
    return _at_rate(found, rate)


def _at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the requests in the order of their times, which are scaled so that `rate` come per second."""
    requests.sort()
    begin, end = requests[0].at_s, requests[-1].at_s
    scale = len(requests) / rate / (end - begin)
    return [each._replace(at_s=(each.at_s - begin) * scale) for each in requests]


class _Cache:
    """The prefix cache of a worker that computes each prompt at once."""

    def __init__(self, blocks: int) -> None:
        self._cache = PrefixCache(BLOCK_TOKENS)
        self._free = blocks

    def run(self, ids: array[int]) -> int:
        """Return how many tokens of a prompt are cached. Afterwards all its full blocks are."""
        needed = -(-len(ids) // BLOCK_TOKENS)
        reserved = self._cache.reserve(ids, None, needed, self._free)
        if reserved is None:
            return 0  # the prompt is larger than the cache
        cached, chain = len(reserved.reused), reserved.reused
        self._free += len(reserved.evicted)
        self._free -= self._cache.store(ids, None, chain, repeat(0))
        self._cache.release(chain)
        return cached * BLOCK_TOKENS


def oracle_hits(trace: Iterable[TraceRequest], framing_tokens: int, cache_blocks: int) -> int:
    """Return how many tokens an oracle finds in caches of `cache_blocks` blocks of all workers together.

    The oracle knows every cache, and the prefix that a prompt needs is always where the prompt runs, without a second
    copy of it: it has one cache with the space of all workers. Prompts are computed in the order in which they come, in
    no time.

    Args:
        trace: the requests.
        framing_tokens: tokens that the chat template puts before each prompt.
        cache_blocks: blocks that all workers can cache.
    """
    cache = _Cache(cache_blocks)
    return sum(cache.run(_ids(request.blocks, framing_tokens)) for request in trace)


def round_robin_hits(trace: Sequence[TraceRequest], framing_tokens: int, cache_blocks: int, workers: int) -> int:
    """Return how many tokens are found if the workers get the prompts in turn. Arguments are as above."""
    return sum(oracle_hits(trace[first::workers], framing_tokens, cache_blocks // workers) for first in range(workers))


def _ids(blocks: Sequence[int], framing_tokens: int) -> array[int]:
    ids = array("i", repeat(_NEW, framing_tokens))
    for block in blocks:
        ids.extend(repeat(block, BLOCK_TOKENS))
    ids.append(_NEW)
    return ids

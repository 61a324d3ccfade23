"""Traces for `benchmarks.routing replay`: when requests come, and which blocks of tokens their
prompts consist of.

Reads the format of Mooncake's traces (https://github.com/kvcache-ai/Mooncake): per line a JSON
object with `timestamp` (ms), `output_length` (tokens) and `hash_ids`, one number per block of 512
tokens of the prompt; equal prompts have equal numbers. Each block becomes BLOCK_TOKENS words, which
depend on its number only.
"""

from __future__ import annotations

import gzip
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.kv_events import prefix_hashes

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
        return "".join(
            " " + " ".join(random.Random(block).choices(WORDS, k=BLOCK_TOKENS))
            for block in self.blocks
        )


class _Line(msgspec.Struct):
    timestamp: float
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int, rate: float) -> list[TraceRequest]:
    """Read about `count` requests: all of some conversations, spread over the whole trace, and
    `rate` per second.

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
            found.append(
                TraceRequest(
                    line.timestamp + rnd.random() * _TICK_MS, tuple(line.hash_ids), output_tokens
                )
            )
    return _at_rate(found, rate)


def synthetic_trace(count: int, rate: float) -> list[TraceRequest]:
    """Generate a trace of the same shape.

    All prompts share their first block. Conversations have 1 to 12 turns. Over a third of the
    blocks of prompts were in the turn before. The length of prompts has a median of 19 blocks and a
    long tail.
    """
    rnd, found = random.Random(1), list[TraceRequest]()
    number = 0

    def new_blocks(median: float) -> tuple[int, ...]:
        nonlocal number
        begin, number = (
            number + 1,
            number + min(230, max(1, int(rnd.lognormvariate(0, 1.0) * median))),
        )
        return tuple(range(begin, number + 1))

    while len(found) < count:
        at_s, blocks = rnd.random(), (0, *new_blocks(14))
        for _ in range(min(12, 1 + int(rnd.expovariate(0.8)))):
            if at_s < 1:
                found.append(TraceRequest(at_s, blocks, max(2, int(rnd.expovariate(1 / 22)))))
            at_s, blocks = at_s + rnd.lognormvariate(0, 1.0) * 0.05, blocks + new_blocks(3)
    return _at_rate(found, rate)


def _at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the requests in the order of their times, which are scaled so that `rate` come per
    second.
    """
    requests.sort()
    begin, end = requests[0].at_s, requests[-1].at_s
    scale = len(requests) / rate / (end - begin)
    return [each._replace(at_s=(each.at_s - begin) * scale) for each in requests]


class _Cache:
    """The prefix cache of a worker that computes each prompt at once.

    The least recently used blocks go first.
    """

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # prefix hashes

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are cached."""
        return next(
            (count for count, prefix in enumerate(hashes) if prefix not in self._blocks),
            len(hashes),
        )

    def store(self, hashes: Sequence[int], needed: int) -> None:
        """Cache the full blocks of a prompt, which needs so many blocks in all."""
        if needed > self._limit:
            return
        for prefix in hashes:
            self._blocks.pop(prefix, None)
        while len(self._blocks) + needed > self._limit:
            self._blocks.popitem(last=False)
        self._blocks.update(dict.fromkeys(reversed(hashes)))


def oracle_hits(
    trace: Sequence[TraceRequest], framing_tokens: int, cache_blocks: int, workers: int = 1
) -> int:
    """Return how many tokens an oracle finds in the caches of workers.

    It knows each cache. A prompt goes to the worker that has most of it, of equal ones to that with
    the fewest tokens of prompts so far. The beginning that all prompts share does not count,
    because all would follow the first one to its worker. Prompts are computed in the order in which
    they come, in no time. With one worker that has the space of all, this is more than any
    selection of workers can reach.

    Args:
        trace: the requests.
        framing_tokens: tokens that the chat template puts before each prompt.
        cache_blocks: blocks that each worker can cache.
        workers: the number of workers.
    """
    caches, num_sent, hits = [_Cache(cache_blocks) for _ in range(workers)], [0] * workers, 0
    prompts = [_ids(request.blocks, framing_tokens) for request in trace]
    # the last token is never in a cache
    hashed = [prefix_hashes(ids[:-1], BLOCK_TOKENS, 0) for ids in prompts]
    shared = next(
        (count for count, each in enumerate(zip(*hashed, strict=False)) if len(set(each)) > 1), 0
    )
    for ids, hashes in zip(prompts, hashed, strict=True):
        found = [cache.match(hashes) for cache in caches]
        best = min(
            range(workers), key=lambda worker: (-max(shared, found[worker]), num_sent[worker])
        )
        caches[best].store(prefix_hashes(ids, BLOCK_TOKENS, 0), -(-len(ids) // BLOCK_TOKENS))
        hits, num_sent[best] = hits + found[best] * BLOCK_TOKENS, num_sent[best] + len(ids)
    return hits


def _ids(blocks: Sequence[int], framing_tokens: int) -> array[int]:
    ids = array("i", repeat(_NEW, framing_tokens))
    for block in blocks:
        ids.extend(repeat(block, BLOCK_TOKENS))
    ids.append(_NEW)
    return ids

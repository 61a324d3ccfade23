"""Traces for `benchmarks.routing replay`: when requests come, and the blocks of their prompts.

Reads the format of Mooncake's traces (https://github.com/kvcache-ai/Mooncake): per line a JSON
object with `timestamp` (ms), `output_length` (tokens) and `hash_ids`, one number per block of 512
tokens of the prompt; equal prompts have equal numbers. Each block becomes BLOCK_TOKENS words, which
depend on its number only.
"""

from __future__ import annotations

import gzip
import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.protocol.kv_events import prefix_hashes

from .load_client import WORDS

BLOCK_TOKENS: Final = 32
SCALE: Final = 512 // BLOCK_TOKENS  # tokens of a trace per token that is sent
_TICK_MS = 3000  # Mooncake's timestamps are multiples of this
_NEW = -1  # stands for tokens that are in no block of the trace


class TraceRequest(NamedTuple):
    """One request of a trace."""

    at_s: float
    blocks: tuple[int, ...]
    output_tokens: int

    def prompt(self) -> str:
        """Return a text with BLOCK_TOKENS tokens per block."""
        text = ""
        for block in self.blocks:
            words = random.Random(block).choices(WORDS, k=BLOCK_TOKENS)
            text += " " + " ".join(words)
        return text


class _Line(msgspec.Struct):
    timestamp: float
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, count: int, rate: float) -> list[TraceRequest]:
    """Read about `count` requests, and let `rate` of them come per second.

    They are all requests of some conversations, spread over the whole trace. The first two blocks
    identify a conversation, because all conversations may share the first block.
    """
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        lines = [msgspec.json.decode(line, type=_Line) for line in file]
    rnd = random.Random(1)
    share = count / len(lines)
    is_used: dict[tuple[int, ...], bool] = {}
    requests: list[TraceRequest] = []
    for line in lines:
        conversation = tuple(line.hash_ids[:2])
        if is_used.setdefault(conversation, rnd.random() < share):
            request = TraceRequest(
                at_s=line.timestamp + rnd.random() * _TICK_MS,
                blocks=tuple(line.hash_ids),
                output_tokens=max(2, line.output_length // SCALE),
            )
            requests.append(request)
    return _at_rate(requests, rate)


def synthetic_trace(count: int, rate: float) -> list[TraceRequest]:
    """Generate a trace of the same shape.

    All prompts share their first block. Conversations have 1 to 12 turns. Over a third of the
    blocks of prompts were in the turn before. The length of prompts has a median of 19 blocks and a
    long tail.
    """
    rnd = random.Random(1)
    requests: list[TraceRequest] = []
    last_block = 0  # the highest number so far

    def new_blocks(median: float) -> tuple[int, ...]:
        nonlocal last_block
        drawn = int(rnd.lognormvariate(0, 1.0) * median)
        num_blocks = min(230, max(1, drawn))
        first = last_block + 1
        last_block += num_blocks
        return tuple(range(first, last_block + 1))

    while len(requests) < count:
        at_s = rnd.random()
        blocks = (0, *new_blocks(14))
        num_turns = min(12, 1 + int(rnd.expovariate(0.8)))
        for _ in range(num_turns):
            if at_s < 1:
                output_tokens = max(2, int(rnd.expovariate(1 / 22)))
                requests.append(TraceRequest(at_s, blocks, output_tokens))
            at_s += rnd.lognormvariate(0, 1.0) * 0.05
            blocks += new_blocks(3)
    return _at_rate(requests, rate)


def _at_rate(requests: list[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the requests in the order of their times, scaled so that `rate` come per second."""
    requests.sort()
    begin_s = requests[0].at_s
    end_s = requests[-1].at_s
    scale = len(requests) / rate / (end_s - begin_s)
    return [request._replace(at_s=(request.at_s - begin_s) * scale) for request in requests]


class _Cache:
    """The prefix cache of a worker that computes each prompt at once.

    The least recently used blocks go first.
    """

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # prefix hashes

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are cached."""
        for count, prefix in enumerate(hashes):
            if prefix not in self._blocks:
                return count
        return len(hashes)

    def store(self, hashes: Sequence[int], needed: int) -> None:
        """Cache the full blocks of a prompt. `needed` also counts its last, partial block."""
        if needed > self._limit:
            return
        for prefix in hashes:
            self._blocks.pop(prefix, None)
        while len(self._blocks) + needed > self._limit:
            self._blocks.popitem(last=False)
        # The last block of a prompt is the first one that is evicted.
        self._blocks.update(dict.fromkeys(reversed(hashes)))


def oracle_hits(
    trace: Sequence[TraceRequest], framing_tokens: int, cache_blocks: int, workers: int = 1
) -> int:
    """Return how many tokens an oracle finds in the caches of workers.

    It knows each cache. A prompt goes to the worker whose cache has most of it; of equal ones, to
    the worker with the fewest tokens of prompts so far. The beginning that all prompts share does
    not count, because otherwise all would follow the first one to its worker. Prompts are computed
    in the order in which they come, in no time. With one worker that has the space of all, this is
    more than any selection of workers can reach.

    Args:
        trace: the requests.
        framing_tokens: tokens that the chat template puts before each prompt.
        cache_blocks: blocks that each worker can cache.
        workers: the number of workers.
    """
    caches = [_Cache(cache_blocks) for _ in range(workers)]
    sent_tokens = [0] * workers
    hits = 0
    prompts = [_ids(request.blocks, framing_tokens) for request in trace]
    # The last token is never in a cache.
    hashed = [prefix_hashes(ids[:-1], BLOCK_TOKENS, 0) for ids in prompts]
    num_shared = _num_shared(hashed)
    for ids, hashes in zip(prompts, hashed, strict=True):
        found = [cache.match(hashes) for cache in caches]
        # The most cached blocks, then the fewest tokens.
        ranks = [
            (-max(num_shared, num_found), tokens)
            for num_found, tokens in zip(found, sent_tokens, strict=True)
        ]
        best = ranks.index(min(ranks))
        needed_blocks = math.ceil(len(ids) / BLOCK_TOKENS)
        caches[best].store(prefix_hashes(ids, BLOCK_TOKENS, 0), needed_blocks)
        hits += found[best] * BLOCK_TOKENS
        sent_tokens[best] += len(ids)
    return hits


def _num_shared(hashed: Sequence[Sequence[int]]) -> int:
    """Return with how many equal blocks all prompts begin; 0 if all blocks are equal."""
    for count, prefixes in enumerate(zip(*hashed, strict=False)):
        if len(set(prefixes)) > 1:
            return count
    return 0


def _ids(blocks: Sequence[int], framing_tokens: int) -> array[int]:
    """Return numbers in place of the tokens of a prompt, equal ones for equal blocks."""
    ids = array("i", repeat(_NEW, framing_tokens))
    for block in blocks:
        ids.extend(repeat(block, BLOCK_TOKENS))
    ids.append(_NEW)
    return ids

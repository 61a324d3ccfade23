"""Converts lessons to token ids with the frontend's renderer.

The ids are then mapped to the compact vocabulary.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from dataclasses import dataclass
from datetime import date

import numpy as np
from corpus import Lesson, Writer

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.models import vocabulary

SHARD = 500  # lessons per seed, independent of the number of processes
MAX_TOKENS = 2560  # longer lessons are left out
MAX_TOUCHED = 4096
# The control tokens <|start|>, <|end|> and <|message|>.
_START = 200006
_END = 200007
_MESSAGE = 200008
_ROLE_TOKENS = 3  # a message begins with <|start|>, the role and <|message|>


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Token ids of prompt and output; the loss begins at `output_start`.

    Noise falls on `noisy` positions.
    """

    ids: np.ndarray
    output_start: int
    noisy: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The used ids, sorted.

    Compact id i stands for touched[i], and len(touched) for every other id.
    """

    touched: np.ndarray

    @property
    def rest(self) -> int:
        return len(self.touched)

    def compact(self, ids: np.ndarray) -> np.ndarray:
        places = np.searchsorted(self.touched, ids).clip(max=self.rest - 1)
        return np.where(self.touched[places] == ids, places, self.rest)


def make_examples(count: int, *, seed: int, processes: int) -> list[Example]:
    """Return `count` examples, the same for the same seed.

    Examples longer than MAX_TOKENS are left out.
    """
    shards = [seed * 1_000_003 + index for index in range((count + SHARD - 1) // SHARD)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        made = pool.map(_shard, shards, chunksize=1)
    return [example for shard in made for example in shard][:count]


def make_vocabulary(examples: list[Example]) -> Vocabulary:
    """Return all ids in outputs, all control tokens, and the most frequent ids in prompts."""
    needed: set[int] = set()
    counts: Counter[int] = Counter()
    for example in examples:
        needed.update(example.ids[example.output_start :].tolist())
        counts.update(set(example.ids[: example.output_start].tolist()))
    needed.update(number for number in counts if number >= vocabulary.FIRST_SPECIAL)
    frequent = [number for number, seen in counts.most_common(MAX_TOUCHED) if seen >= 20]
    if len(needed) < MAX_TOUCHED:
        needed.update(frequent)
    return Vocabulary(touched=np.array(sorted(needed), dtype=np.int32))


def compact_example(example: Example, vocab: Vocabulary, rng: np.random.Generator) -> np.ndarray:
    """Return compact ids.

    Noisy positions are replaced, mostly by the unknown id and some by a random id.
    """
    ids = vocab.compact(example.ids)
    words = np.flatnonzero(vocab.touched < vocabulary.FIRST_SPECIAL)
    is_unknown = rng.random(len(ids)) < 0.75
    replacements = np.where(is_unknown, vocab.rest, rng.choice(words, len(ids)))
    return np.where(example.noisy, replacements, ids).astype(np.int32)


def _shard(seed: int) -> list[Example]:
    writer = Writer(seed)
    classroom = Classroom()
    rng = np.random.default_rng(seed)
    made = (classroom.example(writer.lesson(), rng) for _ in range(SHARD))
    return [example for example in made if len(example.ids) <= MAX_TOKENS]


class Classroom:
    """Converts lessons to examples, with the date of each lesson."""

    def __init__(self) -> None:
        self._today = date.min
        self._renderer = HarmonyRenderer(today=lambda: self._today)

    def example(self, lesson: Lesson, rng: np.random.Generator) -> Example:
        self._today = lesson.today
        prompt = np.array(self._renderer.render(lesson.conversation), dtype=np.int32)
        harmony = o200k_tokenizer.load_tokenizer().harmony
        output = harmony.encode(lesson.output, allowed_special="all")
        ids = np.concatenate([prompt, np.array(output, dtype=np.int32)])
        noisy = np.zeros(len(ids), dtype=bool)
        first, last = _last_user_text(prompt)
        noisy[first:last] = rng.random(last - first) < lesson.noise
        # What was said before must not matter.
        if not lesson.conversation.tools and rng.random() < 0.2:
            system_end = int(np.flatnonzero(ids == _END)[0])
            noisy[system_end:first] = rng.random(first - system_end) < 0.5
        noisy &= ids < vocabulary.FIRST_SPECIAL
        for start in np.flatnonzero(ids == _START):  # the role names stay
            noisy[start : start + _ROLE_TOKENS] = False
        return Example(ids=ids, output_start=len(prompt), noisy=noisy)


def _last_user_text(prompt: np.ndarray) -> tuple[int, int]:
    user = o200k_tokenizer.load_tokenizer().harmony.encode("user")[0]
    begins_user_message = (
        (prompt[:-2] == _START) & (prompt[1:-1] == user) & (prompt[2:] == _MESSAGE)
    )
    first = int(np.flatnonzero(begins_user_message)[-1]) + _ROLE_TOKENS
    length = int(np.flatnonzero(prompt[first:] == _END)[0])
    return first, first + length

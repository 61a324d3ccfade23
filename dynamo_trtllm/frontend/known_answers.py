"""Answers that are known before a pair is asked for them: those of one worker that does the whole request by itself.

A prefill/decode pair whose KV arrives changed, stale or not at all still answers, with other tokens. Comparing tokens
finds that for every engine, whatever moves its KV.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from dynamo_trtllm.errors import DynamoError, EngineRefused, RequestError
from dynamo_trtllm.messages import Instance, Role, TokenIds, token_ids
from dynamo_trtllm.router.policy import Placement
from dynamo_trtllm.router.view import ModelView

ANSWER_TOKENS: Final = 8
"""Few enough that rounding rarely changes one. With 4, models with random weights did not notice a lost eighth of
every KV row in 7 of 24 cases, with 8 in 1."""
_PROMPT_TOKENS: Final = 168  # longer than the sliding window of gpt-oss (128), and ends within a block


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What a prompt is answered with by a worker alone, greedily."""

    prompt: TokenIds
    tokens: list[int]  # ANSWER_TOKENS of them
    depends_on_kv: bool  # after another prompt the same first token is followed by other tokens


class Ask(Protocol):
    """Sends one greedy request to `placement` and returns the tokens of its answer.

    Raises DynamoError, or TimeoutError when the answer takes too long.
    """

    async def __call__(
        self, placement: Placement, prompt: TokenIds, max_tokens: int, *, resumed_tokens: int = 0
    ) -> list[int]: ...


class _Key(NamedTuple):
    decode: int
    prompt_tokens: int


class _Failure(NamedTuple):
    at_s: float
    error: Exception


class KnownAnswers:
    """The known answers per decode instance, asked for when they are needed first."""

    def __init__(self) -> None:
        self._answers: dict[_Key, list[KnownAnswer]] = {}
        self._locks: defaultdict[_Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failures: dict[_Key, _Failure] = {}

    async def get(self, number: int, placement: Placement, view: ModelView, ask: Ask) -> KnownAnswer | None:
        """Return known answer `number` for a pair, counted from 0; None when no worker of the model can give one.

        Raises what `ask` raises. A failure is shared with the pairs that waited for the same answer meanwhile: a worker
        that does not answer costs its pairs one time-out, not one each.
        """
        sources = _sources(placement, view)
        if not is_salted(placement):  # a prefix cache would answer a prompt that was used before
            return await _make(placement, sources, ask)
        key, begun_s = _Key(placement.decode.id, _prompt_tokens(placement)), asyncio.get_running_loop().time()
        async with self._locks[key]:
            failure = self._failures.get(key)
            if failure is not None and failure.at_s >= begun_s:
                raise failure.error
            answers = self._answers.setdefault(key, [])
            while len(answers) <= number:
                try:
                    made = await _make(placement, sources, ask)
                except (DynamoError, TimeoutError) as exc:
                    self._failures[key] = _Failure(asyncio.get_running_loop().time(), exc)
                    raise
                if made is None:
                    return None
                answers.append(made)
            return answers[number]

    def forget(self, decode: int) -> None:
        """Use other prompts next time: two tokens may have been about equally likely after all of these."""
        for key in [key for key in self._answers if key.decode == decode]:
            self._answers[key] = []

    def keep_only(self, ids: Iterable[int]) -> None:
        """Forget instances that are gone."""
        kept = set(ids)
        for key in [key for key in self._locks if key.decode not in kept and not self._locks[key].locked()]:
            del self._locks[key]
            self._answers.pop(key, None)
            self._failures.pop(key, None)


def random_prompt(placement: Placement) -> TokenIds:
    """Return a prompt that no worker has seen. Raises ValueError for a model without a vocabulary.

    Its ids are of the middle half of the vocabulary: control tokens and placeholders of pictures are at the ends.
    """
    vocab_size = placement.decode.card.vocab_size
    ids = (vocab_size // 4 + secrets.randbelow(vocab_size // 2) for _ in range(_prompt_tokens(placement)))
    return token_ids(ids)


def _prompt_tokens(placement: Placement) -> int:
    """Return the length of a canary's prompt: more than two KV blocks, if both workers can hold so many tokens."""
    instances = _instances(placement)
    block = max(instance.layout.block_tokens for instance in instances)
    room = min(instance.card.context_length for instance in instances) - ANSWER_TOKENS
    for limits in (instance.limits for instance in instances):
        if limits.max_num_tokens:
            room = min(room, limits.max_num_tokens)
        if limits.kv_blocks:
            room = min(room, limits.kv_blocks * block // 2)
    return max(1, min(room, max(_PROMPT_TOKENS, 2 * block + block // 2 + 1)))


def is_salted(placement: Placement) -> bool:
    """Whether the pair's workers keep the prefix caches of different salts apart."""
    return not any("cache_salt" in instance.card.refuses for instance in _instances(placement))


def _instances(placement: Placement) -> list[Instance]:
    return [placement.decode] if placement.prefill is None else [placement.decode, placement.prefill]


def _sources(placement: Placement, view: ModelView) -> list[Instance]:
    """Who may give the known answer, the best first: the decode worker, as its own rounding is that of the pair.

    Where salts do not keep prefix caches apart it is left out: it would then find the prompt's KV in its own cache,
    and the pair would move none.
    """
    wanted = [*_instances(placement), *view.aggregated]
    if not is_salted(placement):
        wanted.remove(placement.decode)
    return [instance for instance in wanted if instance.serves_whole or instance.role is Role.AGGREGATED]


async def _make(placement: Placement, sources: Iterable[Instance], ask: Ask) -> KnownAnswer | None:
    for source in sources:
        alone, prompt, other = Placement(None, source), random_prompt(placement), random_prompt(placement)
        try:
            tokens = await ask(alone, prompt, ANSWER_TOKENS)
            follows = await ask(alone, other + token_ids(tokens[:1]), ANSWER_TOKENS - 1, resumed_tokens=1)
        except (DynamoError, TimeoutError) as exc:
            refused = isinstance(exc, (EngineRefused, RequestError))  # it serves whole requests, and not this one
            if source in _instances(placement) and not refused:
                raise
            continue
        if len(tokens) == ANSWER_TOKENS:
            return KnownAnswer(prompt, tokens, depends_on_kv=follows != tokens[1:])
    return None

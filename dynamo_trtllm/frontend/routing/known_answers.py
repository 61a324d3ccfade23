"""Obtain the known answers with which the probes of prefill/decode pairs are compared.

A known answer comes from one worker that runs the aggregated request. A pair whose KV arrives
changed, stale or not at all still answers, but with other tokens. Comparing tokens detects this for
every engine and KV transfer backend.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.protocol.errors import DynamoError, RequestError, RequestRejected
from dynamo_trtllm.protocol.messages import Instance, Role, TokenIds, token_ids

ANSWER_TOKENS: Final = 8
"""Output tokens of a probe.

Few enough that rounding rarely changes one. In 24 trials on models with random weights,
losing an eighth of every KV row was missed 7 times with 4 tokens and once with 8.
"""
_PROMPT_TOKENS: Final = 168  # longer than the sliding window of gpt-oss (128); ends within a block


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A prompt and the greedy answer of one worker that ran it as an aggregated request."""

    prompt: TokenIds
    tokens: list[int]  # ANSWER_TOKENS of them
    depends_on_kv: bool  # another prompt with the same first output token continues differently


ProbeCall: TypeAlias = Callable[[WorkerSelection, TokenIds, int], Awaitable[list[int]]]
"""A function that sends one greedy request to some workers and returns the output tokens.

The prompt ends with as many tokens of the answer as the number says, and the request is for the
rest of ANSWER_TOKENS. It raises DynamoError if the request failed, and TimeoutError if the answer
took too long.
"""


@dataclass(slots=True, eq=False)
class _Making:
    """A known answer that is there or being made.

    The task is cancelled when no pair waits for it any more.
    """

    task: asyncio.Task[KnownAnswer | None]
    num_waiting: int = 0


class KnownAnswers:
    """The known answers per decode instance, requested when first needed."""

    def __init__(self) -> None:
        # By decode instance, and by length of the prompt and number of the answer.
        self._answers: defaultdict[int, dict[tuple[int, int], _Making]] = defaultdict(dict)

    async def get(
        self, number: int, selection: WorkerSelection, view: ModelView, ask: ProbeCall
    ) -> KnownAnswer | None:
        """Return known answer `number` (from 0) for a pair; None if no worker can give one.

        Raises what `ask` raises. A failure is shared with all pairs that waited for the same
        answer, so that the pairs of a worker that does not answer wait for one timeout together.
        """
        sources = _sources(selection, view)
        # Without salts, a prefix cache would hit on a prompt that was used before.
        if not is_salted(selection):
            return await _make(selection, sources, ask)
        answers = self._answers[selection.decode.id]
        key = (_prompt_tokens(selection), number)
        making = answers.get(key)
        if making is None:
            task = asyncio.create_task(_make(selection, sources, ask), name="known answer")
            making = _Making(task)
            answers[key] = making
        making.num_waiting += 1
        answer: KnownAnswer | None = None
        try:
            answer = await asyncio.shield(making.task)
        finally:
            making.num_waiting -= 1
            if not making.num_waiting:
                making.task.cancel()  # nothing happens if it has ended
            is_useless = answer is None and (making.task.done() or not making.num_waiting)
            if is_useless and answers.get(key) is making:
                del answers[key]
        return answer

    def forget(self, decode: int) -> None:
        """Drop the answers of a decode instance, so that new prompts are used.

        In an answer, two tokens may be equally likely.
        """
        self._answers.pop(decode, None)

    def keep_only(self, ids: Iterable[int]) -> None:
        """Drop the answers of instances that are not in `ids`."""
        for decode in self._answers.keys() - set(ids):
            del self._answers[decode]


def random_prompt(selection: WorkerSelection) -> TokenIds:
    """Return a prompt of random tokens from the middle half of the vocabulary.

    Control tokens and image placeholders are usually at the ends. Raises ValueError for a card
    without a vocabulary.
    """
    size = selection.decode.card.vocab_size
    begin = size // 4
    count = size // 2
    if count < 1:
        raise ValueError(
            f"the card of model {selection.decode.card.name} has a vocabulary of {size} tokens"
        )
    # One system call. One per token was half of the CPU time of a probe.
    num_bytes = array("I").itemsize * _prompt_tokens(selection)
    numbers = array("I", secrets.token_bytes(num_bytes))
    return token_ids(begin + number % count for number in numbers)


def _prompt_tokens(selection: WorkerSelection) -> int:
    """Return the length of a probe's prompt: more than two KV blocks if both workers hold them."""
    instances = _instances(selection)
    block = max(instance.layout.block_tokens for instance in instances)
    max_prompt = min(instance.card.context_length for instance in instances) - ANSWER_TOKENS
    for instance in instances:
        limits = instance.limits
        if limits.max_num_tokens:
            max_prompt = min(max_prompt, limits.max_num_tokens)
        if limits.kv_blocks:
            max_prompt = min(max_prompt, limits.kv_blocks * block // 2)
    wanted = max(_PROMPT_TOKENS, 2 * block + block // 2 + 1)
    return max(1, min(max_prompt, wanted))


def is_salted(selection: WorkerSelection) -> bool:
    """Return True if the pair's workers separate their prefix caches by salt."""
    return not any(
        "cache_salt" in instance.card.unsupported_features for instance in _instances(selection)
    )


def _instances(selection: WorkerSelection) -> list[Instance]:
    if selection.prefill is None:
        return [selection.decode]
    return [selection.decode, selection.prefill]


def _sources(selection: WorkerSelection, view: ModelView) -> list[Instance]:
    """Return the workers that may give the known answer, the best first.

    The decode worker is first because it rounds as the pair does. Without cache salts it is
    excluded: its prefix cache would then contain the prompt's KV, and the pair would transfer none.
    """
    wanted = [*_instances(selection), *view.aggregated]
    if not is_salted(selection):
        wanted.remove(selection.decode)
    return [
        instance
        for instance in wanted
        if instance.can_aggregate or instance.role is Role.AGGREGATED
    ]


async def _make(
    selection: WorkerSelection, sources: Iterable[Instance], ask: ProbeCall
) -> KnownAnswer | None:
    for source in sources:
        alone = WorkerSelection(None, source)
        prompt = random_prompt(selection)
        other = random_prompt(selection)
        try:
            tokens = await ask(alone, prompt, 0)
            follows = await ask(alone, other + token_ids(tokens[:1]), 1)
        except (DynamoError, TimeoutError) as exc:
            # A worker that does not support this request says nothing about the pair: ask another.
            is_rejected = isinstance(exc, (RequestRejected, RequestError))
            if source in _instances(selection) and not is_rejected:
                raise
            continue
        if len(tokens) == ANSWER_TOKENS:
            return KnownAnswer(prompt, tokens, depends_on_kv=follows != tokens[1:])
    return None

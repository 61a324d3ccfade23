"""Probe every idle pair: its answer to a prompt must be that of its decode worker alone.

Probes prove that pairs are ready, and end quarantine. A pair whose KV arrives changed, stale or not
at all still answers, but with other tokens; comparing them detects this for every engine and KV
transfer backend. Such a pair gets no requests. The first probe of a pair also causes its handshake,
so that no user's request waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import secrets
import time
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.pairs import PAIR_FAILURES, Pair, WorkerSelection, format_pair
from dynamo_trtllm.frontend.routing.probe_schedule import (
    MAX_PAIRS,
    is_probed,
    new_pairs,
)
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    Sampling,
    TokenIds,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.protocol.streams import run_stream
from dynamo_trtllm.support.background import wait_for_first

log = logging.getLogger(__name__)

_CANCEL_S = 1.0  # time in which the cancel of a probe arrives at the worker

# Probes per decode worker: one of them may wait for a prefill worker that hangs.
_MAX_CONCURRENT = 2
# Probes at the same time: thousands of them would be an overload that makes them fail.
_MAX_ALL = 128
_UNAVAILABLE_S = 1.0  # pause before the request plane is checked again
# Output tokens of a probe: few enough that rounding rarely changes one. In 24 trials on models with
# random weights, losing an eighth of every KV row was missed 7 times with 4 tokens and once with 8.
ANSWER_TOKENS: Final = 8
_PROMPT_TOKENS: Final = 168  # longer than the sliding window of gpt-oss (128); ends within a block
# A wrong answer is followed by another prompt: rounding rarely changes the answers to all of them.
_MAX_PROMPTS: Final = 3
# Rounding may choose another one of so many likeliest tokens, if its log-probability is lower by at
# most _NEAR_LOGPROB. vLLM's own tests compare models by the first of these conditions
# (`check_logprobs_close` in its tests/models/utils.py).
_NEAR_TOKENS: Final = 5
_NEAR_LOGPROB: Final = 0.5
_PASSED = "ok"
_ERROR_CHARS = 300  # longest text of an unexpected exception in /health, in characters


class _Due(NamedTuple):
    """A pair in the queue of probes, ordered by time."""

    due_at: float
    number: int  # decides between equal times: pairs cannot be compared
    pair: Pair


class _ProbeAnswer(NamedTuple):
    """The output tokens of a request of a probe."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]  # empty if they were not requested


class _Difference(NamedTuple):
    """A prompt to which a pair and its decode worker alone gave different answers."""

    prompt: TokenIds
    expected: list[int]  # the tokens of the decode worker alone
    tokens: list[int]  # those of the pair


class _ProbeResult(NamedTuple):
    """The outcome of a probe."""

    code: str  # the label of the metric
    reason: str = ""  # the reason of a failure


@dataclass(eq=False)
class PairProbes:
    """The probes of all pairs of workers. The owner runs `run` in a task.

    Args:
        router: runs the probes. Its breakers record their outcomes.
        probe_finished: is called after each probe, with its `model` and `code`.
        interval_s: seconds between probes of an idle pair, of at most MAX_PAIRS.
        timeout_s: longest time of each request of a probe.
    """

    router: RequestRouter
    probe_finished: Callable[..., None]
    interval_s: float
    timeout_s: float

    def __post_init__(self) -> None:
        self._view = self.router.view
        self._breakers = self.router.breakers
        self._numbers = itertools.count(1)
        # Pairs whose probe raised an unexpected exception and has not passed since.
        self._unexpected_failures: set[Pair] = set()
        self._probing: set[Pair] = set()
        self._changes = self._view.subscribe()
        self._queue: list[_Due] = []  # a heap
        # For each pair in the queue, its earliest time. Entries with another time are outdated.
        self._due_at: dict[Pair, float] = {}
        self._slots: defaultdict[int, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, _MAX_CONCURRENT)
        )
        self._all_slots = asyncio.Semaphore(_MAX_ALL)
        # The workers of pairs that are compared again, because their answers differed.
        self._compared_again: set[int] = set()
        self._comparison_ended = asyncio.Condition()
        self._probed = asyncio.Event()

    async def run(self) -> None:
        """Send probes until cancelled.

        Each pair is probed in its own task, so that a slow one delays no other.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                changed = self._view.changed
                self._probed.clear()
                self._schedule_changed()
                # Without the request plane, thousands of probes would fail per second.
                if self.router.plane.unavailable_reason() is not None:
                    await asyncio.sleep(_UNAVAILABLE_S)
                    continue
                now = time.monotonic()
                for pair, model in self._pop_due(now):
                    self._probing.add(pair)
                    group.create_task(self._probe_one(pair, model), name="pair probe")
                timeout_s = None
                if self._queue:
                    timeout_s = max(0.0, self._queue[0].due_at - now)
                await wait_for_first(changed.wait(), self._probed.wait(), timeout_s=timeout_s)

    @property
    def _idle_s(self) -> float:
        """Time between probes of an idle pair.

        It is longer with many pairs, so that probes are never most of the load.
        """
        return self.interval_s * max(1.0, len(self._due_at) / MAX_PAIRS)

    def _schedule_changed(self) -> None:
        """Schedule pairs that are new or may be due earlier, and drop instances that are gone."""
        # New pairs get no requests before their probe.
        self.router.health.update_breakers(time.monotonic())
        if not all(change.is_added for change in self._changes):
            self._keep_only(self._view.ids())
        while self._changes:
            change = self._changes.popleft()
            for pair in new_pairs(self._view.model(change.instance.card.name), change):
                self._schedule(pair)
        while self._breakers.rescheduled:
            self._schedule(self._breakers.rescheduled.pop())

    def _schedule(self, pair: Pair) -> None:
        if pair in self._probing:
            return
        due_at = self._breakers.due_at(pair, self._idle_s)
        is_earlier = due_at < self._due_at.get(pair, math.inf)
        if is_earlier:
            self._due_at[pair] = due_at
            heapq.heappush(self._queue, _Due(due_at, next(self._numbers), pair))

    def _pop_due(self, now: float) -> Iterator[tuple[Pair, str]]:
        """Yield the pairs to probe now with their models.

        A pair that was seen since it was scheduled is due later. One that is not to be probed any
        more is dropped.
        """
        while self._queue and self._queue[0].due_at <= now:
            due_at, _, pair = heapq.heappop(self._queue)
            if self._due_at.get(pair) != due_at:
                # The pair was scheduled for an earlier time, too.
                continue
            del self._due_at[pair]
            selection = self._selection(pair)
            if selection is None:
                continue
            model = selection.decode.card.name
            if not is_probed(self._view.model(model), pair, self._breakers.quarantined):
                continue
            if self._breakers.due_at(pair, self._idle_s) > now:
                self._schedule(pair)
            else:
                yield pair, model

    def _keep_only(self, ids: Collection[int]) -> None:
        self._unexpected_failures = {
            (prefill, decode)
            for prefill, decode in self._unexpected_failures
            if decode in ids and (prefill is None or prefill in ids)
        }
        for decode in list(self._slots):
            if decode not in ids:
                del self._slots[decode]

    async def _probe_one(self, pair: Pair, model: str) -> None:
        _, decode_id = pair
        try:
            async with self._slots[decode_id], self._all_slots:
                code = await self._probe_safely(pair)
            self.probe_finished(model=model, code=code)
        finally:
            self._probing.discard(pair)
            self._schedule(pair)
            self._probed.set()

    async def _probe_safely(self, pair: Pair) -> str:
        """Probe a pair. An unexpected exception counts as a failure of this pair alone."""
        try:
            code = await self._probe(pair)
        # A probe uses data that workers send. An exception would end the probes of all pairs and
        # the frontend. The traceback is logged once per pair until its probe passes.
        except Exception as exc:
            code = errors.InternalError.code
            if pair not in self._unexpected_failures:
                self._unexpected_failures.add(pair)
                log.error(
                    "probe raised an unexpected exception: %s", format_pair(pair), exc_info=exc
                )
            self._record_failure(pair, f"{code}: {type(exc).__name__}: {str(exc)[:_ERROR_CHARS]}")
        if code == _PASSED:
            self._unexpected_failures.discard(pair)
        return code

    async def _probe(self, pair: Pair) -> str:
        """Probe a pair and record the outcome in its breaker. Return the code for the metric."""
        selection = self._selection(pair)
        if selection is None:
            return "gone"
        timeline = ChoiceTimeline()
        try:
            code, text = await self._compare(selection, timeline)
        except TimeoutError:
            code = "failed"
            text = f"no answer to a probe within {self.timeout_s:g} s"
        except PAIR_FAILURES as exc:
            return exc.code  # the router has recorded it
        except errors.CapacityError as exc:  # a busy worker is not a broken pair
            self._breakers.defer(pair, time.monotonic())
            return exc.code
        # An unreachable worker says nothing about KV transfer.
        except (errors.Unreachable, errors.Disconnected) as exc:
            self._breakers.record_unreachable(pair, f"{exc.code}: {exc.message}", time.monotonic())
            called = timeline.decode_instance
            if called is None:
                called = timeline.prefill_instance
            if called is not None:
                self.router.health.record_failed_call(called, exc, time.monotonic())
            return exc.code
        except DynamoError as exc:
            self._record_failure(pair, f"{exc.code}: {exc.message}")
            return exc.code
        if code == _PASSED:
            self.router.health.record_success(pair, time.monotonic(), is_probe=True)
        else:
            self._record_failure(pair, text, is_wrong=code == "mismatch")
        return code

    async def _compare(self, selection: WorkerSelection, timeline: ChoiceTimeline) -> _ProbeResult:
        """Compare the pair's answer to a prompt with that of its decode worker alone.

        If they differ, compare the answers to further prompts.
        """
        are_near = True  # rounding may have changed all answers
        for number in range(_MAX_PROMPTS):
            # What an engine computes in the same steps may change its rounding, as the probes of
            # other pairs do. So further prompts are compared for one pair of a worker at a time.
            is_first = number == 0
            async with contextlib.AsyncExitStack() as stack:
                if not is_first:
                    await stack.enter_async_context(self._comparing_again(selection))
                found = await self._compare_one(selection, timeline)
                if isinstance(found, _ProbeResult):
                    return found
                # One answer that rounding can't explain is enough.
                if not is_first:
                    are_near = are_near and await self._is_near(selection, timeline, found)
        if are_near:
            log.info(
                "worker %x: with the KV of another worker, it answers %d probes with other tokens"
                " that are about as likely: rounding explains that",
                selection.decode.id,
                _MAX_PROMPTS,
            )
            return _ProbeResult(_PASSED)
        text = (
            f"its answers to {_MAX_PROMPTS} prompts differ from those of the decode worker alone,"
            " and have tokens that are unlikely there: KV arrives changed, stale or not at all;"
            " check that both workers have the same build, model files and KV settings, and check"
            " the transport between them"
        )
        return _ProbeResult("mismatch", text)

    @asynccontextmanager
    async def _comparing_again(self, selection: WorkerSelection) -> AsyncIterator[None]:
        """Wait until no other pair of these workers is compared again, and then keep others away.

        A pair that waits keeps no worker for itself. So a worker that hangs delays its own pairs
        only.
        """
        ids = {selection.decode.id}
        if selection.prefill is not None:
            ids.add(selection.prefill.id)
        async with self._comparison_ended:
            await self._comparison_ended.wait_for(lambda: not self._compared_again & ids)
            self._compared_again |= ids
        try:
            yield
        finally:
            self._compared_again -= ids
            async with self._comparison_ended:
                self._comparison_ended.notify_all()

    async def _compare_one(
        self, selection: WorkerSelection, timeline: ChoiceTimeline
    ) -> _ProbeResult | _Difference:
        """Compare the answers to one prompt.

        An aggregated instance, and a pair whose decode worker can't run aggregated requests, only
        have to answer.
        """
        prompt = random_prompt(selection)
        expected: list[int] | None = None
        if selection.prefill is not None and selection.decode.can_aggregate:
            alone = WorkerSelection(None, selection.decode)
            expected = (await self._ask(timeline, alone, prompt)).token_ids
        tokens = (await self._ask(timeline, selection, prompt)).token_ids
        for answer in (tokens, expected):
            if answer is not None and len(answer) != ANSWER_TOKENS:
                text = f"a probe of {ANSWER_TOKENS} tokens returned {len(answer)}"
                return _ProbeResult("failed", text)
        if selection.prefill is None:
            return _ProbeResult(_PASSED)
        if not (timeline.decode_stats and timeline.decode_stats.kv_bytes):
            text = "the decode worker answered a probe without reading the prefill worker's KV"
            return _ProbeResult("failed", text)
        if expected is None or tokens == expected:
            return _ProbeResult(_PASSED)
        return _Difference(prompt, expected, tokens)

    async def _is_near(
        self, selection: WorkerSelection, timeline: ChoiceTimeline, found: _Difference
    ) -> bool:
        """Return whether rounding may explain a difference.

        The first token that differs is then about as likely as the likeliest one at the decode
        worker, after the prompt and the tokens that are equal. False if this is not known.
        """
        prompt, expected, tokens = found
        num_equal = next(at for at, token in enumerate(tokens) if token != expected[at])
        try:
            answer = await self._ask(
                timeline,
                WorkerSelection(None, selection.decode),
                prompt + token_ids(expected[:num_equal]),
                max_tokens=1,
                logprobs=_NEAR_TOKENS,
            )
        except errors.RequestRejected:
            return False  # the engine reports no log-probabilities
        likely = dict(answer.logprobs[0].top) if answer.logprobs else {}
        logprob = likely.get(tokens[num_equal], -math.inf)
        return logprob >= max(likely.values(), default=0.0) - _NEAR_LOGPROB

    async def _ask(
        self,
        timeline: ChoiceTimeline,
        selection: WorkerSelection,
        prompt: TokenIds,
        *,
        max_tokens: int = ANSWER_TOKENS,
        logprobs: int | None = None,
    ) -> _ProbeAnswer:
        """Send a greedy request to these workers, and return its answer.

        Each request has its own salt: otherwise a prefix cache could replace the KV transfer.

        Args:
            timeline: filled while the request runs.
            selection: the workers.
            prompt: the prompt.
            max_tokens: number of output tokens.
            logprobs: for how many of the likeliest tokens their log-probabilities are requested.

        Raises:
            DynamoError: the request failed.
            TimeoutError: it took too long.
        """
        timeline.reset_calls()
        request = GenerateRequest(
            request_id=f"probe-{next(self._numbers)}",
            model=selection.decode.card.name,
            token_ids=prompt,
            sampling=Sampling(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs
            ),
            # The limit below comes first, and cancels the request. The deadline ends it if this
            # cancel is lost.
            deadline=time.time() + self.timeout_s + _CANCEL_S,
            cache_salt=secrets.token_hex(8),
        )
        answer = _ProbeAnswer([], [])

        def collect(chunk: Chunk) -> bool:
            answer.token_ids.extend(chunk.token_ids)
            answer.logprobs.extend(chunk.logprobs)
            return True

        generate = partial(self.router.generate, request, timeline, selection=selection)
        async with asyncio.timeout(self.timeout_s):
            await run_stream(generate, collect)
        return answer

    def _selection(self, pair: Pair) -> WorkerSelection | None:
        prefill_id, decode_id = pair
        prefill = None if prefill_id is None else self._view.instance(prefill_id)
        decode = self._view.instance(decode_id)
        is_prefill_gone = prefill is None and prefill_id is not None
        if decode is None or is_prefill_gone:
            return None
        return WorkerSelection(prefill, decode)

    def _record_failure(self, pair: Pair, reason: str, *, is_wrong: bool = False) -> None:
        if self._breakers.record_failure(pair, reason, time.monotonic(), is_wrong=is_wrong):
            log.error("%s quarantined: %s", format_pair(pair), reason)


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
    instances = [selection.decode]
    if selection.prefill is not None:
        instances.append(selection.prefill)
    block_tokens = max(instance.layout.block_tokens for instance in instances)
    max_prompt = min(instance.card.context_length for instance in instances) - ANSWER_TOKENS
    for instance in instances:
        limits = instance.limits
        if limits.max_num_tokens:
            max_prompt = min(max_prompt, limits.max_num_tokens)
        if limits.kv_blocks:
            # A probe takes at most half of a KV cache.
            max_prompt = min(max_prompt, limits.kv_blocks * block_tokens // 2)
        if limits.max_transfer_blocks:
            max_prompt = min(max_prompt, limits.max_transfer_blocks * block_tokens)
    # Two blocks, and a bit more than half of a third one.
    two_and_half_blocks = 2 * block_tokens + block_tokens // 2 + 1
    wanted = max(_PROMPT_TOKENS, two_and_half_blocks)
    return max(1, min(max_prompt, wanted))

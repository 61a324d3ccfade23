"""Requests of two tokens through every idle pair: readiness that has crossed the wire, and the way out of quarantine.

Two, because one token has no decode leg and would cross nothing. The first canary of a pair also pays its handshake,
so that no user does. A worker none of whose pairs works any more, while others do, is asked to restart.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from dynamo_trtllm.errors import (
    CapacityError,
    Disconnected,
    DynamoError,
    HandoffTimeout,
    InternalError,
    TransferFailed,
    Unreachable,
)
from dynamo_trtllm.frontend.pipeline import Pipeline, Trace
from dynamo_trtllm.messages import GenerateRequest, Instance, ModelCard, Restart, Sampling, token_ids
from dynamo_trtllm.plane.base import Plane
from dynamo_trtllm.router.pairs import Pair, PairBook, pairs_of, poisoned, spelled
from dynamo_trtllm.router.policy import Placement
from dynamo_trtllm.router.view import ClusterView

_log = logging.getLogger(__name__)

_PROMPT_TOKENS = 8
_AT_ONCE = 4
_PASSED = "ok"
_MOST_SAID = 300  # longest text of an unexpected exception in /health, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    interval_s: float = 30.0  # of a pair that serves nothing
    timeout_s: float = 10.0


class CanaryMetrics(Protocol):
    def canary_finished(self, *, model: str, code: str) -> None: ...


class Canaries:
    """`run` in a task of the owner's."""

    def __init__(self, view: ClusterView, pipeline: Pipeline, book: PairBook, options: CanaryOptions) -> None:
        self._view = view
        self._pipeline = pipeline
        self._book = book
        self._options = options
        self._numbers = itertools.count(1)
        self._asked_to_restart: set[int] = set()
        # pairs whose canary raised an unexpected exception and has not passed since
        self._broke: set[Pair] = set()

    async def run(self, plane: Plane, metrics: CanaryMetrics) -> None:
        """Until cancelled."""
        while True:
            changed = self._view.changed
            models = self._pairs()
            due = self._book.due(models, time.monotonic(), self._options.interval_s)
            if due:
                await self._try_all({pair: models[pair] for pair in due}, metrics)
                await self._restart_poisoned(plane, list(models))
                continue
            next_at = self._book.next_due_at(models, self._options.interval_s)
            await _first_of(changed, None if next_at is None else next_at - time.monotonic())

    def _pairs(self) -> dict[Pair, str]:
        return {pair: name for name in self._view.models() for pair in pairs_of(self._view.model(name))}

    async def _try_all(self, due: dict[Pair, str], metrics: CanaryMetrics) -> None:
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(pair: Pair, model: str) -> None:
            async with places:
                metrics.canary_finished(model=model, code=await self._try_safely(pair))

        async with asyncio.TaskGroup() as group:
            for pair, model in due.items():
                group.create_task(one(pair, model))

    async def _try_safely(self, pair: Pair) -> str:
        """As `_try`; an unexpected exception is the failure of this pair alone."""
        try:
            code = await self._try(pair)
        # A canary uses data that workers send. An exception would end the canaries of all pairs and the frontend. The
        # traceback is logged once per pair until its canary passes.
        except Exception as exc:  # noqa: BLE001
            code = InternalError.code
            if pair not in self._broke:
                self._broke.add(pair)
                prefill, decode = ("none" if each is None else f"{each:x}" for each in pair)
                text = "canary raised an unexpected exception: prefill %s, decode %s"
                _log.error(text, prefill, decode, exc_info=exc)
            self._note(pair, f"{code}: {type(exc).__name__}: {str(exc)[:_MOST_SAID]}")
        if code == _PASSED:
            self._broke.discard(pair)
        return code

    async def _try(self, pair: Pair) -> str:
        """Notes the outcome in the book; returns "ok" or an error's code."""
        placement = self._placement(pair)
        if placement is None:
            return "gone"
        trace = Trace()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                reason = await self._outcome(placement, trace)
        except TimeoutError:
            reason = f"no answer to a canary within {self._options.timeout_s:g} s"
        except (TransferFailed, HandoffTimeout) as exc:
            return exc.code  # the pipeline has noted it
        except CapacityError as exc:  # busy is not broken
            self._book.postpone(pair, time.monotonic())
            return exc.code
        except (Unreachable, Disconnected) as exc:  # not taken up is not broken either
            self._book.doubt(pair, f"{exc.code}: {exc.message}", time.monotonic())
            self._pipeline.note_missed(trace, exc)
            return exc.code
        except DynamoError as exc:
            self._note(pair, f"{exc.code}: {exc.message}")
            return exc.code
        if reason:
            self._note(pair, reason)
            return "canary"
        self._pipeline.note_passed(pair)
        return _PASSED

    async def _outcome(self, placement: Placement, trace: Trace) -> str:
        """Why the canary does not count as passed; "" when it does."""
        tokens = 0
        legs = self._pipeline.legs(placement, self._request(placement.decode.card), trace, is_canary=True)
        async with aclosing(legs) as chunks:
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
        if tokens != 2:
            return f"a canary of 2 tokens brought {tokens}"
        if placement.prefill is not None and not (trace.decode_stats and trace.decode_stats.kv_bytes):
            return "the decode worker answered a canary without reading the prefill worker's KV"
        return ""

    def _request(self, card: ModelCard) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"canary-{next(self._numbers)}",
            model=card.name,
            token_ids=token_ids((7 * i + 3) % card.vocab_size for i in range(_PROMPT_TOKENS)),
            sampling=Sampling(max_tokens=2, temperature=0.0, ignore_eos=True),
            deadline=time.time() + self._options.timeout_s,
        )

    def _placement(self, pair: Pair) -> Placement | None:
        by_id: dict[int | None, Instance] = {instance.id: instance for instance in self._view.instances()}
        prefill, decode = by_id.get(pair[0]), by_id.get(pair[1])
        if decode is None or (prefill is None and pair[0] is not None):
            return None
        return Placement(prefill, decode)

    def _note(self, pair: Pair, reason: str) -> None:
        if self._book.failed(pair, reason, time.monotonic()):
            _log.error("%s is quarantined: %s", spelled(pair), reason)

    async def _restart_poisoned(self, plane: Plane, pairs: list[Pair]) -> None:
        by_id = {instance.id: instance for instance in self._view.instances()}
        self._asked_to_restart &= by_id.keys()
        self._broke.intersection_update(pairs)
        for instance_id in poisoned(self._book, pairs) - self._asked_to_restart:
            self._asked_to_restart.add(instance_id)
            instance = by_id.get(instance_id)
            if instance is None:
                continue
            _log.error("instance %x hands over no KV to anybody: asking it to restart", instance_id)
            try:
                await plane.control(instance.subject, Restart("none of its pairs hands KV over any more"))
            except DynamoError as exc:
                _log.warning("instance %x was not asked to restart (%s): %s", instance_id, exc.code, exc.message)


async def _first_of(event: asyncio.Event, seconds: float | None) -> None:
    """Returns when `event` is set or `seconds` have passed."""
    try:
        async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return

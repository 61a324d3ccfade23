"""Drain a worker before it stops or sleeps, put its engine to sleep, and wake it again.

An engine that sleeps has freed its GPU memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo_trtllm.cluster.discovery.discovery_interface import Registration
from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from dynamo_trtllm.engines.capabilities import Sleeps
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.errors import DynamoError, EngineFailed
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, token_ids
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.support.background import BackgroundTasks, wait_for_first
from dynamo_trtllm.worker.health import Health
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming

log = logging.getLogger(__name__)

_LOG_EVERY_S = 3.0
_QUIET_DRAIN_S = 0.1  # a shorter drain logs no progress
_PROMPT = range(16)
_ANSWER_TOKENS = 4
_ANSWER_S = 120.0


async def drain(engine: Engine, serving: PlaneServer, timeout_s: float) -> None:
    """Wait until running requests and pending KV transfers have ended.

    Args:
        engine: the engine to drain.
        serving: the server of its requests; it rejects new ones from now on.
        timeout_s: longest wait in seconds, which ends with a warning.
    """
    serving.is_accepting = False
    try:
        is_drained = await wait_for_first(
            _finish(engine, serving), _log_progress(engine, serving, timeout_s), timeout_s=timeout_s
        )
        if is_drained:
            log.info("drained")
        else:
            text = "drain timed out after %g s (%s); raise --drain-timeout-s to wait longer"
            log.warning(text, timeout_s, _left(engine, serving))
    except DynamoError as exc:
        log.warning("drain failed (%s): %s", exc.code, exc.message)


async def _finish(engine: Engine, serving: PlaneServer) -> bool:
    # This includes requests that have not reached the engine yet.
    await serving.finished()
    await engine.drain()
    return True


async def _log_progress(engine: Engine, serving: PlaneServer, timeout_s: float) -> None:
    spent_s = _QUIET_DRAIN_S
    await asyncio.sleep(_QUIET_DRAIN_S)
    while True:
        log.info("draining for %.0f s (up to %g s): %s", spent_s, timeout_s, _left(engine, serving))
        await asyncio.sleep(_LOG_EVERY_S)
        spent_s += _LOG_EVERY_S


def _left(engine: Engine, serving: PlaneServer) -> str:
    num_transfers = engine.stats().pending_kv_transfers
    return f"running requests: {serving.running}, pending KV transfers: {num_transfers}"


@dataclass
class StartedWorker:
    """Changes a serving worker to an asleep one, and back. Only one change runs at a time.

    | phase    | registered | what happens                                     | next phase        |
    |----------|------------|--------------------------------------------------|-------------------|
    | serving  | yes        | requests                                         | draining          |
    | draining | no         | running requests end; if they take too long, the | asleep or serving |
    |          |            | worker stays                                     |                   |
    | asleep   | no         | nothing; GPU memory is free                      | waking            |
    | waking   | no         | the engine restores its memory and gives a known | serving           |
    |          |            | answer again                                     |                   |

    An engine that fails at a change, or then answers otherwise, ends the worker: its memory is in
    an unknown state. The change is then a failed task of `tasks`.

    Args:
        engine: the started engine.
        model: served name of the model.
        serving: the server of its requests.
        registration: the worker's registration.
        register: registers the worker again.
        health: health of the worker.
        drain_timeout_s: longest wait for running requests.
        tasks: owner of the changes.
        timing: how long the worker waits.
    """

    engine: Engine
    model: str
    serving: PlaneServer
    registration: Registration
    register: Callable[[], Awaitable[Registration]]
    health: Health
    drain_timeout_s: float
    tasks: BackgroundTasks
    timing: WorkerTiming = TIMING
    _answer: list[int] = field(init=False, default_factory=list)  # before the sleep
    _change: asyncio.Task[None] | None = field(init=False, default=None)

    def sleep(self) -> str:
        """Begin to fall asleep, unless the worker is asleep.

        Return why it can't, as text; "" if it can.
        """
        engine = self.engine
        if not isinstance(engine, Sleeps):
            return "this engine can't sleep"
        obstacle = engine.sleep_obstacle
        if obstacle or self.health.phase == "asleep":
            return obstacle
        return self._begin("serving", "draining", partial(self._fall_asleep, engine))

    def wake(self) -> str:
        """Begin to wake up, unless the worker is awake.

        Return why it can't, as text; "" if it can.
        """
        if self.health.phase == "serving":
            return ""
        engine = self.engine
        if not isinstance(engine, Sleeps):
            return "this engine can't sleep"
        return self._begin("asleep", "waking", partial(self._wake_up, engine))

    async def aclose(self) -> None:
        """End the change in progress, and deregister. Idempotent."""
        await self.tasks.cancel(self._change)
        await self.registration.aclose()

    def _begin(
        self, phase: str, next_phase: str, change: Callable[[], Coroutine[Any, Any, None]]
    ) -> str:
        if self.health.phase != phase:
            return f"the worker is {self.health.phase}; retry later"
        self.health.phase = next_phase
        self._change = self.tasks.start(self._run(change()), "worker-sleep")
        return ""

    async def _run(self, change: Coroutine[Any, Any, None]) -> None:
        await change
        if self._change is not None:
            self.tasks.release(self._change)

    async def _fall_asleep(self, engine: Sleeps) -> None:
        await self.registration.aclose()
        await drain(self.engine, self.serving, self.drain_timeout_s)
        if self.serving.running:
            log.warning(
                "not put to sleep: requests still run after --drain-timeout-s %g s",
                self.drain_timeout_s,
            )
            await self._serve()
            return
        self._answer = await self._sample()
        await self._within_limit(engine.sleep(), "fall asleep")
        self.health.phase = "asleep"
        log.info("asleep: GPU memory was released; POST /wake restores it")

    async def _wake_up(self, engine: Sleeps) -> None:
        await self._within_limit(engine.wake(), "wake up")
        answer = await self._sample()
        if answer != self._answer:
            raise EngineFailed(
                f"the engine answers {answer} after its sleep and answered {self._answer} before"
            )
        await self._serve()
        log.info("awake")

    async def _serve(self) -> None:
        self.serving.is_accepting = True
        self.registration = await self.register()
        self.health.phase = "serving"

    async def _sample(self) -> list[int]:
        """Return the greedy answer to a fixed prompt."""
        request = GenerateRequest(
            request_id="sleep-check",
            model=self.model,
            token_ids=token_ids(_PROMPT),
            sampling=Sampling(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
            deadline=time.time() + _ANSWER_S,
        )
        answer: list[int] = []
        async with aclosing(as_stream(self.engine, request)) as chunks:
            async for chunk in chunks:
                answer += chunk.token_ids
        return answer

    async def _within_limit(self, change: Awaitable[None], what: str) -> None:
        limit_s = self.timing.memory_change_s
        try:
            async with asyncio.timeout(limit_s):
                await change
        except TimeoutError:
            raise EngineFailed(
                f"the engine did not {what} within {limit_s:g} s; see its log for ranks that hang"
            ) from None

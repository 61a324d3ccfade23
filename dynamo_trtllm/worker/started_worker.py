"""Drain, sleep, wake and close a worker that has started.

An engine that sleeps has freed its GPU memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
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
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming

log = logging.getLogger(__name__)

_LOG_EVERY_S = 3.0
_QUIET_DRAIN_S = 0.1  # a drain that is shorter than this logs no progress
# A fixed prompt that the engine must answer in the same way before and after a sleep.
_CHECK_PROMPT = range(16)
_CHECK_TOKENS = 4
_CHECK_LIMIT_S = 120.0


@dataclass
class StartedWorker:
    """A worker that has started: it serves and sleeps in turn, until it is drained and closed.

    | phase    | registered | what happens                                     | next phase        |
    |----------|------------|--------------------------------------------------|-------------------|
    | serving  | yes        | requests                                         | draining          |
    | draining | no         | running requests end; if they take too long, the | asleep or serving |
    |          |            | worker does not sleep                            |                   |
    | asleep   | no         | nothing; GPU memory is free                      | waking            |
    | waking   | no         | the engine restores its memory, and must answer  | serving           |
    |          |            | a fixed prompt as it did before the sleep        |                   |

    Only one change between serving and asleep runs at a time, as a task of `tasks`. If the engine
    fails, or answers the fixed prompt differently, its memory is in an unknown state. Then the task
    fails, and the worker ends.

    Args:
        service: the worker's service of its engine.
        server: receives the requests for the service.
        registration: the worker's registration.
        register: registers the worker again, after a sleep.
        health: health of the worker.
        drain_timeout_s: longest wait for running requests.
        tasks: watches the tasks of the worker.
        timing: how long the worker waits.
    """

    service: WorkerService
    server: PlaneServer
    registration: Registration
    register: Callable[[], Awaitable[Registration]]
    health: Health
    drain_timeout_s: float
    tasks: BackgroundTasks
    timing: WorkerTiming = TIMING
    _answer_before_sleep: list[int] = field(init=False, default_factory=list)
    _change: asyncio.Task[None] | None = field(init=False, default=None)

    @property
    def _engine(self) -> Engine:
        return self.service.engine

    def sleep(self) -> str:
        """Begin to fall asleep, unless the worker is asleep.

        Return why the worker can't fall asleep; "" if it can.
        """
        engine = self._engine
        if not isinstance(engine, Sleeps):
            return "this engine can't sleep"
        if engine.sleep_obstacle:
            return engine.sleep_obstacle
        if self.health.phase == "asleep":
            return ""
        if self.health.phase != "serving":
            return self._busy_reason()
        self._start_change("draining", self._fall_asleep(engine))
        return ""

    def wake(self) -> str:
        """Begin to wake up, unless the worker is awake.

        Return why the worker can't wake up; "" if it can.
        """
        if self.health.phase == "serving":
            return ""
        engine = self._engine
        if not isinstance(engine, Sleeps):
            return "this engine can't sleep"
        if self.health.phase != "asleep":
            return self._busy_reason()
        self._start_change("waking", self._wake_up(engine))
        return ""

    async def drain(self) -> None:
        """Reject new requests, and wait until running ones and pending KV transfers have ended.

        The wait ends with a warning after `drain_timeout_s`.
        """
        self.server.is_accepting = False
        try:
            # `_log_drain` never ends by itself.
            is_drained = await wait_for_first(
                self._finish_requests(), self._log_drain(), timeout_s=self.drain_timeout_s
            )
            if is_drained:
                log.info("drained")
            else:
                text = "drain timed out after %g s (%s); raise --drain-timeout-s to wait longer"
                log.warning(text, self.drain_timeout_s, self._unfinished())
        except DynamoError as exc:
            log.warning("drain failed (%s): %s", exc.code, exc.message)

    async def deregister(self) -> None:
        """Cancel a sleep or wake in progress, and remove the registration. Idempotent."""
        await self.tasks.cancel(self._change)
        await self.registration.aclose()

    # --- drain ------------------------------------------------------------------------------------

    async def _finish_requests(self) -> bool:
        # The server also waits for requests that have not reached the engine yet.
        await self.server.until_finished()
        await self._engine.drain()
        return True

    async def _log_drain(self) -> None:
        spent_s = _QUIET_DRAIN_S
        await asyncio.sleep(_QUIET_DRAIN_S)
        while True:
            text = "draining for %.0f s (up to %g s): %s"
            log.info(text, spent_s, self.drain_timeout_s, self._unfinished())
            await asyncio.sleep(_LOG_EVERY_S)
            spent_s += _LOG_EVERY_S

    def _unfinished(self) -> str:
        """Return how much work is not finished, as text for the log."""
        num_transfers = self._engine.stats().pending_kv_transfers
        return f"running requests: {self.server.num_running}, pending KV transfers: {num_transfers}"

    # --- sleep and wake ---------------------------------------------------------------------------

    def _busy_reason(self) -> str:
        return f"the worker is {self.health.phase}; retry later"

    def _start_change(self, phase: str, change: Coroutine[Any, Any, None]) -> None:
        self.health.phase = phase
        self._change = self.tasks.start(self._run(change), "worker-sleep")

    async def _run(self, change: Coroutine[Any, Any, None]) -> None:
        await change
        # `tasks` counts a task that ends without a release as failed.
        if self._change is not None:
            self.tasks.release(self._change)

    async def _fall_asleep(self, engine: Sleeps) -> None:
        """Deregister, drain, and let the engine sleep. Serve again if requests do not end."""
        await self.registration.aclose()
        await self.drain()
        if self.server.num_running:
            log.warning(
                "not put to sleep: requests still run after --drain-timeout-s %g s",
                self.drain_timeout_s,
            )
            await self._serve_again()
            return
        self._answer_before_sleep = await self._answer_check_prompt()
        await self._within_limit(engine.sleep(), "fall asleep")
        self.health.phase = "asleep"
        log.info("asleep: GPU memory was released; POST /wake restores it")

    async def _wake_up(self, engine: Sleeps) -> None:
        await self._within_limit(engine.wake(), "wake up")
        answer = await self._answer_check_prompt()
        if answer != self._answer_before_sleep:
            raise EngineFailed(
                f"the engine answers {answer} after its sleep and answered"
                f" {self._answer_before_sleep} before"
            )
        await self._serve_again()
        log.info("awake")

    async def _serve_again(self) -> None:
        self.server.is_accepting = True
        self.registration = await self.register()
        self.health.phase = "serving"

    async def _answer_check_prompt(self) -> list[int]:
        """Return the engine's greedy answer to a fixed prompt."""
        request = GenerateRequest(
            request_id="sleep-check",
            model=self.service.instance.card.name,
            token_ids=token_ids(_CHECK_PROMPT),
            sampling=Sampling(max_tokens=_CHECK_TOKENS, temperature=0.0, ignore_eos=True),
            deadline=time.time() + _CHECK_LIMIT_S,
        )
        answer: list[int] = []
        async with aclosing(as_stream(self._engine, request)) as chunks:
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

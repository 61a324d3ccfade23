"""What the supervisor of real child processes does at their ends, at its own, and at failures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psutil
import pytest

from dynamo_trtllm.config.deployment import RestartConfig
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.subprocesses import Child, RunFailed, Supervisor, spawn
from tests.kit.cases import each_case
from tests.kit.waiting import SOON_S

DRAINS = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); print(flush=True);"
    " signal.sigwait({signal.SIGTERM})"
)
IGNORES = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
    " signal.pause()"
)
FAILS = "exit(5)"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


class Programs:
    """A supervisor of short programs. The order of their starts and ends is recorded."""

    def __init__(self, **restart: float) -> None:
        self.said: list[str] = []
        self.ended: list[str] = []
        self.children: dict[str, Child] = {}
        self.supervisor = Supervisor(RestartConfig(**restart), self.said.append)
        self._starts = asyncio.Semaphore(0)

    async def run(
        self, programs: dict[str, str], then: Callable[[], Awaitable[None]]
    ) -> dict[str, int]:
        """Run programs, and `then` once each has started. The first is stopped last."""

        async def work() -> None:
            for rank, (name, code) in enumerate(programs.items()):
                self.supervisor.keep(name, self._running(name, code, -rank))
            for _ in programs:
                await self.next_start()
            await then()

        async with asyncio.timeout(3 * SOON_S):
            return await self.supervisor.run(work())

    async def next_start(self) -> None:
        await self._starts.acquire()

    def _running(
        self, name: str, code: str, rank: int
    ) -> Callable[[], AbstractAsyncContextManager[Child]]:
        @asynccontextmanager
        async def running() -> AsyncIterator[Child]:
            process = spawn([sys.executable, "-c", code], stdout=subprocess.PIPE)
            assert process.stdout is not None
            child = self.children[name] = Child(process, SOON_S)
            child.stop_rank = rank
            with process.stdout:
                try:
                    await asyncio.to_thread(process.stdout.readline)
                except BaseException:
                    child.kill()
                    await child.ended()
                    raise
                self._starts.release()
                yield child
            self.ended.append(name)

        return running


async def nothing() -> None:
    """Do nothing."""


async def test_run_on_signal_ends_programs_by_rank() -> None:
    made = Programs()

    async def then() -> None:
        signal.raise_signal(signal.SIGINT)

    assert await made.run({"a": DRAINS, "b": DRAINS, "c": DRAINS}, then) == {"a": 0, "b": 0, "c": 0}
    assert made.ended == ["c", "b", "a"]
    assert made.said == ["stopping all processes; a second Ctrl-C or SIGTERM kills them"]


async def test_stop_is_announced_to_all_programs_before_the_first_ends() -> None:
    made = Programs()
    announced: list[str] = []

    async def then() -> None:
        for name, child in made.children.items():
            child.announce_stop = lambda name=name: announced.append(name + str(made.ended))  # type: ignore[method-assign, misc]
        made.supervisor.stop()

    await made.run({"a": DRAINS, "b": DRAINS}, then)
    assert sorted(announced[:2]) == ["a[]", "b[]"]


async def test_run_when_a_second_signal_comes_then_all_are_killed() -> None:
    async def then() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        signal.raise_signal(signal.SIGTERM)

    assert await Programs().run({"a": IGNORES, "b": IGNORES}, then) == {"a": -9, "b": -9}


async def test_closed_terminal_drains_programs() -> None:
    made = Programs()

    async def then() -> None:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGHUP)

    # It is ignored if the tests run under `nohup`.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert await made.run({"a": DRAINS}, then) == {"a": 0}
    finally:
        signal.signal(signal.SIGHUP, before)
    assert made.said == ["stopping all processes, because the terminal was closed (SIGHUP)"]


async def test_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    made = Programs()

    async def then() -> None:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.1)
        made.supervisor.stop()

    try:
        await made.run({"a": DRAINS}, then)
        assert made.said == []
    finally:
        signal.signal(signal.SIGHUP, before)


@each_case("error", [RunFailed, ConfigError])
async def test_start_that_fails_because_of_a_stop_is_no_failure(error: type[Exception]) -> None:
    made = Programs()

    async def then() -> None:
        made.supervisor.stop()
        # The rest of the start needs this program, such as a server.
        await made.children["a"].ended()
        raise error("a does not answer")

    assert await made.run({"a": DRAINS}, then) == {"a": 0}
    assert made.said == []


async def test_run_with_unkillable_program_stops_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Programs()

    async def then() -> None:
        made.children["b"].stop_timeout_s = 0.05
        made.children["b"]._kill_timeout_s = 0.05
        monkeypatch.setattr(os, "killpg", lambda *_: None)
        made.supervisor.stop()

    try:
        assert await made.run({"a": DRAINS, "b": IGNORES}, then) == {"a": 0, "b": -9}
    finally:
        made.children["b"]._process.kill()
        await asyncio.to_thread(made.children["b"]._process.wait)
    assert made.said == ["b did not end within 0.05 s of SIGTERM, and was killed"]


async def test_run_when_stopped_twice_then_programs_still_drain() -> None:
    made = Programs()

    async def then() -> None:
        made.supervisor.stop()
        made.supervisor.stop()

    assert await made.run({"a": DRAINS}, then) == {"a": 0}


async def test_run_given_up_program_drains_the_others() -> None:
    made = Programs(max_restarts=1)

    async def then() -> None:
        await made.next_start()

    reason = "b exited with status 5; it was restarted 1 time in 60 s, which is the limit"
    with pytest.raises(RunFailed) as failed:
        await made.run({"a": DRAINS, "b": FAILS}, then)
    assert (str(failed.value), failed.value.exit_status) == (reason, 1)
    assert made.said == [
        "b exited with status 5; starting it again (1 of 1 in 60 s)",
        f"stopping all processes: {reason}",
    ]
    assert made.children["a"].has_ended


@pytest.mark.parametrize("error", [ConfigError("no port"), OSError("no port")])
async def test_failed_restart_keeps_the_others_running(error: Exception) -> None:
    made = Programs()
    failures = [error]
    start = made._running("b", FAILS, 0)

    def running() -> AbstractAsyncContextManager[Child]:
        if "b" in made.children and failures:
            raise failures.pop()
        return start()

    async def then() -> None:
        made.supervisor.keep("b", running)
        for _ in range(2):
            await made.next_start()
        assert not made.children["a"].is_terminating
        made.supervisor.stop()

    await made.run({"a": DRAINS}, then)
    assert made.said[:2] == [
        "b exited with status 5; starting it again (1 of 3 in 60 s)",
        "b could not be started: no port; starting it again (2 of 3 in 60 s)",
    ]


async def test_run_requested_end_does_not_count_as_restart() -> None:
    made = Programs(max_restarts=0)

    async def then() -> None:
        made.children["a"].terminate()
        await made.next_start()
        made.supervisor.stop()

    assert await made.run({"a": DRAINS}, then) == {"a": 0}
    assert made.said == ["a exited with status 0 as requested; restarting"]


@pytest.mark.parametrize("error", [ConfigError("no"), ValueError("bug")])
async def test_run_when_the_work_fails_then_programs_drain_first(error: Exception) -> None:
    async def then() -> None:
        raise error

    made = Programs()
    with pytest.raises(type(error) if isinstance(error, ConfigError) else ExceptionGroup):
        await made.run({"a": DRAINS}, then)
    assert await made.children["a"].ended() == 0
    assert made.said == []


async def test_run_stopped_in_restart_pause_ends_at_once() -> None:
    made = Programs(pause_s=600)

    async def then() -> None:
        await made.next_start()
        asyncio.get_running_loop().call_later(1, made.supervisor.stop)

    assert await made.run({"a": FAILS}, then) == {"a": 5}
    assert made.said[-1].startswith(
        "a exited with status 5; starting it again in 600 s (2 of 3 in 60 s)"
    )

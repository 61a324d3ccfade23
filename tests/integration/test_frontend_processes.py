"""The parent of several frontend processes with stand-ins for them: how they end, and what it does
then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.process import process_group
from dynamo_trtllm.frontend.process.control_pipe import _Message
from dynamo_trtllm.frontend.process.process_group import ProcessGroup
from dynamo_trtllm.protocol.messages import encode
from tests.kit.waiting import SOON_S

# The program of a frontend process: it reports that it is ready, as `ControlPipe` does, and then
# does what follows.
SERVED = "import os, signal, sys, time; os.write(0, bytes.fromhex(sys.argv[1]));"
FAILS = "sys.exit(3)"
STAYS = "signal.pause()"
SLEEPS = "time.sleep(60)"


@pytest.fixture
def make_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessGroup]]:
    """Makes one whose processes do what is listed, the first to be started first; the last goes on
    and on.
    """
    before = psutil.Process().children()  # servers of the session

    def make(*programs: str, workers: int = 2) -> ProcessGroup:
        turns = itertools.chain(programs, itertools.repeat(programs[-1]))
        monkeypatch.setattr(
            process_group, "process_argv", lambda *_: [sys.executable, "-c", next(turns), served()]
        )
        return ProcessGroup(FrontendConfig(workers=workers), 0, process_environment())

    yield make
    assert psutil.Process().children() == before


def served() -> str:
    return framed(_Message()).hex()


def framed(message: _Message) -> bytes:
    data = encode(message)
    return len(data).to_bytes(4, "little") + data


async def until_serving(group: ProcessGroup, count: int) -> None:
    while len(group._ready) < count:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0.01)


def pid(made: ProcessGroup, name: str) -> int:
    return made._supervisor._children[name].pid


async def test_run_when_a_process_cannot_start_then_all_end(make_group, caplog) -> None:
    made = make_group("import sys; " + FAILS, SERVED + STAYS)
    async with asyncio.timeout(3 * SOON_S):
        assert await made.run() == 3
    assert "exited with status 3 before it was ready" in caplog.text


async def test_run_notifies_all_when_the_last_process_serves(make_group, tmp_path) -> None:
    heard = tmp_path / "heard"
    go_on = tmp_path / "go_on"
    first = SERVED + f"said = os.read(0, 99); open({str(heard)!r}, 'wb').write(said);" + STAYS
    second = (
        f"import pathlib, time\nwhile not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)\n"
    )
    made = make_group(first, second + SERVED + STAYS)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(3 * SOON_S):
        await until_serving(made, 1)
        assert not heard.exists()
        go_on.touch()
        while not heard.exists() or not heard.read_bytes():  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0
    assert heard.read_bytes().hex() == served()


async def test_run_restarts_a_process_that_died(make_group, caplog) -> None:
    made = make_group(SERVED + STAYS)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(3 * SOON_S):
        await until_serving(made, 2)
        first = pid(made, "frontend-1")
        os.kill(first, 9)
        while pid(made, "frontend-1") == first:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0
    assert "frontend-1 was killed by SIGKILL; starting it again (1 of 3 in 60 s)" in caplog.text


async def test_announced_stop_reaches_running_and_restarted_processes(
    make_group, caplog, tmp_path
) -> None:
    caplog.set_level(logging.INFO)
    hears = (
        f"\nheard = open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'wb', 0)\n"
        "while data := os.read(0, 99): heard.write(data)"
    )
    made = make_group(SERVED + hears)

    async def until_announced(*names: str) -> None:
        announced = framed(_Message(is_stop=True))
        paths = [tmp_path / str(pid(made, name)) for name in names]
        while not all(path.exists() and announced in path.read_bytes() for path in paths):  # noqa: ASYNC110  # another process writes them
            await asyncio.sleep(0.01)

    running = asyncio.create_task(made.run())
    async with asyncio.timeout(3 * SOON_S):
        await until_serving(made, 2)
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        await until_announced("frontend-1", "frontend-2")
        first = pid(made, "frontend-1")
        os.kill(first, 9)
        while pid(made, "frontend-1") == first:  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.01)
        await until_announced("frontend-1")
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0
    assert caplog.text.count("these frontends will be stopped, so /ready answers 503") == 1


async def test_requested_stop_is_not_logged_as_an_error(make_group, caplog) -> None:
    caplog.set_level(logging.INFO)
    made = make_group(SERVED + STAYS)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(3 * SOON_S):
        await until_serving(made, 2)
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0
    assert "stopping all processes" in caplog.text
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_run_gives_up_a_process_that_keeps_dying(make_group, caplog) -> None:
    caplog.set_level(logging.ERROR)
    made = make_group(SERVED + "time.sleep(0.05); " + FAILS, workers=1)
    async with asyncio.timeout(3 * SOON_S):
        assert await made.run() == 1
    assert "it was restarted 3 times in 60 s, which is the limit" in caplog.text


async def test_run_second_signal_kills_remaining_processes(make_group) -> None:
    made = make_group("import signal; signal.signal(15, signal.SIG_IGN); " + SERVED + SLEEPS)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(3 * SOON_S):
        await until_serving(made, 2)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert not running.done()
        signal.raise_signal(signal.SIGTERM)
        assert await running == 137

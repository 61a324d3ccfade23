"""Who keeps a dead worker's GPU memory taken, and how the supervisor has them end: children do as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.deployment import DeploymentConfig
from dynamo_trtllm.launch import supervisor
from dynamo_trtllm.launch.console import Console
from dynamo_trtllm.launch.plan import Addresses, ProcessSpec, processes
from dynamo_trtllm.launch.readers import next_to_drain, readers_of
from dynamo_trtllm.launch.supervisor import GivenUp, Supervisor

KILLED = -signal.SIGKILL


def worker(name: str, role: str, devices: Any, engine: str | None = "vllm", **more: Any) -> dict[str, Any]:
    flags = {"model_path": "/m", **({"engine": engine} if engine else {}), **more.pop("flags", {})}
    return {"name": name, "disaggregation_mode": role, "devices": devices, "flags": flags, **more}


def deployment(*workers: dict[str, Any], **restart: Any) -> DeploymentConfig:
    services = {"etcd": "127.0.0.1:1", "nats": "nats://127.0.0.1:2"}
    return DeploymentConfig.model_validate({"services": services, "workers": workers, "restart": restart})


PREFILL, DECODE = worker("prefill", "prefill", [0]), worker("decode", "decode", [1])
TWO_EACH = (worker("prefill", "prefill", [0, 1], count=2), worker("decode", "decode", [2, 3], count=2))


def readers(name: str, *workers: dict[str, Any]) -> list[str]:
    specs = processes(deployment(*workers), Addresses(etcd="a:1", nats="nats://b:2"))
    (dead,) = [spec for spec in specs if spec.name == name]
    return readers_of(dead, specs)


@pytest.mark.parametrize(
    ("workers", "wanted"),
    [
        ((PREFILL, DECODE), ["decode"]),
        ((PREFILL, worker("decode", "decode", [1, 2], count=2)), ["decode-1", "decode-2"]),
        ((worker("prefill", "prefill", "cpu"), DECODE), []),
        ((PREFILL, worker("decode", "decode", "cpu")), []),
        ((PREFILL, worker("decode", "decode", "cpu", env={"CUDA_VISIBLE_DEVICES": "1"})), ["decode"]),
        ((PREFILL, worker("decode", "decode", [1], engine="torch")), []),
        ((PREFILL, worker("decode", "decode", [1], flags={"served_model_name": "other"})), []),
        ((PREFILL, worker("whole", "prefill_and_decode", [1])), []),
        ((worker("prefill", "prefill", [0], "torch"), worker("decode", "decode", [1], "torch")), []),
        ((worker("prefill", "prefill", [0], "trtllm"), worker("decode", "decode", [1], "trtllm")), []),
        ((worker("prefill", "prefill", [0], None), worker("decode", "decode", [1], None)), []),
        ((PREFILL, worker("more", "prefill", [1])), []),
    ],
)
def test_readers_when_a_prefill_worker_dies_then_decode_workers_of_vllm_on_gpus_and_of_its_model(
    workers: tuple[dict[str, Any], ...], wanted: list[str]
) -> None:
    assert readers("prefill", *workers) == wanted


def test_readers_when_a_decode_worker_or_the_frontend_dies_then_none() -> None:
    assert readers("decode", PREFILL, DECODE) == []
    assert readers("frontend", PREFILL, DECODE) == []


@pytest.mark.parametrize(
    ("is_work_done", "are_all_back", "wanted"),
    [
        (False, True, ["a", "b"]),
        (False, False, ["a", "b"]),
        (True, True, ["a"]),
        (True, False, []),
    ],
)
def test_next_to_drain_when_another_prefill_worker_serves_then_one_after_the_other(
    is_work_done: bool, are_all_back: bool, wanted: list[str]
) -> None:
    assert list(next_to_drain(["a", "b"], is_work_done=is_work_done, are_all_back=are_all_back)) == wanted


# --- the supervisor's decisions ------------------------------------------------------------------------


class Scripted:
    """A child that does what the test says."""

    def __init__(self, spec: ProcessSpec, environ: Any, on_line: Callable[[str], None]) -> None:
        self.spec, self._on_line = spec, on_line
        self.is_ready = self.is_asked = False
        self.times_asked = 0
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ALL.append(self)

    @property
    def has_ended(self) -> bool:
        return self._end.done()

    def serve(self) -> None:
        self._on_line("listening on http://h:1" if self.spec.is_frontend else "serving as instance ab")

    def die(self, status: int) -> None:
        self._end.set_result(status)

    def ask(self) -> None:
        if not self.is_asked and not self.has_ended:
            self.is_asked = True
            self.times_asked += 1

    async def stop(self) -> None:
        self.ask()
        await self.ended()

    async def ended(self) -> int:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        if not self.has_ended:
            self.die(KILLED)


ALL: list[Scripted] = []


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "Running", Scripted)
    monkeypatch.setattr(supervisor, "scratch_folder", lambda prefix: contextlib.nullcontext(Path("/nowhere")))
    yield
    ALL.clear()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not happen; living: " + ", ".join(child.spec.name for child in ALL))


def lives(name: str) -> list[Scripted]:
    return [child for child in ALL if child.spec.name == name]


def now(name: str) -> Scripted:
    return lives(name)[-1]


async def settle() -> None:
    """What was about to happen has happened: turns of the loop in which nobody has to wait for time."""
    for _ in range(200):
        await asyncio.sleep(0)


async def lives_reach(name: str, number: int) -> Scripted:
    await until(lambda: len(lives(name)) == number)
    return now(name)


class World:
    """A supervisor that runs, and what it says."""

    def __init__(self, of: DeploymentConfig) -> None:
        self.out = io.StringIO()
        self.supervisor = Supervisor(of, Console(self.out, []), {})
        self.running = asyncio.create_task(self.supervisor.run(self._on_ready))

    async def _on_ready(self, serving: Any) -> bool:
        return False

    async def end(self) -> None:
        """Asked to stop: every child obeys, and nobody is started any more."""
        number = len(ALL)
        self.supervisor.stop()

        def is_over() -> bool:
            for child in ALL:
                if child.is_asked and not child.has_ended:
                    child.die(0)
            return self.running.done()

        await until(is_over)
        await self.running
        assert len(ALL) == number
        assert all(child.has_ended for child in ALL)


@contextlib.asynccontextmanager
async def world(*workers: dict[str, Any], **restart: Any) -> AsyncIterator[World]:
    of = deployment(*workers, **restart)
    made = World(of)
    await until(lambda: len(ALL) == 1 + sum(spec.count for spec in of.workers))
    for child in ALL:
        child.serve()
    await settle()
    try:
        yield made
    finally:
        if not made.running.done():
            await made.end()


async def test_supervisor_when_prefill_is_killed_then_its_reader_is_drained_before_it_is_back() -> None:
    async with world(PREFILL, DECODE) as made:
        now("prefill").die(KILLED)
        await until(lambda: now("decode").is_asked)
        await settle()
        assert len(lives("prefill")) == 1  # the reader still drains
        now("decode").die(0)
        await lives_reach("decode", 2)
        await lives_reach("prefill", 2)
        said = made.out.getvalue()
    assert "decode: to be drained and started again, too: a worker that reads KV over CUDA IPC keeps" in said
    assert "decode exited with status 0, as it was to end; starting it again" in said
    assert "frontend exited" not in said


async def test_supervisor_when_a_reader_ends_again_and_again_as_asked_then_only_prefills_deaths_count() -> None:
    async with world(PREFILL, DECODE, max_restarts=2) as made:
        for number in (2, 3):
            now("prefill").die(KILLED)
            await until(lambda: now("decode").is_asked)
            now("decode").die(KILLED)  # it was slow, or died while it drained
            (await lives_reach("decode", number)).serve()
            (await lives_reach("prefill", number)).serve()
            await settle()
        for number in (4, 5):
            now("decode").die(KILLED)  # its own deaths
            (await lives_reach("decode", number)).serve()
            await settle()
        now("prefill").die(KILLED)
        for name in ("decode", "frontend"):
            await until(partial(getattr, now(name), "is_asked"))
            now(name).die(0)
        with pytest.raises(GivenUp, match="prefill was killed by SIGKILL; it was restarted 2 times"):
            await made.running


@pytest.mark.parametrize(
    ("who", "status", "settings"),
    [
        ("prefill", 0, {}),  # it ended in order, and gave its memory back
        ("decode", KILLED, {}),
        ("prefill", KILLED, {"readers_too": False}),
    ],
)
async def test_supervisor_when_no_memory_can_be_kept_then_the_dead_one_alone_is_started_again(
    who: str, status: int, settings: dict[str, Any]
) -> None:
    async with world(PREFILL, DECODE, **settings):
        now(who).die(status)
        await lives_reach(who, 2)
        assert [child for child in ALL if child.is_asked] == []


async def test_supervisor_when_it_dies_before_it_has_ever_served_then_no_reader_is_drained() -> None:
    made = World(deployment(PREFILL, DECODE))
    await until(lambda: len(ALL) == 3)
    now("decode").serve()
    now("prefill").die(1)
    await lives_reach("prefill", 2)
    assert not now("decode").is_asked
    await made.end()


async def test_supervisor_when_the_successor_of_one_that_ended_in_order_fails_then_readers_are_drained_once() -> None:
    async with world(PREFILL, DECODE):
        now("prefill").die(0)
        (await lives_reach("prefill", 2)).die(1)
        await until(lambda: now("decode").is_asked)
        now("decode").die(0)
        (await lives_reach("decode", 2)).serve()
        (await lives_reach("prefill", 3)).die(1)  # and that is not for memory of the first
        await lives_reach("prefill", 4)
        assert not now("decode").is_asked


async def test_supervisor_when_the_reader_does_not_serve_yet_then_it_is_left_alone() -> None:
    async with world(PREFILL, DECODE):
        now("decode").die(KILLED)
        await lives_reach("decode", 2)
        now("prefill").die(KILLED)
        await lives_reach("prefill", 2)
        assert not now("decode").is_asked


async def test_supervisor_when_another_prefill_worker_serves_then_readers_go_one_after_the_other() -> None:
    async with world(*TWO_EACH):
        now("prefill-1").die(KILLED)
        await until(lambda: now("decode-1").is_asked)
        now("decode-1").die(0)
        again = await lives_reach("decode-1", 2)
        await settle()
        assert not now("decode-2").is_asked  # the other one does not serve yet
        again.serve()
        await until(lambda: now("decode-2").is_asked)
        await settle()
        assert len(lives("prefill-1")) == 1
        now("decode-2").die(0)
        await lives_reach("prefill-1", 2)
        await lives_reach("decode-2", 2)
        assert len(lives("decode-1")) == 2


async def test_supervisor_when_a_second_one_of_three_dies_while_a_reader_drains_then_the_other_reader_goes_on() -> None:
    three = worker("prefill", "prefill", [0, 1, 4], count=3)
    async with world(three, TWO_EACH[1]):
        now("prefill-1").die(KILLED)
        await until(lambda: now("decode-1").is_asked)
        now("decode-1").die(0)
        (await lives_reach("decode-1", 2)).serve()
        await until(lambda: now("decode-2").is_asked)
        now("prefill-2").die(KILLED)  # both readers may have read from it
        await settle()
        assert not now("decode-1").is_asked
        now("decode-2").die(0)
        (await lives_reach("decode-2", 2)).serve()
        await until(lambda: now("decode-1").is_asked)
        await lives_reach("prefill-1", 2)
        now("decode-1").die(0)
        await lives_reach("prefill-2", 2)
        assert not now("decode-2").is_asked  # it began after both deaths


async def test_supervisor_when_both_prefill_workers_die_then_all_readers_end_once_and_at_once() -> None:
    async with world(*TWO_EACH):
        now("prefill-1").die(KILLED)
        await until(lambda: now("decode-1").is_asked)
        now("prefill-2").die(KILLED)
        await until(lambda: now("decode-2").is_asked)
        first = [now("decode-1"), now("decode-2")]
        for child in first:
            child.die(0)
        for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
            await lives_reach(name, 2)
        await settle()
        assert [child.times_asked for child in first] == [1, 1]
        assert not [child for child in ALL if child.is_asked and not child.has_ended]


async def test_supervisor_when_the_last_prefill_worker_dies_while_a_reader_loads_then_the_other_is_not_waited_for() -> (
    None
):
    async with world(*TWO_EACH):
        now("prefill-1").die(KILLED)
        await until(lambda: now("decode-1").is_asked)
        now("decode-1").die(0)
        loading = await lives_reach("decode-1", 2)
        now("prefill-2").die(KILLED)
        await until(lambda: now("decode-2").is_asked)
        now("decode-2").die(0)
        await lives_reach("prefill-1", 2)
        await lives_reach("prefill-2", 2)
        assert not loading.is_asked  # it began after the first death and has read nothing


async def test_supervisor_when_the_waited_for_reader_dies_by_itself_then_that_is_its_end() -> None:
    async with world(*TWO_EACH):
        now("prefill-1").die(KILLED)
        await until(lambda: now("decode-1").is_asked)
        now("decode-2").die(KILLED)
        (await lives_reach("decode-2", 2)).serve()
        now("decode-1").die(0)
        await lives_reach("prefill-1", 2)
        assert not now("decode-2").is_asked


async def test_supervisor_when_stopped_while_a_reader_drains_then_it_is_asked_once_and_nothing_starts() -> None:
    async with world(PREFILL, DECODE) as made:
        now("prefill").die(KILLED)
        await until(lambda: now("decode").is_asked)
        await made.end()
        assert len(lives("prefill")) == len(lives("decode")) == 1
        assert now("decode").times_asked == 1


async def test_supervisor_when_stopped_while_it_waits_for_a_reader_to_be_back_then_nothing_starts() -> None:
    async with world(*TWO_EACH) as made:
        now("prefill-1").die(KILLED)
        await until(lambda: now("decode-1").is_asked)
        now("decode-1").die(0)
        await lives_reach("decode-1", 2)
        await made.end()
        assert len(lives("prefill-1")) == 1

"""Who keeps a dead worker's GPU memory taken, and how the launcher has them end: children do as the
test says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dynamo_trtllm.launch.launcher import dependents_of
from dynamo_trtllm.launch.process_specs import processes
from dynamo_trtllm.support.subprocesses import RunFailed
from tests.kit.cases import each_case
from tests.kit.fake_children import (
    ALL,
    KILLED,
    LauncherRun,
    children_named,
    deployment,
    latest_child,
    run_launcher,
    settle,
    until,
    wait_for_start,
    worker,
)

pytestmark = pytest.mark.usefixtures("scripted")

PREFILL = worker("prefill", "prefill", [0])
DECODE = worker("decode", "decode", [1])
TWO_EACH = (
    worker("prefill", "prefill", [0, 1], count=2),
    worker("decode", "decode", [2, 3], count=2),
)


def readers(name: str, *workers: dict[str, Any]) -> list[str]:
    specs = processes(deployment(*workers))
    (dead,) = [spec for spec in specs if spec.name == name]
    return dependents_of(dead, specs)


@each_case(
    ("workers", "wanted"),
    [
        ((PREFILL, DECODE), ["decode"]),
        ((PREFILL, worker("decode", "decode", [1, 2], count=2)), ["decode-1", "decode-2"]),
        ((worker("prefill", "prefill", "cpu"), DECODE), []),
        ((PREFILL, worker("decode", "decode", "cpu")), []),
        (
            (PREFILL, worker("decode", "decode", "cpu", env={"CUDA_VISIBLE_DEVICES": "1"})),
            ["decode"],
        ),
        ((PREFILL, worker("decode", "decode", [1], engine="torch")), []),
        ((PREFILL, worker("decode", "decode", [1], flags={"served_model_name": "other"})), []),
        ((PREFILL, worker("aggregated", "prefill_and_decode", [1])), []),
        (
            (worker("prefill", "prefill", [0], "torch"), worker("decode", "decode", [1], "torch")),
            [],
        ),
        (
            (
                worker("prefill", "prefill", [0], "trtllm"),
                worker("decode", "decode", [1], "trtllm"),
            ),
            [],
        ),
        ((worker("prefill", "prefill", [0], None), worker("decode", "decode", [1], None)), []),
        ((PREFILL, worker("more", "prefill", [1])), []),
        (
            # UCX_CUDA_IPC_CACHE=n keeps mappings, too
            (PREFILL, worker("decode", "decode", [2], env={"UCX_CUDA_IPC_CACHE": "n"})),
            ["decode"],
        ),
    ],
)
def test_readers_of_dead_prefill_worker_are_vllm_on_gpus(
    workers: tuple[dict[str, Any], ...], wanted: list[str]
) -> None:
    assert readers("prefill", *workers) == wanted


def test_readers_of_dead_decode_worker_or_frontend_are_none() -> None:
    assert readers("decode", PREFILL, DECODE) == []
    assert readers("frontend", PREFILL, DECODE) == []


async def test_launcher_drains_readers_of_killed_prefill_first() -> None:
    async with run_launcher(PREFILL, DECODE) as made:
        latest_child("prefill").die(KILLED)
        await until(lambda: latest_child("decode").is_terminating)
        await settle()
        assert len(children_named("prefill")) == 1  # the reader still drains
        latest_child("decode").die(0)
        await wait_for_start("decode", 2)
        await wait_for_start("prefill", 2)
        said = made.out.getvalue()
    assert "draining and restarting decode, which holds GPU memory of prefill over CUDA IPC" in said
    assert "decode exited with status 0 as requested; restarting" in said
    assert "frontend exited" not in said


async def test_launcher_counts_only_deaths_of_prefill() -> None:
    async with run_launcher(PREFILL, DECODE, max_restarts=2) as made:
        for number in (2, 3):
            latest_child("prefill").die(KILLED)
            await until(lambda: latest_child("decode").is_terminating)
            latest_child("decode").die(KILLED)  # it was slow, or died while it drained
            (await wait_for_start("decode", number)).serve()
            (await wait_for_start("prefill", number)).serve()
            await settle()
        for number in (4, 5):
            latest_child("decode").die(KILLED)  # its own deaths
            (await wait_for_start("decode", number)).serve()
            await settle()
        latest_child("prefill").die(KILLED)
        for name in ("decode", "frontend"):
            await until(partial(getattr, latest_child(name), "is_terminating"))
            latest_child(name).die(0)
        with pytest.raises(
            RunFailed, match="prefill was killed by SIGKILL; it was restarted 2 times"
        ):
            await made.running


@pytest.mark.parametrize(
    ("who", "status", "settings"),
    [
        ("prefill", 0, {}),  # it ended in order, and gave its memory back
        ("decode", KILLED, {}),
        ("prefill", KILLED, {"decode_workers": False}),
    ],
)
async def test_launcher_without_stored_memory_restarts_one_only(
    who: str, status: int, settings: dict[str, Any]
) -> None:
    async with run_launcher(PREFILL, DECODE, **settings):
        latest_child(who).die(status)
        await wait_for_start(who, 2)
        assert [child for child in ALL if child.is_terminating] == []


async def test_launcher_when_it_died_before_serving_then_no_drain() -> None:
    made = LauncherRun(deployment(PREFILL, DECODE))
    await until(lambda: len(ALL) == 3)
    latest_child("decode").serve()
    latest_child("prefill").die(1)
    await wait_for_start("prefill", 2)
    assert not latest_child("decode").is_terminating
    await made.end()


async def test_launcher_failed_successor_drains_readers_once() -> None:
    async with run_launcher(PREFILL, DECODE):
        latest_child("prefill").die(0)
        (await wait_for_start("prefill", 2)).die(1)
        await until(lambda: latest_child("decode").is_terminating)
        latest_child("decode").die(0)
        (await wait_for_start("decode", 2)).serve()
        (await wait_for_start("prefill", 3)).die(1)  # and that is not for memory of the first
        await wait_for_start("prefill", 4)
        assert not latest_child("decode").is_terminating


async def test_launcher_does_not_drain_a_starting_reader() -> None:
    async with run_launcher(PREFILL, DECODE):
        latest_child("decode").die(KILLED)
        await wait_for_start("decode", 2)
        latest_child("prefill").die(KILLED)
        await wait_for_start("prefill", 2)
        assert not latest_child("decode").is_terminating


async def test_launcher_with_another_prefill_drains_one_by_one() -> None:
    async with run_launcher(*TWO_EACH):
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("decode-1").die(0)
        again = await wait_for_start("decode-1", 2)
        await settle()
        assert not latest_child("decode-2").is_terminating  # the other one does not serve yet
        again.serve()
        await until(lambda: latest_child("decode-2").is_terminating)
        await settle()
        assert len(children_named("prefill-1")) == 1
        latest_child("decode-2").die(0)
        await wait_for_start("prefill-1", 2)
        await wait_for_start("decode-2", 2)
        assert len(children_named("decode-1")) == 2


async def test_launcher_second_death_keeps_the_other_reader() -> None:
    three = worker("prefill", "prefill", [0, 1, 4], count=3)
    async with run_launcher(three, TWO_EACH[1]):
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("decode-1").die(0)
        (await wait_for_start("decode-1", 2)).serve()
        await until(lambda: latest_child("decode-2").is_terminating)
        latest_child("prefill-2").die(KILLED)  # both readers may have read from it
        await settle()
        assert not latest_child("decode-1").is_terminating
        latest_child("decode-2").die(0)
        (await wait_for_start("decode-2", 2)).serve()
        await until(lambda: latest_child("decode-1").is_terminating)
        await wait_for_start("prefill-1", 2)
        latest_child("decode-1").die(0)
        await wait_for_start("prefill-2", 2)
        assert not latest_child("decode-2").is_terminating  # it began after both deaths


async def test_launcher_when_both_prefills_die_drains_all_at_once() -> None:
    async with run_launcher(*TWO_EACH) as made:
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("prefill-2").die(KILLED)
        await until(lambda: latest_child("decode-2").is_terminating)
        first = [latest_child("decode-1"), latest_child("decode-2")]
        for child in first:
            child.die(0)
        for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
            await wait_for_start(name, 2)
        await settle()
        assert [child.times_asked for child in first] == [1, 1]
        assert not [child for child in ALL if child.is_terminating and not child.has_ended]
        said = made.out.getvalue()
    assert "draining and restarting decode-1, decode-2, which hold GPU memory of prefill-1" in said


async def test_launcher_last_prefill_death_ends_waiting_for_reader() -> None:
    async with run_launcher(*TWO_EACH):
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("decode-1").die(0)
        loading = await wait_for_start("decode-1", 2)
        latest_child("prefill-2").die(KILLED)
        await until(lambda: latest_child("decode-2").is_terminating)
        latest_child("decode-2").die(0)
        await wait_for_start("prefill-1", 2)
        await wait_for_start("prefill-2", 2)
        assert not loading.is_terminating  # it began after the first death and has read nothing


async def test_launcher_awaited_reader_that_dies_has_ended() -> None:
    async with run_launcher(*TWO_EACH):
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("decode-2").die(KILLED)
        (await wait_for_start("decode-2", 2)).serve()
        latest_child("decode-1").die(0)
        await wait_for_start("prefill-1", 2)
        assert not latest_child("decode-2").is_terminating


async def test_launcher_stopped_during_drain_starts_nothing() -> None:
    async with run_launcher(PREFILL, DECODE) as made:
        latest_child("prefill").die(KILLED)
        await until(lambda: latest_child("decode").is_terminating)
        await made.end()
        assert len(children_named("prefill")) == len(children_named("decode")) == 1
        assert latest_child("decode").times_asked == 1


async def test_launcher_stopped_while_reader_returns_starts_nothing() -> None:
    async with run_launcher(*TWO_EACH) as made:
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("decode-1").die(0)
        await wait_for_start("decode-1", 2)
        await made.end()
        assert len(children_named("prefill-1")) == 1

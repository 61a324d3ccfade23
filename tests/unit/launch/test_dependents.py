"""Who keeps a dead worker's GPU memory taken, and how the launcher has them end: children do as the
test says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dynamo_trtllm.launch.launcher import dependents_of
from dynamo_trtllm.launch.plan import processes
from dynamo_trtllm.support.subprocesses import RunFailed
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


@pytest.mark.parametrize(
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
def test_readers_when_a_prefill_worker_dies_then_decode_workers_of_vllm_on_gpus_and_of_its_model(
    workers: tuple[dict[str, Any], ...], wanted: list[str]
) -> None:
    assert readers("prefill", *workers) == wanted


def test_readers_when_a_decode_worker_or_the_frontend_dies_then_none() -> None:
    assert readers("decode", PREFILL, DECODE) == []
    assert readers("frontend", PREFILL, DECODE) == []


async def test_launcher_when_prefill_is_killed_then_its_reader_is_drained_before_it_is_back() -> (
    None
):
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


async def test_launcher_when_a_reader_ends_again_and_again_as_asked_then_only_prefills_deaths_count() -> (
    None
):
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
async def test_launcher_when_no_memory_can_be_kept_then_the_dead_one_alone_is_started_again(
    who: str, status: int, settings: dict[str, Any]
) -> None:
    async with run_launcher(PREFILL, DECODE, **settings):
        latest_child(who).die(status)
        await wait_for_start(who, 2)
        assert [child for child in ALL if child.is_terminating] == []


async def test_launcher_when_it_dies_before_it_has_ever_served_then_no_reader_is_drained() -> None:
    made = LauncherRun(deployment(PREFILL, DECODE))
    await until(lambda: len(ALL) == 3)
    latest_child("decode").serve()
    latest_child("prefill").die(1)
    await wait_for_start("prefill", 2)
    assert not latest_child("decode").is_terminating
    await made.end()


async def test_launcher_when_the_successor_of_one_that_ended_in_order_fails_then_readers_are_drained_once() -> (
    None
):
    async with run_launcher(PREFILL, DECODE):
        latest_child("prefill").die(0)
        (await wait_for_start("prefill", 2)).die(1)
        await until(lambda: latest_child("decode").is_terminating)
        latest_child("decode").die(0)
        (await wait_for_start("decode", 2)).serve()
        (await wait_for_start("prefill", 3)).die(1)  # and that is not for memory of the first
        await wait_for_start("prefill", 4)
        assert not latest_child("decode").is_terminating


async def test_launcher_when_the_reader_does_not_serve_yet_then_it_is_left_alone() -> None:
    async with run_launcher(PREFILL, DECODE):
        latest_child("decode").die(KILLED)
        await wait_for_start("decode", 2)
        latest_child("prefill").die(KILLED)
        await wait_for_start("prefill", 2)
        assert not latest_child("decode").is_terminating


async def test_launcher_when_another_prefill_worker_serves_then_readers_go_one_after_the_other() -> (
    None
):
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


async def test_launcher_when_a_second_one_of_three_dies_while_a_reader_drains_then_the_other_reader_goes_on() -> (
    None
):
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


async def test_launcher_when_both_prefill_workers_die_then_all_readers_end_once_and_at_once() -> (
    None
):
    async with run_launcher(*TWO_EACH):
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


async def test_launcher_when_the_last_prefill_worker_dies_while_a_reader_loads_then_the_other_is_not_waited_for() -> (
    None
):
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


async def test_launcher_when_the_waited_for_reader_dies_by_itself_then_that_is_its_end() -> None:
    async with run_launcher(*TWO_EACH):
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("decode-2").die(KILLED)
        (await wait_for_start("decode-2", 2)).serve()
        latest_child("decode-1").die(0)
        await wait_for_start("prefill-1", 2)
        assert not latest_child("decode-2").is_terminating


async def test_launcher_when_stopped_while_a_reader_drains_then_it_is_asked_once_and_nothing_starts() -> (
    None
):
    async with run_launcher(PREFILL, DECODE) as made:
        latest_child("prefill").die(KILLED)
        await until(lambda: latest_child("decode").is_terminating)
        await made.end()
        assert len(children_named("prefill")) == len(children_named("decode")) == 1
        assert latest_child("decode").times_asked == 1


async def test_launcher_when_stopped_while_it_waits_for_a_reader_to_be_back_then_nothing_starts() -> (
    None
):
    async with run_launcher(*TWO_EACH) as made:
        latest_child("prefill-1").die(KILLED)
        await until(lambda: latest_child("decode-1").is_terminating)
        latest_child("decode-1").die(0)
        await wait_for_start("decode-1", 2)
        await made.end()
        assert len(children_named("prefill-1")) == 1

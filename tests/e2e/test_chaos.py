"""Each fault of `scripts/chaos` once, short, with the mock engine: what clients see, and that nothing is kept.

The longer runs are `scripts/chaos --all`. Most faults share one deployment, which each must leave whole.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos import migration
from benchmarks.chaos.course import Course
from benchmarks.chaos.deployment import Options
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.judge import Kind, Verdict
from benchmarks.chaos.main import Stage, is_good, table

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
OPTIONS = Options(stall_timeout_s=1.0, lease_ttl_s=1.0, ticket_ttl_s=1.0)
SHORT = Course(seconds=1.5, streams=6, osl=20)
MAY_REFUSE = {f"{word}-nats" for word in ("kill", "freeze", "restart", "empty")} | {"full-kv"}
CUTS = {"kill-frontend", "kill-launcher", "freeze-launcher", "term-launcher"}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage(OPTIONS, SHORT)
    left = ["the deployment was not closed"]
    try:
        yield stage
    finally:
        left = stage.close()
    assert left == []


@pytest.mark.parametrize("name", FAULTS)
async def test_requests_when_a_fault_strikes_then_right_or_told_and_nothing_is_kept(stage: Stage, name: str) -> None:
    before = await asyncio.to_thread(stage.total, "migrations") if name == "kill-decode" else 0
    verdict = await stage.run(FAULTS[name])
    assert is_good(verdict), table([verdict])
    assert verdict.counts[Kind.RIGHT] > 0, table([verdict])
    if name not in MAY_REFUSE:
        assert verdict.counts[Kind.NAMED_ERROR] == 0, table([verdict])
    if name in CUTS:
        assert verdict.counts[Kind.CUT] > 0, table([verdict])
    if name == "kill-decode":
        assert await asyncio.to_thread(stage.total, "migrations") > before


@pytest.mark.long
async def test_greedy_requests_when_their_decode_worker_is_killed_midway_then_as_undisturbed() -> None:
    verdict = await migration.run(wanted=10)
    assert verdict.counts[Kind.RIGHT] == verdict.sent > 10, table([verdict])


def test_command_when_asked_for_the_faults_then_they_are_listed() -> None:
    listed = chaos("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [*FAULTS, "migration"]


@pytest.mark.parametrize("argv", [(), ("no-such-fault",), ("--engine", "none", "rolling")])
def test_command_when_it_is_called_wrongly_then_it_says_so(argv: tuple[str, ...]) -> None:
    said = chaos(*argv)
    assert said.returncode == 2
    assert said.stderr.startswith("usage: scripts/chaos")


def test_command_when_json_is_asked_for_then_one_object_with_a_row_per_fault() -> None:
    """The launcher's fault: the one whose deployment does not have to be whole afterwards."""
    said = chaos("kill-launcher", "--seconds", "1", "--streams", "2", "--osl", "5", "--json")
    assert said.returncode == 0, said.stdout + said.stderr
    (row,) = json.loads(said.stdout)["faults"]
    assert list(row) == ["fault", "sent", "right", "named_error", "cut", "wrong", "lost", "hung", "leaked"]
    assert row["fault"] == "kill-launcher"
    assert row["sent"] == row["right"] + row["cut"] > 0


def chaos(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.chaos", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("name", "good"), [("kill-decode", False), ("kill-nats", True)])
def test_verdict_when_a_request_is_refused_that_another_worker_could_serve_then_bad(name: str, good: bool) -> None:
    verdict = Verdict(fault=name, sent=2, early=1)
    verdict.counts[Kind.NAMED_ERROR] = 1
    assert is_good(verdict) is good
    assert table([verdict]).rstrip().endswith("BAD") is not good

"""Each fault of `scripts/chaos` once, short, with the mock engine: what clients see, and that
nothing is kept.

The longer runs are `scripts/chaos --all`. Most faults share one deployment, which each must leave
whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import migration
from benchmarks.chaos.deployment import Options
from benchmarks.chaos.fault_run import FaultRunner, RunConfig
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.main import is_good, table
from benchmarks.chaos.verdict import Outcome
from tests.kit.cluster import START_TIMEOUT_S, until
from tests.kit.waiting import SOON_S

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
OPTIONS = Options(
    stall_timeout_s=1.0,
    worker_stall_timeout_s=1.0,
    lease_ttl_s=1.0,
    kv_transfer_ttl_s=1.0,
    hold_s=2.0,
)
# What hangs does so for ever; a busy machine may be silent for long.
SHORT = RunConfig(seconds=1.2, streams=6, osl=16, hung_s=30.0)
MAY_REFUSE = {f"{word}-nats" for word in ("kill", "freeze", "restart", "empty")}
MAY_REFUSE |= {"full-kv", "term-frontend", "late-query-of-death"}
CUTS = {"kill-frontend", "kill-launcher", "freeze-launcher", "term-launcher"}


@pytest.fixture(scope="module")
def stage() -> Iterator[FaultRunner]:
    stage = FaultRunner(OPTIONS, SHORT)
    left = ["the deployment was not closed"]
    try:
        yield stage
    finally:
        left = stage.close()
    assert left == []


# The start of torch alone is tens of seconds; large bodies and words take as long on two cores. What
# makes them harmless is in tests/unit/frontend: test_generate_endpoint.py (they are parsed in a
# thread), test_admission.py (their memory), and tokenization/test_tokenizer.py (linear time).
LONG = {name for name, fault in FAULTS.items() if fault.engine == "torch"}
LONG |= {"memory-bound", "big-body", "slow-words"}
# Each has a deployment of its own. What is left when the launcher is killed or stopped:
# tests/e2e/test_launch.py.
LONG |= {"kill-launcher", "freeze-launcher", "term-launcher"}
# tests/unit/frontend/test_query_of_death.py is their short form
LONG |= {"query-of-death", "late-query-of-death"}
# They need another deployment. tests/integration/test_planner.py replaces a planner that is silent,
# and tests/integration/test_elastic.py changes roles under load.
LONG |= {"kill-planner", "change-roles"}
# They need another deployment. tests/contract/test_lossy_plane.py loses and repeats frames and
# messages without processes, and a route that breaks loses messages, too.
LONG |= {"lost-first", "lost-last", "repeated-message", "route-flap"}
# `empty-nats` also kills the server. tests/integration/test_control_plane.py stops, restarts and
# freezes both and empties etcd, and fails if a request or a registration is lost.
LONG |= {
    f"{word}-{server}" for word in ("kill", "freeze", "restart") for server in ("etcd", "nats")
}
LONG |= {"empty-etcd"}
# A worker of either role leaves alike, which `term-decode` shows with processes, and
# tests/integration/test_draining.py for both roles without.
LONG |= {"term-prefill"}
# The same of a killed one: `kill-decode` shows it, and tests/e2e/test_launch_scripts.py restarts a
# prefill worker.
LONG |= {"kill-prefill"}
# `freeze-frontend` shows it with processes; that a worker gives up a silent caller:
# tests/contract/test_plane_liveness.py.
LONG |= {"freeze-frontend-long"}
# The same against the parts themselves: tests/integration/test_poisoned_records.py;
# tests/contract/test_plane_versions.py; test_changed_kv.py and test_engine.py; and
# tests/e2e/mock_cluster/test_overload.py, whose connections take up all files of a frontend.
LONG |= {"bad-record", "version-skew", "corrupt-kv", "idle-connections"}
LONG |= {"rolling"}  # tests/e2e/test_rolling_restart.py restarts every worker under streams, too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in FAULTS]
)
async def test_fault_gives_right_answers_or_named_errors(stage: FaultRunner, name: str) -> None:
    verdict = await stage.run(FAULTS[name])
    assert is_good(verdict), table([verdict])
    assert verdict.counts[Outcome.RIGHT] > 0 or FAULTS[name].is_launcher, table([verdict])
    if name not in MAY_REFUSE:
        assert verdict.counts[Outcome.NAMED_ERROR] == 0, table([verdict])
    if name in CUTS:
        assert verdict.counts[Outcome.CUT] > 0, table([verdict])


@pytest.mark.long
async def test_greedy_requests_survive_a_killed_decode_worker() -> None:
    verdict = await migration.run(wanted=10)
    assert verdict.counts[Outcome.RIGHT] == verdict.sent > 10, table([verdict])


@pytest.mark.long  # tests/e2e/test_launch.py kills the launcher, too
def test_command_when_it_is_killed_then_nothing_is_left(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    env = os.environ | {"CHAOS_TEST_MARK": mark, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.chaos", "rolling", "--seconds", "60"]
    with subprocess.Popen(command, cwd=ROOT, env=env) as chaos:
        until(lambda: num_workers(mark) == 4, START_TIMEOUT_S)
        chaos.kill()
    until(lambda: not marked(mark) and not list(tmp_path.iterdir()), SOON_S)


def num_workers(mark: str) -> int:
    """Return how many workers of one run of the command live."""
    count = 0
    for pid in marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            arguments = psutil.Process(pid).cmdline()
            count += any(argument.startswith("--model-path") for argument in arguments)
    return count


def marked(mark: str) -> list[int]:
    """Living processes of one run of the command."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("CHAOS_TEST_MARK") == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found

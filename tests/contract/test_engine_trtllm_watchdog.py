"""What the trtllm engine does when a call of TensorRT-LLM blocks the event loop: its process ends
by itself.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.watchdog import DEAD_S, EXIT_STATUS, THREAD
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import prompt_of, started
from tests.kit.engines import answer, make
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm
from tests.kit.waiting import SOON_S

ROOT = Path(__file__).parents[2]
START_S = 60.0  # of a process that imports PyTorch and loads the model
RECORDING = ("1.2.1", "1.3.0rc29")  # they record the death of a rank in different places


# The start of torch takes 9 s of CPU time. By default, the tests below show that the failure is read
# and that the engine has a watchdog, and tests/unit/engines/trtllm/test_watchdog.py that a watchdog
# ends its process.
@pytest.mark.long
@pytest.mark.parametrize("version", RECORDING)
def test_submission_blocked_by_dead_rank_ends_the_process(version: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.blocked_engine", version],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_S + DEAD_S + SOON_S,  # else it would run for ever
        check=False,
    )
    assert done.returncode == EXIT_STATUS, done.stderr
    assert "the short request was answered" in done.stdout
    assert "the long request has ended" not in done.stdout
    assert "MPI worker exited unexpectedly" in done.stderr  # what the executor has recorded
    assert "stack of thread MainThread" in done.stderr
    assert "in generate_async" in done.stderr


@pytest.mark.parametrize("version", RELEASES)
async def test_dead_executor_failure_is_read_without_a_library_call(
    version: str, gpt_oss: Path
) -> None:
    async def until_recorded() -> str:
        failure = ""
        while not failure:
            await asyncio.sleep(0.01)
            failure = engine.library.bindings.recorded_failure(llm)
        return failure

    with fake_tensorrt_llm(version) as package:
        engine: Any = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            llm = engine.library.llm
            assert len(await answer(engine, prompt_of(33))) == 8
            assert engine.library.bindings.recorded_failure(llm) == ""
            package.standin.core.kill_all("a rank was lost")
            assert "a rank was lost" in await asyncio.wait_for(until_recorded(), SOON_S)


async def test_engine_when_it_is_closed_then_its_watchdog_has_ended(gpt_oss: Path) -> None:
    def watchdogs() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == THREAD]

    with fake_tensorrt_llm():
        engine = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            assert watchdogs() == [THREAD]
        assert watchdogs() == []

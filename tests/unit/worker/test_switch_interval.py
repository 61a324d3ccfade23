"""An engine thread beside the loop gets the GIL back soon."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.support import exit_limit
from dynamo_trtllm.worker import Worker


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def test_run_then_threads_change_ten_times_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def run(work: Coroutine[Any, Any, None]) -> None:
        seen.append(sys.getswitchinterval())
        work.close()

    monkeypatch.setattr(uvloop, "run", run)
    # the process is that of the tests
    monkeypatch.setattr(exit_limit, "limit_interpreter_exit", lambda status: None)
    sys.setswitchinterval(0.005)
    Worker(WorkerConfig(model_path="tiny", engine="mock")).run()
    assert seen == [pytest.approx(0.0005)]

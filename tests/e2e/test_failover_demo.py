"""`demo --failover` with real processes. They have the mock engine, which starts faster than torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kit.launcher_process import LauncherProcess
from tests.kit.waiting import SOON_S

CONSOLE = (sys.executable, "-c", "from dynamo_trtllm.cli.console import main; main()")


@pytest.mark.long  # tests/unit/cli/test_failover.py has all but real processes
def test_failover_demo_continues_the_stream(tmp_path: Path) -> None:
    launched = LauncherProcess(
        tmp_path, "demo", "--failover", "--engine", "mock", "--port", "0", command=CONSOLE
    )
    try:
        assert launched.end() == (0, "")
        said = "\n".join(launched.lines)
        assert re.search(r"^✗ kill -9 \d+: decode-\d, which generates this, is gone$", said, re.M)
        assert re.search(
            r"^✓ the same text as undisturbed: .*, the rest from decode-\d$", said, re.M
        )
        assert "call failed: disconnected" in said  # of explain
        assert " | " not in said  # no lines of the processes
        launched.wait_gone(SOON_S)
    finally:
        launched.close()

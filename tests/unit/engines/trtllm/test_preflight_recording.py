"""Preflight's findings in the shipped engine_configs/ are the recorded ones, word for word."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.engines.trtllm.preflight_recording import RECORDING, shipped_findings


def test_shipped_files_have_the_recorded_problems(tmp_path: Path) -> None:
    recorded = json.loads(RECORDING.read_text(encoding="utf-8"))
    now = shipped_findings(tmp_path)
    cases = {*recorded, *now}
    changed = {name: now.get(name) for name in cases if now.get(name) != recorded.get(name)}
    assert changed == {}, (
        "run python -m tests.unit.engines.trtllm.preflight_recording and commit the difference"
    )

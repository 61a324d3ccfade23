"""`dynamo-trtllm simulate`: what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_trtllm.cli import simulate

ELASTIC = """
frontend: {router-mode: slo, slo-ttft-ms: 2000, slo-itl-ms: 100}
workers:
- name: elastic
  disaggregation_mode: elastic
  devices: [0, 1, 2, 3]
  count: 4
  flags: {model-path: openai/gpt-oss-120b, engine: vllm}
"""


@pytest.mark.parametrize(("planner", "is_changed"), [("", True), ("planner: off\n", False)])
def test_simulate_says_how_often_the_planner_changed_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planner: str, is_changed: bool
) -> None:
    file = tmp_path / "elastic.yaml"
    file.write_text(ELASTIC + planner)
    load = ["--gpu", "h200", "--shape", "8192/256", "--rate", "8", "--requests", "100"]
    with pytest.raises(SystemExit) as ended:
        simulate.main([str(file), *load])
    assert ended.value.code == 0
    assert ("the planner changed shares 1 time\n" in capsys.readouterr().out) is is_changed

"""`simulate` and `plan` print equal figures for equal commands, and plain sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dynamo_trtllm.cli import plan, simulate

MOCK = """
constants:
- models: [some-model]
  engine: vllm
  versions: ['1.0']
  gpu: h200
  source: made up for this test
  fitted: nothing
  mock: {step_s: 0.01, prefill_token_s: 0.0001}
"""
DEPLOYMENT = """
workers:
- name: worker
  disaggregation_mode: prefill_and_decode
  flags: {model: some-model, engine: vllm}
"""


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Run a command in a folder with constants and a deployment, and return what it prints."""
    (tmp_path / "constants.yaml").write_text(MOCK, encoding="utf-8")
    (tmp_path / "deployment.yaml").write_text(DEPLOYMENT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run_command(line: str) -> str:
        name, *words = line.split()
        command = {"plan": plan, "simulate": simulate}[name]
        with pytest.raises(SystemExit) as ended:
            command.main([*words, "--constants", "constants.yaml"])
        output = capsys.readouterr()
        assert ended.value.code in (0, 2)
        return output.err if ended.value.code else output.out

    return run_command


SIMULATE = (
    "simulate deployment.yaml --gpu h200 --shape 1000/20 --rate 4 --requests 50 --mean-gap-ms 50"
)
PLAN = "plan some-model --gpu h200 --gpus 2 --shape 1000/20 --rate 4 --requests 20 --seeds 2 --mean-gap-ms 50"


def test_simulate_prints_equal_figures_again(run: Callable[[str], str]) -> None:
    text = run(SIMULATE)
    assert text.startswith("50 requests in ")
    assert "TTFT 2000 ms and worst gap 100 ms: kept by" in text
    assert run(SIMULATE) == text
    assert run(f"{SIMULATE} --seed 2") != text


def test_simulate_prints_json(run: Callable[[str], str]) -> None:
    figures = json.loads(run(f"{SIMULATE} --json"))
    assert figures["goodput"]["mean-gap"]["attainment"] == 0.86
    assert figures["ttft_ms"]["p50"] == pytest.approx(110, abs=15)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("simulate deployment.yaml --gpu h200", "give --trace or --shape"),
        ("simulate deployment.yaml --gpu h200 --shape 1/1", "either --rate or --concurrency"),
        ("simulate deployment.yaml --gpu h200 --shape 1/1 --rate 0", "rate"),
        ("simulate deployment.yaml --gpu h200 --trace x --rate 1", "use --speed"),
        ("simulate deployment.yaml --gpu h100 --shape 1/1 --rate 1", "no constants"),
        ("simulate deployment.yaml --gpu h200 --trace none.jsonl", "can't be read"),
        ("simulate deployment.yaml --gpu h200 --shape 131072/1 --rate 1", "context"),
        ("plan other --gpu h200 --shape 1/1 --rate 1", "no constants for other"),
    ],
)
def test_bad_command_line_says_what_to_do(
    run: Callable[[str], str], line: str, problem: str
) -> None:
    assert problem in run(line)


def test_plan_recommends_a_split_for_worst_gaps(run: Callable[[str], str]) -> None:
    text = run(f"{PLAN} --decide-by worst-gap")
    assert "Disaggregate at 4 requests/s: 1P1D is the best." in text
    assert "By mean-gap, no split is clearly better than aggregated workers." in text


def test_plan_says_when_not_to_disaggregate(run: Callable[[str], str]) -> None:
    text = run(PLAN)
    assert "Do not disaggregate at 4 requests/s: 2A is the best." in text


def test_plan_writes_deployments(run: Callable[[str], str], tmp_path: Path) -> None:
    run(f"{PLAN} --decide-by worst-gap --out plan")
    real = yaml.safe_load((tmp_path / "plan" / "deployment.yaml").read_text("utf-8"))
    mock = yaml.safe_load((tmp_path / "plan" / "mock.yaml").read_text("utf-8"))
    assert [worker["flags"]["engine"] for worker in real["workers"]] == ["vllm", "vllm"]
    assert [worker["devices"] for worker in mock["workers"]] == ["cpu", "cpu"]

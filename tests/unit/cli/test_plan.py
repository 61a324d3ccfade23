"""`simulate` and `plan` print equal figures for equal commands, and plain sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from dynamo_trtllm.cli import plan, simulate
from dynamo_trtllm.cli.preflight import evaluate
from dynamo_trtllm.config.commands import PreflightConfig
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.preflight.facts import known_gpu
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.vllm.args import vllm_args
from dynamo_trtllm.engines.vllm.preflight import VllmFacts, findings
from dynamo_trtllm.models.checkpoint import SHAPES
from dynamo_trtllm.simulate.topologies import Comparison

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
    "load",
    [
        "--trace one.jsonl",
        "--shape 1000/20 --concurrency 8 --requests 8",
        "--shape 1000/20 --concurrency 2 --requests 8",
    ],
)
def test_requests_that_arrive_at_once_have_a_rate(
    run: Callable[[str], str], tmp_path: Path, load: str
) -> None:
    (tmp_path / "one.jsonl").write_text(
        '{"timestamp": 0, "input_length": 68, "output_length": 6, "hash_ids": [0]}\n'
    )
    command = f"simulate deployment.yaml --gpu h200 {load}"
    assert "inf requests/s" not in run(command)
    figures = json.loads(run(f"{command} --json"), parse_constant=pytest.fail)
    goodput = figures["goodput"]["worst-gap"]
    assert goodput["attainment"] == 1
    per_s = figures["requests"] / figures["seconds"]
    assert goodput["good_requests_per_s_per_gpu"] == pytest.approx(per_s)


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


def test_plan_recommends_and_writes_a_split_for_worst_gaps(
    run: Callable[[str], str], tmp_path: Path
) -> None:
    text = run(f"{PLAN} --decide-by worst-gap --out plan")
    assert "Disaggregate at 4 requests/s: 1P1D is the best." in text
    assert "By mean-gap, no split is clearly better than aggregated workers." in text
    real = yaml.safe_load((tmp_path / "plan" / "deployment.yaml").read_text("utf-8"))
    mock = yaml.safe_load((tmp_path / "plan" / "mock.yaml").read_text("utf-8"))
    assert [worker["flags"]["engine"] for worker in real["workers"]] == ["vllm", "vllm"]
    assert [worker["devices"] for worker in mock["workers"]] == ["cpu", "cpu"]


def test_plan_says_when_not_to_disaggregate(run: Callable[[str], str]) -> None:
    text = run(PLAN)
    assert "Do not disaggregate at 4 requests/s: 2A is the best." in text


def test_plan_for_one_worker_compares_nothing(run: Callable[[str], str]) -> None:
    text = run(f"{PLAN} --gpus 1")
    assert "1A is the only topology: a split needs GPUs for two workers." in text
    assert "% of the requests within the limits" in text
    assert "isaggregate at" not in text
    assert "clearly better" not in text


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        (1, "It keeps the limits for no request."),
        (2, "At 4 requests/s, no topology keeps the limits for any request."),
    ],
)
def test_plan_that_keeps_no_limits_recommends_nothing(
    run: Callable[[str], str], gpus: int, problem: str
) -> None:
    text = run(f"{PLAN} --gpus {gpus} --ttft-ms 1")
    assert problem in text
    assert "Use more GPUs (--gpus), a lower --rate or longer limits." in text
    assert "is the best" not in text
    assert "It keeps 0 %" not in text


def plan_gpt_oss(engine: str, by: str, folder: Path, *more_words: str) -> None:
    """Plan with the constants of the package, and write files to a folder."""
    words = f"openai/gpt-oss-120b --engine {engine} --gpu h200 --gpus 2 --shape 8192/64 --rate 2"
    words += f" --requests 10 --seeds 1 --decide-by {by} --out {folder}"
    with pytest.raises(SystemExit) as ended:
        plan.main([*words.split(), *more_words])
    assert not ended.value.code


@pytest.fixture(scope="module")
def planned_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files and the chart of a plan for vLLM."""
    folder = tmp_path_factory.mktemp("plan")
    plan_gpt_oss("vllm", "worst-gap", folder, "--plot", str(folder / "chart.svg"))
    return folder


@pytest.mark.parametrize("by", ["mean-gap", "worst-gap"])
def test_engine_files_of_trtllm_pass_preflight(by: str, tmp_path: Path) -> None:
    plan_gpt_oss("trtllm", by, tmp_path / "plan")
    files = {path.stem: path for path in (tmp_path / "plan").glob("*.yaml")}
    roles = {"agg": files["worker"]} if "worker" in files else {}
    roles |= {name: files[name] for name in ("prefill", "decode") if name in files}
    report = evaluate(
        PreflightConfig(**roles, gpu="h200", model_path="gpt-oss-120b", isl=8192, osl=256)
    )
    wrong = [found for _, found in report.findings if found.severity != "note"]
    assert [asdict(found) for found in wrong] == []


def test_engine_files_of_vllm_pass_its_preflight(planned_vllm: Path) -> None:
    real = yaml.safe_load((planned_vllm / "deployment.yaml").read_text("utf-8"))
    for worker in real["workers"]:
        config = WorkerConfig(
            model_path="openai/gpt-oss-120b",
            engine="vllm",
            disaggregation_mode=worker["disaggregation_mode"],
            extra_engine_args=worker["flags"]["extra-engine-args"],
        )
        args = vllm_args(config, LIBRARY.newest)
        assert args.leaves["max_num_batched_tokens"].value == 8192
        facts = VllmFacts(
            role=config.disaggregation_mode,
            args=args,
            model=SHAPES["gpt-oss-120b"],
            gpu=known_gpu("h200"),
            num_gpus=len(worker["devices"]),
        )
        assert findings(facts, []) == []


def test_plot_shows_both_definitions_and_the_crossover(planned_vllm: Path) -> None:
    chart = (planned_vllm / "chart.svg").read_text("utf-8")
    for text in ("mean gap 20 ms", "worst gap 100 ms", "1P1D", "2A", "split better from"):
        assert f"<!-- {text}" in chart or text in chart


def test_plot_needs_the_package_that_draws(
    run: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--plot needs matplotlib" in run(f"{PLAN} --plot chart.svg")


def test_plot_rejects_the_ending_of_another_format(run: Callable[[str], str]) -> None:
    assert "--plot writes SVG only, but its file is a.png; use a.svg" in run(f"{PLAN} --plot a.png")


@pytest.mark.parametrize("flag", ["--out", "--plot"])
def test_file_that_plan_cannot_write_is_named_first(
    run: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(Comparison, "cell", None)
    assert "constants.yaml/x can't be written" in run(f"{PLAN} {flag} constants.yaml/x")


def test_plan_prints_figures_before_it_writes(
    run: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(plan, "write_text", lambda *_: printed.append(capsys.readouterr().out))
    monkeypatch.setattr(plan, "RATE_FACTORS", (1.0,))
    monkeypatch.setattr(plan, "_plot", lambda *_: "chart")
    run(f"{PLAN} --out plan --plot chart.svg")
    assert len(printed) > 1
    assert "is the best" in printed[0]

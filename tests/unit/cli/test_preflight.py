"""The preflight command as it is typed: what it prints, and with which status it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_trtllm.cli.preflight import main

CONFIGS = Path(__file__).resolve().parents[3] / "engine_configs" / "gpt-oss-120b"
TARGET = [
    "--prefill",
    f"{CONFIGS}/k8s-disagg/prefill.yaml",
    "--decode",
    f"{CONFIGS}/k8s-disagg/decode.yaml",
]
LOCAL = CONFIGS.parents[1] / "deploy" / "local"
DEPLOYMENT = f"{LOCAL}/gpt-oss-120b-disagg.yaml"
KNOWN = ["--gpu", "gb200", "--model", "gpt-oss-120b"]
LOAD = ["--isl", "8192", "--osl", "1024", "--concurrency", "1536"]

Changed = Callable[..., list[str]]


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """The Kubernetes pair with the decode role's arguments changed."""

    def write(**changes: Any) -> list[str]:
        values = yaml.safe_load((CONFIGS / "k8s-disagg" / "decode.yaml").read_text())
        path = tmp_path / "decode.yaml"
        path.write_text(yaml.safe_dump({**values, **changes}))
        return [*TARGET[:3], str(path)]

    return write


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    said = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, said.out, said.err


def test_main_when_the_pair_is_right_then_tables_and_status_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(capsys, *TARGET, *KNOWN, *LOAD)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "TensorRT-LLM 1.2.1 on gb200"
    assert lines[-1].startswith("0 errors, 0 warnings, ")
    cells = {line[:30].strip(): line[30:].split() for line in lines}
    assert cells["weights"] == ["60.8", "GiB", "15.2", "GiB"]
    assert cells["KV per token"] == ["36.0", "KiB", "9.0", "KiB"]
    assert cells["tokens per request"] == ["8,192", "9,216"]
    assert "1,280 (by max_batch_size)" in out
    assert "KV transfer of 8192 tokens at full rate" in out


def test_main_problem_shows_values_reason_and_fix(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    status, out, _ = run(capsys, *changed(max_seq_len=8500), *KNOWN)
    assert status == 1
    assert "error    pair: max_seq_len  [seq-len-order]" in out
    assert f"prefill: 9000 (YAML {CONFIGS}/k8s-disagg/prefill.yaml)" in out
    assert "decode: 8500 (YAML " in out
    assert "why: prefill would accept requests that are too long for decode" in out
    assert "fix: set it to at most 8500 on prefill" in out
    assert out.splitlines()[2].startswith("error")  # the worst first


def test_main_when_only_warnings_are_found_then_status_0(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    status, out, _ = run(capsys, *changed(load_format="dummy"), *KNOWN)
    assert status == 0
    assert "warning  decode: load_format  [dummy-weights]" in out


def test_main_reports_argument_the_release_rejects(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    argv = changed(
        moe_config={"backend": "MARLIN"},
        cache_transceiver_config={"backend": "UCX"},
        kv_cache_config={},
    )
    status, out, _ = run(capsys, *argv, *KNOWN, "--release", "1.1.0")
    assert status == 1
    assert "[argument-refused]" in out
    assert "moe_config.backend is 'MARLIN'" in out


@pytest.mark.parametrize(
    ("release", "changes"),
    [
        ("1.4.0rc4", {"moe_config": {"backend": "CUTEDSL_FC12"}}),
        (
            "1.3.0rc29",
            {"cache_transceiver_config": {"backend": "NIXL", "agent_bounce_buffer_enable": True}},
        ),
    ],
)
def test_main_accepts_argument_of_the_candidate(
    release: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    _, out, _ = run(capsys, *changed(**changes), *KNOWN, "--release", release)
    assert out.startswith(f"TensorRT-LLM {release} on gb200\n")
    assert "argument-refused" not in out


def test_main_rejects_wrong_scheduler_value(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    argv = changed(scheduler_config={"waiting_queue_policy": "prio"})
    status, out, _ = run(capsys, *argv, *KNOWN, "--release", "1.3.0rc27")
    assert status == 1
    assert "scheduler_config.waiting_queue_policy is 'prio': expected one of fcfs, priority" in out
    _, out, _ = run(capsys, *argv, *KNOWN, "--release", "1.3.0rc29")
    assert "scheduler_config.waiting_queue_policy 'prio' is passed on unchecked" in out


def test_main_warns_of_argument_in_unread_candidate(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    argv = changed(sampler_type="auto")
    status, out, _ = run(capsys, *argv, *KNOWN, "--release", "1.3.0rc13")
    assert status == 0
    assert "warning  decode: sampler_type  [argument-removed]" in out
    assert "1.3.0rc27 has none; 1.1.0, 1.2.1 have it" in out
    status, out, _ = run(capsys, *argv, *KNOWN, "--release", "1.3.0rc27")
    assert status == 1
    assert "TensorRT-LLM 1.3.0rc27 has no sampler_type" in out


def test_main_with_unsupported_release_names_the_oldest(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    status, _, err = run(capsys, *changed(), *KNOWN, "--release", "1.0.0")
    assert status == 2
    assert "TensorRT-LLM 1.0.0 is too old. Install 1.1.0 or newer." in err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "max_num_tokens: 20000\nmax_batch_size: 32\ngpu_memory_utilization: 0.9\n",
            "gpu_memory_utilization",
        ),
        ("max_num_tokens: [\n", "expected"),
    ],
    ids=["one key of vLLM", "no YAML"],
)
def test_main_reports_a_wrong_file_as_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    status, out, _ = run(capsys, "--prefill", str(file), "--decode", str(file), *KNOWN)
    assert status == 1
    assert "argument-refused" in out
    assert why in out


@pytest.mark.parametrize(
    ("file", "engine", "key"),
    [
        ("vllm/gpt-oss-120b/prefill.yaml", "vllm", "gpu_memory_utilization"),
        ("tiny-gpt-oss/prefill.yaml", "torch", "prefill_chunk_tokens"),
    ],
)
def test_main_with_file_of_another_engine_says_how_to_check(
    capsys: pytest.CaptureFixture[str], file: str, engine: str, key: str
) -> None:
    path = str(CONFIGS.parent / file)
    status, out, err = run(capsys, "--prefill", path, "--decode", path, *KNOWN)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert (
        f"preflight checks TensorRT-LLM files only, but {path} is a file for --engine {engine} (it"
        f" has {key})" in err
    )
    assert f"--engine {engine} --model-path MODEL --extra-engine-args {path} --print-config" in err
    assert len(err) < 500


def test_main_with_unfamiliar_key_does_not_list_all(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    status, out, _ = run(capsys, *changed(xyzzy=1), *KNOWN)
    assert status == 1
    (line,) = [line for line in out.splitlines() if "unknown key 'xyzzy'" in line]
    assert len(line) < 300


def test_main_when_json_is_asked_then_it_is_all_there(
    capsys: pytest.CaptureFixture[str], changed: Changed
) -> None:
    argv = changed(kv_cache_config={"dtype": "auto", "enable_block_reuse": False})
    status, out, _ = run(capsys, *argv, *KNOWN, *LOAD, "--json")
    body = json.loads(out)
    assert status == 1
    assert (body["release"], body["gpu"], body["errors"]) == ("1.2.1", "gb200", 1)
    (error,) = [found for found in body["findings"] if found["severity"] == "error"]
    assert (error["role"], error["rule"], error["field"]) == (
        "pair",
        "kv-dtype-equal",
        "kv_cache_config.dtype",
    )
    assert set(error) == {"role", "severity", "rule", "field", "value", "other", "why", "fix"}
    assert [table["role"] for table in body["memory"]] == ["prefill", "decode"]
    assert body["memory"][0]["kv_token_bytes"] == 36 * 1024
    assert body["kv_transfer"]["tokens"] == 8192
    assert set(body["kv_transfer"]["seconds"]) == {"NVLink", "PCIe", "network (400 Gb/s)"}


def test_main_flags_override_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, *TARGET, *KNOWN, "--decode-args", "--max-seq-len 8000 --max-batch-size 64"
    )
    assert status == 1
    assert "decode: 8000 (flag --max-seq-len)" in out
    assert "--max-seq-len 8000 overrides max_seq_len 11000" in out


def test_main_checks_one_aggregated_worker_alone(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--tensor-parallel-size 4 --expert-parallel-size 4 --max-batch-size 800"
    status, out, _ = run(
        capsys, "--agg", f"{CONFIGS}/k8s-agg/agg.yaml", "--agg-args", flags, *KNOWN
    )
    assert status == 0
    assert "prefill_and_decode, 4 GPUs" in out
    assert "at full rate" not in out


def test_main_without_model_and_gpu_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, *TARGET)
    assert status == 0
    assert "on an unknown GPU (see --gpu)" in out
    assert "Memory estimate skipped: pass --model" in out


def test_main_uses_settings_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TRTLLM_GPU", "h200")
    # a worker's: not read for the workers that are judged
    monkeypatch.setenv("DYN_TRTLLM_MAX_SEQ_LEN", "5")
    status, out, _ = run(capsys, *TARGET, *KNOWN[2:])
    assert "TensorRT-LLM 1.2.1 on h200" in out
    assert "max_seq_len" not in out
    assert "[moe-backend-falls-back]" in out
    assert status == 0


def test_main_with_one_file_checks_only_that_role(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *TARGET[2:], *KNOWN)
    assert status == 0
    assert "decode, 4 GPUs" in out
    assert "prefill" not in out


def test_main_checks_the_workers_of_a_deployment_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, DEPLOYMENT, "--gpu", "b200", "--isl", "8K", "--json")
    report = json.loads(out)
    assert (status, report["errors"]) == (0, 0)
    assert len(report["memory"]) == 2  # its served model is known
    assert report["kv_transfer"]["tokens"] == 8192


def test_main_uses_flags_of_the_deployment_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spoiled = tmp_path / "deployment.yaml"
    text = Path(DEPLOYMENT).read_text(encoding="utf-8")
    spoiled.write_text(text.replace("max-batch-size: 128", "max-seq-len: 100"))
    status, out, _ = run(capsys, str(spoiled), "--gpu", "b200")
    assert status == 1
    assert "decode: 100 (flag --max-seq-len)" in out


def test_main_rejects_two_groups_of_a_role(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = Path(DEPLOYMENT).read_text(encoding="utf-8")
    twice = tmp_path / "deployment.yaml"
    twice.write_text(text.replace("disaggregation_mode: decode", "disaggregation_mode: prefill"))
    status, _, err = run(capsys, str(twice))
    assert status == 2
    assert "several groups of prefill workers" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to check; give --prefill and --decode, --agg, or a deployment file"),
        ([*TARGET, DEPLOYMENT], "a deployment file has all settings of its workers"),
        ([f"{LOCAL}/demo.yaml"], "preflight checks TensorRT-LLM workers only, but prefill of"),
        ([*TARGET, "--agg", "a.yaml"], "--agg can't be combined with --prefill or --decode"),
        ([*TARGET, "--osl", "5"], "--osl and --concurrency need --isl"),
        ([*TARGET, "--gpu", "b2000"], "Unknown --gpu b2000. Choose one of a100"),
        ([*TARGET, "--model", "no/where"], "Model folder no/where does not exist"),
        ([*TARGET, "--release", "new"], "Invalid TensorRT-LLM version 'new'"),
        (["--prefill", "no.yaml"], "file no.yaml does not exist"),
        (
            [*TARGET, "--decode-args", "--max-sequence-len 5"],
            "the flags of the decode worker: unknown flag",
        ),
        (["--agg", 300 * "a"], "does not exist"),
        (
            [*TARGET, "--model-path", "~no-such-user/m"],
            "Model folder ~no-such-user/m does not exist",
        ),
        (
            [*TARGET, "--decode-args=--engine mock"],
            "--engine mock can't be used here: only TensorRT-LLM is checked",
        ),
        (
            [*TARGET, "--decode-args=--model /m"],
            "--model /m can't be used here: pass --model-path to this command",
        ),
        (
            [*TARGET, "--decode-args=--is-prefill-worker"],
            "--prefill, --decode and --agg set the role",
        ),
        ([*TARGET, "--decode-args=--print-config"], "--print-config can't be used here"),
        (
            [*TARGET, "--decode-args", "--x 'y"],
            "the flags of the decode worker can't be parsed: No closing quotation",
        ),
        ([*TARGET, "--isl", "0"], "flag --isl is '0'"),
    ],
)
def test_main_with_bad_command_line_exits_with_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("python -m dynamo_trtllm.preflight: ")
    assert err.count("\n") == 1
    assert said in err


def test_module_when_asked_for_help_then_it_teaches() -> None:
    command = [sys.executable, "-m", "dynamo_trtllm.preflight", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for word in (
        "--prefill",
        "--decode",
        "--agg",
        "--gpu",
        "--isl",
        "--json",
        "exit status: 0 without errors",
    ):
        assert word in done.stdout


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_batch_size: !!bool x", "quote the value"),
        ("max_batch_size: !!timestamp x", "quote the value"),
        ("max_batch_size: !!int ''", "quote the value"),
        ("pytorch_backend_config: {1: 2}", "key 1 of pytorch_backend_config is not text"),
        (
            f"cache_transceiver_config: {{backend: UCX, max_tokens_in_buffer: {HUGE}}}",
            "has 400 digits",
        ),
        (f"pipeline_parallel_size: {HUGE}", "has 400 digits"),
        ("kv_cache_config: {host_cache_size: -5}", "expected 0 or more"),
        ("cuda_graph_config: {batch_sizes: [0]}", "each 1 or more"),
        (
            "{use_cuda_graph: false, cuda_graph_config: {max_batch_size: 8}}",
            "have different values",
        ),
        ("moe_backend: cutlass", "moe_config.backend is 'cutlass'"),
    ],
)
def test_main_with_odd_value_reports_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text + "\n")
    status, out, err = run(capsys, "--agg", str(path), *KNOWN, "--json")
    assert (status, err) == (1, "")
    assert says in json.dumps(json.loads(out)["findings"])


def test_main_shows_terminal_codes_escaped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "codes.yaml"
    path.write_text('attn_backend: "\\e[31mRED"\n')
    _, out, _ = run(capsys, "--agg", str(path), *KNOWN)
    assert "\x1b" not in out
    assert "\\x1b[31mRED" in out


def test_main_with_too_deep_json_reports_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    deep = "[" * 100_000
    status, _, err = run(capsys, *TARGET, "--decode-args", f"--override-engine-args '{deep}'")
    assert status == 2
    assert "nested too deep" in err or "expected a JSON object" in err

"""What `--print-environment` prints for the launch scripts of engines on several nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.kernel_profiles import load_profile
from dynamo_trtllm.engines.warm_up import cache_folders
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker import main as worker_main
from dynamo_trtllm.worker.show_arguments import shell_exports

ROOT = Path(__file__).parents[3]


def worker(*argv: str) -> WorkerConfig:
    return load(
        WorkerConfig,
        prog="w",
        argv=["--model-path", "/m", "--print-environment", *argv],
        environ={},
    )


def evaluated(lines: str, **environment: str) -> dict[str, str]:
    """Return the environment of a program that a shell starts after it has evaluated the lines."""
    script = 'eval "$LINES_TO_EVALUATE"; unset LINES_TO_EVALUATE; env -0'
    env = {"PATH": os.environ["PATH"], "LINES_TO_EVALUATE": lines, **environment}
    done = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, check=True)
    entries = (entry.decode().split("=", 1) for entry in done.stdout.split(b"\0") if entry)
    return {name: value for name, value in entries if name not in ("PATH", "PWD", "SHLVL", "_")}


def test_exports_set_profile_variables_and_compile_cache() -> None:
    lines = shell_exports(worker("--kernels-profile", "hopper", "--compile-cache", "/a b/'c'"), {})
    assert evaluated(lines) == load_profile("hopper").environment | cache_folders(Path("/a b/'c'"))
    assert evaluated(lines)["TRTLLM_ENABLE_PDL"] == "1"


@pytest.mark.parametrize("value", ["y", "", "a 'b' $HOME \n`c`"])
def test_exports_keep_a_variable_of_the_user(value: str) -> None:
    lines = shell_exports(worker("--kernels-profile", "hopper"), {"UCX_MEMTYPE_CACHE": value})
    assert evaluated(lines)["UCX_MEMTYPE_CACHE"] == value
    assert evaluated(lines, UCX_MEMTYPE_CACHE=value)["UCX_MEMTYPE_CACHE"] == value


@pytest.mark.parametrize(
    ("flags", "warns"), [((), True), (("--kernels-profile", "fallback"), False)]
)
def test_exports_without_profile_warn_unless_chosen(
    flags: tuple[str, ...],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("dynamo_trtllm.engines.trtllm.kernel_profiles.visible_gpus", list)
    first, *_ = shell_exports(worker(*flags), {}).splitlines()
    assert first == "# kernel profile fallback"
    assert ("no kernel profile is for the GPUs of this host" in caplog.text) == warns


@pytest.mark.parametrize("engine", ["torch", "vllm", "mock"])
def test_exports_when_the_engine_is_another_one_then_rejected(engine: str) -> None:
    with pytest.raises(ConfigError, match=rf"which only trtllm has, not {engine}"):
        shell_exports(worker("--engine", engine), {})


def test_main_prints_environment_without_a_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_main, "Worker", None)
    argv = ["w", "--model-path", "/m", "--kernels-profile=hopper", "--print-environment"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as stop:
        worker_main.main()
    assert stop.value.code == 0
    assert all(line.startswith(("# ", "export ")) for line in capsys.readouterr().out.splitlines())


def test_environment_command_does_not_import_tensorrt_llm(tmp_path: Path) -> None:
    """A rank that imports it before its variables are set has read them."""
    (tmp_path / "tensorrt_llm.py").write_text("raise SystemExit('imported')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "dynamo_trtllm", "--model-path", "/m", "--print-environment"]
    done = subprocess.run(
        [*command, "--kernels-profile", "hopper"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "export TRTLLM_ENABLE_PDL=1\n" in done.stdout

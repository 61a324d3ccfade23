"""The wheel by itself: it serves the demo and has the benchmarks, outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dynamo_trtllm.support.network.addresses import free_ports

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.extra, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new virtual environment with the wheel.

    Its dependencies are those that the tests run with.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    no_index = ["-q", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *no_index, "--no-build-isolation", "-w", folder / "dist", ROOT], check=True
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    (wheel,) = (folder / "dist").iterdir()
    subprocess.run([*pip, "--python", python, "install", *no_index, wheel], check=True)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    # a line of a .pth file comes after the packages of the environment, and .pth files in its
    # folder are not read
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "env"


def run(environment: Path, program: str, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{environment / 'bin'}:{env['PATH']}"
    command = [environment / "bin" / program, *words]
    done = subprocess.run(
        command, cwd=environment.parent, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_when_installed_then_its_own_files_are_used(environment: Path) -> None:
    said = run(environment, "python", "-c", "import dynamo_trtllm; print(dynamo_trtllm.__file__)")
    assert Path(said.strip()).is_relative_to(environment)


def test_demo_when_started_from_the_wheel_then_it_answers(environment: Path) -> None:
    said = run(environment, "dynamo-trtllm", "demo", "--once", "--port", str(free_ports()))
    assert "decode by:  decode-" in said
    assert "KV moved:   " in said


def test_serve_when_run_from_the_wheel_then_it_answers(environment: Path) -> None:
    said = run(environment, "python", str(ROOT / "examples" / "one_process.py"))
    assert "CompletionUsage(completion_tokens=100" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("profile", "--help"), "usage: python -m dynamo_trtllm.bench.profile "),
        (("plane", "--help"), "usage: python -m dynamo_trtllm.bench.plane "),
        (("client", "--help"), "usage: python -m dynamo_trtllm.bench.client "),
        (("hostile", "--help"), "usage: python -m dynamo_trtllm.bench.hostile "),
        (("chaos", "--list"), "kill"),
    ],
)
def test_benchmark_when_started_from_the_wheel_then_it_loads(
    environment: Path, words: tuple[str, ...], says: str
) -> None:
    name, *rest = words
    assert says in run(environment, "python", "-m", f"dynamo_trtllm.bench.{name}", *rest)
    assert not (environment.parent / "benchmarks").exists()


def test_chaos_when_run_from_the_wheel_then_a_fault_is_survived(environment: Path) -> None:
    said = run(environment, "dynamo-trtllm", "chaos", "kill-decode", "--seconds", "8")
    assert "kill-decode" in said
    assert "BAD" not in said


def test_wheel_has_no_results_or_tests(environment: Path) -> None:
    (package,) = environment.glob("lib/python*/site-packages/dynamo_trtllm")
    assert not (package / "bench/results").exists()
    assert not (package / "bench/__init__.py").exists()
    assert {
        path.name for path in package.parent.glob("*") if path.suffix not in (".dist-info", ".pth")
    } == {"dynamo_trtllm"}

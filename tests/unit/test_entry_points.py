"""What is typed to start something: `python -m` modules that Ctrl-C ends while they load, and
scripts/demo.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Interrupts(MetaPathFinder):
    """An importer that sends Ctrl-C when a module is imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == self._name:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "main"),
    [
        ("dynamo_trtllm", "dynamo_trtllm.worker.main"),
        ("dynamo_trtllm.frontend", "dynamo_trtllm.frontend.process.main"),
        ("dynamo_trtllm.launch", "dynamo_trtllm.launch.main"),
        ("dynamo_trtllm.chat", "dynamo_trtllm.cli.chat"),
        ("dynamo_trtllm.clear_namespace", "dynamo_trtllm.cli.clear_namespace"),
        ("dynamo_trtllm.preflight", "dynamo_trtllm.cli.preflight"),
    ],
)
def test_module_interrupted_while_loading_ends_properly(
    monkeypatch: pytest.MonkeyPatch, module: str, main: str
) -> None:
    monkeypatch.delitem(sys.modules, main, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupts(main), *sys.meta_path])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 130


@pytest.fixture
def demo(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """scripts/demo as it is, in a folder where the set-up and the demo print their arguments."""
    for name in ("scripts/setup", ".venv/bin/dynamo-trtllm"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\necho "${0##*/}" "$@"\n')
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / "scripts/demo", tmp_path / "scripts")

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [tmp_path / "scripts/demo", *words], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("words", "setup", "launch"),
    [
        ((), "", "deploy/local/demo.yaml"),
        (("--model=smollm2",), "--model smollm2", "--model smollm2 deploy/local/demo.yaml"),
        (
            ("--model", "smollm2"),
            "--model smollm2",
            "--model smollm2 deploy/local/demo.yaml",
        ),
        (("--failover", "--port=0"), "", "--failover --port 0 deploy/local/demo.yaml"),
        (("--engine=mock", "a.yaml"), "", "--engine mock a.yaml"),
        (("--port=81", "--host", "::"), "", "--port 81 --host :: deploy/local/demo.yaml"),
        (
            ("--torch-index=https://t", "--once"),
            "--torch-index https://t",
            "--once deploy/local/demo.yaml",
        ),
        (
            ("--engine=trtllm", "--stand-in"),
            "",
            "--engine trtllm deploy/local/demo-trtllm-stand-in.yaml",
        ),
    ],
)
def test_demo_script_divides_flags_of_setup_and_launcher(
    demo: Callable[..., tuple[int, str, str]], words: tuple[str, ...], setup: str, launch: str
) -> None:
    status, said, errors = demo(*words)
    assert (status, errors) == (0, "")
    lines = [line for line in said.splitlines() if not line.startswith("STAND-IN")]
    assert lines == [f"setup {setup}".strip(), f"dynamo-trtllm demo {launch}"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("a.yaml", "b.yaml"), "give one deployment file, not a.yaml and b.yaml"),
        (("--port",), "--port needs a value"),
        (("--modl=x",), "unknown flag --modl=x; see --help"),
        (("--stand-in",), "--stand-in needs --engine trtllm"),
    ],
)
def test_demo_script_with_wrong_line_starts_nothing(
    demo: Callable[..., tuple[int, str, str]], words: tuple[str, ...], says: str
) -> None:
    assert demo(*words) == (2, "", f"demo: {says}\n")

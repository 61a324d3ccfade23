"""A module in another process: which folders are searched for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.process.process_group import process_argv
from dynamo_trtllm.support.subprocesses import module_command
from tests.kit.cases import each_case


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module of the standard library that the working folder has, too."""
    (tmp_path / "colorsys.py").write_text("print('own')")
    monkeypatch.chdir(tmp_path)
    outside = [path for path in sys.path if os.path.abspath(path) != os.getcwd()]
    monkeypatch.setattr(sys, "path", outside)
    return "colorsys"


def output_of(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_file_of_the_working_folder_replaces_no_module(own_module: str) -> None:
    assert output_of(module_command(own_module)) == ""


@each_case("path", ["", ".", "{folder}"])
def test_working_folder_is_searched_if_this_process_does(
    own_module: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path.format(folder=os.getcwd()), *sys.path])
    assert output_of(module_command(own_module)) == "own\n"


def test_deleted_working_folder_is_no_error(own_module: str, tmp_path: Path) -> None:
    (tmp_path / f"{own_module}.py").unlink()
    tmp_path.rmdir()
    assert module_command("m", "--flag") == [sys.executable, "-P", "-m", "m", "--flag"]


def test_frontend_processes_do_not_search_the_working_folder(own_module: str) -> None:
    assert process_argv(FrontendConfig(workers=2), 1, 80)[:3] == [sys.executable, "-P", "-m"]

"""The gate of sizes finds what it is for: a long file, a long function, a wide package and a deep one."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "size"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    loader = SourceFileLoader("size_gate", str(SCRIPT))
    spec = importlib.util.spec_from_loader("size_gate", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_file_when_it_or_a_function_is_long_then_both_are_named(gate: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def work():\n" + "    pass\n" * 400)
    assert list(gate.too_long(path, path)) == [
        f"{path}: 401 lines, at most 400",
        f"{path}:1: work has 401 lines, at most 60",
    ]


def test_package_when_it_is_wide_then_the_number_of_files(gate: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "dynamo_trtllm" / "router"
    package.mkdir(parents=True)
    for name in ("__init__", "__main__", *(f"m{n}" for n in range(10))):
        (package / f"{name}.py").touch()
    assert list(gate.too_wide_or_deep(tmp_path)) == []
    (package / "one_more.py").touch()
    (line,) = gate.too_wide_or_deep(tmp_path)
    assert line.startswith("dynamo_trtllm/router: 11 files, at most 10")


def test_package_when_its_modules_import_one_another_in_a_row_then_the_number_of_levels(
    gate: ModuleType, tmp_path: Path
) -> None:
    package = tmp_path / "dynamo_trtllm" / "router"
    package.mkdir(parents=True)
    for n in range(7):
        (package / f"m{n}.py").write_text(
            f"from dynamo_trtllm.router.m{n + 1} import NAME\n" if n < 6 else "NAME = 1\n"
        )
    assert list(gate.too_wide_or_deep(tmp_path)) == ["dynamo_trtllm/router: 7 levels of imports, at most 6"]
    (package / "m5.py").write_text("from dynamo_trtllm.codec import m6\nfrom dynamo_trtllm.router import m0\n")
    assert list(gate.too_wide_or_deep(tmp_path)) == []

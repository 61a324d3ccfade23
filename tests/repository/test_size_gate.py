"""The gate of sizes finds what it is for: a long file and a long function."""

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


def test_file_when_it_or_a_function_is_long_then_both_are_named(
    gate: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "long.py"
    path.write_text("def work():\n" + "    pass\n" * 600)
    assert list(gate.too_long(path, path)) == [
        f"{path}: 601 lines, at most 600",
        f"{path}:1: work has 601 lines, at most 60",
    ]

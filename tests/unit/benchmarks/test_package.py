"""The benchmarks as a package: `benchmarks` in a checkout, `dynamo_trtllm.bench` in the wheel."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_modules_import_one_another_by_relative_names() -> None:
    """The wheel has no package `benchmarks`."""
    found = []
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            found += [
                f"{path}:{node.lineno}" for name in names if name.split(".")[0] == "benchmarks"
            ]
    assert found == []


def test_module_imported_by_wheel_name_is_of_the_checkout() -> None:
    module = importlib.import_module("dynamo_trtllm.bench.summary")
    assert module.__file__ == str(ROOT / "benchmarks/summary.py")

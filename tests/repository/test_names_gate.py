"""The gate of names finds what it is for.

That is a class name used twice, a long name of a test, and a private word.
"""

from __future__ import annotations

import importlib.util
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "names"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    loader = SourceFileLoader("names_gate", str(SCRIPT))
    spec = importlib.util.spec_from_loader("names_gate", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dynamo_trtllm").mkdir()
    (tmp_path / "docs").mkdir()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def test_class_when_its_name_stands_twice_then_both_places(gate: ModuleType, root: Path) -> None:
    for name in ("a", "b"):
        (root / "dynamo_trtllm" / f"{name}.py").write_text(
            f"class Scheduler: ...\nclass Only{name}: ...\n"
        )
    (line,) = gate.repeated_classes(root)
    assert line == "class Scheduler is defined 2 times: dynamo_trtllm/a.py:1, dynamo_trtllm/b.py:1"


def test_long_test_name_is_found_with_its_place(gate: ModuleType, root: Path) -> None:
    longest = "test_".ljust(60, "x")
    too_long = "test_".ljust(61, "x")
    helper = "make_".ljust(61, "x")
    folder = root / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(
        f"def {longest}(): ...\n"
        f"def {helper}(): ...\n"
        "class TestA:\n"
        f"    async def {too_long}(self): ...\n"
    )
    (line,) = gate.long_test_names(root)
    assert line == f"tests/unit/test_a.py:4: {too_long} has 61 characters, at most 60"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("dynamo_trtllm/a.py", "def _told(legs): ...", ["told", "legs"]),
        ("docs/a.md", "Each Twin is *handed* over.", ["Twin", "handed"]),
        ("docs/b.md", "Bedrooms, legends and a telltale handle.", []),
        ("tests/data/heldout_prompts.txt", "A room.", []),
        ("dynamo_trtllm/observability/metrics.json", '[{"help": "Seats in a room"}]', ["room"]),
        ("dynamo_trtllm/engines/vllm/api_manifests/0.json", '["seam"]', []),
    ],
)
def test_rejected_words_are_found_unless_allowed(
    gate: ModuleType, root: Path, name: str, text: str, words: list[str]
) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    assert [line.split("'")[1] for line in gate.rejected_words(root)] == words

"""Which tests `scripts/test --changed` runs after a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grimp
import pytest

from scripts.changed_tests import changed_files, import_graph, touched_tests

UNTOUCHED = "tests/unit/support/http_server/test_request_head.py"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return import_graph()


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("tests/unit/protocol/test_streams.py", "tests/unit/protocol/test_streams.py"),
        (
            "dynamo_trtllm/frontend/routing/prefix_index.py",
            "tests/unit/frontend/routing/test_prefix_index.py",
        ),
        # through modules between them
        (
            "dynamo_trtllm/frontend/routing/prefix_index.py",
            "tests/unit/frontend/test_request_router.py",
        ),
        # a helper that no test is
        ("tests/kit/request_planes.py", "tests/contract/test_plane_ends.py"),
        # which pytest reads without an import
        ("tests/contract/conftest.py", "tests/contract/test_discovery.py"),
        ("dynamo_trtllm/frontend/docs.html", "tests/unit/frontend/test_openapi.py"),
        ("tests/data/wire_format.json", "tests/unit/protocol/test_wire_format.py"),
        ("docs/api.md", "tests/repository/test_docs.py"),
    ],
)
def test_file_when_changed_then_only_tests_that_use_it_run(
    changed: str, test: str, graph: grimp.ImportGraph
) -> None:
    touched = touched_tests([changed], graph)
    assert test in touched
    assert UNTOUCHED not in touched


@pytest.mark.parametrize("changed", ["pyproject.toml", "tests/conftest.py"])
def test_file_when_it_concerns_all_tests_then_all_run(
    changed: str, graph: grimp.ImportGraph
) -> None:
    assert touched_tests([changed], graph) == ["tests"]


def test_files_when_of_this_branch_then_they_are_changed(
    tmp_path: Path,
) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@localhost")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "-m", name)

    git("init", "--initial-branch=main")
    commit("both.py")
    git("checkout", "-b", "branch")
    commit("committed.py")
    git("checkout", "main")
    commit("of_main.py")
    git("checkout", "branch")
    (tmp_path / "both.py").write_text("changed")
    (tmp_path / "new.py").write_text("")
    assert changed_files(tmp_path, "main") == ["both.py", "committed.py", "new.py"]


def test_ref_when_unknown_then_an_error_says_how_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        changed_files(tmp_path, "nowhere")
    assert ended.value.code == 2
    assert "nowhere" in capsys.readouterr().err

"""Which files a process of pytest-xdist collects and runs, and how the others go on when it dies:
without the test that killed it, and to an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.xdist_scheduling import COLLECTED_ONCE, TOGETHER, FolderScheduling, is_of_another

FOLDER = Path(__file__).parents[1]
TESTS = [f"tests/{file}.py::test_{number}" for file in ("a", "b", "c") for number in range(4)]


class FakeNode:
    """One process, as the scheduler sees it."""

    def __init__(self, name: str, collected: Sequence[str] = TESTS) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.collected = collected
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [self.collected[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduler(*nodes: FakeNode) -> FolderScheduling:
    config: Any = SimpleNamespace(getvalue=lambda name: [f"{len(nodes)}*popen"])
    session: Any = SimpleNamespace(testscollected=0)
    made = FolderScheduling(config, None, session)
    for node in nodes:
        join(made, node)
    made.schedule()
    return made


def join(made: FolderScheduling, node: Any) -> None:
    made.add_node(node)
    made.add_node_collection(node, node.collected)


def run(made: FolderScheduling, node: Any, count: int) -> None:
    """Its first tests, also those that it is given meanwhile."""
    done = 0
    while done < min(count, len(node.given)):
        made.mark_test_complete(node, node.collected.index(node.given[done]))
        done += 1


def test_dead_process_loses_only_the_test_that_killed_it() -> None:
    dying = FakeNode("dying")
    other = FakeNode("other")
    made = scheduler(dying, other)
    run(made, dying, 1)
    assert made.remove_node(dying) == dying.given[1]
    run(made, other, len(TESTS))
    assert sorted([dying.given[0], dying.given[1], *other.given]) == sorted(TESTS)
    assert made.tests_finished
    assert other.shutting_down


def test_process_dying_in_last_test_leaves_nothing_to_run() -> None:
    dying = FakeNode("dying")
    made = scheduler(dying)
    run(made, dying, len(TESTS) - 1)
    assert dying.given == TESTS
    assert made.remove_node(dying) == TESTS[-1]  # type: ignore[arg-type]
    assert not made.workqueue


def test_successor_with_one_test_left_gets_another_file() -> None:
    """It begins a test when it knows the next one."""
    dying = FakeNode("dying")
    ended = FakeNode("ended")
    made = scheduler(dying, ended)
    run(made, dying, 2)
    ended.shutdown()
    assert made.remove_node(dying) == dying.given[2]
    successor = FakeNode("successor")
    late = FakeNode("late")
    made.add_node(late)  # it has not collected yet
    join(made, successor)
    made.schedule()
    assert late.given == []
    assert successor.given[0] == dying.given[3]
    assert len(successor.given) > 1


def test_process_runs_only_what_it_has_collected() -> None:
    first = FakeNode("first")
    second = FakeNode("second", TESTS[8:])
    made = scheduler(first, second)
    run(made, second, len(TESTS))
    assert second.given == TESTS[8:]
    run(made, first, len(TESTS))
    assert first.given == TESTS[:8]
    assert made.tests_finished


def test_process_without_tests_ends_at_once() -> None:
    idle = FakeNode("idle", [])
    made = scheduler(FakeNode("other"), idle)
    assert idle.shutting_down
    assert made._session.testscollected == len(TESTS)
    assert not made.tests_finished


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_each_file_has_one_process_or_all(processes: int) -> None:
    for file in FOLDER.rglob("test_*.py"):
        path = file.relative_to(FOLDER.parent).as_posix()
        folders = [f"{folder.as_posix()}/" for folder in Path(path).parents][:-1]
        collecting = [
            process
            for process in range(processes)
            if not any(is_of_another(part, process, processes) for part in (path, *folders))
        ]
        is_own = path.startswith(tuple(prefix for group in COLLECTED_ONCE for prefix in group))
        assert len(collecting) == (1 if is_own else processes), path


def test_successor_of_a_dead_process_collects_all_files() -> None:
    assert is_of_another("tests/unit/cli/", 0, 3)
    assert not is_of_another("tests/unit/cli/", 3, 3)


def test_files_of_a_group_have_the_same_process() -> None:
    for group in TOGETHER:
        owners = {
            next(number for number, paths in enumerate(COLLECTED_ONCE) if path.startswith(paths))
            for path in group
        }
        assert len(owners) == 1, group

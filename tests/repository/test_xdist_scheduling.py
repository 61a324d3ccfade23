"""How pytest-xdist goes on when one of its processes dies: without the test that killed it, and to
an end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.kit.xdist_scheduling import FolderScheduling

TESTS = [f"tests/{file}.py::test_{number}" for file in ("a", "b", "c") for number in range(4)]


class FakeNode:
    """One process, as the scheduler sees it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduler(*nodes: FakeNode) -> FolderScheduling:
    config: Any = SimpleNamespace(
        getvalue=lambda name: [f"{len(nodes)}*popen"],
        option=SimpleNamespace(loadscopereorder=False),
    )
    made = FolderScheduling(config)
    for node in nodes:
        join(made, node)
    made.schedule()
    return made


def join(made: FolderScheduling, node: Any) -> None:
    made.add_node(node)
    made.add_node_collection(node, TESTS)


def run(made: FolderScheduling, node: Any, count: int) -> None:
    """Its first tests, also those that it is given meanwhile."""
    done = 0
    while done < min(count, len(node.given)):
        made.mark_test_complete(node, TESTS.index(node.given[done]))
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

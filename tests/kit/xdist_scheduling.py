"""Assigns test files to the processes of pytest-xdist."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# torch, transformers and tiny models: 8 s of CPU time for each process
_TORCH = (
    "tests/contract/test_engine",
    "tests/contract/test_trtllm_",
    "tests/contract/test_changed_kv.py",
    "tests/contract/test_pair_probes.py",
    "tests/contract/test_prefix_cache.py",
    "tests/contract/test_sampling_after_transfer.py",
    "tests/contract/test_warm_up.py",
    "tests/integration/test_elastic.py",
    "tests/integration/test_kv_collection.py",
    "tests/integration/test_template_model.py",
    "tests/integration/test_worker_preflight.py",
    "tests/unit/engines/torch/",
    "tests/unit/engines/vllm/test_vllm_dummy_weights.py",
    "tests/unit/fakes/test_stand_in.py",
    "tests/unit/models/test_checkpoint.py",
)
# Groups of files, by the beginning of their paths, that share what takes long to start: processes;
# transformers.
TOGETHER = (
    ("tests/e2e/demo_model/",),
    ("tests/e2e/mock_cluster/",),
    _TORCH,
    ("tests/unit/frontend/tokenization/",),  # fastokens
    ("tests/unit/deploy/",),  # the schemas of Kubernetes
)
# What only one process collects and runs, each its own files: another process needs neither their
# imports nor their tests. The files of the first group that has them are those of process 0.
COLLECTED_ONCE = (
    (
        *_TORCH,
        "tests/unit/engines/",
        "tests/integration/test_kv_transfer_bench.py",
        "tests/unit/test_numbers_from_outside.py",
    ),
    (  # OpenAI's SDK and hypothesis
        "tests/e2e/demo_model/",
        "tests/e2e/test_keep_alive.py",
        "tests/clients/",
        "tests/unit/frontend/",
        "tests/unit/access/",
        "tests/unit/test_own_engine.py",
    ),
    ("tests/e2e/mock_cluster/", "tests/unit/", "tests/fuzz/"),
)
# A process runs its own files first, and then those that any process may run: they fill the time
# until the end. Of these, the longest start first, so that they do not run alone at the end.
FIRST = (
    *chain(*TOGETHER),
    *chain(*COLLECTED_ONCE),
    "tests/e2e/test_chaos.py",
    "tests/e2e/test_launch.py",
    "tests/e2e/test_failures.py",
    "tests/e2e/test_printed_commands.py",
    "tests/e2e/test_stand_in.py",
    "tests/e2e/",
    "tests/integration/",
    "tests/contract/",
)


def rank(nodeid: str) -> int:
    """Return the position of a test's file in the order of starts."""
    return next((place for place, path in enumerate(FIRST) if nodeid.startswith(path)), len(FIRST))


def is_of_another(path: str, process: int, processes: int) -> bool:
    """Return whether this process collects nothing of a file or folder.

    Args:
        path: relative to the repository; that of a folder ends with a slash.
        process: number of this process. The successor of one that died has a higher number than
            the first processes, and collects all files.
        processes: how many there were at the start.
    """
    owner = next(
        (number for number, paths in enumerate(COLLECTED_ONCE) if path.startswith(paths)), None
    )
    if owner is None or process >= processes or owner % processes == process:
        return False
    own = chain.from_iterable(COLLECTED_ONCE[process::processes])
    return not any(file.startswith(path) for file in own)


class FolderScheduling(LoadFileScheduling):
    """Schedules like `--dist loadfile`; a group of TOGETHER counts as one file, processes collect
    different files, and a process may die.

    pytest-xdist 3.8 gives the test that killed a process to the next one, sends work to a successor
    that has not collected its tests yet, and waits for ever for a successor that got a file with a
    single test left.
    """

    def __init__(self, config: pytest.Config, log: Any, session: pytest.Session) -> None:
        super().__init__(config, log)
        self._session = session
        self._collected: dict[Any, frozenset[str]] = {}

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Register what a process has collected: it can run nothing else."""
        self.registered_collections[node] = list(collection)
        self._collected[node] = frozenset(collection)

    def schedule(self) -> None:
        """Give each process its first files."""
        if self.collection is None:
            collected = chain.from_iterable(self.registered_collections.values())
            self.collection = sorted(dict.fromkeys(collected), key=rank)
            for nodeid in self.collection:
                self.workqueue.setdefault(self._split_scope(nodeid), {})[nodeid] = False
        # pytest-xdist counts those of the process that has collected last.
        self._session.testscollected = len(self.collection)
        for node in self.nodes:
            self._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return next(
            (group[0] for group in TOGETHER if nodeid.startswith(group)),
            super()._split_scope(nodeid),
        )

    def remove_node(self, node: Any) -> str | None:
        """Take back what a process did not run.

        Return the test in which it died, which is not run again.
        """
        left = [
            (unit, nodeid)
            for unit in self.assigned_work[node].values()
            for nodeid in unit
            if not unit[nodeid]
        ]
        if not left:
            return super().remove_node(node)
        unit, died_in = left[0]
        unit[died_in] = True
        workload = self.assigned_work[node]
        self.assigned_work[node] = {
            scope: unit for scope, unit in workload.items() if not all(unit.values())
        }
        super().remove_node(node)
        return died_in

    def _reschedule(self, node: Any) -> None:
        """Give files to a process until it knows three tests: it begins one when it knows which
        comes next.
        """
        if node not in self.registered_collections or node.shutting_down:
            return
        while self._pending_of(self.assigned_work[node]) < 3:
            file = self._next_file(node)
            if file is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(file, last=False)
            self._assign_work_unit(node)

    def _next_file(self, node: Any) -> str | None:
        """Return the first file, or group, that waits and that this process has collected."""
        collected = self._collected[node]
        return next(
            (file for file, unit in self.workqueue.items() if next(iter(unit)) in collected), None
        )

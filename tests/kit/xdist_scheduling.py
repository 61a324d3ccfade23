"""Assigns test files to the processes of pytest-xdist."""

from __future__ import annotations

from itertools import chain
from typing import Any

from xdist.scheduler import LoadFileScheduling

# Groups of files, by the beginning of their paths, that share what takes long to start: processes;
# transformers.
TOGETHER = (
    ("tests/e2e/demo_model/",),
    ("tests/e2e/mock_cluster/",),
    (  # torch, transformers and tiny models: 8 s of CPU time for each process
        "tests/contract/test_engine",
        "tests/contract/test_trtllm_",
        "tests/contract/test_changed_kv.py",
        "tests/contract/test_pair_probes.py",
        "tests/contract/test_prefix_cache.py",
        "tests/contract/test_sampling_after_transfer.py",
        "tests/contract/test_warm_up.py",
        "tests/integration/test_kv_collection.py",
        "tests/integration/test_template_model.py",
        "tests/integration/test_worker_preflight.py",
        "tests/unit/engines/torch/",
        "tests/unit/engines/vllm/test_vllm_dummy_weights.py",
        "tests/unit/fakes/test_stand_in.py",
        "tests/unit/models/test_checkpoint.py",
    ),
    ("tests/unit/frontend/tokenization/",),  # fastokens
    ("tests/unit/deploy/",),  # the grammars of jsonschema
)
# The longest tests start first, so that they do not run alone at the end.
FIRST = (
    *chain(*TOGETHER),
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


class FolderScheduling(LoadFileScheduling):
    """Schedules like `--dist loadfile`; a group of TOGETHER counts as one file, and a process may
    die.

    pytest-xdist 3.8 gives the test that killed a process to the next one, sends work to a successor
    that has not collected its tests yet, and waits for ever for a successor that got a file with a
    single test left.
    """

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
        """Give files to a process until it knows two tests: it begins one when it knows which comes
        next.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while (
            self.workqueue
            and not node.shutting_down
            and self._pending_of(self.assigned_work[node]) < 2
        ):
            self._assign_work_unit(node)
